"""Quantized attention products: selects the attention modules and hooks into transformers.

transformers dispatches attention through a registry of functions, by a name in the config of each
attention module. A converted module gets its own config, which names `attention_forward`, and an
`AttentionProducts` submodule, which computes the two products. The model's config keeps its
implementation, which decides the form of the masks. Modules that stay in high precision, and
converted modules while their scheme quantizes nothing, compute as before, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metis_hf.config import MetisConfig
from metis_hf.layers.attention import AttentionProducts, build_attention_scheme
from metis_hf.layers.parallelism import FSDP2_INSTEAD, TENSOR, planned

IMPLEMENTATION = "metis"
_ATTRIBUTE = "metis_attention"
_INTERFACE = re.compile(r"\bget_interface\(\s*self\.config\._attn_implementation,\s*(\w+)")
_ATTENTION_CLASS = re.compile(r"Attention|Attn")
_MASKED = ("eager", "sdpa")  # implementations whose masks are matrices
# Arguments of the interface that select keys or add terms; not supported here.
_FOREIGN = ("indices", "block_indices", "sinks", "cache")


def attention_products(model: nn.Module) -> Iterator[tuple[str, AttentionProducts]]:
    """Yield (module name, `AttentionProducts`) for every converted attention module."""
    for name, module in model.named_modules():
        products = module._modules.get(_ATTRIBUTE)
        if isinstance(products, AttentionProducts):
            yield name, products


def select_attention(
    model: nn.Module, config: MetisConfig, converted: Collection[str]
) -> tuple[str, ...]:
    """Return the names of the attention modules to convert.

    These contain at least one converted layer, so an option that keeps a block or module out of the
    conversion keeps its attention out too.

    Args:
        model: before or after its conversion.
        config: with `attention=None`, nothing is selected.
        converted: names of the converted linear layers and experts.

    Raises:
        ValueError: the scheme is unknown or does not apply to attention; no attention module
            contains a converted layer; a module does not call transformers' interface, or its
            implementation does not use matrix masks.
        NotImplementedError: the model is loaded with tensor parallelism.
    """
    if config.attention is None:
        return ()
    build_attention_scheme(config)
    if config.backend == "native":
        raise ValueError(
            f'backend="native" does not support attention={config.attention!r}: FP4 units run '
            'only linear layers. Use backend="auto", which emulates the attention products and '
            "reports it, or leave attention unset"
        )
    if planned(model).get("tp_size", 1) > 1:
        raise NotImplementedError(
            f"attention={config.attention!r} does not support tensor parallelism: each process has "
            "only some of the heads, and a tensor scale would cover only those; "
            f"{TENSOR}. {FSDP2_INSTEAD}"
        )
    around = {name.rpartition(".")[0] for name in converted}
    inside = {
        name
        for name, module in model.named_modules()
        if _eager_name(type(module).forward)
        and any(f"{one}.".startswith(f"{name}.") for one in around)
    }
    for name, module in model.named_modules():
        kind = type(module)
        if name not in around or not _ATTENTION_CLASS.search(kind.__name__):
            continue
        if not any(f"{name}.".startswith(f"{one}.") for one in inside):
            raise ValueError(
                f"attention={config.attention!r}: {name} ({kind.__name__}) does not call "
                "transformers' AttentionInterface, so its products cannot be replaced. Exclude it "
                "with modules_to_not_convert, or leave attention unset"
            )
    if not inside:
        raise ValueError(
            f"attention={config.attention!r}: no module of {type(model).__name__} with a converted "
            "layer calls transformers' AttentionInterface. Convert layers of attention modules "
            "too, or leave attention unset"
        )
    for name in inside:
        module = model.get_submodule(name)
        config_of = _plain_config(name, module)
        if getattr(module, "reorder_and_upcast_attn", False):
            raise ValueError(
                f"{name} has reorder_and_upcast_attn=True, which computes scores in fp32 in its "
                "own way. Quantized products always compute them in fp32; set it to False in the "
                "model's config"
            )
        _plain_function(name, module, config_of)
    return tuple(name for name, _ in model.named_modules() if name in inside)


def install_attention(model: nn.Module, config: MetisConfig, names: Collection[str]) -> None:
    """Make the named attention modules compute their products as `config` says, in place."""
    for name in names:
        module: Any = model.get_submodule(name)
        products = AttentionProducts(config, name, module.config)
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = IMPLEMENTATION
        module.add_module(_ATTRIBUTE, products.train(module.training))


def set_attention(model: nn.Module, config: MetisConfig, names: Collection[str]) -> None:
    """Change the config of attention modules in place; `attention=None` reverts them.

    `select_attention` has checked the config and returned the names.
    """
    before = dict(attention_products(model))
    if config.attention is None:
        remove_attention(model)
        return
    for products in before.values():
        products.set_config(config)
    install_attention(model, config, [name for name in names if name not in before])


def remove_attention(model: nn.Module) -> None:
    """Restore the original attention implementation of every converted module, in place."""
    for name, products in list(attention_products(model)):
        module: Any = model.get_submodule(name)
        module.config = products.plain_config
        del module._modules[_ATTRIBUTE]


def _plain_config(name: str, module: nn.Module) -> Any:
    """Return the config that names the module's original attention implementation."""
    products = module._modules.get(_ATTRIBUTE)
    if isinstance(products, AttentionProducts):
        return products.plain_config
    config = getattr(module, "config", None)
    if not hasattr(config, "_attn_implementation"):
        raise ValueError(
            f"{name} has no transformers config that names its attention implementation; leave "
            "attention unset"
        )
    return config


