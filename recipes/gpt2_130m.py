"""GPT-2 130M from scratch on 100B tokens with FP4 GEMMs, the smallest run of the Metis paper.

    accelerate launch recipes/gpt2_130m.py --data DIR
    python recipes/gpt2_130m.py --smoke
    python recipes/gpt2_130m.py --dry-run --world-size 8

From the paper (arXiv 2509.00404): the size, 100B tokens of DCLM, W4A4G4 in NVFP4, rank 1.5 %.
recipes/README.md says where every other setting comes from.
"""

from metis_hf.experiments.recipe import Recipe
from metis_hf.experiments.sizes import SIZES

RECIPE = Recipe(
    name="gpt2_130m",
    size=SIZES["130m"],
    smoke_model={
        "vocab_size": 512,
        "n_positions": 64,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)


if __name__ == "__main__":
    RECIPE.run(description=__doc__)
