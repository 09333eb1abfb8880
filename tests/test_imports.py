"""Imports point one way, and `import metis_hf` stays light."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from conftest import llama
from forked import python

import metis_hf

ROOT = Path(metis_hf.__file__).parent

# Which rooms of metis_hf each room may import: downwards only. A file at the top is a room too.
SPINE = ("noise", "config", "numerics", "transforms", "operands", "schemes", "layers")
BESIDE = {"shared", "data"}  # they know nothing of quantization
ALLOWED: dict[str, set[str]] = {
    "config": {"shared"},
    "noise": set(),
    "shared": set(),
    "data": {"shared"},
    "numerics": {"noise"},
    "transforms": {"noise", "numerics"},
    "operands": {"noise", "numerics", "transforms"},
    "schemes": {"config", "noise", "numerics", "transforms", "operands"},
    "layers": {*SPINE},
    "conversion": {*SPINE, "shared"},
    "training": {*SPINE, *BESIDE, "conversion"},
    "deploy": {*SPINE, *BESIDE, "conversion"},
    "lab": {*SPINE, *BESIDE, "conversion", "training", "deploy"},
    "cli": {*BESIDE, "schemes", "deploy", "lab"},
    "__init__": {"config", "schemes", "layers", "conversion", "training", "deploy"},
}


def imported(path: Path) -> set[str]:
    """Top-level parts of metis_hf that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):  # a bare `import metis_hf` runs __init__
            bare = {"metis_hf": "metis_hf.__init__"}
            names = [bare.get(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            base = node.module or ""
            names = [f"{base}.{a.name}" for a in node.names] if base == "metis_hf" else [base]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import; write metis_hf.x")
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("metis_hf.")}
    return found


def test_imports_point_one_way():
    upwards = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        part = name.parts[0].removesuffix(".py")
        assert part in ALLOWED, f"{part} is new: say here what it may import"
        if rooms := imported(path) - {part} - ALLOWED[part]:
            upwards[str(name)] = rooms
    assert not upwards


def edges(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of metis_hf that a file imports by name, for type checkers and inside functions too.

    Importing a module runs the packages above it first; those edges are Python's, not the file's.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else base for name in inner}
    return found & modules.keys()


def test_modules_form_no_circle():
    modules = {
        ".".join(("metis_hf", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in ROOT.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    left = {name: edges(path, modules) - {name} for name, path in modules.items()}
    while leaves := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left, f"these modules need each other: {sorted(left)}"


def test_import_is_light():
    code = (
        "import sys, metis_hf\n"
        "heavy = ['lm_eval', 'datasets', 'matplotlib', 'rich', 'typer', 'triton']\n"
        "print([name for name in heavy if name in sys.modules])\n"
        # torch imports triton where it is installed, once torch's compiler is; metis_hf does not.
        "import metis_hf.layers.gemm\n"
        "print([name for name in sys.modules if 'metis_hf' in name and 'triton' in name])"
    )
    assert python("-c", code).split() == ["[]", "[]"]


def test_completion_offers_names_that_are_imported_when_first_used(monkeypatch):
    later = set(metis_hf.__all__) - {"MetisConfig"}
    for name in later:
        monkeypatch.delitem(vars(metis_hf), name, raising=False)
    assert later <= set(dir(metis_hf))


@pytest.mark.slow
def test_from_pretrained_registers_without_a_model_imported(tmp_path):
    """transformers' quantizers are not imported with metis_hf, and know it once they are."""
    metis_hf.get_metis_model(llama(1), metis_hf.MetisConfig()).save_pretrained(tmp_path)
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
    assert python("-c", code).strip() == "7 True"


LORA = """
import torch, transformers
from peft import LoraConfig, PeftConfig, get_peft_model, LoraModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING as tuners
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
                                  num_hidden_layers=1, num_attention_heads=2)
model = metis_hf.get_metis_model(transformers.LlamaForCausalLM(config))
model = get_peft_model(model, LoraConfig(r=2, target_modules='all-linear'))
assert sum(type(m).__name__ == 'MetisLoraLinear' for m in model.modules()) == 7
assert all(type(finder).__module__ != 'metis_hf.conversion.registration'
           for finder in sys.meta_path) or 'transformers.quantizers.auto' not in sys.modules
import peft
assert 'metis_hf' not in type(peft.__loader__).__module__
assert 'metis_hf' not in type(peft.__spec__.loader).__module__
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import sys, metis_hf", "import sys, peft, metis_hf"])
def test_peft_takes_converted_layers_without_another_import(first):
    """In whichever order the two are imported."""
    looked = "import importlib.util; assert importlib.util.find_spec('peft') is not None\n"
    python("-c", f"{first}\n{looked}{LORA}")


@pytest.mark.slow
def test_a_peft_that_we_do_not_know_stays_usable():
    """Registration fails with a warning; the other package's import does not."""
    code = (
        "import sys, warnings, metis_hf\n"
        "sys.modules['metis_hf.conversion.lora'] = None  # importing it raises ImportError\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import peft\n"
        "assert any('could not register with peft' in str(w.message) for w in caught)\n"
        "print(peft.LoraConfig(r=2).r)\n"
    )
    assert python("-c", code).strip() == "2"


def test_a_word_names_one_class():
    found = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    words = ("CallKeys", "Role", "Plan", "Variant", "Task", "Packed", "Quantized", "LowRank")
    assert {word: found[word] for word in words} == dict.fromkeys(words, 1)
