"""Weight matrices of a checkpoint on disk, read from safetensors one at a time.

A split weight of a Metis checkpoint is read as its four stored tensors and the matrix that they
represent. The model is only built as a skeleton on the meta device, to find the weights of linear
layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.core_model_loading import rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from metis_hf.config import MetisConfig
from metis_hf.conversion.naming import name_mapping
from metis_hf.conversion.select import select_modules
from metis_hf.layers.experts import fused_weights
from metis_hf.operands import SplitWeight, WeightForm
from metis_hf.schemes import build_scheme
from metis_hf.shared.checkpoints import depth_damage, refuse_links
from metis_hf.shared.messages import reading, shown
from metis_hf.shared.records import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SPLIT = SplitWeight.names
# Matrices that are not weights of linear layers, for modules that the skeleton does not have.
_NO_LINEAR = re.compile(
    r"embed|wte|wpe|position|norm|lm_head|router|(^|\.|_)gate$|relative_attention_bias", re.I
)
_LAST_FFN = re.compile(
    r"down_proj|(mlp|ffn)\.(c_proj|fc2|w2|wo)|fc2|dense_4h_to_h|DenseReluDense\.wo|"
    r"(?<!attention\.)output\.dense|experts\..*w2",
)
_KEY = re.compile(r"k_proj|\.key\b|c_attn|query_key_value|qkv_proj|SelfAttention\.k\b|qkv\b")


@dataclass(frozen=True)
class StoredWeight:
    """A weight as a checkpoint holds it, in fp32."""

    name: str  # of the layer
    weight: Tensor  # [o i], the represented matrix
    parts: tuple[Tensor, ...] | None = None  # split: u [o k], s [k], vh [k i], residual [o i]
    form: WeightForm | None = None  # computes the weight from the parts
    scheme: str | None = None  # the scheme that the parts were trained in

    def rows(self, index: Tensor) -> StoredWeight:
        """Return the same weight with the rows `index` only."""
        parts = self.parts
        if parts is not None:
            parts = (parts[0][index], *parts[1:3], parts[3][index])
        return replace(self, weight=self.weight[index], parts=parts)

    @property
    def residual(self) -> Tensor | None:
        """The stored residual [o i] of a split weight."""
        return None if self.parts is None else self.parts[-1]


@dataclass(frozen=True)
class _Place:
    """The location of a layer's weight: tensor name, is it stored [i o], index of an expert."""

    key: str
    transposed: bool = False
    expert: int | None = None


