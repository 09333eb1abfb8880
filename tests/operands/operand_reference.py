"""One forward and backward pass of a layer in float64, by the table of operands."""

from __future__ import annotations

import math

import numpy as np
import torch
from layers.layer_reference import (
    Slot,
    SpectralParts,
    SplitParts,
    Terms,
    array,
    correction,
    exact,
    hadamard_operand,
    mean_operand,
    rotated_operand,
    spectral_operand,
    split_weight,
)
from layers.layer_tools import (
    distinct,
    layer_of,
    record,
)
from reference import fake_quantize

from metis_hf.noise import Key
from metis_hf.schemes import Role, layer_rank
from metis_hf.transforms.hadamard import hadamard_matrix
from metis_hf.transforms.rotation import rotate_all, rotation_of
from metis_hf.transforms.spectral import fewest_rows, find_basis
from operands.operand_table import (
    IN,
    OPERANDS,
    OUT,
    SLOTS,
    TOKENS,
    options,
)
from operands.outlier_reference import clamped_operand, hot_operand, random_signs, with_content


def inputs():
    """x and dy with a dominant direction and columns of different size, as in a network."""
    g = torch.Generator().manual_seed(3)

    def matrix(rows, columns):
        noise = torch.randn(rows, columns, generator=g)
        direction = torch.randn(rows, 1, generator=g) * torch.randn(1, columns, generator=g)
        return (noise + 2 * direction) * torch.logspace(0, -1, columns)

    return matrix(TOKENS, IN), matrix(TOKENS, OUT) * 1e-3


def run(scheme, mode, **changes):
    """(layer, x, dy, distinct quantizations, results by name) of one forward and backward pass."""
    torch.manual_seed(0)
    _, layer = layer_of(mode=mode, i=IN, o=OUT, **options(scheme), **changes)
    calls = record(layer)
    x, dy = inputs()
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    results = {"y": array(y), "x": array(x.grad)}
    results |= {name: array(p.grad) for name, p in layer.named_parameters()}
    return layer, x, dy, distinct(calls), results


def operand(recording, x: np.ndarray, row: Slot, conditioner) -> Terms:
    """One quantized tensor by its line; random numbers of the conditioner are the layer's."""
    kind, *options = row.conditioner.split()
    if kind == "direct":
        return recording.quantize(x, row)
    if kind == "mean" and options == ["hadamard"]:
        signs = np.sign(array(hadamard_matrix(conditioner.inner.seed))[0])
        return mean_operand(recording, x, row, signs)
    if kind in ("mean", "clamped", "hot"):
        return {"mean": mean_operand, "clamped": clamped_operand, "hot": hot_operand}[kind](
            recording, x, row
        )
    if kind == "requantized":
        (kind,), conditioner = options, conditioner.second
        rule = "four-over-six" if kind == "random" else "absmax"
        x = fake_quantize(x, scale_rounding=row.scale_rounding, scale_rule=rule).values
    if kind == "random":
        return hadamard_operand(recording, x, row, random_signs(conditioner, x.shape[row.dim]))
    if kind in ("hadamard", "sylvester"):
        assert (conditioner.seed is None) == (kind == "sylvester")
        signs = np.sign(array(hadamard_matrix(conditioner.seed))[0])
        return hadamard_operand(recording, x, row, signs)
    assert kind == "rotated"
    axis = (row.dim + ("across" in options)) % 2
    n = torch.eye(x.shape[axis], dtype=torch.float64)
    rotation = rotate_all(n, rotation_of(options[0], len(n), conditioner.seed, n), dim=0)
    return rotated_operand(recording, x, row, array(rotation), axis)


