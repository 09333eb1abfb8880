"""GPT-2 1.1B from scratch on 100B tokens with FP4 GEMMs, the middle run of the Metis paper.

    accelerate launch recipes/gpt2_1b1.py --data DIR
    python recipes/gpt2_1b1.py --smoke
    python recipes/gpt2_1b1.py --dry-run --world-size 8

From the paper (arXiv 2509.00404): the size, at least 32 blocks (it shows layers 1, 16 and 32), 100B
tokens of DCLM, W4A4G4 in NVFP4, rank 1.5 %.
recipes/README.md says where every other setting comes from.
"""

from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.recipe import Recipe

RECIPE = Recipe(name="gpt2_1b1", size=SIZES["1b1"])

if __name__ == "__main__":
    RECIPE.run(description=__doc__)
