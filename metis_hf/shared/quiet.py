"""Silences progress bars, notices and warnings in a block."""

from __future__ import annotations

import importlib.util
import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and notices of transformers and datasets in the block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with quiet_datasets():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def no_warnings(package: str = "metis_hf") -> Iterator[None]:
    """Let a package log only errors in the block, such as a trial run."""
    logger = python_logging.getLogger(package)
    level = logger.level
    logger.setLevel(python_logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the progress bars of datasets in the block, if datasets is installed."""
    if importlib.util.find_spec("datasets") is None:
        yield
        return
    import datasets

    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars:
            datasets.enable_progress_bars()