def channels(kind, x: np.ndarray, params) -> tuple[Terms, Terms]:
    """(s, z) of the first call: by its own input."""
    x = x.astype(np.float64)
    if kind == "smooth":
        w = params.get("weight", params.get("weight_residual"))
        s = (np.abs(x).max(0) / np.abs(w).max(0)) ** 0.5
        return exact(s), exact(np.zeros(len(s)))
    z, half = (x.max(0) + x.min(0)) / 2, (x.max(0) - x.min(0)) / 2
    median = np.sort(half)[(len(half) - 1) // 2]
    return exact(np.maximum(1, half / (median * half.max()) ** 0.5)), exact(z)


def clipped(w: np.ndarray, clip: np.ndarray):
    """(the clipped weight, its gradients from those of the clipped weight), block by block."""
    strength = 1 / (1 + np.exp(-4 - clip.astype(np.float64)))
    cut, over, largest = w.astype(np.float64), np.zeros_like(w, bool), np.zeros_like(w, bool)
    amax = np.zeros(w.shape)
    for row in range(w.shape[0]):
        for start in range(0, w.shape[1], 16):
            block = (row, slice(start, start + 16))
            amax[block] = np.abs(cut[block]).max()
            largest[row, start + np.abs(cut[block]).argmax()] = True
            limit = strength[row] * amax[block]
            over[block] = np.abs(cut[block]) > limit
            cut[block] = np.clip(cut[block], -limit, limit)

    def gradients(dw: Terms) -> dict[str, Terms]:
        """Of w: of what is not cut, and for a block's largest of all that is; of clip."""

        def both(function) -> Terms:
            return Terms(function(dw.value, np.sign(w)), function(dw.size, np.ones_like(w)))

        def through(g, sign):
            moved = g * sign * over
            blocks = range(0, w.shape[1], 16)
            sums = np.concatenate(
                [np.repeat(moved[:, b : b + 16].sum(1)[:, None], len(w[0, b : b + 16]), 1)
                 for b in blocks], 1)  # fmt: skip
            return g * ~over + largest * sign * strength[:, None] * sums

        def of_clip(g, sign):
            return (g * sign * over * amax).sum(1) * strength * (1 - strength)

        return {"weight": both(through), "weight_clip": both(of_clip)}

    return Terms(cut, np.abs(cut)), gradients


def expected_results(scheme, mode, layer, x, dy, recording) -> dict[str, Terms]:
    """y and all gradients by the table, in float64, from operands checked on the way."""
    table = OPERANDS[scheme, mode]
    params = {name: array(p) for name, p in layer.named_parameters()}
    keys = layer.call_keys(x)
    tensors = {"x": x.detach(), "dy": dy}
    done: dict[str, Terms | SplitParts | SpectralParts] = {}

    def matrix(slot: str) -> Terms | SpectralParts:
        row = table[slot]
        if row.reuses:
            return done[row.reuses]
        tensor = tensors[row.source]
        if not row.quantized:
            return exact(tensor)
        kind, *_ = row.conditioner.split()
        conditioner = layer.scheme.operand(Role(SLOTS.index(slot))).conditioner
        conditioner = with_content(conditioner, keys, slot)
        if kind in ("smooth", "shifted"):
            s, z = channels(kind, array(tensor), params)
            return s * recording.quantize((exact(tensor) - z).divided_by(s), row) + z
        if kind != "spectral":
            return operand(recording, array(tensor), row, conditioner)
        key = keys[Role(SLOTS.index(slot))]
        return spectral(slot, tensor, layer.config.sample_frac, key)

    def spectral(slot: str, tensor, sample_frac: float, key: Key) -> SpectralParts:
        rank = rank_of(layer)
        if table[slot].conditioner.endswith(" quarter"):
            rank = math.ceil(rank / 4)
        rank = min(rank, *tensor.shape)
        compensated = layer.config.scheme == "metis"
        if layer.config.scheme == "metis-released":
            sample_frac = 1.0
        basis = find_basis(
            tensor,
            rank,
            sample_frac=sample_frac,
            min_rows=fewest_rows(rank, 16 if compensated else 4),
            summed=compensated,
            n_iter=layer.config.n_iter,
            key=key,
        )
        return spectral_operand(recording, array(tensor), table[slot], array(basis))

    def weight(slot: str) -> Terms | SplitParts | SpectralParts:
        row = table[slot]
        if row.reuses:
            return done[row.reuses]
        if row.conditioner == "clipped":
            return recording.quantize(clipped(params["weight"], params["weight_clip"])[0], row)
        if row.conditioner in ("smooth", "shifted"):
            s, _ = channels(row.conditioner, array(x), params)
            return recording.quantize(exact(params["weight"]) * s, row).divided_by(s)
        if row.conditioner == "split smooth":
            s, _ = channels("smooth", array(x), params)
            gain = exact((IN * OUT) ** -0.5)
            factors = [exact(params[name]) for name in ("u", "s", "vh")]
            factors[1] = factors[1] * gain
            residual = recording.quantize(exact(params["weight_residual"]) * s, row).divided_by(s)
            low = (factors[0] * factors[1]) @ factors[2]
            return SplitParts(low + residual, *factors, gain)
        if row.conditioner == "branch":
            return recording.quantize(params["weight_residual"], row)
        if row.conditioner.startswith("split"):
            gain = 1.0 if row.conditioner == "split published" else (IN * OUT) ** -0.5
            return split_weight(recording, params, row, gain)
        if row.conditioner.startswith("spectral"):
            key = keys[Role(SLOTS.index(slot))]
            return spectral(slot, layer.weight.detach(), 1.0, key)  # of all rows
        if not row.quantized:
            return exact(params["weight"])
        conditioner = layer.scheme.operand(Role(SLOTS.index(slot))).conditioner
        conditioner = with_content(conditioner, keys, slot)
        return operand(recording, params["weight"], row, conditioner)

    def corrections(gemm: str) -> list[Terms]:
        """What its operands' errors add to a GEMM, in order."""
        a, b = (slot for slot in SLOTS if slot.startswith(gemm))
        terms = []
        for slot, other in ((a, b), (b, a)):
            if not table[slot].corrected:
                continue
            row = table[table[slot].reuses or slot]
            source = {"x": array(x), "dy": array(dy), "w": dense_weight(params)}[row.source]
            error = (source if isinstance(source, Terms) else exact(source)) - whole(done[slot])
            left, lengths, right = thin_factors(done[other])
            turned, by_rows, turned_out = CORRECTIONS[slot]
            near, far = (left, right) if by_rows else (right.T, left.T)
            error = error.T if turned else error
            term = correction(recording, error, row, near, lengths, far)
            terms.append(term.T if turned_out else term)
        return terms

    added: dict[str, list[Terms]] = {}
    for slot in SLOTS:
        done[slot] = weight(slot) if slot.endswith("weight") else matrix(slot)
        if slot in ("fprop.weight", "dgrad.weight", "wgrad.input"):
            gemm = slot.split(".")[0]
            added[gemm] = corrections(gemm)
    assert next(recording.calls, None) is None, "more was quantized than the table has"
    hats = {slot: whole(operand) for slot, operand in done.items()}
    y = hats["fprop.input"] @ hats["fprop.weight"].T
    dw = sum(added["wgrad"], hats["wgrad.grad_output"].T @ hats["wgrad.input"])
    dx = hats["dgrad.grad_output"] @ hats["dgrad.weight"]
    expected = {
        "y": sum(added["fprop"], y + exact(params["bias"])),
        "x": sum(added["dgrad"], dx),
        "bias": exact(np.ones(TOKENS)) @ exact(dy),
    }
    if table["fprop.weight"].conditioner == "branch":
        return with_branch(expected, dw, array(x), array(dy), params)
    if isinstance(done["fprop.weight"], SplitParts):
        return expected | dict(done["fprop.weight"].gradients(dw))
    if table["fprop.weight"].conditioner == "clipped":
        _, gradients = clipped(params["weight"], params["weight_clip"])
        return expected | gradients(dw)
    return expected | {"weight": dw}


def with_branch(expected, dw, x: np.ndarray, dy: np.ndarray, params) -> dict[str, Terms]:
    """Add a branch that reads x as it is, y += (x vh^T) s u^T, and its gradients."""
    u, s, vh = (exact(params[name]) for name in ("u", "s", "vh"))
    read, back = exact(x) @ vh.T, exact(dy) @ u  # [t k]
    scaled = back * s
    ones = exact(np.ones(len(x)))
    return expected | {
        "y": expected["y"] + (read * s) @ u.T,
        "x": expected["x"] + scaled @ vh,
        "u": exact(dy).T @ (read * s),
        "s": ones @ (read * back),
        "vh": scaled.T @ exact(x),
        "weight_residual": dw,
    }


# slot -> of a corrected operand: its error is transposed, taken along rows of the other operand's
# low-rank part (its left factor) rather than columns, and what it adds is transposed.


CORRECTIONS = {
    "fprop.input": (False, False, False),
    "fprop.weight": (False, False, True),
    "dgrad.grad_output": (False, True, False),
    "dgrad.weight": (True, False, True),
    "wgrad.grad_output": (True, True, False),
}


def whole(operand: Terms | SplitParts | SpectralParts) -> Terms:
    """The matrix that enters the GEMM."""
    if isinstance(operand, SplitParts):
        return operand.w_hat
    return operand.x_hat if isinstance(operand, SpectralParts) else operand


def thin_factors(operand: SplitParts | SpectralParts) -> tuple[Terms, Terms, Terms]:
    """[t k], [k] and [k c]: the low-rank part of x_hat, dy_hat or w_hat."""
    if isinstance(operand, SplitParts):
        return operand.u_hat, operand.s, operand.vh_hat
    return operand.left, operand.lengths, operand.right


def dense_weight(params: dict[str, np.ndarray]) -> Terms:
    """The weight as it is stored [o i]."""
    if "u" not in params:
        return exact(params["weight"])
    s = exact(params["s"]) * exact((IN * OUT) ** -0.5)
    return (exact(params["u"]) * s) @ exact(params["vh"]) + exact(params["weight_residual"])


def rank_of(layer) -> int:
    return layer_rank(layer.config, layer.in_features, layer.out_features)


def has_rank(scheme: str) -> bool:
    return any(word in scheme for word in ("metis", "split", "released", "svdquant"))
