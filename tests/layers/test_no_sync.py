"""Nothing of a training step waits for the device: it runs where there are no values to wait for.

Fake tensors have shapes and no content; whatever needs a value on the host, or a shape that depends
on values, raises with them. Two things do not show. `torch.linalg.eigh` reads its status back from
CUDA devices: operators of linear algebra are those listed here. A tensor made of numbers on the
host is copied, and the host waits for that: none is made but constants that are kept.

What may wait, and is no part of such a step: routing tokens to experts, refreshing the SVD of split
weights, calibration, monitoring, evaluation, and constants and compilation on first use.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from functools import partial

import pytest
import torch
from conftest import llama
from design import cases, some_slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from layers.layer_tools import SCHEME_MODES, STRUCTURES, layer_of
from metis_hf import MetisConfig, get_metis_model, noise, reuse_weights
from metis_hf.numerics import FORMATS, Quantizer
from metis_hf.numerics.formats import SCALE_E4M3, BlockFormat, CodebookFormat
from metis_hf.numerics.kernels import use_kernels
from metis_hf.operands import Conditioner, Operand
from metis_hf.schemes import Scheme
from metis_hf.transforms import rotate, unrotate
from metis_hf.transforms.hadamard import rotate_groups, unrotate_groups
from metis_hf.transforms.rotation import rotate_by

# Of those in torch.linalg, the ones that give no status back, or hand it on unread.
LINEAR_ALGEBRA = {"linalg_vector_norm", "linalg_cholesky_ex", "linalg_solve_triangular"}
FROM_HOST = "lift_fresh"  # what torch.tensor and Tensor.new_tensor make of numbers on the host


class Waits(Exception):
    """An operator that makes the host wait for a CUDA device."""


class NoWaiting(TorchDispatchMode):
    """Raise `Waits` where the host would wait although fake tensors let it pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_status = "linalg_" in name and name not in LINEAR_ALGEBRA
        if (is_status or name == FROM_HOST) and not _makes_constant():
            raise Waits(name)
        return func(*args, **(kwargs or {}))


def _makes_constant() -> bool:
    """Whether a function under `noise.constant` is running, whose result is kept."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "found" and frame.f_code.co_filename == noise.__file__:
            return True
        frame = frame.f_back
    return False


def step_of_a_layer(layer, row_mask=None, optimizer=torch.optim.SGD):
    layer = copy.deepcopy(layer)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(mode.from_tensor(param.detach())))
        for name, buffer in list(layer.named_buffers()):
            setattr(layer, name, mode.from_tensor(buffer))
        x = torch.empty(96, 64, requires_grad=True)
        mask = row_mask if row_mask is None else mode.from_tensor(row_mask)
        with NoWaiting():
            layer(x, mask).sum().backward()
        assert x.grad is not None
        assert all(p.grad is not None for p in layer.parameters())
        optimizer(layer.parameters(), lr=0.1).step()


# Whose parts are those of other schemes.
COMBINED = [
    ("averis", "contraction"), ("halo", "shared"), ("metis-paper", "contraction"),
    ("mxfp4-hadamard", "contraction"), ("nvidia-paper", "contraction"), ("quip", "contraction"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@cases(
    {"scheme, mode": STRUCTURES},
    rotated={"masked": [False, True], "reuses": [False, True]},
    slow=COMBINED,
)
def test_a_layer(scheme, mode, masked, reuses):
    _, layer = layer_of(scheme, mode, i=64, o=48)
    mask = torch.ones(96, dtype=torch.bool) if masked else None
    with reuse_weights(layer) if reuses else contextlib.nullcontext():
        step_of_a_layer(layer, mask)


OPTIONS = {
    "split weight": {"split_weight": True},
    "everything split at each step": {"decompose": ("weight", "activation", "gradient")},
    "everything split, in contraction mode": {
        "decompose": ("weight", "activation", "gradient"),
        "operand_mode": "contraction",
    },
    "high precision backward": {"high_precision": ("backward",)},
}


@cases(
    {"name": list(OPTIONS)},
    rotated={"masked": [False, True]},
    slow=["everything split, in contraction mode"],
)
def test_options_of_metis(name, masked):
    options = dict(OPTIONS[name])
    _, layer = layer_of("metis", options.pop("operand_mode", None), i=64, o=48, **options)
    step_of_a_layer(layer, torch.ones(96, dtype=torch.bool) if masked else None)


@cases({"name": [*FORMATS, "codebook"]}, rotated={"rounding": ["nearest", "stochastic"]})
def test_formats(name, rounding):
    """Tables of a format's values are made once and kept."""
    values = CodebookFormat("five", (-1.0, -0.4, 0.0, 0.4, 1.0))
    fmt = FORMATS.get(name) or BlockFormat(name, values, SCALE_E4M3, 16)
    _, layer = layer_of("nvfp4", i=64, o=48)
    operand = Operand(Quantizer(fmt, rounding))
    layer.scheme = Scheme(fprop_input=operand, dgrad_grad_output=operand)
    step_of_a_layer(layer)


