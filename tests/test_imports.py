"""Imports point one way, and `import metis_hf` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import metis_hf

ROOT = Path(metis_hf.__file__).parent

# Which rooms of metis_hf each room may import: downwards only. A file at the top is a room too.
SPINE = ("noise", "config", "numerics", "transforms", "operands", "schemes", "layers")
WINGS = ("training", "export", "planning", "evaluation", "analysis")
HELPERS = {"shared", "data"}
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "noise": set(),
    "shared": set(),
    "data": {"shared"},
    "numerics": {"noise"},
    "transforms": {"noise"},
    "operands": {"noise", "numerics", "transforms"},
    "schemes": {"config", "noise", "numerics", "transforms", "operands"},
    "layers": {*SPINE},
    "conversion": {*SPINE},
    "monitoring": {*SPINE, *HELPERS},
    "training": {*SPINE, *HELPERS, "conversion", "monitoring"},
    "export": {*SPINE, *HELPERS, "conversion"},
    "planning": {*SPINE, *HELPERS, "conversion"},
    "evaluation": {*SPINE, *HELPERS, "conversion"},
    "analysis": {*SPINE, *HELPERS, "conversion", "monitoring"},
    "run_report": {*SPINE, *HELPERS, "monitoring", "training", "experiments"},
    "experiments": {*SPINE, *HELPERS, *WINGS, "conversion", "monitoring"},
    "cli": {"schemes", "export", "evaluation", "analysis", "run_report", "experiments"},
    "__init__": {"config", "schemes", "layers", "conversion", "training"},
}


def imported(path: Path) -> set[str]:
    """Top-level parts of metis_hf that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            base = node.module or ""
            names = [f"{base}.{a.name}" for a in node.names] if base == "metis_hf" else [base]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import; write metis_hf.x")
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("metis_hf.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part} is new: say here what it may import"
    assert imported(path) - {part} <= ALLOWED[part]


def test_import_is_light():
    code = (
        "import sys, metis_hf\n"
        "heavy = ['lm_eval', 'datasets', 'matplotlib', 'rich', 'typer', 'triton']\n"
        "print([name for name in heavy if name in sys.modules])\n"
        # torch imports triton where it is installed, once torch's compiler is; metis_hf does not.
        "import metis_hf.layers.gemm\n"
        "from metis_hf.numerics.kernels import compiled\n"
        "print([name for name in sys.modules if 'metis_hf' in name and 'triton' in name])\n"
        "print(compiled.compile_seconds())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "[]", "{}"]


def test_from_pretrained_registers_without_a_model_imported(tmp_path):
    """transformers' quantizers are not imported with metis_hf, and know it once they are."""
    import transformers

    from metis_hf import MetisConfig, get_metis_model

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    get_metis_model(model, MetisConfig()).save_pretrained(tmp_path)
    code = (
        "import sys, torch, transformers, metis_hf\n"
        "heavy = ['transformers.quantizers.auto', 'transformers.modeling_utils', 'peft']\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
        "import importlib.util\n"
        "importlib.util.find_spec('transformers.quantizers.auto')  # a look is no import\n"
        "assert type(metis_hf.MetisConfig()).__name__ == 'MetisConfig'\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(len(list(metis_hf.metis_layers(model))), callable(metis_hf.refresh))\n"
        "from transformers.quantizers import auto\n"
        "assert 'metis' in auto.AUTO_QUANTIZER_MAPPING\n"
        "spec = importlib.util.find_spec('transformers.quantizers.auto')\n"
        "assert spec.loader is auto.__loader__ and 'metis_hf' not in type(spec.loader).__module__\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "7 True"


@pytest.mark.parametrize("name", ["Plan", "Variant", "Run", "Packed", "Quantized", "LowRank"])
def test_a_word_names_one_class(name):
    found = [
        path
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    assert len(found) == 1
