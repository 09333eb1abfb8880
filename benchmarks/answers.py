"""Compare log-probabilities from inference engines with our own forward pass."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from timing import Row
from torch import Tensor
from transformers import PreTrainedModel

ENGINE = Path(__file__).resolve().parent.parent / ".engine" / "bin" / "python"
WRITER = ENGINE.parent.parent / "writer" / "bin" / "python"  # llm-compressor's environment
# Limit on the ratio of rms errors. vLLM rounds to BF16 at other places than we do: the ratio
# reached 1.16, and 1.26 when inputs stayed unquantized.
BOUND = 1.2
NEW = 16  # tokens to generate


@torch.no_grad()
def logprobs(model: PreTrainedModel, prompts: Tensor) -> Tensor:
    """Return the log-probabilities [p n-1] of prompts [p n], without the first tokens."""
    logits = (model.eval()(input_ids=row[None]).logits[0, :-1].float() for row in prompts)
    found = [each.log_softmax(-1).gather(1, row[1:, None]) for each, row in zip(logits, prompts)]
    return torch.stack(found)[..., 0]


def beside(found: Tensor, exact: Tensor) -> Row:
    """Compare log-probabilities with the exact ones, as means and token by token."""
    apart = (exact - found).flatten()
    return {
        "loss": -found.mean().item(),
        "difference": apart.mean().item(),
        "error": (apart.std() / len(apart) ** 0.5).item(),
        "rms": apart.square().mean().sqrt().item(),
        "largest": apart.abs().max().item(),
    }


def holds(found: Row, own: Row) -> bool:
    """Return whether `found` is as close to our fp32 pass as our BF16 pass `own`, up to noise."""
    loss = abs(own["difference"]) + 3 * found["error"]
    return abs(found["difference"]) <= loss and found["rms"] <= BOUND * own["rms"]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Tensor, theirs: list[int]) -> Row:
    """Return the length of the common prefix, and the largest log-probability lost by `theirs`."""
    own = model.generate(prompt[None], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    same = (own[0, len(prompt) :] == torch.tensor(theirs)).long().cumprod(0).sum().item()
    ids = torch.cat([prompt, torch.tensor(theirs)])[None]
    given = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    lost = given.amax(-1) - given.gather(1, torch.tensor(theirs)[:, None])[:, 0]
    return {"same": same, "of": NEW, "most_given_up": lost.max().item()}


def ask(request: Row, python: Path = ENGINE) -> Any:
    """Return the answer of in_engine.py to a request, run with the Python of an environment."""
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("in_engine.py"))],
        input=json.dumps(request, default=str),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def served(prompts: Tensor, models: list[list[Path | None]], layers: Path | None = None) -> Row:
    """Return vLLM's answers for models, each a directory and an adapter's directory or None."""
    return ask({"prompts": prompts.tolist(), "new": NEW, "models": models, "layers": layers})
