"""recipes/sft_nvfp4.py as a person launches it: TRL's SFT to an export that others read."""

from __future__ import annotations

import functools
import json
import re
import sys

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from paths import ROOT

from lab.compare.comparing import run_recipe
from metis_hf.deploy.packed import load_packed
from metis_hf.lab.smoke import smoke_model

RECIPE = str(ROOT / "recipes/sft_nvfp4.py")
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


main = functools.partial(run_recipe, RECIPE)


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """A function that runs it into a directory, and returns the losses and the last line."""
    pytest.importorskip("trl", reason="TRL is not installed")

    def launch(*options):
        places = ("--output_dir", str(tmp_path / "out"), "--export", str(tmp_path / "nvfp4"))
        main(monkeypatch, "--smoke", *places, "--disable_tqdm", "True", *options)
        said = capsys.readouterr().out.rstrip()
        return re.findall(r"^  (.*?) +(\d+\.\d+)$", said, re.MULTILINE), said.splitlines()[-1]

    return launch


def test_without_trl_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match="needs TRL; run pip install trl"):
        main(monkeypatch, "--smoke")


@pytest.mark.slow
def test_smoke(launch, tmp_path, capsys):
    """Distillation stays at the model in high precision; so many steps on labels gain 0.5 nats."""
    losses, last = launch()
    assert [name for name, _ in losses] == ["sft", "w4a4, calibrated", "w4a4, qad"]
    exact, calibrated, trained = (float(loss) for _, loss in losses)
    assert calibrated == pytest.approx(exact, abs=0.05)
    assert trained == pytest.approx(exact, abs=0.05)
    assert last == f"vllm serve {tmp_path / 'nvfp4'}"
    model = load_packed(tmp_path / "nvfp4", dtype=torch.float32)
    assert model.config.use_cache
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "nvfp4")
    ids = tokenizer("import json", return_tensors="pt").input_ids
    assert model(input_ids=ids).logits.isfinite().all()
    with pytest.raises(SystemExit):  # at once, and not after the training
        launch()
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_chat_and_labels_and_weights_alone(launch, tmp_path):
    path, _ = smoke_model(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    turns = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "pass"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    losses, _ = launch(
        "--model", path, "--data", str(tmp_path / "chat.jsonl"), "--method", "qat",
        "--scheme", "w4a16", "--max_steps", "4",
    )  # fmt: skip
    assert [name for name, _ in losses] == ["sft", "w4a16, calibrated", "w4a16, qat"]
    assert float(losses[2][1]) < float(losses[1][1])
    config = json.loads((tmp_path / "nvfp4/config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["num_bits"] == 4
    assert group.get("input_activations") is None
    tags = ModelCard.load(tmp_path / "out/qat/README.md").data.tags
    assert {"sft", "scheme:w4a16"} <= {*tags}
    assert "vllm serve nvfp4" in ModelCard.load(tmp_path / "nvfp4/README.md").text
