"""Perplexity of documents under a reference causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_WEIGHTS = ("*.safetensors", "*.bin")


class Scorer:
    """A reference model that measures log perplexity.

    Each text is preceded by the beginning-of-text token (or end-of-text, if there is none), so that
    its first token is predicted too. The model runs in bf16 on CUDA and in fp32 on the CPU.

    Args:
        name: Path or hub name of a causal language model and its tokenizer.
        tokens: Texts are truncated to this many tokens.
        batch_size: Texts per forward pass.

    Raises:
        FileNotFoundError, ValueError: As in `check_reference`.
    """

    def __init__(self, name: str, tokens: int, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        check_reference(name, tokens)
        self.tokens, self.batch_size, self.name = tokens, batch_size, name
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.device = torch.device(device_type())
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        self.model = model.to(self.device).eval()
        self.prefix = prefix_token(self.tokenizer, model.config, name, "--reference-model")

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """Return the mean negative log-likelihood in nats per token, the log of the perplexity.

        Returns:
            float64 `[len(texts)]`; NaN for a text that has no tokens under the reference.

        Raises:
            ValueError: If a loss is not finite.
        """
        encoded = self._encode(texts)
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))  # less padding
        scores = np.full(len(texts), np.nan)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            filled = [i for i in chosen if encoded[i]]
            if filled:
                scores[filled] = self._losses([encoded[i] for i in filled])
            if not np.isfinite(scores[filled]).all():
                raise ValueError(
                    f"the reference model {self.name} produces a loss that is not finite; check "
                    "its weights, or choose another --reference-model"
                )
        return scores

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            truncation=True,
            max_length=self.tokens,
            verbose=False,
        )["input_ids"]

    def _losses(self, batch: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, batch))
        # Padded on the right: under causal attention no real token sees the padding.
        rows = [[self.prefix, *ids] + [self.prefix] * (longest - len(ids)) for ids in batch]
        mask = [[1] * (1 + len(ids)) + [0] * (longest - len(ids)) for ids in batch]
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor(rows, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                use_cache=False,
            ).logits  # [b 1+t v]
            return [
                # One text at a time: an fp32 copy of all logits would take too much memory.
                torch.nn.functional.cross_entropy(
                    logits[i, : len(ids)].float(), torch.tensor(ids, device=self.device)
                ).item()
                for i, ids in enumerate(batch)
            ]


def device_type() -> str:
    """Return the device type of the reference model: `"cuda"` if available, else `"cpu"`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_reference(name: str, tokens: int) -> None:
    """Refuse a reference model that cannot score texts, without loading its weights.

    Raises:
        FileNotFoundError: `name` is a directory without weights.
        ValueError: `tokens` plus a prefix token exceed the context; the tokenizer has neither a
            bos_token nor an eos_token, or its ids exceed the model's vocabulary.
    """
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(name)
    folder = Path(name)
    if folder.is_dir() and not any(p for kind in _WEIGHTS for p in folder.glob(kind)):
        raise FileNotFoundError(
            f"--reference-model {name} has no weights ({', '.join(_WEIGHTS)}); save the model "
            "there, or choose another"
        )
    prefix_token(AutoTokenizer.from_pretrained(name), config, name, "--reference-model")
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and tokens + 1 > context:
        raise ValueError(
            f"perplexity_tokens={tokens} and one token before them do not fit the context of "
            f"{name}, which has {context} tokens; choose at most {context - 1}"
        )


def prefix_token(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str, option: str
) -> int:
    """Return the token to put before a text: BOS, or EOS if there is no BOS.

    Messages name the model and tokenizer, `name`, and the `option` that chooses another.

    Raises:
        ValueError: the tokenizer has neither, or its ids (without added tokens) exceed the model's
            vocabulary.
    """
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if prefix is None:
        raise ValueError(
            f"the tokenizer of {name} has neither a bos_token nor an eos_token to put before a "
            f"text; set one and save the tokenizer, or choose another {option}"
        )
    highest = max(tokenizer.vocab_size - 1, prefix)
    known = getattr(config.get_text_config(), "vocab_size", None)
    if known is not None and highest >= known:
        raise ValueError(
            f"the tokenizer of {name} produces tokens up to {highest}, but the model's vocabulary "
            f"has {known} tokens: they do not match; save the model's own tokenizer in its "
            f"directory, or choose another {option}"
        )
    return prefix
