"""Quantizers and layers of other libraries behind one interface, if they can be imported.

torchao and modelopt may also be in the environment's folder `oracles`, where `make` installs them.
Layers come from checkouts, which `LAYERS` names by folder. Imports that a layer does not need are
skipped or stubbed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

BLOCK = 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
Call = Callable[[], object]


def _see_oracles() -> None:
    """Add `oracles` to the path, a separate folder because transformers uses what it can import."""
    folder = str(Path(sys.prefix) / "oracles")
    if folder not in sys.path:
        sys.path.append(folder)


def torchao(x: Tensor) -> Call:
    _see_oracles()
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def call() -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().max())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)

    return call


def compressed_tensors(x: Tensor) -> Call:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights

    def call() -> Tensor:
        tensor_scale = generate_gparam(x.amin(), x.amax())
        blocks = x.unflatten(-1, (-1, BLOCK))
        scale, zero = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), args, global_scale=tensor_scale
        )
        return fake_quantize(x, scale, zero, args, global_scale=tensor_scale)

    return call


def ml_dtypes(x: Tensor) -> Call:
    """Return a call with the library's casts and two levels of scales in numpy."""
    dtypes = importlib.import_module("ml_dtypes")
    array = x.float().numpy()

    def call() -> np.ndarray:
        blocks = array.reshape(-1, BLOCK)
        tensor_scale = np.abs(array).max() / (E4M3_MAX * E2M1_MAX)
        wanted = np.abs(blocks).max(1, keepdims=True) / (E2M1_MAX * tensor_scale)
        scale = wanted.astype(dtypes.float8_e4m3fn).astype(np.float32) * tensor_scale
        codes = np.clip(blocks / scale, -E2M1_MAX, E2M1_MAX).astype(dtypes.float4_e2m1fn)
        return codes.astype(np.float32) * scale

    return call


def modelopt(x: Tensor) -> Call:
    _see_oracles()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modelopt warns about the installed versions
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def call() -> Tensor:
        quantized, scale, tensor_scale = NVFP4QTensor.quantize(x, BLOCK)
        return quantized.dequantize(
            dtype=x.dtype, scale=scale, double_scale=tensor_scale, block_sizes={-1: BLOCK}
        )

    return call


QUANTIZERS: dict[str, Callable[[Tensor], Call]] = {
    "torchao": torchao,
    "compressed-tensors": compressed_tensors,
    "ml_dtypes": ml_dtypes,
    "modelopt": modelopt,
}


def usable(make: Callable[[], Call], name: str) -> Call | None:
    """Make and run a call once, and return it; on failure print a line to stderr, return None."""
    try:
        call = make()
        call()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        print(f"skipping {name}: {type(error).__name__}: {first}", file=sys.stderr)
        return None
    return call


@contextlib.contextmanager
def standing_in(modules: dict[str, types.ModuleType], path: Path) -> Iterator[None]:
    """Make a folder's modules importable, with stubs for modules that are not imported yet."""
    missing = [name for name in modules if name not in sys.modules]
    sys.modules.update({name: modules[name] for name in missing})
    try:
        with mock.patch.object(sys, "path", [str(path), *sys.path]):
            yield
    finally:
        # Remove only the stubs: other imported modules cannot be imported a second time.
        for name in missing:
            del sys.modules[name]


@functools.lru_cache
def paper_module(path: Path) -> Any:
    """Import `Metis.bitlinear` from a checkout of github.com/sii-research/Metis.

    The module imports TransformerEngine, but uses it only for options that are off here.
    """
    engine = ("transformer_engine", "transformer_engine.pytorch")
    with standing_in({name: types.ModuleType(name) for name in engine}, path):
        return importlib.import_module("Metis.bitlinear")


def paper_quantizer(path: Path, x: Tensor) -> Call:
    """Return a call of the paper's FP4 blocks of 1 x 16: stochastic, one level of fp32 scales."""
    module = paper_module(path)
    quantizer = module.Cast2Fp4e2m1Block
    module.BlockQuantFunc.block_shape = (1, BLOCK)

    def call() -> Tensor:
        scale = quantizer.get_scalar(x)
        return quantizer.rquant(quantizer.quant(x, scale), scale)

    return call


