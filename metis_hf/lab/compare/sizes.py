"""Models and training settings by size, for recipes and comparisons.

The sizes of 130M, 1.1B and 8B are the paper's (arXiv 2509.00404); recipes/README.md says where each
of their settings comes from. "tiny" and "demo" train on two CPU cores in minutes. "quartet2-30m"
is the smallest model of a public grid of FP4 trainings (`compare.published`), with that grid's
settings. "scale-30m" and "scale-130m" train in minutes on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A model and its training settings."""

    model_type: str  # of its transformers config
    config: dict[str, Any]  # keyword arguments of that config
    training: dict[str, Any]  # of TrainingArguments; the batch size is per process
    sequence_length: int  # tokens per sequence
    global_batch: int  # sequences per optimizer step, over all processes and accumulation
    tokens: int  # of one run in a comparison; a recipe trains on the paper's 100B
    eval_sequences: int  # held-out sequences for the loss
    health_interval: int = 0  # steps between measurements of spectral health; 0 never measures
    # Fields of `variants.Experiment` that no transformers class has: `one_cycle`,
    # `decay_embeddings`, `scaled_residuals`.
    beyond: dict[str, Any] = field(default_factory=dict)
    # How much of the standard library's text is chunked if no data is given: "all" or "run" (the
    # tokens of one run); None requires data.
    corpus: str | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of one run in a comparison."""
        return round(self.tokens / (self.global_batch * self.sequence_length))


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "activation_function": "gelu_pytorch_tanh",  # gelu_new in one kernel, which saves less
        "embd_pdrop": 0.0,  # one pass over the data does not overfit
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _training(learning_rate: float, device_batch: int, **more: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": device_batch,
        "per_device_eval_batch_size": device_batch,
        "learning_rate": learning_rate,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        **more,
    }


_SMALL = {"lr_scheduler_type": "cosine", "warmup_steps": 0.05}
_LARGE = {"logging_steps": 10, "ddp_find_unused_parameters": False}
_PAPER = {
    **_LARGE,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.01,
    "bf16": True,
    "save_steps": 1000,
    "save_total_limit": 2,
    "dataloader_num_workers": 2,
}
# Sizes "scale-": warm-up over a tenth of the steps, then cosine decay to a tenth of the rate.
_SCALE = {
    **_LARGE,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0.1,
    "save_steps": 500,
}
# For a tokenizer that is trained on tens of megabytes.
_SCALE_VOCABULARY = {"vocab_size": 16_384, "bos_token_id": 0, "eos_token_id": 0}
# The smallest model of Quartet II's public grid.
_LLAMA_30M = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# For a comparison that starts from a checkpoint, which brings its model.
CHECKPOINT = "checkpoint"
CONTINUED = Size(
    model_type="",
    config={},
    training=_training(1e-4, 4, **_SMALL, save_steps=50),
    sequence_length=256,
    global_batch=8,
    tokens=300_000,
    eval_sequences=128,
)


def _small_llama(width: int, layers: int, heads: int, vocab: int = 1024) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 16 * 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 1024,
        "initializer_range": width**-0.5,  # 0.02 suits widths near 1000
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


SIZES = {
    # 0.3M parameters, 10 tokens per parameter; the learning rate is the best one for the control in
    # eval/results/tiny-learning-rate.json.
    "tiny": Size(
        model_type="llama",
        config=_small_llama(96, 2, 3),
        training=_training(8e-3, 32, **_SMALL, save_steps=200),
        sequence_length=128,
        global_batch=32,
        tokens=780 * 32 * 128,
        eval_sequences=1024,
        corpus="all",
    ),
    # 0.7M parameters: five schemes train in minutes.
    "demo": Size(
        model_type="llama",
        config=_small_llama(128, 3, 4),
        training={
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 32,
            "learning_rate": 4e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.1,
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            "save_steps": 110,
        },
        sequence_length=128,
        global_batch=8,
        tokens=220 * 8 * 128,
        eval_sequences=256,
        health_interval=55,
        corpus="run",
    ),
    "130m": Size(
        model_type="gpt2",
        config=_gpt2(768, 12, 12),
        training=_training(1e-4, 32, **_PAPER),
        sequence_length=1024,
        global_batch=512,
        tokens=2_600_000_000,  # 20 per parameter
        eval_sequences=1024,
        health_interval=500,
    ),
    "1b1": Size(
        model_type="gpt2",
        config=_gpt2(1600, 32, 25),
        training=_training(1e-4, 8, **_PAPER),
        sequence_length=1024,
        global_batch=512,
        tokens=22_000_000_000,
        eval_sequences=1024,
        health_interval=500,
    ),
    "8b": Size(
        model_type="llama",
        config={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        training=_training(1.5e-4, 4, **_PAPER),
        sequence_length=1024,
        global_batch=512,
        tokens=100_000_000_000,  # the paper's
        eval_sequences=1024,
        health_interval=500,
    ),
    # The smallest model of Quartet II's public grid; the technical report lists the differences.
    "quartet2-30m": Size(
        model_type="llama",
        config={"vocab_size": 32000, **_LLAMA_30M},
        # A step has four micro-batches. Tensor scales, the rotation of tokens and wgrad's sum span
        # one micro-batch, so another size would change the quantizer.
        training=_training(1.2e-3, 128, **_LARGE, save_steps=500),
        sequence_length=512,
        global_batch=512,
        tokens=749_993_984,  # of the grid's shortest run, 2,861 steps
        eval_sequences=16_384,
        beyond={
            # Cosine up from lr / 100 for a tenth of the steps, and down to lr / 10.
            "one_cycle": {"pct_start": 0.1, "div_factor": 100.0, "final_div_factor": 0.1},
            "decay_embeddings": False,
            "scaled_residuals": True,
        },
    ),
    # The same shape: 51M parameters, embeddings included, and 32,768 tokens per step.
    "scale-30m": Size(
        model_type="llama",
        config={**_LLAMA_30M, **_SCALE_VOCABULARY},
        training=_training(1.5e-3, 64, **_SCALE),
        sequence_length=512,
        global_batch=64,
        tokens=700 * 64 * 512,
        eval_sequences=512,
    ),
    # The paper's smallest model with that vocabulary; the learning rate is nanoGPT's.
    "scale-130m": Size(
        model_type="gpt2",
        config={**_gpt2(768, 12, 12), **_SCALE_VOCABULARY},
        training=_training(6e-4, 32, **_SCALE),
        sequence_length=1024,
        global_batch=32,
        tokens=1000 * 32 * 1024,
        eval_sequences=256,
    ),
}
# Overrides of the size "demo" for a run that only shows the mechanics.
QUICK_DEMO: dict[str, Any] = {
    "model": _small_llama(64, 2, 2, vocab=512),
    "training": {"max_steps": 12, "per_device_train_batch_size": 4, "save_steps": 4},
    "sequence_length": 64,
    "global_batch": 4,
    "eval_sequences": 64,
    "health_interval": 6,
}
