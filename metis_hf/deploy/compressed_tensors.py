"""NVFP4 matrices in the layout `nvfp4-pack-quantized` of the compressed-tensors library.

For a layer `name` [o i]: `name.weight_packed` uint8 [o i/2], two E2M1 codes to a byte, the even
column in the low nibble; `name.weight_scale` float8_e4m3fn [o i/16]; `name.weight_global_scale`
fp32 [1], an encode scale: weight = code * weight_scale / weight_global_scale. If inputs are
quantized too, `name.input_global_scale` fp32 [1], also an encode scale. The layout is read and
written without the library. Low-rank factors are packed the same way in a side file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from metis_hf.deploy.casting import cast
from metis_hf.deploy.packed_layouts import FORMAT, RESIDUAL_DIR, SIDE_FILE
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.packed import PackedWeight
from metis_hf.numerics import NVFP4, Quantizer, Tile
from metis_hf.numerics.storage import QuantizedTensor
from metis_hf.operands import Spectral, SplitWeight
from metis_hf.schemes import Role
from metis_hf.schemes.states import StaticScales
from metis_hf.shared.messages import some
from metis_hf.shared.records import read_json

LOW_RANK_FILE = "metis_low_rank.safetensors"
LOW_RANK_VERSION = 1
_PARTS = ("packed", "scale", "global_scale")


@dataclass(frozen=True)
class CompressedMatrix:
    """One packed matrix [rows columns].

    Attributes:
        packed: uint8 [rows, columns / 2, rounded up to whole blocks].
        scale: float8_e4m3fn [rows, columns / 16, rounded up].
        global_scale: fp32 [1]; values are divided by it.
        columns: number of matrix columns; the rest of the last block is padding.
    """

    packed: Tensor
    scale: Tensor
    global_scale: Tensor
    columns: int

    @classmethod
    def of(
        cls, weight: Tensor, quantizer: Quantizer, amax: Tensor | None = None
    ) -> CompressedMatrix:
        """Pack a matrix [rows columns], rounding elements to nearest; blocks run along each row.

        The global scale is computed from `amax`, 0-dim (None: the matrix's largest magnitude).
        """
        packed = PackedWeight.of(weight, quantizer=quantizer, amax=amax)
        return cls(*packed, columns=weight.shape[1])

    def dequantize(self) -> Tensor:
        """Return the represented matrix, fp32: (code * scale) * (1 / global_scale)."""
        shape = torch.Size((self.packed.shape[0], self.columns))
        decode = self.global_scale.reshape(()).reciprocal()
        return QuantizedTensor(
            self.packed, self.scale, decode, NVFP4, Tile.ROW, shape, torch.float32, -1
        ).dequantize()

    def part(self, rows: slice) -> CompressedMatrix:
        """Return some rows as a matrix with copied tensors."""
        packed, scale = self.packed[rows].clone(), self.scale[rows].clone()
        return CompressedMatrix(packed, scale, self.global_scale.clone(), self.columns)

    def state(self, prefix: str = "weight") -> dict[str, Tensor]:
        """Return the tensors by their layout names."""
        return {f"{prefix}_{part}": getattr(self, part) for part in _PARTS}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], prefix: str, columns: int) -> CompressedMatrix:
        """Build the matrix from its tensors: the inverse of `state`."""
        packed, scale, global_scale = (state[f"{prefix}_{part}"] for part in _PARTS)
        return cls(packed, scale, global_scale, columns)


def layer_state(weight: CompressedMatrix, input_scale: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a layer by their layout names.

    `input_scale` is the encode scale of the input, fp32 [1]; None if the input is not quantized.
    """
    return weight.state() | ({} if input_scale is None else {"input_global_scale": input_scale})


@dataclass(frozen=True)
class CompressedFactors:
    """The low-rank part of a weight [o i]: (u * s) @ vh, factors quantized as in training.

    Attributes:
        u: [o k], blocks along k.
        s: fp32 [k], including all constant factors.
        vh: [k i], blocks along i.
    """

    u: CompressedMatrix
    s: Tensor
    vh: CompressedMatrix

    def dense(self) -> Tensor:
        """Return the matrix [o i], fp32."""
        return (self.u.dequantize() * self.s) @ self.vh.dequantize()  # [o k] @ [k i] -> [o i]


def weight_quantizer(layer: MetisLayer) -> Quantizer | None:
    """Return the quantizer of a layer's weight in evaluation; None if it is not quantized."""
    return layer.eval_scheme.fprop_weight.quantizer


def static_scales(layer: MetisLayer) -> StaticScales | None:
    """Return the scheme state of a layer with calibrated tensor scales, or None for others."""
    state = layer.scheme.state
    return state if isinstance(state, StaticScales) else None


def compress(layer: MetisLayer, weight: Tensor, amax: Tensor | None = None) -> CompressedMatrix:
    """Pack a layer's represented weight [o i] the way its forward pass quantizes it.

    The tensor scale is computed from the layer's calibrated magnitude, else from `amax` (0-dim),
    else from the weight's largest.
    """
    quantizer = weight_quantizer(layer)
    assert quantizer is not None
    if static_scales(layer) is not None and not layer.weight_form.is_split:
        amax = layer.get_buffer("weight_amax")
    return CompressedMatrix.of(weight, quantizer, amax)


def is_split(layer: MetisLayer) -> bool:
    """Return whether w_hat has a low-rank part, from a stored split or one made at each use."""
    return layer.weight_form.is_split or _dynamic_split(layer) is not None


def _dynamic_split(layer: MetisLayer) -> Spectral | None:
    """Return the conditioner that splits a dense stored weight at each use, or None."""
    conditioner = layer.eval_scheme.fprop_weight.conditioner
    stored = layer.weight_form.is_split
    return conditioner if isinstance(conditioner, Spectral) and not stored else None


def unsupported(layer: MetisLayer, expert: bool = False) -> str | None:
    """Return why the layout cannot hold a layer, or None if it can.

    Weights of fused experts (`expert`) may be stored transposed.
    """
    quantizer = weight_quantizer(layer)
    if quantizer is None:
        return None
    if layer.conv1d and not expert:
        return "it is a Conv1D, which stores its weight transposed"
    size = NVFP4.block_size
    assert size is not None
    if layer.in_features % size:
        return f"in_features={layer.in_features} is not a multiple of the block size {size}"
    if quantizer.fmt != NVFP4 or quantizer.tile is Tile.TENSOR:
        return f"its weight is quantized to {quantizer.fmt.name} in tiles {quantizer.tile.value!r}"
    direct = layer.eval_scheme.fprop_weight.conditioner.is_direct
    if not direct and _dynamic_split(layer) is None:
        return "its scheme transforms the weight before it is quantized"
    if isinstance(form := layer.weight_form, SplitWeight) and form.exact_factors:
        return "its low-rank part stays in high precision"
    if layer.weight_form.altered:
        return f"its weight is {layer.weight_form.altered} before it is quantized"
    return None


@torch.no_grad()
def split_layer(
    layer: MetisLayer, quantizer: Quantizer
) -> tuple[CompressedMatrix, CompressedFactors]:
    """Return the residual and the factors of a split weight as they enter its GEMM in evaluation.

    In a compensated scheme the residual is computed against the quantized factors, so that residual
    and low-rank part add up to the layer's w_hat.
    """
    params = tuple(param.detach().float() for param in layer.weight_params())
    form = layer.weight_form
    weight = form.dense(params)
    if isinstance(form, SplitWeight):
        u, s, vh, residual = params
        s, compensated = s * form.gain, form.compensated
    else:
        split = _dynamic_split(layer)
        assert split is not None
        # A weight's noise depends only on the layer and the weight itself.
        u, s, v = split.split(weight, key=layer.call_keys(weight)[Role.FPROP_WEIGHT])
        vh, compensated = v.T, split.compensated
        residual = weight - (u * s) @ vh
    low = CompressedFactors(
        CompressedMatrix.of(u, quantizer), s, CompressedMatrix.of(vh, quantizer)
    )
    if compensated:
        residual = weight - low.dense()
    return CompressedMatrix.of(residual, quantizer), low


def save_low_rank(directory: Path, factors: Mapping[str, CompressedFactors]) -> None:
    """Write `metis_low_rank.safetensors` and its description."""
    tensors: dict[str, Tensor] = {}
    layers = {}
    for name, low in factors.items():
        tensors[f"{name}.s"] = low.s.contiguous()
        tensors |= {f"{name}.{key}": value for key, value in low.u.state("u").items()}
        tensors |= {f"{name}.{key}": value for key, value in low.vh.state("vh").items()}
        out_features, in_features = low.u.packed.shape[0], low.vh.columns
        layers[name] = {
            "out_features": out_features,
            "in_features": in_features,
            "rank": low.u.columns,
        }
    save_file(tensors, directory / LOW_RANK_FILE, metadata={"format": "pt"})
    description = {
        "format_version": LOW_RANK_VERSION,
        "weight": "residual + (u * s) @ vh",
        "residual": f"{FORMAT} checkpoint in {RESIDUAL_DIR}/",
        "factors": (
            "u [out_features rank] and vh [rank in_features]: E2M1 codes (<layer>.u_packed, two to "
            "a byte, even column in the low nibble, rows padded to whole blocks of 16), "
            "float8_e4m3fn block scales (<layer>.u_scale) and one fp32 encode scale "
            "(<layer>.u_global_scale); value = code * scale / global_scale. s [rank] in fp32"
        ),
        "layers": layers,
    }
    (directory / SIDE_FILE).write_text(json.dumps(description, indent=2) + "\n", "utf-8")


def load_low_rank(directory: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a side-file export as a plain model with dense weights.

    In fp32 the weights equal, bit for bit, the ones that enter the Metis model's GEMMs in
    evaluation. The compressed-tensors library is not needed.

    Args:
        directory: the directory that `export_checkpoint(..., low_rank="side-file")` wrote.
        dtype: dtype of the model; residual and low-rank part are added in fp32.

    Raises:
        ValueError: not such an export, or one of a newer version; a residual, a factor, or the
            layer of a factor is missing.
    """
    directory = Path(directory)
    residual = directory / RESIDUAL_DIR
    description = _description(directory)
    state: dict[str, Tensor] = {}
    for path in sorted(residual.glob("*.safetensors")):
        state |= load_file(path)
    factors = load_file(directory / LOW_RANK_FILE)
    for name in [k.removesuffix(".weight_packed") for k in state if k.endswith(".weight_packed")]:
        columns = 2 * state[f"{name}.weight_packed"].shape[1]
        try:
            weight = CompressedMatrix.from_state(state, f"{name}.weight", columns)
        except KeyError as error:
            raise ValueError(f"{residual} lacks {error.args[0]}") from None
        for part in _PARTS:
            del state[f"{name}.weight_{part}"]
        state[f"{name}.weight"] = weight.dequantize()
    config = copy.deepcopy(AutoConfig.from_pretrained(residual))
    del config.quantization_config
    assert config.architectures is not None
    cls = getattr(transformers, config.architectures[0])
    model, info = cls.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{residual} lacks {some(missing)}")
    if (residual / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(residual)
    modules = dict(model.named_modules())
    for name, shape in description["layers"].items():  # names in the model, not in its files
        if name not in modules:
            raise ValueError(f"{SIDE_FILE} describes {name}, but {cls.__name__} has no such layer")
        with torch.no_grad():
            modules[name].weight.add_(_low_rank_of(name, shape, factors).dense())
    cast(model, dtype)
    return model


def _description(directory: Path) -> dict[str, Any]:
    path = directory / SIDE_FILE
    if not path.is_file():
        raise ValueError(
            f'{directory} has no {SIDE_FILE}; give an export with low_rank="side-file"'
        )
    description = read_json(path)
    if description["format_version"] > LOW_RANK_VERSION:
        raise ValueError(
            f"{path} has format_version {description['format_version']}, but the installed "
            f"metis_hf reads only up to {LOW_RANK_VERSION}; upgrade metis_hf"
        )
    return description


def _low_rank_of(
    name: str, shape: Mapping[str, int], state: Mapping[str, Tensor]
) -> CompressedFactors:
    mine = {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
    try:
        u = CompressedMatrix.from_state(mine, "u", shape["rank"])
        vh = CompressedMatrix.from_state(mine, "vh", shape["in_features"])
        return CompressedFactors(u, mine["s"], vh)
    except KeyError as error:
        raise ValueError(f"{LOW_RANK_FILE} lacks {name}.{error.args[0]}") from None
