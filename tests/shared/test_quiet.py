"""Silence of the libraries below."""

from __future__ import annotations

import importlib.util
import sys

import datasets
from transformers.utils import logging

from metis_hf.shared.quiet import quiet


def test_bars_are_silent_in_the_block_and_as_before_after_it():
    before = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
    with quiet():
        assert datasets.are_progress_bars_disabled()
        assert not logging.is_progress_bar_enabled()
    assert not datasets.are_progress_bars_disabled()
    if before:
        datasets.disable_progress_bars()


def test_without_datasets(monkeypatch):
    find = importlib.util.find_spec
    there = lambda name, *rest: None if name == "datasets" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises ImportError
    with quiet():
        assert not logging.is_progress_bar_enabled()
