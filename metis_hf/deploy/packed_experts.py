"""Fused experts in packed checkpoints: one linear layer per expert and projection.

Engines read experts under their names in a dense checkpoint of the model, with the tensors of a
packed layer in place of `weight`: `model.layers.0.mlp.experts.3.gate_proj.weight_packed`. If a
dense checkpoint stores the experts fused, as gpt-oss does, names end as llm-compressor writes them:
`gate_proj`, `up_proj`, `down_proj`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

from metis_hf.deploy.compressed_tensors import weight_quantizer
from metis_hf.layers.experts import (
    converted_names,
    expert_shape,
    fused_bias,
    fused_weights,
    is_fused_experts,
    layers_of,
    packed_list,
    part_rows,
    parts_of,
    replace_fused,
    replace_packed,
)


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of one expert.

    Attributes:
        experts: name of the module of fused experts.
        key: name of the fused weight that contains the matrix.
        part: "gate_proj", "up_proj" or "down_proj".
        index: index of the expert.
        name: name of its linear layer, before transformers renames it for the files.
    """

    experts: str
    key: str
    part: str
    index: int
    name: str

    @property
    def place(self) -> str:
        """Name of its packed layer in a model loaded by `load_packed`."""
        return f"{self.experts}.{packed_list(self.part)}.{self.index}"

    def rows(self, module: nn.Module, out_features: int) -> slice:
        """Return its rows in the expert's fused matrix [out_features i]."""
        return part_rows(module, self.key, self.part, out_features)


def expert_matrices(
    model: PreTrainedModel, experts: str, key: str, count: int
) -> list[ExpertMatrix]:
    """Return the matrices that a fused weight of `count` experts is split into, expert by expert.

    Raises:
        ValueError: transformers renames the experts in a way that packed tensors cannot follow.
    """
    module = model.get_submodule(experts)
    parts = parts_of(module, key)
    # Each number of the probe stands for one matrix; the tensor it ends up in gives the name.
    probe = torch.arange(float(count * len(parts)), device="cpu").view(count, len(parts), 1)
    probe = probe.transpose(1, 2) if module.is_transposed else probe
    try:
        saved = _in_files(model, {f"{experts}.{key}": probe})
    except (IndexError, KeyError, RuntimeError, ValueError):
        saved = {}
    known = {
        int(value): name.removesuffix(".weight")
        for name, value in saved.items()
        if value.numel() == 1 and name.endswith(".weight")
    }
    apart = len(known) == count * len(parts)
    found = []
    for index in range(count):
        for at, part in enumerate(parts):
            file = known[index * len(parts) + at] if apart else part
            name = f"{experts}.{index}.{file.rpartition('.')[2]}"
            found.append(ExpertMatrix(experts, key, part, index, name))
    if apart:
        packed = {f"{each.name}.weight_packed": probe for each in found}
        written = _in_files(model, packed).keys()
        if written != {f"{name}.weight_packed" for name in known.values()}:
            raise ValueError(
                f"{experts}.{key}: transformers saves the experts as {next(iter(saved))}, "
                "a name that packed tensors cannot use; exclude the experts"
            )
    return found


