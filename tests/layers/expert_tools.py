"""Fused experts alone, of each kind, and a routing of tokens to them."""

from __future__ import annotations

import pytest
import torch
import transformers
from conversion.architectures import EXPERTS
from torch import nn
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

HIDDEN, INNER, TOKENS, TOP_K = 64, 96, 40, 3

# Gated; without a gate; transposed and interleaved with biases; transposed without.
KINDS = {
    "mixtral": (MixtralExperts, "MixtralConfig", {"num_local_experts": EXPERTS}),
    "nemotron": (
        NemotronHExperts,
        "NemotronHConfig",
        {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER},
    ),
    "gpt-oss": (GptOssExperts, "GptOssConfig", {"num_local_experts": EXPERTS}),
    "aria": (AriaExperts, "AriaTextConfig", {"moe_num_experts": EXPERTS}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Block(nn.Module):
    """Experts alone, under the name that they have in a model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        cls, config, options = KINDS[kind]
        torch.manual_seed(0)
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER}
        config = getattr(transformers, config)(**sizes, **options)
        config._experts_implementation = "eager"
        self.experts = cls(config)
        for param in self.experts.parameters():
            nn.init.normal_(param, std=0.1)

    def forward(self, x, index, weights):
        return self.experts(x, index, weights)


def routing(experts: int = EXPERTS):
    """x [t h], the experts of each token [t k] and their weights, with gradients asked for."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[:, experts:] = -1  # those see no token
    weights, index = scores.topk(min(TOP_K, experts))
    return x, index, weights.softmax(-1).requires_grad_()
