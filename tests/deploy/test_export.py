"""Exported checkpoints: read by plain transformers and by the real compressed-tensors library."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, VOCAB, llama
from conversion import architectures
from design import named
from forked import python
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tensors import relative
from texts import documents
from versions import reads_packed

from deploy.checkpoints import ALL_SPLIT, checkpoint, logits
from metis_hf import (
    MetisConfig,
    get_metis_model,
    metis_layers,
    set_precision,
)
from metis_hf.deploy import export_checkpoint, load_low_rank, load_metis_model
from metis_hf.deploy.compressed_tensors import CompressedMatrix
from metis_hf.deploy.source import held_out_windows

FP32_TOLERANCE = 1e-5  # |difference| / |logits|: the order of fp32 sums
# bf16 rounds weights and activations to 2^-9 of their size; some 30 roundings on the way through
# two blocks add up like a random walk, 2^-9 / sqrt(3) * sqrt(30) = 0.6 %. Twice that.
BF16_TOLERANCE = 0.0125
BF16_ROUNDING = 2.0**-8  # of one value, halfway between two neighbours, and a little
# SQNR of normal values in NVFP4: 1x16 blocks with the best of six scales (metis) have 21.7 dB,
# 16x16 blocks with scales to nearest 19.1 dB.
SQNR_DENSE = {"search": (21.3, 22.1), "square": (18.5, 19.8)}


PACKED_AS_STORED = [
    pytest.param({"scheme": "metis"}, id="metis"),
    pytest.param({"scheme": "metis-paper", "decompose": ["gradient"]}, id="metis-paper-dense"),
    pytest.param({"scheme": "nvidia"}, id="nvidia"),
]


# Weights in one matrix and in a transposed one, tied, of fused experts, of an encoder, of images.
SAVED_OTHERWISE = ("llama", "llama-tied", "gpt2", "gpt-oss", "mixtral", "t5", "bert-masked", "vit")


class TestDense:
    @pytest.mark.slow
    def test_loads_without_the_package(self, token_ids, tmp_path):
        source = checkpoint(tmp_path / "metis")
        model = load_metis_model(source)
        set_precision(model, high_precision=("forward", "backward"))
        expected = logits(model, token_ids)
        torch.save(token_ids, tmp_path / "ids.pt")
        for dtype, tolerance in (("float32", FP32_TOLERANCE), ("bfloat16", BF16_TOLERANCE)):
            report = export_checkpoint(source, tmp_path / dtype, dtype=dtype)
            config = json.loads((tmp_path / dtype / "config.json").read_text())
            assert "quantization_config" not in config
            assert config["dtype"] == dtype
            assert report.packed == ()
            assert report.low_rank is None
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
            assert loaded.dtype is getattr(torch, dtype)
            assert relative(logits(loaded, token_ids), expected) < tolerance
        code = (
            "import sys, torch, transformers\n"
            f"d = {str(tmp_path)!r}\n"
            "model, info = transformers.AutoModelForCausalLM.from_pretrained("
            "d + '/float32', output_loading_info=True)\n"
            "assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
            "torch.save(model(input_ids=torch.load(d + '/ids.pt')).logits.detach(), d + '/l.pt')\n"
            "assert 'metis_hf' not in sys.modules\n"
        )
        python("-c", code)
        assert relative(torch.load(tmp_path / "l.pt"), expected) < FP32_TOLERANCE

    @pytest.mark.parametrize("name", named(architectures.ARCHITECTURES, SAVED_OTHERWISE))
    def test_architectures(self, name, tmp_path):
        architecture = architectures.ARCHITECTURES[name]
        get_metis_model(architecture.build(), MetisConfig()).save_pretrained(tmp_path / "metis")
        model = load_metis_model(tmp_path / "metis")
        set_precision(model, high_precision=("forward", "backward"))
        export_checkpoint(tmp_path / "metis", tmp_path / "out", dtype="float32")
        plain = architecture.auto.from_pretrained(tmp_path / "out").eval()
        assert type(plain) is type(model)
        batch = architecture.batch()
        with torch.no_grad():
            found, expected = (each(**batch).logits for each in (plain, model))
        assert relative(found, expected) < FP32_TOLERANCE

    def test_companions_are_copied(self, tmp_path):
        source = checkpoint(tmp_path / "metis", tokenizer=True)
        (source / "additional_chat_templates").mkdir()
        copied = ("chat_template.jinja", "merges.txt", "spiece.model", "preprocessor_config.json",
                  "additional_chat_templates/a.jinja")  # fmt: skip
        for name in (*copied, "optimizer.pt"):
            (source / name).write_text("{}")
        export_checkpoint(source, tmp_path / "dense")
        files = [*copied, "tokenizer.json", "tokenizer_config.json"]
        assert all((tmp_path / "dense" / name).is_file() for name in files)
        assert not (tmp_path / "dense" / "optimizer.pt").exists()
        config = transformers.GenerationConfig.from_pretrained(tmp_path / "dense")
        assert config.max_new_tokens == 7
        one, other = (
            transformers.AutoTokenizer.from_pretrained(path)("def f(x):")["input_ids"]
            for path in (source, tmp_path / "dense")
        )
        assert one == other

    def test_errors_are_those_of_rounding(self, tmp_path):
        source = checkpoint(tmp_path / "metis")
        exact = export_checkpoint(source, tmp_path / "fp32", dtype="float32")
        assert all(row.max_error == 0 for row in exact.rows)
        assert json.loads(exact.to_json())["rows"][0]["sqnr_db"] is None
        rounded = export_checkpoint(source, tmp_path / "bf16")
        # Uniform rounding errors of at most 2^-9: about 2^-9 / sqrt(3) * (mean over a binade).
        assert all(2**-10.5 < row.mean_error < 2**-8.5 for row in rounded.rows)
        assert {row.kind for row in rounded.rows} == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
        assert all(row.layers == 2 for row in rounded.rows)


class TestCompressedTensors:
    """What the real library makes of the files."""

    @staticmethod
    def quantized(layer):
        """What should have been packed: our quantizer on the represented weight."""
        weight = layer.weight_form.dense(layer.weight_params()).detach()
        return layer.eval_scheme.fprop_weight.quantizer(weight, dim=-1)

    @pytest.mark.parametrize("config", PACKED_AS_STORED)
    def test_the_library_reads_our_values(self, config, token_ids, tmp_path):
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

        source = checkpoint(tmp_path / "metis", **config)
        report = export_checkpoint(
            source, tmp_path / "out", format="compressed-tensors", share_scales=False
        )
        model = load_metis_model(source)
        layers = dict(metis_layers(model))
        assert set(report.packed) == set(layers)

        declared = QuantizationConfig.model_validate(
            json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
        )
        group = declared.config_groups["group_0"]
        assert group.weights == preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
        assert declared.ignore == ["lm_head"]
        compressor = BaseCompressor.get_value_from_registry(declared.format)
        assert compressor.can_compress(torch.nn.Linear, group)
        names = compressor.compression_param_names(group)
        state = load_file(tmp_path / "out/model.safetensors")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        ran = logits(loaded, token_ids)  # the library decompresses at the first forward pass
        for name, layer in layers.items():
            assert f"{name}.weight" not in state
            stored = {key: state[f"{name}.{key}"] for key in names}
            expected = self.quantized(layer)
            # The library's own order, fp32 and then bf16: code * (scale / global scale).
            one = torch.ones(1)
            codes = CompressedMatrix(
                stored["weight_packed"],
                torch.ones_like(stored["weight_scale"].float()).to(torch.float8_e4m3fn),
                one,
                layer.in_features,
            ).dequantize()
            scale = stored["weight_scale"].float().repeat_interleave(16, 1)
            product = (codes * (scale / stored["weight_global_scale"])).bfloat16()
            read = compressor.decompress(stored, group)["weight"]
            assert torch.equal(read, product)
            # Ours is (code * scale) * (1 / global scale): the last bit of fp32 may differ.
            torch.testing.assert_close(product.float(), expected, rtol=BF16_ROUNDING, atol=0)
            fp32 = codes * scale * stored["weight_global_scale"].reciprocal()
            assert torch.equal(fp32, expected)
            weight = loaded.get_submodule(name).weight.detach()
            assert torch.equal(weight, read)
        assert ran.shape == (*token_ids.shape, VOCAB)
        for layer_name, layer in layers.items():
            dense = layer.to_dense()
            dense.weight.data = self.quantized(layer)
            model.set_submodule(layer_name, dense)
        assert relative(ran, logits(model, token_ids)) < BF16_TOLERANCE

    @reads_packed
    def test_transformers_dequantizes_while_loading(self, token_ids, tmp_path):
        pytest.importorskip("compressed_tensors")
        source = checkpoint(tmp_path / "metis")
        export_checkpoint(source, tmp_path / "out", format="compressed-tensors", share_scales=False)
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out",
            dtype=torch.float32,
            quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        )
        layers = dict(metis_layers(load_metis_model(source)))
        for name, layer in layers.items():
            weight = plain.get_submodule(name).weight
            torch.testing.assert_close(weight, self.quantized(layer), rtol=BF16_ROUNDING, atol=0)

    @pytest.mark.parametrize(
        "build",
        [functools.partial(llama, tie_word_embeddings=True), ARCHITECTURES["qwen2"]],
        ids=["tied", "bias"],
    )
    def test_head_and_biases_stay(self, build, tmp_path):
        source = checkpoint(tmp_path / "metis", build)
        report = export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
        original, state = (
            load_file(path / "model.safetensors") for path in (source, tmp_path / "out")
        )
        for name, value in original.items():
            layer, part = name.rsplit(".", 1)
            if layer not in report.packed or part == "bias":
                assert torch.equal(state[name], value.bfloat16()), name
        assert ("lm_head.weight" in state) == ("lm_head.weight" in original)

    def test_errors_of_each_choice(self, tmp_path):
        source = checkpoint(tmp_path / "metis", **ALL_SPLIT)
        report = export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
        rows = {(row.choice, row.kind): row for row in report.rows}
        assert {choice for choice, _ in rows} == {"fold", "side-file"}
        low, high = SQNR_DENSE["search"]
        for (choice, kind), row in rows.items():
            if choice == "fold":
                assert low < row.sqnr_db < high
                # 32 of 64 directions kept in fp32-scaled factors: the residual is smaller.
                assert rows["side-file", kind].mean_error < row.mean_error
            assert row.mean_error <= row.max_error
        assert json.loads((tmp_path / "out/metis_export.json").read_text())["rows"]
        square = export_checkpoint(
            checkpoint(tmp_path / "nvidia", scheme="nvidia"),
            tmp_path / "square",
            format="compressed-tensors",
        )
        low, high = SQNR_DENSE["square"]
        assert all(low < row.sqnr_db < high for row in square.rows)
        assert {row.choice for row in square.rows} == {"fold"}

    def test_layers_in_high_precision_stay_so(self, tmp_path):
        source = checkpoint(tmp_path / "metis", scheme_pattern={"down_proj": "bf16"})
        report = export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
        config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
        kept = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
        assert config["ignore"] == ["lm_head", *kept]
        assert set(kept).isdisjoint(report.packed)
        state = load_file(tmp_path / "out/model.safetensors")
        assert all(state[f"{name}.weight"].dtype is torch.bfloat16 for name in kept)


@torch.no_grad()
def mean_loss(model, ids):
    """Mean of the losses of rows of as many tokens."""
    losses = [model(input_ids=row[None], labels=row[None]).loss for row in ids]
    return torch.stack(losses).mean().item()


class TestText:
    @pytest.fixture
    def source(self, tmp_path):
        build = functools.partial(llama, vocab_size=VOCAB + 1)
        return checkpoint(tmp_path / "metis", build, tokenizer=True, **ALL_SPLIT)

    @pytest.mark.slow
    def test_held_out_loss(self, source, tmp_path):
        text = tmp_path / "held_out.txt"
        text.write_text(documents()[7].text[:2000])
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        ids = tokenizer(text.read_text(), return_tensors="pt", verbose=False)["input_ids"]
        ids = ids[:, : ids.shape[1] // 128 * 128].view(-1, 128)  # the model's context
        text.write_text(tokenizer.decode(ids.flatten()))
        report = export_checkpoint(source, tmp_path / "dense", dtype="float32", text=text)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
        expected = mean_loss(plain, ids)
        assert report.held_out["dense"] == pytest.approx(expected, abs=1e-5)
        assert list(report.held_out) == ["dense", "converted"]
        rounded = export_checkpoint(source, tmp_path / "bf16", text=text)
        assert list(rounded.held_out) == ["dense", "converted", "dense, bfloat16"]
        assert rounded.held_out["dense"] == report.held_out["dense"]
        assert rounded.held_out["dense, bfloat16"] != report.held_out["dense"]
        packed = export_checkpoint(
            source,
            tmp_path / "packed",
            format="compressed-tensors",
            low_rank="side-file",
            text=text,
        )
        assert list(packed.held_out) == ["dense", "converted", "fold", "side-file"]
        # Before anything is rounded to what it is stored in.
        assert packed.held_out["dense"] == report.held_out["dense"]
        whole = load_low_rank(tmp_path / "packed")
        expected = mean_loss(whole, ids)
        assert packed.held_out["side-file"] == pytest.approx(expected, abs=1e-5)

    def test_is_read_as_other_commands_read_it(self, source, tmp_path):
        """Without a byte order mark; of JSON lines the texts, each with the end token behind it."""
        text, lines = documents()[7].text[:600], ("first", "second")
        (tmp_path / "t.txt").write_text(text, "utf-8")
        (tmp_path / "marked.txt").write_text(text, "utf-8-sig")
        objects = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / "t.jsonl").write_text(objects)
        plain, marked, chat = (
            torch.cat(held_out_windows(source, tmp_path / name), dim=1)[0].tolist()
            for name in ("t.txt", "marked.txt", "t.jsonl")
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        assert plain == marked == tokenizer(text)["input_ids"]
        first, second = (tokenizer(line)["input_ids"] for line in lines)
        end = tokenizer.eos_token_id
        assert chat == [*first, end, *second, end]

    def test_too_short(self, source, tmp_path):
        (tmp_path / "t.txt").write_text("a")
        with pytest.raises(ValueError, match="fewer than two tokens"):
            export_checkpoint(source, tmp_path / "out", text=tmp_path / "t.txt")
        assert not (tmp_path / "out").exists()

    def test_command(self, source, tmp_path):
        from typer.testing import CliRunner

        from metis_hf.cli.main import app

        (tmp_path / "t.txt").write_text(documents()[7].text[:600])
        (tmp_path / "r.json").write_text('{"results": {"piqa": {"acc,none": 0.625}}}')
        command = ["export", str(source), "--out", str(tmp_path / "out"), "--format",
                   "compressed-tensors", "--text", str(tmp_path / "t.txt"),
                   "--results", str(tmp_path / "r.json")]  # fmt: skip
        result = CliRunner().invoke(app, command, env={"COLUMNS": "100"})
        assert result.exit_code == 0, result.output
        record = json.loads((tmp_path / "out/metis_export.json").read_text())
        for row in record["rows"]:
            assert f"{row['mean_error']:.2e}" in result.output
        losses = record["held_out"]
        lines = result.output.splitlines()
        for name, loss in losses.items():
            (line,) = [line for line in lines if line.startswith(f"│ {name}: ")]
            assert line.replace("│", "").split()[-2:] == [
                f"{loss:.4f}",
                f"{loss - losses['dense']:+.4f}",
            ]
        assert "difference to dense" in result.output
        assert "14 layers in NVFP4. Load it:" in result.output
        code = result.output.split("Load it:\n")[1].split("Serve it:\n")[0]
        assert len([line for line in code.splitlines() if line]) == 2
        namespace: dict = {}
        exec(code, namespace)
        assert isinstance(namespace["model"], transformers.LlamaForCausalLM)
        card = ModelCard.load(tmp_path / "out/README.md")
        assert "| results / piqa / acc | 0.625 |" in card.text


@pytest.mark.parametrize("format", ["dense", "compressed-tensors"])
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_of_new_ones(format, mask, tmp_path):
    """Also those of libraries that write under a temporary name."""
    source = checkpoint(tmp_path / "metis", scheme="metis-paper", rank=4, split_weight=True)
    sides = ["fold"] if format == "dense" else ["fold", "side-file"]
    before = os.umask(mask)
    try:
        for side in sides:
            export_checkpoint(source, tmp_path / side, format=format, low_rank=side)
    finally:
        os.umask(before)
    for side in sides:
        files = [path for path in (tmp_path / side).rglob("*") if path.is_file()]
        assert len(files) > 3
        assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}
