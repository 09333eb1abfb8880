"""Context managers that confine lm-eval's side effects: random state, modes, logs, output."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from metis_hf.shared.quiet import no_warnings, quiet_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def preserve_random_state(device_type: str) -> Iterator[None]:
    """Restore the random state of Python, numpy and torch, which lm-eval seeds."""
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
    """Turn off the KV cache for the block, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with mock.patch.object(model.config, "use_cache", False, create=True):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def quiet_harness(progress: bool) -> Iterator[None]:
    """Let lm-eval log errors only, print nothing, and show progress bars only if asked for.

    Only bars with a description are shown; they disappear when they are full.
    """
    from lm_eval import evaluator
    from torch.utils import collect_env
    from tqdm import std

    original = std.tqdm.__init__

    def quieter(self: std.tqdm, *args: Any, **kwargs: Any) -> None:
        # HFLM itself passes disable=False, so its arguments cannot hide bars.
        hide = not progress or not kwargs.get("desc") or kwargs.get("disable", False)
        original(self, *args, **{**kwargs, "disable": hide, "leave": False})

    with (
        no_warnings("lm_eval"),
        quiet_datasets(),
        contextlib.redirect_stdout(io.StringIO()),
        # Outside a repository git prints an error, and the hash is not used here.
        mock.patch.object(evaluator, "get_git_commit_hash", return_value=""),
        # This lists all packages, which takes seconds for each evaluation.
        mock.patch.object(collect_env, "get_pretty_env_info", return_value=""),
        mock.patch.object(std.tqdm, "__init__", quieter),
    ):
        yield