def _in_files(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as `save_pretrained` writes them for a model built from its config.

    A loaded model only keeps the conversions that its own files needed.
    """
    own = vars(model).pop("_weight_conversions", None)
    try:
        return revert_weight_conversion(model, tensors)
    finally:
        if own is not None:
            model._weight_conversions = own


def all_matrices(model: PreTrainedModel) -> dict[str, ExpertMatrix]:
    """Return the matrices of all fused weights of a plain model, by their names in files."""
    return {
        each.name: each
        for name, module in model.named_modules()
        if is_fused_experts(module)
        for key, weight in fused_weights(module).items()
        for each in expert_matrices(model, name, key, weight.shape[0])
    }


def converted_experts(model: nn.Module) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield (experts module name, fused weight name, its layers) of a converted model."""
    for name, module in model.named_modules():
        for key in converted_names(module):
            yield name, key, list(layers_of(module, key))


def has_packed_experts(model: nn.Module) -> bool:
    """Return whether a converted model quantizes the weights of fused experts."""
    experts = converted_experts(model)
    return any(weight_quantizer(layer) is not None for *_, layers in experts for layer in layers)


def experts_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note on what can read a packed checkpoint, if the model has fused experts."""
    name = next((name for name, each in model.named_modules() if is_fused_experts(each)), None)
    if name is None:
        return ()
    packed = has_packed_experts(model)
    how = "packed as separate linear layers for each expert" if packed else "not packed"
    return (
        f"{name} has fused experts, which are {how}. metis_hf.load_packed reads such a checkpoint, "
        "but transformers does not.",
    )


@torch.no_grad()
def unfuse(model: nn.Module, layers: Collection[str]) -> None:
    """Replace fused experts of a plain model by nn.Linears, named like the converted `layers`.

    Fused weights without a name in `layers` stay fused.
    """
    for name, module in list(model.named_modules()):
        if not is_fused_experts(module):
            continue
        for key, fused in fused_weights(module).items():
            if f"{name}.metis_{key}.0" not in layers:
                continue
            bias = fused_bias(module, key)
            columns, rows = expert_shape(module, key)
            linears = []
            for index, weight in enumerate(fused):
                with torch.device("meta"):
                    linear = nn.Linear(columns, rows, bias=bias is not None)
                linear.weight = nn.Parameter(weight.T if module.is_transposed else weight)
                if bias is not None:
                    linear.bias = nn.Parameter(bias[index])
                linears.append(linear)
            replace_fused(module, key, linears)


def names_in_files(
    model: PreTrainedModel, layers: Collection[str]
) -> dict[str, list[tuple[str, slice]]]:
    """Return packed layer -> [(name of a linear layer in the files, the rows it holds), ...].

    The model is plain, with its packed experts unfused.
    """
    names = {name: [(name, slice(None))] for name in layers}
    for experts, key, linears in converted_experts(model):
        module, (rows, _) = model.get_submodule(experts), linears[0].weight.shape
        of_expert: dict[int, list[tuple[str, slice]]] = {}
        for each in expert_matrices(model, experts, key, len(linears)):
            of_expert.setdefault(each.index, []).append((each.name, each.rows(module, rows)))
        names |= {f"{experts}.metis_{key}.{index}": parts for index, parts in of_expert.items()}
    return names


def unfuse_packed(
    model: nn.Module, experts: Collection[ExpertMatrix], where: str
) -> dict[str, str]:
    """Give a model on the meta device an nn.Linear for each packed matrix of its experts.

    Args:
        model: plain, as built from its config.
        experts: all expert matrices that are packed in the checkpoint.
        where: name of the checkpoint, for messages.

    Returns:
        Name of each matrix in files -> its layer's name in the model.

    Raises:
        ValueError: some experts of a fused weight are missing.
    """
    of_weight: dict[tuple[str, str], dict[tuple[str, int], ExpertMatrix]] = {}
    for each in experts:
        of_weight.setdefault((each.experts, each.key), {})[each.part, each.index] = each
    for (name, key), found in of_weight.items():
        module = model.get_submodule(name)
        weight, bias = fused_weights(module)[key], fused_bias(module, key)
        columns, rows = expert_shape(module, key)
        layers: dict[str, list[nn.Module]] = {}
        for part in (parts := parts_of(module, key)):
            missing = [index for index in range(weight.shape[0]) if (part, index) not in found]
            if missing:
                raise ValueError(
                    f"{where} has packed experts of {name} but lacks {part} of expert "
                    f"{missing[0]}; restore the files"
                )
            with torch.device("meta"):
                layers[part] = [
                    nn.Linear(columns, rows // len(parts), bias is not None, dtype=weight.dtype)
                    for _ in weight
                ]
        replace_packed(module, key, layers)
    return {each.name: each.place for each in experts}


class ExpertNames(WeightRenaming):
    """Renames the tensors of packed experts between files and model, by layer name."""

    __slots__ = ("back", "there")

    @classmethod
    def of(cls, experts: Mapping[ExpertMatrix, str], places: Mapping[str, str]) -> ExpertNames:
        """Build the renaming; `places` is the result of `unfuse_packed`.

        `experts` maps matrices to their names in files, as transformers renames them.
        """
        there = {
            name: name.removesuffix(each.name.removeprefix(each.experts))
            + each.place.removeprefix(each.experts)
            for each, name in experts.items()
        }
        return cls(there, {place: name for name, place in places.items()})

    def __init__(self, there: Mapping[str, str], back: Mapping[str, str]) -> None:
        super().__init__(source_patterns="packed_experts", target_patterns="packed_experts")
        self.there, self.back = there, back

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        owner, _, last = source_key.rpartition(".")
        if owner not in self.there:
            return source_key, None
        self._was_used = True
        return f"{self.there[owner]}.{last}", self.source_patterns[0]

    def reverse_transform(self) -> ExpertNames:
        return ExpertNames(self.back, self.there)
