"""GPT-2 130M from scratch on 100B tokens with FP4 GEMMs, the smallest run of the Metis paper.

    accelerate launch recipes/gpt2_130m.py --data DIR
    python recipes/gpt2_130m.py --smoke
    python recipes/gpt2_130m.py --dry-run --world-size 8

From the paper (arXiv 2509.00404): the size, 100B tokens of DCLM, W4A4G4 in NVFP4, rank 1.5 %.
recipes/README.md says where every other setting comes from.
"""

from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.recipe import Recipe

RECIPE = Recipe(name="gpt2_130m", size=SIZES["130m"])

if __name__ == "__main__":
    RECIPE.run(description=__doc__)
