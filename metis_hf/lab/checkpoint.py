"""Trained checkpoints on disk: their contents, precisions to evaluate them in, and loading."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
import transformers
from torch import nn

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model, metis_layers, to_dense
from metis_hf.conversion.hub import read_config  # registers the format with transformers
from metis_hf.deploy.packed import load_deployed, load_packed
from metis_hf.deploy.packed_layouts import COMPRESSED, FORMAT, UNPACKED
from metis_hf.schemes import CONTROL, scheme_info
from metis_hf.shared.checkpoints import file_damage, load_complete
from metis_hf.shared.messages import reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "*.model", "vocab.txt")
DENSE = "dense"
# The attention of these model types is causal, whatever `is_decoder` says.
_ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")


@dataclass(frozen=True)
class Checkpoint:
    """A directory that `from_pretrained` can load."""

    path: Path  # holds `config.json`; for an adapter, the base model's directory
    label: str  # its name in a table
    quantization: dict[str, Any]  # `quantization_config`; empty for a dense model
    conversion: MetisConfig | None = None  # converts a dense model after loading
    adapter: Path | None = None  # directory of the PEFT adapter on top of the model
    trained: bool = False  # `conversion` comes from the adapter's training, not from the user

    @property
    def place(self) -> Path:
        """The adapter's directory if there is an adapter, else the model's."""
        return self.adapter or self.path

    @cached_property
    def metis(self) -> MetisConfig | None:
        """The MetisConfig for evaluation in the scheme; None without one."""
        if self.quantization.get("quant_method") != MetisConfig.quant_method:
            return self.conversion
        try:
            return self.conversion or read_config(self.quantization)
        except ValueError as error:
            raise ValueError(f"{self.path / CONFIG_FILE}: {error}") from None

    @property
    def schemes(self) -> tuple[str, ...]:
        """The names of the Metis schemes, the scheme of most layers first."""
        return () if self.metis is None else self.metis.schemes

    @property
    def scheme(self) -> str:
        """The Metis schemes joined by "+", "dense" without quantization, else `quant_method`."""
        if self.metis is None:
            return self.quantization.get("quant_method", DENSE)
        of_layers = dict.fromkeys([self.metis.scheme, *self.metis.scheme_pattern.values()])
        attention = self.metis.attention
        shown = "" if attention in (None, CONTROL) else f", attention {attention}"
        return "+".join(of_layers) + shown

    @property
    def quantized(self) -> bool:
        """Return whether evaluation in the scheme can differ from dense evaluation."""
        return self.scheme not in (DENSE, CONTROL)

    def precisions(self, asked: str) -> tuple[str, ...]:
        """Return the precisions to evaluate in, given "scheme", "dense" or "both"."""
        if not self.quantized:
            return ("dense",)
        if self.conversion is not None and not self.trained:  # the dense model has its own row
            return ("scheme",)
        if asked == "both":
            return ("scheme",) if self._by_others else ("scheme", "dense")
        return (asked,)

    @property
    def _by_others(self) -> bool:
        """Return whether other software quantized the weights, so that there are no dense ones."""
        return self.metis is None and self.scheme != DENSE

    def check(self, asked: str) -> None:
        """Raise ValueError for a missing library, an unknown scheme or missing dense weights."""
        for name in self.schemes:
            scheme_info(name)
        without = importlib.util.find_spec("compressed_tensors") is None
        if self.scheme == COMPRESSED and without:
            raise ValueError(
                f"{self.path} is packed in the {COMPRESSED} layout, and the library that unpacks "
                "it is not installed; run pip install compressed-tensors, or evaluate the "
                "checkpoint that it was exported from"
            )
        if asked == "dense" and self._by_others:
            raise ValueError(
                f"{self.path} contains {self.scheme} weights only, no dense ones; use --precision "
                "scheme, or evaluate the checkpoint that it was exported from"
            )

    def load(self, precision: str, dtype: str, device: torch.device) -> PreTrainedModel:
        """Return the model, in evaluation mode.

        Args:
            precision: "scheme" as trained, "dense" with the dense weights that it represents.
            dtype: "auto" for the saved dtype, or a name such as "bfloat16".
            device: the target device.

        Raises:
            ValueError: not a causal language model, or a damaged checkpoint.
        """
        kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        with reading(self.path):
            model = self._load(precision, kind, device)
        if self.adapter is not None:
            with reading(self.adapter):
                config: Any = peft.PeftConfig.from_pretrained(str(self.adapter))
                if precision == "dense":
                    config.metis_config = None  # or the base would be converted as in training
                model = peft.PeftModel.from_pretrained(  # type: ignore[assignment]
                    model, str(self.adapter), config=config
                )
        return model.eval()

    def config(self) -> transformers.PreTrainedConfig:
        """Return the model's config; raise ValueError unless it is a causal language model."""
        with reading(self.path):
            config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
            raise ValueError(
                f"{self.path} is a {config.model_type} model, not a causal language model; "
                "the tasks need one"
            )
        if (field := looking_ahead(config)) is not None:
            raise ValueError(
                f"{self.path} is a {config.model_type} encoder: each token attends to later "
                "tokens, so there is nothing to predict; the tasks need a causal language model, "
                f"with {field}: true in its config.json"
            )
        return config

    def _load(self, precision: str, kind: Any, device: torch.device) -> PreTrainedModel:
        """Return the model without its adapter."""
        config = self.config()
        options: dict[str, Any] = {"trust_remote_code": False}
        if self.scheme == COMPRESSED:
            wanted: Any = config.dtype if kind == "auto" else kind
            if self.quantization.get("format") == FORMAT:
                # PEFT needs the layers' weights before the library has unpacked them.
                load = load_deployed if self.adapter is None else load_packed
                model = load(self.path, dtype=wanted)
                nn.Module.to(model, device)
                return model
            if wanted is not UNPACKED:  # the dtype that the first forward pass unpacks to anyway
                self._check_weights_alone(dtype=wanted)
                unpack = transformers.CompressedTensorsConfig(dequantize=True)
                options["quantization_config"] = unpack
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            auto = transformers.AutoModelForCausalLM
            model = load_complete(auto, self.path, dtype=kind, **options)
        if precision == "dense" and any(metis_layers(model)):
            to_dense(model)
        model = model.to(device)
        if precision == "scheme" and self.conversion is not None:
            get_metis_model(model, self.conversion)
        return model

    def _check_weights_alone(self, dtype: torch.dtype) -> None:
        """Raise ValueError if unpacking to this dtype would drop the quantization of inputs."""
        groups = self.quantization.get("config_groups") or {}
        if any(group.get("input_activations") for group in groups.values()):
            raise ValueError(
                f"{self.path} quantizes inputs ({self.quantization.get('format')}), which the "
                f"compressed-tensors library supports only in bfloat16, not in {dtype}; leave "
                "--dtype out or set it to bfloat16"
            )

    @property
    def _places(self) -> list[Path]:
        return [self.path] if self.adapter is None else [self.adapter, self.path]

    def tokenizer(self, other: str | Path | None = None) -> PreTrainedTokenizerBase:
        """Return the tokenizer of `other` or the checkpoint; ValueError if missing or damaged."""
        places = self._places if other is None else [Path(other)]
        place = next((each for each in places if _has_tokenizer(each)), places[-1])
        if not _has_tokenizer(place):
            raise ValueError(
                f"{place} contains no tokenizer; save one there with "
                f"tokenizer.save_pretrained({str(place)!r}), pass processing_class=tokenizer to "
                "the Trainer so that its checkpoints include it, or name a directory that has one "
                "with --tokenizer"
            )
        files = [*sorted(place.glob("*token*.json")), *place.glob("vocab.json")]
        reason = next(filter(None, map(file_damage, files)), None)
        if reason is not None:
            raise ValueError(
                f"{place}: {reason}, probably because a process ended while saving; save the "
                f"tokenizer again with tokenizer.save_pretrained({str(place)!r})"
            )
        with reading(place):
            return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)

    def weight_files(self) -> list[Path]:
        """Return the weight files, sorted, an adapter's first."""
        return [
            file
            for place in self._places
            for file in sorted(file for pattern in WEIGHTS for file in place.glob(pattern))
        ]

    def fingerprint(self) -> str:
        """Return the SHA-256 of the config and weight files: names, sizes and contents."""
        digest = hashlib.sha256()
        configs = [self.path / CONFIG_FILE]
        if self.adapter is not None:
            configs.append(self.adapter / ADAPTER_FILE)
        for file in [*configs, *self.weight_files()]:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with open(file, "rb") as stream:
                while block := stream.read(1 << 24):
                    digest.update(block)
        return digest.hexdigest()


def looking_ahead(config: Any) -> str | None:
    """Return the config field that makes attention bidirectional; None if attention is causal.

    Only fields of the config's class count: the model ignores extra keys of config.json.
    """
    if config.model_type in _ALWAYS_CAUSAL or getattr(config, "is_encoder_decoder", False):
        return None  # the decoder of an encoder-decoder is causal
    fields = [name for name in ("is_decoder", "causal") if hasattr(type(config), name)]
    return next((name for name in fields if not getattr(config, name)), None)


def _has_tokenizer(place: Path) -> bool:
    return any(file for pattern in TOKENIZER_FILES for file in place.glob(pattern))
