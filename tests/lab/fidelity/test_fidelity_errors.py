"""What `metis-hf fidelity` refuses, before minutes are spent."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from lab.fidelity.measuring import SMALL, load, settings
from metis_hf.cli.main import main
from metis_hf.lab.fidelity import gradients, measurements
from metis_hf.lab.fidelity.measurements import fidelity
from metis_hf.lab.fidelity.settings import Settings
from metis_hf.lab.fidelity.subject import ModelAndText

pytestmark = pytest.mark.usefixtures("no_pictures")


class TestBadInput:
    def test_the_context_of_a_composite_model_is_that_of_its_text(self, place, tmp_path):
        sizes = {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }  # fmt: skip
        text = {"vocab_size": 300, "num_key_value_heads": 1, "head_dim": 16} | sizes
        config = transformers.Gemma3Config(
            text_config=text | {"max_position_embeddings": 16},
            vision_config=sizes | {"image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
        )
        transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
        transformers.AutoTokenizer.from_pretrained(place / "model").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"32 tokens do not fit in the context of .*, 16"):
            ModelAndText(str(tmp_path), place / "text.txt", sequences=3, length=32, batch=1).open()

    def test_settings(self, place, tmp_path):
        for changes, message in (
            ({"schemes": ("metsi",)}, r"did you mean 'metis'\?"),
            ({"schemes": ("metis", "metis")}, "two rows would be called metis; give each"),
            ({"schemes": ()}, "nothing to measure; name schemes \(or all of them\)"),
            ({"length": 65}, "do not fit in the context of"),
            ({"sequences": 2}, "choose at least 3 sequences"),
            ({"ranks": (8, 8)}, "two rows would be called metis, rank 8; give"),
            ({"alone": ("nvida",)}, "'nvida' is not one of the measured rows"),
            ({"dtype": "float4"}, "dtype 'float4' is not known"),
            ({"tokens_per_step": 0}, "tokens_per_step=0"),
        ):
            with pytest.raises(ValueError, match=message):
                fidelity(settings(place, **changes), tmp_path / "out")
            assert not (tmp_path / "out").exists()

    def test_a_disk_that_the_gradients_do_not_fit_on(self, place, tmp_path, monkeypatch):
        """Named before any is computed; a mapped file that is too large would end the process."""

        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        def fail(*args):
            raise AssertionError("computed")

        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
        monkeypatch.setattr(gradients, "run_batches", fail)
        with pytest.raises(
            OSError, match=r"No space left on device; two gradient files of 0\.\d+ MiB each"
        ):
            fidelity(settings(place, schemes=("nvfp4",), alone=()), tmp_path)
        assert not (tmp_path / "gradients").exists()

    def test_alone_names_rows_of_ranks(self, monkeypatch):
        seen = []

        def measured(settings, *rest):
            seen.append(settings.alone)
            return []

        monkeypatch.setattr(measurements, "fidelity", measured)
        command = ["metis-hf", "fidelity", "model", "--text", "text", "--alone"]
        monkeypatch.setattr(sys, "argv", [*command, "metis, rank 4,nvfp4"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        assert seen == [("metis, rank 4", "nvfp4")]
        ranks = Settings("m", Path("t"), schemes=(), ranks=(4, 8), alone=("metis, rank 8",))
        assert [name for name, _ in ranks.candidates()] == ["metis, rank 4", "metis, rank 8"]

    def test_no_tokenizer(self, place, tmp_path):
        load(place).save_pretrained(tmp_path / "model")
        bare = Settings(str(tmp_path / "model"), place / "text.txt", **SMALL)
        with pytest.raises(ValueError, match="contains no tokenizer"):
            fidelity(bare, tmp_path / "out")
        given = replace(bare, tokenizer=str(place / "model"), schemes=("bf16",), alone=())
        assert fidelity(given, tmp_path / "out")[0].rise.mean == 0

    def test_ranks_that_are_no_numbers(self, monkeypatch, capsys):
        command = ["metis-hf", "fidelity", "model", "--text", "text", "--ranks", "8,x"]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert "--ranks 8,x: expected whole numbers" in capsys.readouterr().err
