"""Llama-3 8B from scratch on 100B tokens with FP4 GEMMs, the largest run of the Metis paper.

    accelerate launch --config_file recipes/accelerate/8gpu_fsdp2.yaml recipes/llama3_8b.py \\
        --data DIR
    python recipes/llama3_8b.py --smoke
    python recipes/llama3_8b.py --dry-run --world-size 64

From the paper (arXiv 2509.00404): the model, 100B tokens of DCLM, W4A4G4 in NVFP4, rank 1.5 %.
recipes/README.md says where every other setting comes from.
"""

from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.recipe import Recipe

RECIPE = Recipe(name="llama3_8b", size=SIZES["8b"])

if __name__ == "__main__":
    RECIPE.run(description=__doc__)
