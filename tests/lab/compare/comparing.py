"""What tests of comparisons share: a small one, and the command in a process of its own."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from metis_hf.lab.compare.plan import make_plan

METIS_HF = [sys.executable, "-m", "metis_hf.cli.main"]
CONFIG = {
    "size": "tiny",
    "model": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    },
    "training": {"max_steps": 6, "save_steps": 2},
    "sequence_length": 32,
    "global_batch": 4,
    "eval_sequences": 16,
    "schemes": ["bf16", "nvfp4"],
    "seeds": [0, 1],
}


def run(*args, **kwargs):
    """Run `metis-hf compare ...` and wait for it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    return subprocess.run(
        [*METIS_HF, "compare", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **kwargs,
    )


def write_config(folder, **changes):
    """Write the small comparison as the file that --config takes."""
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes))
    return path


def fake_launcher(folder, **options):
    """Return a launcher whose workers train nothing, for a comparison of these options."""
    plan = make_plan(**options)
    configs = {variant.name: variant.metis_config(0).to_dict() for variant in plan.variants}
    path = folder / "configs.json"
    path.write_text(json.dumps(configs))
    script = Path(__file__).with_name("fake_worker.py")
    return shlex.join([sys.executable, str(script), str(path)])


def run_recipe(recipe, monkeypatch, *options):
    """Run a recipe as a person launches it, in this process."""
    monkeypatch.setattr(sys, "argv", [recipe, *options])
    runpy.run_path(recipe, run_name="__main__")