@functools.cache
def _eager_name(forward: Callable[..., Any]) -> str | None:
    """Return the name of the eager function passed to `get_interface`; None: it is not called."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return None
    found = _INTERFACE.search(source)
    return found and found.group(1)


def _plain_function(name: str, module: nn.Module, config: Any) -> Callable[..., Any]:
    """Return the attention function that `config` names: the eager one or a registered one."""
    _check_implementation(name, config)
    forward: Any = inspect.unwrap(type(module).forward)
    eager = forward.__globals__.get(_eager_name(type(module).forward))
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)


def _check_implementation(name: str, config: Any) -> None:
    """Refuse an attention implementation whose masks are not matrices."""
    implementation = config._attn_implementation
    if implementation not in _MASKED:
        raise ValueError(
            f"{name}: quantized attention needs masks that are matrices, but the model's "
            f'attn_implementation is {implementation!r}. Load the model with "sdpa" or "eager", '
            "or switch to one of them with model.set_attn_implementation"
        )


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a converted module, with transformers' interface signature.

    Args:
        module: the attention module.
        query: [b h q d]
        key: [b h' k d]
        value: [b h' k e]
        attention_mask: [b 1 q k], True or 0 where queries attend; None: full attention under
            "eager", causal attention under "sdpa" unless `is_causal` is False.
        dropout: rate on the probabilities; refused above 0 in training.
        scaling: factor on the scores; None: 1 / sqrt(d).
        **kwargs: "softcap", "s_aux" (sinks), "position_bias" and "is_causal" are used; key
            selections and caches are refused; others are ignored, as "sdpa" ignores them.

    Returns:
        (output [b q h e], probabilities [b h q k] or None under "sdpa").
    """
    products = module._modules.get(_ATTRIBUTE)
    if products is None:
        raise ValueError(
            f"attention implementation {IMPLEMENTATION!r} is only for converted attention modules; "
            "get_metis_model(model, MetisConfig(attention=...)) selects it automatically"
        )
    config = products.plain_config
    _check_implementation(products.name, config)
    _check_arguments(products.name, kwargs)
    if products.active_scheme().is_high_precision:
        plain = _plain_function(products.name, module, config)
        return plain(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    _check_call(products.name, module, attention_mask, dropout)
    blocked, bias, keys = _mask(module, config, query, key, attention_mask, kwargs.get("is_causal"))
    position_bias = kwargs.get("position_bias")
    if position_bias is not None:
        position_bias = position_bias[..., :keys]
        bias = position_bias if bias is None else bias + position_bias
    sinks = kwargs.get("s_aux")
    output, probabilities = products.attend(
        query,
        key[:, :, :keys],
        value[:, :, :keys],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        blocked=blocked,
        bias=bias,
        softcap=kwargs.get("softcap"),
        sinks=getattr(module, "sinks", None) if sinks is None else sinks,
    )
    weights = probabilities.to(output.dtype) if config._attn_implementation == "eager" else None
    return output.transpose(1, 2).contiguous(), weights


def _check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that change attention in ways the mask does not contain."""
    foreign = [each for each in _FOREIGN if kwargs.get(each) is not None]
    if foreign:
        raise NotImplementedError(
            f"{name} passes {', '.join(foreign)} to its attention function, which quantized "
            "products do not support. Exclude it with modules_to_not_convert, or leave attention "
            "unset"
        )


def _check_call(name: str, module: nn.Module, mask: Tensor | None, dropout: float) -> None:
    """Refuse dropout in training, and masks that are not 4-D."""
    if dropout > 0 and module.training:
        raise NotImplementedError(
            f"{name}: dropout={dropout} of attention probabilities is not supported, because they "
            "would be dropped after quantization or rescaled before it. Load the model without "
            "dropout, for example with from_pretrained(..., attention_dropout=0.0); some models "
            "call it attn_pdrop or attention_probs_dropout_prob"
        )
    if mask is not None and mask.dim() != 4:
        raise ValueError(
            f"{name}: the attention mask has shape {tuple(mask.shape)}; expected [batch, heads or "
            '1, queries, keys], as with attn_implementation="sdpa" or "eager"'
        )


def _mask(
    module: nn.Module,
    config: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
) -> tuple[Tensor | None, Tensor | None, int]:
    """Return (mask of blocked scores, bias added to the scores, number of keys to attend to)."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None:
        if mask.dtype is torch.bool:
            return ~mask, None, keys
        blocked = mask <= torch.finfo(mask.dtype).min / 2
        return blocked, mask.masked_fill(blocked, 0.0), keys
    # Without a mask "eager" attends to everything; "sdpa" follows is_causal.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if config._attn_implementation == "eager" or queries == 1 or not is_causal:
        return None, None, keys
    keys = min(queries, keys)  # the rest of a static cache is still empty
    ones = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return ones.triu(1), None, keys


def _whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the full boolean mask of "sdpa": never skipped for the function's `is_causal`."""
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
# For modules that build their own mask from their own config.
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _whole_mask)
