"""Imports point one way, and `import metis_hf` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import metis_hf

ROOT = Path(metis_hf.__file__).parent

# module -> what of metis_hf it may import; a package stands for its modules.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "noise": set(),
    "numerics": {"noise"},
    "transforms": {"noise"},
    "operands": {"noise", "numerics", "transforms"},
    "conditioners": {"noise", "numerics", "operands", "transforms"},
    "weights": {"noise", "numerics", "operands", "transforms"},
    "weight_reuse": {"model", "weights"},
    "schemes": {"conditioners", "config", "noise", "numerics", "operands"},
    "gemm": {"noise", "operands", "schemes", "weights"},
    "token_mask": {"noise"},
    "linear": {"config", "gemm", "noise", "schemes", "token_mask", "weights"},
    "experts": {"linear"},
    "matching": {"config", "experts"},
    "report": {"experts"},
    "model": {
        "config",
        "experts",
        "linear",
        "matching",
        "numerics",
        "report",
        "schemes",
        "token_mask",
    },
    "refreshing": {"linear", "model"},
    "oscillation": {"linear", "model", "refreshing", "schemes"},
    "precision": {"config", "linear", "model", "schemes"},
    "lora": {"linear", "model"},
    "trainer": {"callback", "linear", "model"},
    "hub": {"config", "model"},
    "noise_monitor": {"gemm", "operands", "schemes"},
    "health": {
        "conditioners",
        "gemm",
        "linear",
        "noise",
        "noise_monitor",
        "numerics",
        "operands",
        "schemes",
        "transforms",
    },
    "records": set(),
    "run_record": {"linear", "records"},
    "callback": {
        "health",
        "linear",
        "model",
        "noise_monitor",
        "oscillation",
        "refreshing",
        "resume",
        "run_record",
        "weight_reuse",
    },
    "resume": {"config", "linear", "model"},
    "packing": {"conditioners", "linear", "numerics", "operands", "schemes"},
    "model_card": {"config", "report"},
    "export_report": {"numerics"},
    "export": {
        "config",
        "experts",
        "export_report",
        "linear",
        "model",
        "model_card",
        "packing",
    },
    "costs": {"linear", "noise", "numerics", "operands", "schemes"},
    "tracing": {"model"},
    "planning": {"config", "costs", "linear", "model", "report", "tracing"},
    "planning_tables": {"planning"},
    "recipe": {
        "callback",
        "config",
        "corpus",
        "data",
        "model",
        "planning",
        "planning_tables",
        "schemes",
        "trainer",
    },
    "corpus": set(),
    "data": set(),
    "tasks": {"corpus"},
    "evaluation": {"corpus", "hub", "model", "progress", "records"},
    "experiment": {
        "callback",
        "config",
        "data",
        "evaluation",
        "model",
        "precision",
        "records",
        "trainer",
    },
    "scales": set(),
    "html": set(),
    "run_report": {
        "config",
        "experiment",
        "health",
        "html",
        "noise_monitor",
        "plots",
        "records",
        "resume",
        "run_record",
    },
    "analysis": {
        "conditioners",
        "config",
        "experts",
        "gemm",
        "health",
        "html",
        "linear",
        "matching",
        "noise",
        "numerics",
        "operands",
        "plots",
        "progress",
        "schemes",
        "transforms",
        "weights",
    },
    "compare": {
        "config",
        "corpus",
        "data",
        "evaluation",
        "experiment",
        "model",
        "plots",
        "progress",
        "records",
        "scales",
        "schemes",
        "weight_reuse",
    },
    "tables": {"experiment"},
    "plots": {"experiment"},
    "progress": set(),
    "demo": {
        "corpus",
        "experiment",
        "plots",
        "progress",
        "records",
        "schemes",
        "tables",
        "tasks",
    },
    "cli": {
        "analysis",
        "compare",
        "demo",
        "evaluation",
        "export",
        "export_report",
        "run_report",
        "schemes",
    },
    "__init__": {
        "callback",
        "config",
        "linear",
        "model",
        "precision",
        "refreshing",
        "registration",
        "schemes",
        "trainer",
        "weight_reuse",
    },
    "registration": {"hub"},
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
        "import metis_hf.gemm\n"
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
