"""Models without weights, what a config selects of a model, and what PEFT does."""

from __future__ import annotations

import copy

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import nn

from conversion.architectures import ARCHITECTURES
from metis_hf import MetisConfig
from metis_hf.conversion.select import select_modules

MLP_OF = "model.layers.{}.mlp.{}"
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = {**SIZES, "intermediate_size": 96, "vocab_size": 64}


class HouseLinear(nn.Linear):
    """Somebody's own linear layer, of whose forward pass nothing is known."""

    def forward(self, input):
        return super().forward(input).clamp(-9, 9)


def build(name: str = "llama") -> transformers.PreTrainedModel:
    return ARCHITECTURES[name].build()


def on_meta(kind: str, **options) -> transformers.PreTrainedModel:
    cls = getattr(transformers, kind)
    with torch.device("meta"):
        return cls(cls.config_class(**options))


def composite(decoder: str, **options) -> transformers.PreTrainedModel:
    encoder = transformers.BertConfig(**TEXT)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, getattr(transformers, decoder)(**options)
    )
    with torch.device("meta"):
        return transformers.EncoderDecoderModel(config)


def selected(model: nn.Module, **options) -> set[str]:
    """Names that a config selects; the model stays as it is."""
    selection = select_modules(model, MetisConfig(**options))
    return {*selection.linears, *selection.experts}


def skipped(model: nn.Module, **options) -> dict[str, str]:
    return select_modules(model, MetisConfig(**options)).skipped


def chosen_by_peft(model: nn.Module, **options) -> set[str]:
    """Names of the modules that PEFT puts a LoRA adapter on."""
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, **options))
    return {
        name.removeprefix("base_model.model.")
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer)
    }
