"""Quantization after training by one command: calibrated, converted and exported."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import VOCAB, llama, t5
from safetensors.torch import load_file
from tensors import same
from texts import documents
from typer.testing import CliRunner

from deploy.checkpoints import checkpoint, mixtral
from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers
from metis_hf.cli.main import app
from metis_hf.data.chat import first_sequences
from metis_hf.data.corpus import train_tokenizer
from metis_hf.deploy import export_checkpoint, load_metis_model
from metis_hf.lab import calibrated
from metis_hf.lab.calibrated import Calibration, calibrated_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
LENGTH, SEQUENCES = 32, 6
FEW = ["--calibration-sequences", str(SEQUENCES), "--calibration-length", str(LENGTH)]


TOKENS = VOCAB + 1  # of the smallest tokenizer


def known(build=llama):
    """A builder of the same model for the tokenizer's tokens."""

    def make():
        model = build()
        model.resize_token_embeddings(TOKENS)
        return model

    return make


def metis(path, build=llama, **config):
    """A Metis checkpoint with a tokenizer."""
    source = checkpoint(path / "metis", known(build), **config)
    tokenizer_of(source)
    return source


def tokenizer_of(path):
    tokenizer = train_tokenizer(documents()[:3], vocab_size=TOKENS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return tokenizer


@pytest.fixture
def dense(tmp_path):
    known()().save_pretrained(tmp_path / "dense")
    tokenizer_of(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(documents()[7].text[:3000], encoding="utf-8")
    return path


def run(*arguments):
    result = CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def state_of(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_dense_model_in_one_command(layout, dense, text, tmp_path):
    """What the three calls of a script give, to the bit, and the lines that load it."""
    printed = run(dense, "--out", tmp_path / "out", "--format", layout, "--calibrate", text, *FEW)
    model = get_metis_model(
        transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32),
        MetisConfig(scheme="w4a4"),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    rows = first_sequences(text, tokenizer, LENGTH, SEQUENCES)
    assert rows.shape == (SEQUENCES, LENGTH)
    calibrate(model, list(rows.split(4)))
    model.save_pretrained(tmp_path / "script")
    tokenizer.save_pretrained(tmp_path / "script")
    export_checkpoint(tmp_path / "script", tmp_path / "expected", format=layout)
    assert same(state_of(tmp_path / "out"), state_of(tmp_path / "expected"))
    files = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("out", "expected")]
    assert files[0] == files[1]
    assert f"calibrating on {SEQUENCES} sequences of {LENGTH} tokens" in printed
    code, command = printed.split("Load it:\n")[1].split("Serve it:\n")
    assert command == f"vllm serve {tmp_path / 'out'}\n"
    if layout == "compressed-tensors":
        namespace: dict = {}
        exec(code, namespace)
        loaded = namespace["model"]
        assert loaded(input_ids=rows[:1]).logits.shape == (1, LENGTH, TOKENS)
    else:
        assert f'LLM("{tmp_path / "out"}")' in code


def test_conversations_by_the_chat_template(dense, tmp_path):
    data = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": each.text[:300]} for each in documents()[:6]]
    data.write_text("".join(json.dumps({"messages": [one]}) + "\n" for one in messages))
    model = calibrated_model(dense, Calibration(data, sequences=3, length=LENGTH))
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    ids = []
    for one in messages:
        ids += tokenizer(TEMPLATE_TEXT.format(**one), add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    expected = get_metis_model(
        transformers.AutoModelForCausalLM.from_pretrained(dense), MetisConfig(scheme="w4a4")
    )
    calibrate(expected, [torch.tensor(ids[: 3 * LENGTH]).view(3, LENGTH)])
    for (name, layer), (_, other) in zip(metis_layers(model), metis_layers(expected), strict=True):
        assert torch.equal(layer.weight_amax, other.weight_amax), name
        torch.testing.assert_close(layer.input_amax, other.input_amax)


TEMPLATE_TEXT = "{role}: {content}\n"


def test_a_checkpoint_that_nobody_calibrated(text, tmp_path):
    source = metis(tmp_path, scheme="w4a4")
    with pytest.raises(ValueError, match=r"not calibrated. Export with --calibrate TEXT"):
        export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
    run(source, "--out", tmp_path / "out", "--format", "compressed-tensors",
        "--calibrate", text, *FEW)  # fmt: skip
    state = state_of(tmp_path / "out")
    weights = load_file(source / "model.safetensors")
    for name, _ in metis_layers(load_metis_model(source)):
        assert f"{name}.input_global_scale" in state
        assert f"{name}.weight" in weights


@pytest.mark.parametrize("config", [{}, {"scheme": "metis-paper"}], ids=["metis", "split"])
def test_a_checkpoint_of_another_scheme(config, text, tmp_path):
    """It takes the scheme, with its layers and the weights that it represents."""
    source = metis(tmp_path, exclude_modules=["down_proj"], **config)
    said = []
    model = calibrated_model(source, Calibration(text, length=LENGTH, sequences=4), said.append)
    assert said[0] == f"scheme {config.get('scheme', 'metis')} -> w4a4"
    before = dict(metis_layers(load_metis_model(source)))
    after = dict(metis_layers(model))
    assert before.keys() == after.keys()
    assert not any("down_proj" in name for name in after)
    for name, layer in after.items():
        represented = before[name].weight_form.dense(before[name].weight_params())
        assert torch.equal(layer.weight, represented)
        assert layer.scales_frozen == 1
    assert model.config.quantization_config.scheme == "w4a4"


def test_layers_that_a_pattern_kept_are_kept(text, tmp_path):
    source = metis(tmp_path, scheme_pattern={"down_proj": "bf16"})
    said = []
    model = calibrated_model(source, Calibration(text, length=LENGTH, sequences=4), said.append)
    assert (
        "kept in high precision, as scheme_pattern had set them: model.layers.0.mlp.down_proj"
        in said[1]
    )
    schemes = {name: layer.config.scheme for name, layer in metis_layers(model)}
    assert not any(name.endswith("down_proj") for name in schemes)
    assert isinstance(model.get_submodule("model.layers.0.mlp.down_proj"), torch.nn.Linear)
    assert {s for n, s in schemes.items() if not n.endswith("down_proj")} == {"w4a4"}
    model.save_pretrained(tmp_path / "run")
    tokenizer_of(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
    assert "model.layers.0.mlp.down_proj.weight" in state_of(tmp_path / "out")


def test_weights_alone_need_no_text(dense, tmp_path):
    printed = run(dense, "--out", tmp_path / "out", "--format", "compressed-tensors",
                  "--scheme", "w4a16", "--calibrate", tmp_path / "none.txt")  # fmt: skip
    assert "no layer quantizes its inputs" in printed
    run(dense, "--out", tmp_path / "alone", "--format", "compressed-tensors", "--scheme", "w4a16")
    assert same(state_of(tmp_path / "out"), state_of(tmp_path / "alone"))
    assert printed.endswith(f"Serve it:\nvllm serve {tmp_path / 'out'}\n")
    state = state_of(tmp_path / "out")
    assert any(key.endswith("weight_global_scale") for key in state)
    assert not any(key.endswith("input_global_scale") for key in state)


def test_a_name_on_the_hub(dense, text, tmp_path, monkeypatch):
    """From the cache, as there is no network: weights and what lies beside them."""
    cached = tmp_path / "hub/models--someone--small"
    revision = "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(revision)
    dense.rename(tmp_path / "moved")
    (cached / "snapshots").mkdir()
    (tmp_path / "moved").rename(cached / "snapshots" / revision)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    run("someone/small", "--out", tmp_path / "out", "--format", "compressed-tensors",
        "--calibrate", text, *FEW)  # fmt: skip
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert "chat_template" in str(sorted(p.name for p in (tmp_path / "out").iterdir()))


class TestRefusals:
    """Before anything is computed where that is possible; nothing is left behind."""

    @staticmethod
    def refused(match, *arguments, out):
        with pytest.raises((ValueError, OSError), match=match):
            run(*arguments, "--out", out)
        assert not out.exists()
        assert not list(out.parent.glob(f"*{out.name}.partial*"))

    PACKED = ("--format", "compressed-tensors")

    def test_choices(self, dense, text, tmp_path):
        out = tmp_path / "out"
        for option in (("--calibrate", text), ("--scheme", "w4a16")):
            self.refused("--format dense does not; choose", dense, *option, out=out)
        self.refused("give --calibrate TEXT, or --scheme w4a16", dense, *self.PACKED,
                     "--scheme", "w4a4", out=out)  # fmt: skip
        self.refused("cannot calibrate on 0 sequences of 512 tokens; use at least 1", dense,
                     *self.PACKED, "--calibrate", text, "--calibration-sequences", "0",
                     out=out)  # fmt: skip
        self.refused("plain checkpoint.*--calibrate TEXT", dense, *self.PACKED, out=out)

    def test_options_without_use(self, tmp_path):
        for missing, *options in (
            ("--calibrate TEXT or --scheme", "--device", "cpu"),
            ("--calibrate TEXT", "--calibration-sequences", "4"),
            ("--calibrate TEXT", "--calibration-length", "32", "--scheme", "w4a16"),
            ("--calibrate TEXT", "--calibration-method", "amax"),
            ("a packed --format", "--own-scales", "--format", "dense"),
        ):
            self.refused(f"{options[0]} does nothing without {missing}; leave it out",
                         tmp_path / "none", *self.PACKED, *options,
                         out=tmp_path / "out")  # fmt: skip

    def test_texts(self, dense, tmp_path):
        out = tmp_path / "out"
        (tmp_path / "short.txt").write_text("import this")
        short = ("--calibrate", tmp_path / "short.txt")
        self.refused("fewer than 128 tokens, the length of one sequence", dense, *self.PACKED,
                     *short, out=out)  # fmt: skip
        self.refused(
            "is not a file", dense, *self.PACKED, "--calibrate", tmp_path / "none", out=out
        )

    def test_an_output_in_use_costs_no_calibration(self, dense, text, monkeypatch):
        monkeypatch.setattr(calibrated, "calibrate", lambda *_, **__: pytest.fail("calibrated"))
        with pytest.raises(ValueError, match="exists already"):
            run(dense, "--out", dense, *self.PACKED, "--calibrate", text)

    @pytest.mark.parametrize("option", ["--calibrate", "--text"])
    def test_texts_are_read_before_the_model(self, option, dense, text, tmp_path, monkeypatch):
        monkeypatch.setattr(calibrated, "load_model", lambda *_: pytest.fail("loaded"))
        given = {"--calibrate": text, "--text": text} | {option: tmp_path / "none.txt"}
        self.refused("is not a file", dense, *self.PACKED, *sum(given.items(), ()),
                     out=tmp_path / "out")  # fmt: skip

    def test_layers_that_the_layout_cannot_hold(self, text, tmp_path, monkeypatch):
        monkeypatch.setattr(calibrated, "calibrate", lambda *_, **__: pytest.fail("calibrated"))
        known(mixtral)().save_pretrained(tmp_path / "dense")
        tokenizer_of(tmp_path / "dense")
        self.refused("down_proj: not quantized, while other weights", tmp_path / "dense",
                     *self.PACKED, "--calibrate", text, "--exclude", ".*experts.down_proj",
                     out=tmp_path / "out")  # fmt: skip

    def test_experts_that_a_pattern_kept(self, text, tmp_path):
        """And layers that are left out twice: by the checkpoint's pattern, and again by name."""
        pattern = {".*experts.*": "bf16", "q_proj": "bf16"}
        source = metis(tmp_path, mixtral, scheme_pattern=pattern)
        run(source, *self.PACKED, "--calibrate", text, *FEW, "--exclude", ".*q_proj",
            "--out", tmp_path / "out")  # fmt: skip
        packed = json.loads((tmp_path / "out" / "metis_export.json").read_text())["packed"]
        assert packed
        assert not any("experts" in name or "q_proj" in name for name in packed)

    def test_what_vllm_refuses_is_not_to_be_served(self, dense, text, tmp_path):
        given = (dense, *self.PACKED, "--calibrate", text, *FEW, "--exclude", ".*q_proj")
        done = run(*given, "--out", tmp_path / "out")
        assert "vLLM rejects such a checkpoint" in done
        assert "vllm serve" not in done

    def test_layers_left_out(self, text, tmp_path):
        """Experts stay as they are; the rest is packed."""
        known(mixtral)().save_pretrained(tmp_path / "dense")
        tokenizer_of(tmp_path / "dense")
        out = tmp_path / "out"
        given = (tmp_path / "dense", *self.PACKED, "--exclude", ".*experts.*")
        done = run(*given, "--calibrate", text, *FEW, "--out", out)
        assert "layers in NVFP4" in done
        packed = json.loads((out / "metis_export.json").read_text())["packed"]
        assert packed
        assert not any("experts" in name for name in packed)
        self.refused("--exclude does nothing without --calibrate", *given, out=tmp_path / "other")

    def test_quantized_by_others(self, dense, text, tmp_path):
        config = json.loads((dense / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (dense / "config.json").write_text(json.dumps(config))
        self.refused("already quantized with 'gptq'", dense, *self.PACKED, "--calibrate", text,
                     out=tmp_path / "out")  # fmt: skip

    def test_a_model_with_a_decoder_of_its_own(self, text, tmp_path):
        t5(vocab_size=TOKENS).save_pretrained(tmp_path / "t5")
        tokenizer_of(tmp_path / "t5")
        self.refused("needs inputs other than token ids; calibrate it in a script", tmp_path / "t5",
                     *self.PACKED, "--calibrate", text, out=tmp_path / "out")  # fmt: skip

    def test_a_scheme_for_a_checkpoint_that_has_one(self, text, tmp_path):
        source = metis(tmp_path, scheme="w4a4")
        self.refused("already has static scales in scheme 'w4a4'", source, *self.PACKED,
                     "--calibrate", text, "--scheme", "w4a16", out=tmp_path / "out")  # fmt: skip

    def test_another_tokenizer(self, dense, text, tmp_path):
        train_tokenizer(documents()[:3], vocab_size=TOKENS + 100).save_pretrained(dense)
        self.refused("they do not match", dense, *self.PACKED, "--calibrate", text,
                     out=tmp_path / "out")  # fmt: skip
