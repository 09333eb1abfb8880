"""Warns when a converted submodel is saved as part of an owner whose config does not record it.

Conversion cannot update the owner's config: a submodel does not know its owner, and other models
may share that config.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Prefixes that PEFT, DDP, torch.compile and FSDP add to the names of a whole model.
_WRAPPERS = re.compile(r"((base_model(\.model)?|module|_orig_mod|_fsdp_wrapped_module)\.)*")


def watch_part(model: nn.Module) -> None:
    """Make a converted model warn when it is saved as part of another model."""
    model.register_state_dict_post_hook(_warn_of_owner)


def forget_part(model: nn.Module) -> None:
    """Undo `watch_part`."""
    for key in [key for key, hook in model._state_dict_hooks.items() if hook is _warn_of_owner]:
        del model._state_dict_hooks[key]


def _warn_of_owner(model: Any, state: Any, prefix: str, metadata: Any) -> None:
    if _WRAPPERS.fullmatch(prefix):
        return
    logger.warning_once(
        "%s is converted, but its owner's config does not say so: if the owner is a transformers "
        "model, a checkpoint that its save_pretrained writes loads without converted layers. To "
        "keep them, convert the owner instead, and choose its layers with target_modules and "
        "exclude_modules",
        prefix.removesuffix("."),
    )
