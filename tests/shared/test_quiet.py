"""Silence of the libraries below."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from transformers.utils import logging

from metis_hf.shared.quiet import quiet


@pytest.fixture
def datasets():
    return importlib.import_module("datasets")


@pytest.fixture(autouse=True)
def loud(datasets):
    """Let the libraries speak, which conftest silences, and leave them as they were."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    of_datasets = not datasets.are_progress_bars_disabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    datasets.enable_progress_bars()
    yield
    logging.set_verbosity(verbosity)
    if not bars:
        logging.disable_progress_bar()
    if not of_datasets:
        datasets.disable_progress_bars()


def is_silent():
    datasets = sys.modules["datasets"]
    bars = logging.is_progress_bar_enabled() or not datasets.are_progress_bars_disabled()
    return not bars and logging.get_verbosity() == logging.ERROR


def fail_silently():
    with quiet():
        with quiet():
            assert is_silent()
        assert is_silent()
        raise KeyError


def test_silent_in_the_block_and_as_before_after_it(datasets):
    """After an error too; silence within silence stays."""
    with pytest.raises(KeyError):
        fail_silently()
    assert not datasets.are_progress_bars_disabled()
    assert logging.is_progress_bar_enabled()
    assert logging.get_verbosity() == logging.INFO


def test_without_datasets(monkeypatch):
    find = importlib.util.find_spec
    there = lambda name, *rest: None if name == "datasets" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises ImportError
    with quiet():
        assert not logging.is_progress_bar_enabled()
