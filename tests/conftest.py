"""Shared builders: small real transformers models from configs, and fixed seeds."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Single operators are tested as torch runs them; tests/numerics/kernels shows that kernels agree.
os.environ.setdefault("METIS_KERNELS", "reference")

import design
import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from torch.utils import collect_env
from transformers.utils import logging

from metis_hf.numerics.kernels import use_kernels

logging.disable_progress_bar()
logging.set_verbosity_error()

# lm-eval writes it into each result, and asks a dozen programs for it: a second.
collect_env.get_pretty_env_info = functools.cache(collect_env.get_pretty_env_info)

# No property depends on how busy a machine is.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.too_slow],
)
settings.load_profile("untimed")

VOCAB = 256
WHOLE_MODELS = {"conversion", "deploy", "lab", "training"}  # rooms of the package
ENVIRONMENT = os.environ


@pytest.fixture(autouse=True)
def one_environment() -> None:
    """Put os.environ back: datasets replaces it when it maps in processes, rich keeps the first."""
    os.environ = ENVIRONMENT  # noqa: B003


@pytest.fixture(autouse=True, scope="module")
def kernels_of_users(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run whole models with the kernels that users get, which are faster."""
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    with use_kernels(None) if room in WHOLE_MODELS else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_old_to_collect() -> None:
    """Keep collections short: Trainer asks for one after each training, .2 s over what is there."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage: what imports make stays, and each search takes .5 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter clean up as ever: libraries complain about what is left."""
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run all combinations of what tests rotate (design.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Note the choice where modules that are collected can see it."""
    if config.getoption("--full"):
        os.environ[design.FULL] = "1"


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need a GPU; put files with slow tests first, so that the last are short."""
    for item in items:
        reasons = [str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif")]
        named = any("CUDA" in reason or "GPU" in reason for reason in reasons)
        if named or item.get_closest_marker("blackwell"):
            item.add_marker("gpu")  # `make gpu` runs them
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def hear_interrupts() -> None:
    """For a process to come (`preexec_fn`): one of a shell's background jobs ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def llama(num_hidden_layers: int = 2, **changes):
    sizes = {**SIZES, "num_hidden_layers": num_hidden_layers, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def gpt2(**changes):
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **dropout,
                                        **changes})  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, num_hidden_layers=2))


def mixtral(num_local_experts: int = 2, **changes):
    sizes = {**SIZES, "num_hidden_layers": 1, "num_local_experts": num_local_experts, **changes}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def t5(**changes):
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, **changes}
    config = transformers.T5Config(**{"vocab_size": VOCAB, "decoder_start_token_id": 0, **sizes})
    return transformers.T5ForConditionalGeneration(config)


def falcon(**changes):
    sizes = {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": False, **changes}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))


def bert(kind: str = "Model", **changes):
    config = transformers.BertConfig(**{**SIZES, "num_hidden_layers": 1, **changes})
    return getattr(transformers, f"Bert{kind}")(config)


def bart(kind: str = "ForConditionalGeneration", **changes):
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
    sizes = {f"{side}_{name}": n for name, n in sizes.items() for side in ("encoder", "decoder")}
    config = transformers.BartConfig(**{"vocab_size": VOCAB, "d_model": 32, **sizes, **changes})
    return getattr(transformers, f"Bart{kind}")(config)


ARCHITECTURES = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """What other tests have compiled counts for nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def token_ids():
    return torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
