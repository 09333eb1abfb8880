"""Measure the cost of each choice in the arithmetic, and write benchmarks/numerics.md.

    python benchmarks/numerics.py            # measure (about a minute), then write
    python benchmarks/numerics.py --render   # write again from results/numerics.json

The figures do not depend on the machine: seeds are fixed, so two runs agree to the digits shown.
The tables also go into eval/results/report/numerics.md, between its markers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conventions import CONVENTIONS, kernel_order
from timing import with_tables
from torch import Tensor, nn

from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
from metis_hf.noise import Key
from metis_hf.numerics import FORMATS, Quantizer, relative_error, sqnr_db
from metis_hf.numerics.formats import SCALE_FP32
from metis_hf.operands import IDENTITY
from metis_hf.operands.conditioners.spectral import Spectral

ROOT = Path(__file__).resolve().parent
JSON = ROOT / "results" / "numerics.json"
REPORT = ROOT / "numerics.md"
DOCS = ROOT.parent / "eval" / "results" / "report" / "numerics.md"

ANOTHER_CODE = 0.01  # neighboring codes and E4M3 scales are at least 6 % apart
Table = dict[str, Any]  # {"title", "note", "columns", "rows"}


# --- tensors -------------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(n: int, k: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, k, generator=seeded(seed), dtype=torch.float64))[0]


def power_law(n: int, exponent: float, seed: int = 0) -> Tensor:
    """Return [n n] with singular values i^-exponent and random singular vectors."""
    s = torch.arange(1, n + 1, dtype=torch.float64) ** -exponent
    return ((orthogonal(n, n, seed) * s) @ orthogonal(n, n, seed + 1).T).float()


def with_top_energy(n: int, k: int, energy: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [n n] and its k dominant singular vectors u, v, which hold `energy` of |x|^2."""
    noise = torch.randn(n, n, generator=seeded(seed), dtype=torch.float64)
    u, v = orthogonal(n, k, seed + 1), orthogonal(n, k, seed + 2)
    noise = noise - u @ (u.T @ noise)
    noise = noise - (noise @ v) @ v.T
    size = (noise.square().sum() * energy / (1 - energy) / k).sqrt()
    return ((u * size) @ v.T + noise).float(), u.float(), v.float()