class PaperLayer(nn.Module):
    """A layer of the paper's code with its splits on: `BitLinear.forward` after `BitLinear.split`.

    `split` itself runs only on a GPU, so this class repeats it. Subspaces of activations and
    gradients take one power iteration over all rows, from the previous step's subspace.
    """

    def __init__(self, path: Path, linear: nn.Linear, rank: int, device: str = "cpu") -> None:
        super().__init__()
        module = paper_module(path)
        function = module.LinearLowbitFunction
        module.BlockQuantFunc.block_shape = (1, BLOCK)
        for place in ("forward_input", "forward_weight", "backward_input", "backward_weight"):
            setattr(function, f"q_{place}", module.Cast2Fp4e2m1Block)
        function.q_backward_outputgrad = module.Cast2Fp4e2m1Block
        function.enable_forward_svd_intime = False
        function.enable_activation_svd = function.enable_backward_svd = True
        function.activation_lowrank_svd = function.backward_lowrank_svd = rank
        function.activation_lowrank_niter = function.backward_lowrank_niter = 1
        args = types.SimpleNamespace(device=device)
        outputs, inputs = linear.weight.shape
        self.residual = module.LinearLowbit(inputs, outputs, bias=False, args=args)
        u, s, vh = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
        self.v = nn.Linear(inputs, rank, bias=False)
        self.s = nn.Parameter(s[:rank].clone())
        self.u = nn.Linear(rank, outputs, bias=False)
        with torch.no_grad():
            self.v.weight.copy_(vh[:rank])
            self.u.weight.copy_(u[:, :rank])
            self.residual.weight.copy_(linear.weight - (u[:, :rank] * s[:rank]) @ vh[:rank])

    def forward(self, x: Tensor) -> Tensor:
        y = self.u(torch.mul(self.s, self.v(x)))
        return y + self.residual(x)


def _hadamard(size: int) -> np.ndarray:
    """Return Sylvester's matrix of +1 and -1, as in scipy."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.kron([[1, 1], [1, -1]], found)
    return found


def _quartet2(path: Path, four_over_six: bool, linear: nn.Linear) -> nn.Module:
    """Return a training layer of github.com/IST-DASLab/Quartet-II, which needs autocast."""
    folders = ("models", "models.quantization", "models.quantization.quantizers")
    packages = {}
    for name in (*folders, "models.quantization.schemes"):  # the real ones import every scheme
        packages[name] = types.ModuleType(name)
        packages[name].__path__ = [str(path / "src" / name.replace(".", "/"))]
    if importlib.util.find_spec("scipy") is None:
        packages["scipy"], linalg = types.ModuleType("scipy"), types.ModuleType("scipy.linalg")
        linalg.hadamard, packages["scipy.linalg"] = _hadamard, linalg
    with standing_in(packages, path / "src"):
        module = importlib.import_module("models.quantization.schemes.quartet_2")
    outputs, inputs = linear.weight.shape
    layer = module.Quartet_II_Linear(inputs, outputs, bias=False, four_over_six=four_over_six)
    layer.weight = linear.weight
    return layer


def _fouroversix(path: Path, linear: nn.Linear) -> nn.Module:
    """Return a layer of github.com/mit-han-lab/fouroversix with its training recipe, emulated."""
    version = importlib.metadata.version

    def known(name: str) -> str:  # the package asks for its own version but is not installed
        return "0" if name == "fouroversix" else version(name)

    with mock.patch.object(importlib.metadata, "version", known), standing_in({}, path / "src"):
        package = importlib.import_module("fouroversix")
    config = package.ModuleQuantizationConfig(
        pseudo_quantize=True, keep_master_weights=True, weight_scale_2d=True
    )
    return package.FourOverSixLinear(linear.to(torch.bfloat16), config)


def _paper(path: Path, linear: nn.Linear) -> nn.Module:
    rank = max(1, round(0.015 * min(linear.weight.shape)))
    return PaperLayer(path, linear, rank, "cuda")


class Peer(NamedTuple):
    """A layer of a library.

    Attributes:
        folder: name of its checkout.
        make: (checkout, nn.Linear in fp32) -> layer with the same weights, for inputs [b s c].
        dtype: of inputs and parameters.
        autocast: run both passes under bf16 autocast.
    """

    folder: str
    make: Callable[[Path, nn.Linear], nn.Module]
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False


LAYERS = {
    "Quartet-II, quartet2": Peer(
        "Quartet-II", lambda path, linear: _quartet2(path, False, linear), autocast=True
    ),
    "Quartet-II, four-over-six": Peer(
        "Quartet-II", lambda path, linear: _quartet2(path, True, linear), autocast=True
    ),
    "fouroversix": Peer("fouroversix", _fouroversix),
    "the Metis authors' layer": Peer("Metis", _paper, torch.float32),
}


def layers(folder: Path, linear: Callable[[], nn.Linear], device: torch.device) -> Iterator[Any]:
    """Yield (name, peer, layer on the device) of `LAYERS`, or (name, peer, reason for none)."""
    for name, peer in LAYERS.items():
        path = folder / peer.folder
        if not path.is_dir():
            yield name, peer, f"there is no folder {path}"
            continue
        try:
            yield name, peer, peer.make(path, linear()).to(device, peer.dtype)
        except Exception as error:
            yield name, peer, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