class WeightSource:
    """The linear layers of a checkpoint by name; loads their weights one at a time.

    Args:
        checkpoint: a directory that `save_pretrained` wrote, or a hub name.

    Raises:
        FileNotFoundError: there is no such directory, it has no safetensors, or a shard is missing.
        ValueError: the checkpoint is damaged, quantized by other software, or has no linear layer.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        self.checkpoint = str(checkpoint)
        if Path(checkpoint).is_dir():
            refuse_links(checkpoint)
        with reading(checkpoint):
            if (damage := depth_damage(Path(checkpoint))) is not None:
                raise ValueError(f"{checkpoint} is incomplete: {damage}; copy its files again")
            self._open()

    def _open(self) -> None:
        checkpoint = self.checkpoint
        self.config: Any = AutoConfig.from_pretrained(
            self.file("config.json"), trust_remote_code=False
        )
        stored = getattr(self.config, "quantization_config", None) or {}
        stored = stored if isinstance(stored, dict) else stored.to_dict()
        method = stored.get("quant_method")
        if method not in (None, MetisConfig.quant_method):
            raise ValueError(
                f"{checkpoint} is quantized by {method!r}, but the analysis needs the original "
                "weights. Give the checkpoint from which it was made"
            )
        self.metis = MetisConfig.from_dict(stored) if method else None
        self._files = self._tensor_files()
        self._places = dict(self._find())
        if not self._places:
            raise ValueError(
                f"{checkpoint} has no linear layer with a weight; there is nothing to analyze"
            )

    @property
    def names(self) -> list[str]:
        """Layer names, in the order of the model."""
        return list(self._places)

    def file(self, name: str) -> Path:
        """Return the path of a checkpoint file, in the directory or in the hub's cache."""
        folder = Path(self.checkpoint)
        if folder.is_dir() or folder.is_absolute() or self.checkpoint.startswith("."):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{folder} has no {name}; give a directory that save_pretrained wrote, or the "
                    "name of a hub repository"
                )
            return folder / name
        try:
            found = cached_file(self.checkpoint, name)
        except OSError as error:
            raise FileNotFoundError(
                f"{self.checkpoint!r} is not a directory, and {name} could not be loaded from a "
                f"Hub repository of that name: {str(error).splitlines()[0]}"
            ) from error
        assert found is not None
        return Path(found)

    def identity(self) -> list[Any]:
        """Return the checkpoint's identity: its config, and its weight files' sizes and times."""
        files = [(path.name, path.stat()) for path in sorted(set(self._files.values()))]
        sizes = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        return [self.file("config.json").read_text(encoding="utf-8"), sizes]

    def load(self, name: str) -> StoredWeight:
        """Read one layer's weight; it is not cached."""
        place = self._places[name]
        if not place.key.endswith(_SPLIT[-1]):
            weight = self._read(place.key, place.expert)
            return StoredWeight(name, weight.T.contiguous() if place.transposed else weight)
        base = place.key.removesuffix(_SPLIT[-1])
        parts = tuple(self._read(base + part) for part in _SPLIT)
        config = (self.metis or MetisConfig()).for_layer(name)
        out_features, in_features = parts[-1].shape
        form = build_scheme(config, in_features, out_features).weight
        if not form.is_split:  # the checkpoint's config is missing or does not match
            form = SplitWeight(len(parts[1]))
        return StoredWeight(name, form.dense(parts), parts, form, config.scheme)

    def shape(self, name: str) -> tuple[int, int]:
        """Return (out_features, in_features) of a layer, without reading its weight."""
        place = self._places[name]
        rows, columns = self._shape(place.key)[-2:]
        return (columns, rows) if place.transposed else (rows, columns)

    def _read(self, key: str, index: int | None = None) -> Tensor:
        with safe_open(self._files[key], "pt") as tensors:
            if index is None:
                return tensors.get_tensor(key).float()
            return tensors.get_slice(key)[index].float()

    def _tensor_files(self) -> dict[str, Path]:
        """Return tensor name -> its file."""
        try:
            index = self.file(INDEX)
        except FileNotFoundError:
            try:
                path = self.file(SINGLE)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{self.checkpoint} has neither {SINGLE} nor {INDEX}; the analysis reads "
                    "weights only from safetensors. Save the model again with save_pretrained"
                ) from error
            with safe_open(path, "pt") as tensors:
                return dict.fromkeys(tensors.keys(), path)
        shards = read_json(index)["weight_map"]
        if away := [shard for shard in set(shards.values()) if Path(shard).name != shard]:
            raise ValueError(
                f"{index} names {shown(away[0])}, which is not a file in the same directory"
            )
        paths = {shard: self.file(shard) for shard in sorted(set(shards.values()))}
        return {key: paths[shard] for key, shard in shards.items()}

    def _find(self) -> Iterator[tuple[str, _Place]]:
        """Return (layer, place) for every linear layer's weight, in the order of the model."""
        skeleton = _skeleton(self.config)
        linears, known = _linear_layers(skeleton, self.metis)
        renamed = _renaming(skeleton)
        found: dict[str, _Place] = {}
        for key in self._files:
            base, _, part = key.rpartition(".")
            if base not in known:  # including converted experts, which no skeleton has
                base = renamed(key).rpartition(".")[0]
            name = _in_model(base, known, getattr(skeleton, "base_model_prefix", ""))
            if part == _SPLIT[-1]:
                found[name] = _Place(key)
            elif part == "weight" and (name in linears or self._is_linear(key, name, known)):
                found[name] = _Place(key, transposed=linears.get(name, False))
            elif (whole := _in_model(key, linears, "")) in linears:
                for expert in range(self._shape(key)[0]):
                    found[f"{whole}.{expert}"] = _Place(key, linears[whole], expert)
        order = {name: position for position, name in enumerate(known)}
        return iter(sorted(found.items(), key=lambda item: _position(item[0], order)))

    def _is_linear(self, key: str, name: str, known: Container[str]) -> bool:
        """Guess whether a module that the skeleton does not have is linear."""
        return name not in known and len(self._shape(key)) == 2 and not _NO_LINEAR.search(name)

    def _shape(self, key: str) -> list[int]:
        with safe_open(self._files[key], "pt") as tensors:
            return tensors.get_slice(key).get_shape()