@pytest.mark.parametrize("foreach", some_slow([False, True], [False]))
def test_adamw_of_a_layer(foreach):
    _, layer = layer_of("metis", i=64, o=48)
    step_of_a_layer(layer, optimizer=partial(torch.optim.AdamW, foreach=foreach))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernels", ["reference", None])  # None: those that a GPU's user gets
def test_layers_on_cuda(kernels):
    """The second step of each scheme, as CUDA itself sees it."""
    for scheme, mode in SCHEME_MODES:
        layer = layer_of(scheme, mode, i=64, o=48)[1].cuda()
        optimizer = torch.optim.AdamW(layer.parameters(), capturable=True)
        x = torch.randn(96, 64, device="cuda", requires_grad=True)
        mask = torch.ones(96, dtype=torch.bool, device="cuda")
        with use_kernels(kernels):
            for waiting in ("default", "error"):
                torch.cuda.set_sync_debug_mode(waiting)
                try:
                    layer(x, mask).sum().backward()
                    optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scheme", ["metis", "smoothquant"])
def test_a_model_and_its_optimizer(scheme):
    some = ["q_proj", "k_proj"]  # which read one input
    config = MetisConfig(scheme=scheme, target_modules=some)
    model = get_metis_model(llama(1).to("meta"), config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(2, 16, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()


def test_the_detector_detects():
    class Peeking(Conditioner):
        """A conditioner that looks at what it quantizes."""

        def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32):
            return quantizer(x, dim=dim, key=key, dtype=dtype) if x.abs().max() > 0 else x

    _, layer = layer_of("nvfp4", i=64, o=48)
    layer.scheme = Scheme(fprop_input=Operand(Quantizer(), Peeking()))
    with pytest.raises((RuntimeError, NotImplementedError), match="_local_scalar_dense"):
        step_of_a_layer(layer)


def test_the_detector_detects_what_fake_tensors_let_pass():
    for waiting, match in (
        (lambda x: torch.linalg.eigh(x.T @ x)[0], "_linalg_eigh"),
        (lambda x: torch.linalg.svdvals(x), "_linalg_svd"),
        (lambda x: torch.linalg.qr(x).Q, "linalg_qr"),
        (lambda x: torch.linalg.inv(x.T @ x), "linalg_inv"),
        (lambda x: x * torch.tensor([2.0], device=x.device), "lift_fresh"),
        (lambda x: x.new_tensor([2.0]), "lift_fresh"),
    ):
        with FakeTensorMode(), NoWaiting(), pytest.raises(Waits, match=match):
            waiting(torch.empty(8, 4))


def test_fake_tensors_detect_shapes_and_values_that_are_not_known():
    for waiting in (lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.sum().item()):
        with FakeTensorMode(), NoWaiting(), pytest.raises((RuntimeError, NotImplementedError)):
            waiting(torch.empty(8))


SEED = 990  # that no other test has
CACHED = {
    "hadamard": (partial(rotate, seed=SEED), partial(unrotate, seed=SEED)),
    "whole hadamard": (
        partial(rotate_by, kind="hadamard", seed=SEED),
        partial(rotate_by, kind="hadamard", seed=SEED, inverse=True),
    ),
    "kronecker": (
        partial(rotate_by, kind="kronecker", seed=SEED),
        partial(rotate_by, kind="kronecker", seed=SEED, inverse=True),
    ),
    "random signs": (
        # Groups of 8, which are no conditioner's.
        partial(rotate_groups, signs=torch.ones(8)),
        partial(unrotate_groups, signs=torch.ones(8)),
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_constants_without_values_are_not_kept(name):
    """Planning a run traces one step so; what it makes must not meet real tensors later."""
    there, back = CACHED[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        there(torch.empty(16, 16), dim=0)
    x = torch.eye(16)
    assert torch.allclose(back(there(x, dim=0), dim=0), x, atol=1e-6)