def distributions(n: int = 1024) -> dict[str, Tensor]:
    normal = torch.randn(n, n, generator=seeded(0))
    chi = torch.randn(3, n, n, generator=seeded(1)).square().mean(0).sqrt()
    outliers = normal.clone()
    outliers[:, torch.randperm(n, generator=seeded(2))[: n // 100]] *= 50
    return {
        "normal": normal,
        "uniform": torch.rand(n, n, generator=seeded(3)) * 2 - 1,
        "Student t3": normal / chi,
        "1 % of columns x 50": outliers,
        "spectrum i^-1/2": power_law(n, 0.5),
        "spectrum i^-1": power_law(n, 1.0),
    }


def percent(share: float) -> str:
    """Format with two significant digits; a plain 0 means exactly zero."""
    return "0" if share == 0 else f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


# --- tables --------------------------------------------------------------------------------------


def sqnr_by_format() -> Table:
    options = []
    for name, fmt in FORMATS.items():
        for rounding in fmt.scale.roundings:
            options.append((name, {"scale_rounding": rounding}))
        if fmt.block_size is None:
            options.append((name, {"tile": "tensor"}))
    options.insert(2, ("nvfp4", {"scale_rule": "four-over-six"}))
    options.insert(3, ("nvfp4", {"tile": "square"}))
    options.insert(4, ("nvfp4", {"rounding": "stochastic"}))
    options.insert(5, ("nvfp4", {"rounding": "stochastic", "scale_rounding": "up"}))
    tensors = distributions()
    rows = []
    for name, changes in options:
        quantizer = Quantizer(FORMATS[name], **changes)
        cells = [sqnr_db(x, quantizer(x, key=7)).item() for x in tensors.values()]
        what = ", ".join(
            f"scale {value}" if key == "scale_rounding" else str(value)
            for key, value in changes.items()
        )
        if FORMATS[name].scale is SCALE_FP32:
            owner = "block" if FORMATS[name].block_size else quantizer.tile.value
            what = f"one fp32 scale per {owner}"
        bits = FORMATS[name].bits_per_element
        rows.append([name, what, f"{bits:g}", *(f"{cell:.2f}" for cell in cells)])
    return {
        "title": "SQNR in dB by format",
        "note": "Tensors of 1024 x 1024, quantized along the second dimension. Elements are "
        "rounded to nearest unless the options say stochastic. A higher SQNR is better; 6 dB are "
        "one bit.",
        "columns": ["format", "options", "bits", *tensors],
        "rows": rows,
    }


def disagreement() -> Table:
    """Compare other conventions with TransformerEngine's, element by element."""
    normal = torch.randn(1024, 1024, generator=seeded(0))
    wide = normal * torch.exp2(torch.rand(1024, 1, generator=seeded(1)) * 24 - 12)
    tensors = {"normal": normal, "bf16 values": normal.bfloat16().float(), "wide rows": wide}
    rows = []
    for name, (source, convention) in CONVENTIONS.items():
        cells = []
        for x in tensors.values():
            exact, other = CONVENTIONS["ours"][1](x).values(), convention(x).values()
            differ = (other - exact).abs() > ANOTHER_CODE * exact.abs()
            share = 100 * differ.float().mean().item()
            change = sqnr_db(x, other) - sqnr_db(x, exact)
            cells += [percent(share), f"{change.item():+.2f}"]
        rows.append([name, source, *cells])
    columns = ["convention", "found in"]
    for name in tensors:
        columns += [f"{name}: values that differ", "dB"]
    return {
        "title": "Where implementations differ, and what it costs",
        "note": "Rounding is to nearest, in blocks of 16. Each line is compared with the first: "
        "the share of elements whose value differs by more than 1 %, because its code or scale "
        "differs, and the change of SQNR. *wide rows*: rows have sizes 2^U(-12, 12), so block "
        "scales reach E4M3's subnormals and zero.",
        "columns": columns,
        "rows": rows,
    }


def final_product() -> Table:
    """Compare the two orders of the decoding products, the only difference for the same bits."""
    x = torch.randn(1024, 1024, generator=seeded(0))
    ours, kernel = Quantizer()(x), kernel_order(x)
    ulp = ((ours - kernel).abs() / ours.abs().clamp_min(1e-30)).max().item()
    differ = 100 * (ours != kernel).float().mean().item()
    return {
        "title": "Two orders of the last products",
        "note": "This package computes `(code * scale) * (1 / S)`. TransformerEngine's dequantize "
        "kernel computes `code * ((scale * amax) * fl(1/2688))`, and its product `scale * amax` "
        "overflows above amax = 7.6e35. Codes and scales are the same bits.",
        "columns": ["values that differ", "largest relative difference"],
        "rows": [[f"{differ:.1f} %", f"{ulp:.1e}"]],
    }


def gain(x: Tensor, q: Tensor) -> str:
    """Return <x, q> / <x, x> and its standard error."""
    x, q = x.double(), q.double()
    energy = x.square().sum()
    error = (x * (q - x)).square().sum().sqrt() / energy
    return f"{(x * q).sum() / energy:.4f} +- {error:.4f}"


def stochastic_bias() -> Table:
    """Measure the gain <x, q> / <x, x> of stochastic rounding, which is 1 if unbiased."""
    rows = []
    tensors = distributions()
    for name in ("normal", "Student t3", "uniform"):
        x = torch.cat([tensors[name]] * 4)
        top = x.abs().unflatten(-1, (-1, 16)).argmax(-1, keepdim=True)
        for rounding in ("nearest", "up"):
            quantizer = Quantizer(rounding="stochastic", scale_rounding=rounding)
            q = quantizer(x, key=11)
            a, b = (t.double().unflatten(-1, (-1, 16)).gather(-1, top) for t in (x, q))
            clipped = f"{100 * quantizer.saturated(x).item():.2f} %"
            rows.append([name, rounding, gain(x, q), gain(a, b), clipped])
    return {
        "title": "Bias of stochastic rounding by scale rounding",
        "note": "The gain is <x, q> / <x, x> +- its standard error; an unbiased quantizer has a "
        "gain of 1. A scale that is rounded to nearest is too small half of the time, and values "
        "above 6 scales are then clipped.",
        "columns": ["tensor", "scale", "gain", "gain of block maxima", "clipped elements"],
        "rows": rows,
    }


def levels() -> Table:
    x = torch.randn(1024, 1024, generator=seeded(0))
    rows = []
    for std in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        cells = []
        for two_level in (True, False):
            q = Quantizer(two_level=two_level)(x * std)
            cells += [f"{sqnr_db(x * std, q):.2f}", f"{100 * (q == 0).float().mean():.1f} %"]
        rows.append([f"{std:g}", *cells])
    return {
        "title": "One level of scales against two",
        "note": "Normal tensors of decreasing standard deviation. E4M3 has no value between 0 and "
        "2^-9.",
        "columns": ["std", "two-level dB", "zeros", "one-level dB", "zeros"],
        "rows": rows,
    }


def split() -> Table:
    n, k = 1024, 16
    rows = []
    for energy in (0.44, 0.88, 0.997):
        x, u, v = with_top_energy(n, k, energy)

        def tail(t: Tensor, u: Tensor = u, v: Tensor = v) -> Tensor:
            t = t - u @ (u.T @ t)
            return t - (t @ v) @ v.T

        cells = []
        for conditioner in (IDENTITY, Spectral(k, compensated=False), Spectral(k)):
            x_hat = conditioner(x, Quantizer(), dim=-1, key=Key(3), row_mask=None)
            outside = sqnr_db(tail(x), tail(x) + tail(x_hat - x))
            cells += [f"{sqnr_db(x, x_hat):.1f} / {outside:.1f}"]
        rows.append([f"{100 * energy:g} %", *cells])
    return {
        "title": "What the spectral split buys",
        "note": "SQNR in dB of the whole tensor / of the part outside the 16 dominant left and "
        "right directions. Tensors are 1024 x 1024. The split has rank 16 and takes its subspace "
        "from 1 % of the rows; scales have two levels, and rounding is to nearest. The first "
        "column is the share of energy in those 16 directions.",
        "columns": ["energy on top", "direct", "split as published", "split, compensated"],
        "rows": rows,
    }


def gemm_errors() -> Table:
    """Measure the errors of y, dx, dw of one layer under each scheme and operand mode."""
    tokens, width = 512, 512
    torch.manual_seed(0)
    linear = nn.Linear(width, width, bias=False)
    linear.weight.data = power_law(width, 0.5, seed=3) * 4
    x = with_top_energy(512, 8, 0.8, seed=5)[0][:tokens]
    dy = with_top_energy(512, 8, 0.6, seed=8)[0][:tokens] * 1e-4

    def run(layer: nn.Module) -> list[Tensor]:
        a = x.clone().requires_grad_()
        y = layer(a)
        y.backward(dy)
        weight = getattr(layer, "weight_residual", None)
        dw = layer.weight.grad if weight is None else weight.grad
        assert a.grad is not None
        assert dw is not None
        return [y.detach(), a.grad, dw]

    exact = run(linear)
    rows = []
    for scheme in ("metis", "metis-paper", "nvfp4", "nvidia"):
        for mode in ("shared", "contraction"):
            if scheme == "nvidia" and mode == "shared":
                continue  # nvidia has no shared mode
            config = MetisConfig(scheme=scheme, operand_mode=mode)
            linear.zero_grad()
            found = run(convert_linear(linear, config, name="layer").train())
            errors = [relative_error(e, f).item() for e, f in zip(exact, found)]
            rows.append([scheme, mode, *(f"{error:.3f}" for error in errors)])
    return {
        "title": "Error of the three GEMMs by scheme and operand mode",
        "note": "Relative Frobenius errors of the output, the input gradient and the weight "
        "gradient of one 512 x 512 layer on 512 tokens. Eight directions hold 80 % of the input's "
        "energy and 60 % of the output gradient's; the weight's spectrum is i^-1/2. The noise is "
        "drawn once.",
        "columns": ["scheme", "operands", "y", "dx", "dw"],
        "rows": rows,
    }


SECTIONS: dict[str, Callable[[], Table]] = {
    "sqnr": sqnr_by_format,
    "conventions": disagreement,
    "order": final_product,
    "bias": stochastic_bias,
    "levels": levels,
    "split": split,
    "gemms": gemm_errors,
}


# --- output --------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """Return a table and its note, without the title."""
    lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + f"\n{table['note']}\n"


def report(record: dict[str, Any]) -> str:
    """Return the text of benchmarks/numerics.md."""
    parts = [
        "# What each choice in the arithmetic costs\n",
        "`python benchmarks/numerics.py` writes this page from "
        f"[results/numerics.json](results/numerics.json), measured with torch {record['torch']}. "
        "[The report](../eval/results/report/numerics.md) explains the choices.\n",
    ]
    parts += [f"## {table['title']}\n\n{markdown(table)}" for table in record["tables"].values()]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--render", action="store_true", help="only rewrite the pages from the existing results"
    )
    if not parser.parse_args().render:
        tables = {}
        for name, measure in SECTIONS.items():
            tables[name] = measure()
            print(f"{tables[name]['title']}\n\n{markdown(tables[name])}")
        JSON.parent.mkdir(exist_ok=True)
        record = {"torch": torch.__version__, "tables": tables}
        JSON.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(JSON.read_text())
    shown = {name: markdown(table) for name, table in record["tables"].items()}
    REPORT.write_text(report(record))
    DOCS.write_text(with_tables(DOCS.read_text(), shown))


if __name__ == "__main__":
    main()
