"""What export refuses, by name, leaving nothing half-written."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import filelock
import pytest
import torch
import transformers
from conftest import ARCHITECTURES, bert, llama
from forked import exit_code
from safetensors.torch import load_file, save_file

import metis_hf.deploy.checkpoint
from deploy.checkpoints import checkpoint, recorded_rows
from metis_hf import (
    MetisConfig,
    get_metis_model,
    register_scheme,
)
from metis_hf.deploy import ExportReport, export_checkpoint, load_metis_model
from metis_hf.lab.calibrated import Calibration, calibrated_model
from metis_hf.schemes import Scheme, registry


def export_and_die(source: Path, out: Path, when: str) -> None:
    """Export, and be killed as it begins, before anything moves to its place, or amid that."""

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    rename = Path.rename

    def rename_or_die(path, target):
        return die() if path.name == "generation_config.json" else rename(path, target)

    if when == "begun":
        filelock.FileLock = die
    elif when == "written":
        metis_hf.deploy.checkpoint.report_section = die
    else:
        Path.rename = rename_or_die
    export_checkpoint(source, out)


class TestErrors:
    """Each names the layer or the value, and leaves no directory."""

    @staticmethod
    def refused(source, out, match, **options):
        with pytest.raises(ValueError, match=match):
            export_checkpoint(source, out, **({"format": "compressed-tensors"} | options))
        assert not out.exists()
        assert not list(out.parent.glob(f"*{out.name}.partial*"))

    def test_conv1d(self, tmp_path):
        source = checkpoint(tmp_path / "metis", ARCHITECTURES["gpt2"])
        self.refused(
            source, tmp_path / "out", r"transformer.h.0.attn.c_attn: it is a Conv1D.*dense"
        )

    def test_ragged_columns(self, tmp_path):
        source = checkpoint(tmp_path / "metis", partial(llama, intermediate_size=100))
        match = r"layers.0.mlp.down_proj: in_features=100 is not a multiple of the block size 16"
        self.refused(source, tmp_path / "out", match)

    @pytest.mark.parametrize(
        ("config", "match"),
        [
            ({"scheme": "bf16"}, "no layer .* quantized weights .*'bf16'"),
            ({"high_precision": ["forward"]}, r"no layer .*high_precision=\['forward'\]"),
        ],
    )
    def test_nothing_is_quantized(self, config, match, tmp_path):
        self.refused(checkpoint(tmp_path / "metis", **config), tmp_path / "out", match)

    def test_a_scheme_that_the_layout_cannot_express(self, tmp_path):
        from metis_hf.numerics import Quantizer
        from metis_hf.operands import Hadamard, Operand

        for name, operand, match in (
            ("mx", Operand(Quantizer("mxfp4")), "q_proj: its weight is quantized to mxfp4"),
            ("rotated", Operand(Quantizer(), Hadamard()), "q_proj: its scheme transforms"),
        ):
            scheme = Scheme(fprop_weight=operand)
            register_scheme(name, summary="x", source="x")(lambda config, rank, s=scheme: s)
            try:
                source = checkpoint(tmp_path / name, scheme=name)
                self.refused(source, tmp_path / "out", match)
            finally:
                del registry.SCHEMES[name]

    def test_side_file_without_a_low_rank_part_or_a_place_for_it(self, tmp_path):
        source = checkpoint(tmp_path / "metis", scheme="nvidia")
        self.refused(source, tmp_path / "out", r"needs split weights.*'nvidia'.*fold",
                     low_rank="side-file")  # fmt: skip
        self.refused(source, tmp_path / "out", r"side-file.*compressed-tensors.*\"fold\"",
                     format="modelopt", low_rank="side-file")  # fmt: skip

    def test_no_metis_checkpoint(self, tmp_path):
        llama().save_pretrained(tmp_path / "plain")
        self.refused(
            tmp_path / "plain", tmp_path / "out", "is a plain checkpoint, not a Metis checkpoint"
        )
        self.refused(tmp_path / "nowhere", tmp_path / "out", "no config.json")

    def test_unknown_choice(self, tmp_path):
        for name in ("format", "dtype", "low_rank"):
            match = f"{name}='nf4'; choose one of"
            self.refused(tmp_path, tmp_path / "out", match, **{name: "nf4"})

    def test_a_dtype_of_torch_s_is_its_name(self, tmp_path):
        source = checkpoint(tmp_path / "metis", scheme="nvfp4")
        report = export_checkpoint(source, tmp_path / "out", dtype=torch.float16)
        assert report.dtype == "float16"
        assert (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype
            is torch.float16
        )
        match = "dtype='float64'; choose one of bfloat16, float16, float32"
        self.refused(source, tmp_path / "wide", match, dtype=torch.float64)

    def test_packed_in_a_dtype_that_the_library_does_not_unpack_to(self, tmp_path):
        """Such a checkpoint loads, and its first forward pass mixes two dtypes."""
        dtype = "float16"
        split = ["weight", "activation", "gradient"]
        source = checkpoint(tmp_path / "metis", decompose=split)
        self.refused(source, tmp_path / "out", f"dtype='{dtype}'.*unpacks to bfloat16.*dequantize",
                     dtype=dtype)  # fmt: skip
        export_checkpoint(source, tmp_path / "out", dtype=dtype)  # the dense format has all
        export_checkpoint(source, tmp_path / "parts", format="compressed-tensors", dtype=dtype,
                          low_rank="side-file")  # fmt: skip

    def test_directory_in_use(self, tmp_path):
        source = checkpoint(tmp_path / "metis")
        with pytest.raises(ValueError, match="exists already"):
            export_checkpoint(source, source)
        (tmp_path / "empty").mkdir()
        export_checkpoint(source, tmp_path / "empty")

    def test_a_directory_that_is_a_volume(self, tmp_path, monkeypatch):
        """Nothing moves into it from outside of it."""
        source, out = checkpoint(tmp_path / "metis"), tmp_path / "out"
        out.mkdir()
        real = Path.rename

        def rename(path, target):
            if not path.is_relative_to(out):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            return real(path, target)

        monkeypatch.setattr(Path, "rename", rename)
        export_checkpoint(source, out)
        names = {path.name for path in out.iterdir()}
        assert {"model.safetensors", "metis_export.json", "README.md"} <= names
        assert not any("partial" in name for name in names)

    def test_a_place_that_is_not_to_be_written_to(self, tmp_path, monkeypatch):
        """Refused before the loss is measured."""
        source = checkpoint(tmp_path / "metis", tokenizer=True)
        (tmp_path / "t.txt").write_text("def f(x): return x")

        def refuse(path, *args, **kwargs):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        def fail(*args, **kwargs):
            raise AssertionError("measured")

        monkeypatch.setattr(Path, "mkdir", refuse)
        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fail)
        with pytest.raises(PermissionError, match=re.escape(str(tmp_path))):
            export_checkpoint(source, tmp_path / "out", text=tmp_path / "t.txt")

    @pytest.mark.parametrize(
        ("option", "content", "said"),
        [
            ("results", b'{"piqa": ', r"file is not a valid JSON file"),
            ("results", b"[1, 2]", r"file contains no metrics; expected a JSON object"),
            ("text", b"\xff\xfe\x00", r"file is not UTF-8 text"),
        ],
    )
    def test_files_are_read_before_the_model(self, option, content, said, tmp_path):
        def load(_):
            raise AssertionError("loaded")

        source = checkpoint(tmp_path / "metis", tokenizer=True)
        (tmp_path / "file").write_bytes(content)
        options = {option: tmp_path / "file", "load": load}
        self.refused(source, tmp_path / "out", said, **options)

    def test_a_text_of_tokens_that_the_model_does_not_know(self, tmp_path):
        source = checkpoint(tmp_path / "metis", tokenizer=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        tokenizer.add_tokens(["import"])
        tokenizer.save_pretrained(source)
        (tmp_path / "t.txt").write_text("import this")
        self.refused(source, tmp_path / "out", "they do not match",
                     text=tmp_path / "t.txt")  # fmt: skip

    def test_a_weight_that_is_not_finite(self, tmp_path):
        """It would be packed, with its sibling; a dense export has it, and the report is JSON."""
        source = checkpoint(tmp_path / "metis", scheme="nvfp4-rne")
        tensors = load_file(source / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = math.inf
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        for layout in ("compressed-tensors", "modelopt"):
            match = r"layers\.0\.mlp\.up_proj: its weight has NaN or inf"
            self.refused(source, tmp_path / "out", match, format=layout)
        export_checkpoint(source, tmp_path / "out")
        rows = recorded_rows(tmp_path / "out")
        assert rows["up_proj"]["mean_error"] is None
        assert rows["down_proj"]["mean_error"] > 0

    @pytest.mark.parametrize("calibrates", [False, True])
    def test_a_checkpoint_that_is_not_whole(self, calibrates, tmp_path):
        """Nothing is made up for what is not there."""
        source = tmp_path / "source"
        if calibrates:
            llama().save_pretrained(source)
            calibration = Calibration(text=None, scheme="w4a16")
            options = {"load": partial(calibrated_model, calibration=calibration)}
        else:
            checkpoint(source, scheme="nvfp4-rne")
            options = {}
        path = source / "model.safetensors"
        whole = path.read_bytes()
        tensors = load_file(path)
        del tensors["model.embed_tokens.weight"]
        save_file(tensors, path, {"format": "pt"})
        match = r"source lacks model\.embed_tokens\.weight, which .* would be random"
        self.refused(source, tmp_path / "out", match, **options)
        path.write_bytes(whole[: len(whole) // 2])
        match = r"source is incomplete: model\.safetensors is truncated"
        self.refused(source, tmp_path / "out", match, **options)

    def test_an_interrupted_export_leaves_no_directory(self, tmp_path, monkeypatch):
        source = checkpoint(tmp_path / "metis")

        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(metis_hf.deploy.checkpoint, "report_section", interrupted)
            with pytest.raises(KeyboardInterrupt):
                export_checkpoint(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert isinstance(export_checkpoint(source, tmp_path / "out"), ExportReport)
        assert not list(tmp_path.glob("*out.partial*"))

    @pytest.mark.parametrize("exists", [False, True])
    def test_a_second_export_to_one_place(self, exists, tmp_path):
        """It is refused in one line while the first one works, and the first one is whole."""
        source, out = checkpoint(tmp_path / "metis", scheme="nvfp4-rne"), tmp_path / "out"

        def load(path):
            out.mkdir(exist_ok=True)
            for format in ("dense", "compressed-tensors"):
                with pytest.raises(ValueError, match=r"out is in use by process \d+ on .*--out$"):
                    export_checkpoint(source, out, format=format)
            assert not [path for path in out.iterdir() if not path.name.startswith(".")]
            return load_metis_model(path)

        if exists:
            out.mkdir()
        report = export_checkpoint(source, out, load=load)
        names = {path.name for path in out.iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors",
                         "metis_export.json", "README.md"}  # fmt: skip
        assert report.packed == ()
        assert {path.name for path in tmp_path.iterdir()} == {"metis", "out"}

    @pytest.mark.parametrize("when", ["begun", "written", "moving"])
    def test_what_a_killed_export_left(self, when, tmp_path):
        """The next one removes it and succeeds; whatever else lies there stays, and is refused."""
        source, out = checkpoint(tmp_path / "metis", scheme="nvfp4-rne"), tmp_path / "out"
        expected = export_checkpoint(source, tmp_path / "undisturbed")
        names = {path.name for path in (tmp_path / "undisturbed").iterdir()}
        for exists in (True,) if when == "moving" else (True, False):
            if exists:
                out.mkdir()
            assert exit_code(export_and_die, source, out, when) == -signal.SIGKILL
            hidden = list((out if exists else tmp_path).glob(".out.partial-*"))
            assert len(hidden) == 1
            out.mkdir(exist_ok=True)
            (out / "model.safetensors.mine").write_text("not of an export")
            with pytest.raises(ValueError, match="out exists already"):
                export_checkpoint(source, out)
            assert hidden[0].is_dir()
            (out / "model.safetensors.mine").unlink()
            assert export_checkpoint(source, out).rows == expected.rows
            assert {path.name for path in out.iterdir()} == names
            assert {path.name for path in tmp_path.iterdir()} == {"metis", "out", "undisturbed"}
            shutil.rmtree(out)

    @pytest.mark.parametrize("link", [False, True])
    def test_a_directory_in_the_way_is_left_alone(self, link, tmp_path):
        """By its name it could be what a killed export left; an export has a lock in it."""
        source, place = checkpoint(tmp_path / "metis"), tmp_path / ".out.partial-export"
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / ".lock").touch()
        (tmp_path / "mine" / "letter").touch()
        if link:
            place.symlink_to(tmp_path / "mine")
        else:
            place.mkdir()
            (place / "letter").touch()
        with pytest.raises(ValueError, match=r"\.out\.partial-export is in the way"):
            export_checkpoint(source, tmp_path / "out")
        assert (place / "letter").is_file()

    def test_text_for_another_kind_of_model(self, tmp_path):
        model = get_metis_model(bert("ForMaskedLM"), MetisConfig())
        model.save_pretrained(tmp_path / "metis")
        (tmp_path / "t.txt").write_text("text")
        self.refused(tmp_path / "metis", tmp_path / "out", "not a causal language model",
                     format="dense", text=tmp_path / "t.txt")  # fmt: skip
        export_checkpoint(tmp_path / "metis", tmp_path / "out")
        transformers.BertForMaskedLM.from_pretrained(tmp_path / "out")
