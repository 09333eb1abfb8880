"""Training with dropout and without metis_hf: what a control run computes on its own.

Run as a script, in a process that never imports metis_hf, it prints the fingerprint of a run.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import transformers
from torch import nn

VOCAB, STEPS = 128, 3


def gpt2(dropout: float = 0.1) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(step))


class Run:
    """A model, its optimizer and what it has computed so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def step(self) -> None:
        ids = batch(len(self.losses))
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def digest(self) -> str:
        """Losses, parameters by content, and where torch's generator has come to, to the bit."""
        parameters = sorted(p.detach().numpy().tobytes() for p in self.model.parameters())
        rng = torch.get_rng_state().numpy().tobytes()
        return hashlib.sha256(repr(self.losses).encode() + b"".join([*parameters, rng])).hexdigest()


def train(**options) -> Run:
    """The control run: seeds torch, builds the model, takes a few steps."""
    torch.manual_seed(0)
    run = Run(gpt2(**options))
    for _ in range(STEPS):
        run.step()
    return run


if __name__ == "__main__":
    digest = train().digest()
    assert "metis_hf" not in sys.modules
    print(digest)