def _skeleton(config: Any) -> nn.Module | None:
    """Build the model on the meta device; None if transformers does not know its class."""
    cls = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if cls is None:
        return None
    with torch.device("meta"):
        return cls(config)


def _renaming(skeleton: Any) -> Callable[[str], str]:
    """Return a function from a checkpoint's tensor names to the model's; merged names stay."""
    renamings, converters = ([], []) if skeleton is None else name_mapping(skeleton)

    def renamed(key: str) -> str:
        name, merged = rename_source_key(key, renamings, converters)
        return name if merged is None else key

    return renamed


def _linear_layers(
    skeleton: nn.Module | None, metis: MetisConfig | None
) -> tuple[dict[str, bool], dict[str, None]]:
    """Return (layers that conversion takes: name -> is the weight stored [i o]; all modules)."""
    if skeleton is None:
        return {}, {}
    modules = dict(skeleton.named_modules())
    selections = [select_modules(skeleton, MetisConfig())]
    if metis is not None:  # names were checked when the model was converted
        selections.append(select_modules(skeleton, metis, check_names=False))
    names = [name for selection in selections for name in selection.linears]
    linears = {name: isinstance(modules[name], Conv1D) for name in names}
    for name in (name for selection in selections for name in selection.experts):
        owner, _, weight = name.rpartition(".")
        if weight in fused_weights(modules[owner]):
            linears[name] = bool(modules[owner].is_transposed)
    return linears, dict.fromkeys([*modules, *linears])


def _in_model(base: str, known: dict[str, Any], prefix: str) -> str:
    """Return the model's name of a module, whose prefix in the checkpoint may differ."""
    if base in known:
        return base
    others = (f"{prefix}.{base}", base.removeprefix(f"{prefix}."))
    return next((name for name in others if name in known), base)


def _position(name: str, order: dict[str, int]) -> tuple:
    """Return a sort key: position in the model, or the nearest known parent's, then the rest.

    Indices compare as numbers.
    """
    parent, tail = name, ""
    while parent and parent not in order:
        parent, _, last = parent.rpartition(".")
        tail = f"{last}.{tail}"
    digits = [part.zfill(6) if part.isdigit() else part for part in tail.split(".")]
    return order.get(parent, len(order)), digits


def portrait_layers(names: list[str]) -> list[str]:
    """Return the layers that the paper shows: last and first FFN output and attention key.

    The last FFN comes first. If the names identify neither, return the last and the first layer.
    """
    chosen = []
    for pattern in (_LAST_FFN, _KEY):
        matching = [name for name in names if pattern.search(name)]
        chosen += [matching[-1], matching[0]] if matching else []
    return list(dict.fromkeys(chosen or [names[-1], names[0]]))


def last_ffn(names: list[str]) -> str:
    """Return the last FFN's output projection; without one, the last attention key or layer."""
    return portrait_layers(names)[0]
