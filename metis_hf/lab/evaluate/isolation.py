"""Context managers that keep lm-eval from leaving a trace: random state, modes, logs, variables."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metis_hf.shared.quiet import quiet_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for a while."""
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def preserve_random_state(device_type: str) -> Iterator[None]:
    """Keep lm-eval's seeding of python, numpy and torch from a training run."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    count = 0 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    kind = "cuda" if device_type == "cpu" else device_type
    try:
        with torch.random.fork_rng(devices=range(count), device_type=kind):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def preserve_model(model: PreTrainedModel) -> Iterator[None]:
    """Evaluate without a key-value cache; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    had_cache_flag = hasattr(model.config, "use_cache")
    use_cache = getattr(model.config, "use_cache", None)
    model.config.use_cache = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        if had_cache_flag:
            model.config.use_cache = use_cache
        else:
            del model.config.use_cache


@contextlib.contextmanager
def quiet_harness(progress: bool) -> Iterator[None]:
    """Let lm-eval log errors only, print nothing, and show progress bars only if asked for.

    Of the bars those are kept that say what they count; they go when they are full.
    """
    from lm_eval import evaluator
    from torch.utils import collect_env
    from tqdm import std

    original = std.tqdm.__init__

    def quieter(self: std.tqdm, *args: Any, **kwargs: Any) -> None:
        # HFLM passes disable=False itself, so its arguments cannot do this.
        hide = not progress or not kwargs.get("desc") or kwargs.get("disable", False)
        original(self, *args, **{**kwargs, "disable": hide, "leave": False})

    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet_datasets())
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            # Outside a repository git complains on the terminal, and the hash is not used here.
            stack.enter_context(_replaced(evaluator, "get_git_commit_hash", lambda: ""))
            # It lists all packages, which takes seconds for each evaluation.
            stack.enter_context(_replaced(collect_env, "get_pretty_env_info", lambda: ""))
            stack.enter_context(_replaced(std.tqdm, "__init__", quieter))
            yield
    finally:
        harness.setLevel(level)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    # What the owner holds may make another function at each access, as a partialmethod does.
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
