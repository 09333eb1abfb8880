"""Render the record of a machine as a markdown page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memory import megabytes
from timing import Row, short, spread, table

from on_gpu.record import DOES_NOT_FIT, SKIPPED, Entry, Record

_FACTS = {
    "gpu": "GPU", "capability_of_gpu": "compute capability", "memory_gb": "memory, GiB",
    "driver": "driver", "cuda": "CUDA", "processor": "processor", "cores": "cores",
    "python": "python", "torch": "torch", "transformers": "transformers", "triton": "triton",
    "datasets": "datasets", "allow_tf32": "torch.backends.cuda.matmul.allow_tf32",
    "float32_matmul_precision": "precision of fp32 products",
}  # fmt: skip


def page(record: Record, name: str, order: Sequence[str]) -> str:
    """Return the page of a record, with parts in the given order."""
    machine = record.machine
    calls = [call["machine"] for call in record.calls if "machine" in call]
    lines = [f"# {machine.get('gpu', name)}", ""]
    if machine["quick"]:
        lines += ["**A quick run: tiny sizes, which say nothing about speed.**", ""]
    lines += [
        "Written by `make gpu` (`benchmarks/gpu.py`) from the record of the same name. Times are "
        "medians with quartiles, of fewer than four rounds with the range, of CUDA events on a "
        "GPU; what is compared ran in turn in one process.",
        "",
        _machines([*calls, machine]),
        "",
        _states(record, order),
    ]
    for part in order:
        entry = record.parts.get(part)
        if entry is None:
            continue
        title, section = _SECTIONS[part]
        body = section(entry) if entry.items else ""
        body += _not_measured(entry) + _errors(entry) + _commits(entry)
        if body:
            lines += ["", f"## {title}", "", body.rstrip()]
    commits = list(dict.fromkeys(str(call["commit"]) for call in record.calls))
    lines += ["", f"{len(record.calls)} calls, of commit {', '.join(commits)}."]
    if unknown := len(record.calls) - len(calls):
        lines[-1] += (
            f" The processor, driver and versions of python and CUDA of {unknown} of them are not "
            "known."
        )
    lines.append("")
    return "\n".join(lines)


def _machines(machines: Sequence[Row]) -> str:
    """Return a table of the calls' machines; a fact that differs lists all its values."""
    rows = []
    for key, title in _FACTS.items():
        values = [machine[key] for machine in machines if key in machine]
        texts = [".".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
        if texts:
            rows.append([title, " and ".join(dict.fromkeys(texts))])
    return table(["machine", ""], rows).rstrip()


def _states(record: Record, order: Sequence[str]) -> str:
    rows = []
    for part in order:
        entry = record.part(part) if part in record.parts else Entry()
        taken = sum(entry.seconds.values())
        seconds = f"{taken:.0f}" if taken else ""
        commits = ", ".join(_by_commit(entry))
        rows.append([part, entry.state, seconds, commits, _one_line(entry.reason)])
    return table(["part", "state", "seconds", "commit", "reason"], rows).rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _not_measured(entry: Entry) -> str:
    """List missing measurements with the reasons."""
    found = []
    for key, item in entry.items.items():
        if DOES_NOT_FIT in item:
            found.append(f"- {key}: memory is too small ({item[DOES_NOT_FIT]})")
        for row in item.get("without", ()):
            found.append(f"- {key}: {_what(row)}: {row['reason']}")
        for row in item.get("rows", ()):
            if "recorded_note" in row:
                note = _one_line(row["recorded_note"])
                found.append(f"- {key}: {_what(row)}, in a CUDA graph: {note}")
        if entry.state != SKIPPED and "reason" in item:
            found.append(f"- {key}: {item['reason']}")
    if entry.outdated:
        found.append(
            "- to be measured again, with the older results kept until then: "
            f"{'; '.join(entry.outdated)}"
        )
    return "\nNot measured:\n\n" + "\n".join(found) + "\n" if found else ""


def _what(row: Row) -> str:
    """Return a label from the keys that identify a row."""
    keys = ("name", "dtype", "kernels", "backend")
    return ", ".join(str(row[key]) for key in keys if row.get(key) is not None)


def _errors(entry: Entry) -> str:
    return "".join(
        f"\nFailed: {key}\n\n```text\n{text}\n```\n" for key, text in entry.errors.items()
    )


def _commits(entry: Entry) -> str:
    """List the results by commit, if there are several commits."""
    keys = _by_commit(entry)
    if len(keys) < 2:
        return ""
    lines = [f"- {commit}: {'; '.join(found)}" for commit, found in keys.items()]
    return "\nResults of several commits:\n\n" + "\n".join(lines) + "\n"


def _by_commit(entry: Entry) -> dict[str, list[str]]:
    """Return commit -> the results that were measured at it."""
    keys: dict[str, list[str]] = {}
    for key in entry.items:
        keys.setdefault(entry.commits.get(key) or "not known", []).append(key)
    return keys


def _rows(entry: Entry) -> list[Row]:
    return [row for item in entry.items.values() for row in item.get("rows", ())]


def _tests(entry: Entry) -> str:
    cells = []
    for key, row in entry.items.items():
        skipped = "; ".join(row.get("skipped_because", ()))
        cells.append([key, row["passed"], row["failed"], row["skipped"], _one_line(skipped)])
    return table(["tests", "passed", "failed", "skipped", "skipped because"], cells)


def _kernels(entry: Entry) -> str:
    compared = [row for row in _rows(entry) if "differing" in row]
    wrong = sum(1 for row in compared if row["differing"])
    text = ""
    if compared:
        verdict = "All give" if not wrong else f"{len(compared) - wrong} of them give"
        text = (
            f"{len(compared)} quantizers, kernels and dtypes were compared with the reference on "
            f"the CPU, on tensors that are hard to round. {verdict} its bits.\n\n"
        )
    cells = [
        [
            f"{row['shape'][0]} x {row['shape'][1]}",
            row["dtype"],
            row["name"],
            row["kernels"],
            spread(row, "ms"),
            spread(row),
            f"{row['gb_per_s']:.0f}",
            f"{row['first_call_s']:.2f}",
        ]
        for row in _rows(entry)
        if "ms" in row
    ]
    columns = ["shape", "dtype", "quantizer", "kernels", "ms (quartiles)", "over copy"]
    if cells:
        text += table([*columns, "GB/s", "first call, s"], cells)
        text += (
            "\nGB/s: the tensor read once and written once (sums and projections: read once); "
            "a two-level scale reads it twice.\n"
        )
    return text


def _layer(entry: Entry) -> str:
    import layer

    rows = _rows(entry)
    return layer.markdown(rows) if rows else ""


def _step(entry: Entry) -> str:
    import step

    rows = _rows(entry)
    text = step.markdown(rows) if rows else ""
    for key, item in entry.items.items():
        if item.get("too_large"):
            batches = ", ".join(map(str, item["too_large"]))
            text += f"\n{key}: batches of {batches} do not fit into memory.\n"
    return text


def _large(entry: Entry) -> str:
    rows = _rows(entry)
    plain = [row for row in rows if row["name"] == "bf16" and not row["recorded"]]
    cells = []
    for row in rows:
        share = f"{row['tokens_per_s'] / plain[0]['tokens_per_s']:.2f}" if plain else ""
        how = "recorded" if row["recorded"] else ": ".join(filter(None, ["by Python", row["note"]]))
        times = [spread(row, "ms"), f"{row['tokens_per_s']:.0f}", share]
        cells.append([row["name"], how, *times, megabytes(row["peak_bytes"])])
    if not cells:
        return ""
    columns = ["scheme", "blocks", "ms a step (quartiles)", "tokens/s", "of bf16's", "peak MB"]
    return f"{rows[0]['parameters'] / 1e9:.1f} billion parameters.\n\n" + table(columns, cells)


def _fidelity(entry: Entry) -> str:
    columns = ["loss_rise_percent", "kl_nats", "same_top_token"]
    columns += ["gradient_error", "gradient_cosine"]
    cells = [
        [key, short(row["extra_multiply_adds"]), *(_estimate(row[column]) for column in columns)]
        for key, row in entry.items.items()
        if "reason" not in row and DOES_NOT_FIT not in row
    ]
    header = ["scheme", "extra multiply-adds, %", *(name.replace("_", " ") for name in columns)]
    return table(header, cells) if cells else ""


def _estimate(pair: Sequence[float]) -> str:
    mean, error = pair
    if not math.isfinite(mean):
        return "not finite"
    return f"{mean:.4g}" + (f" ± {error:.2g}" if math.isfinite(error) else "")


def _compare(entry: Entry) -> str:
    found = dict(entry.items)
    planned = found.pop("plan", None)
    if planned is None or "steps" not in planned:
        return ""
    text = (
        f"{planned['parameters'] / 1e6:.0f} million parameters from scratch, {planned['steps']} "
        f"steps of {planned['tokens_per_step']:,} tokens for each scheme, one seed; bound by "
        f"{planned['bound_by']}. GEMMs in {planned['precision']}.\n\n"
    )
    rows = [row for row in found.values() if "loss" in row]
    base = next((row for row in rows if row["scheme"] == "bf16"), None)
    cells = []
    for row in rows:
        gap = "" if base is None else f"{100 * (row['loss'] / base['loss'] - 1):+.2f}"
        time = row["seconds_per_step"]
        over = "" if base is None else short(time / base["seconds_per_step"])
        peak = megabytes(row["peak_bytes"])
        cells.append([row["scheme"], f"{row['loss']:.4f}", gap, short(1e3 * time), over, peak])
    columns = ["scheme", "held-out loss", "above bf16, %", "ms a step", "over bf16", "peak MB"]
    return text + (table(columns, cells) if cells else "")


def _native(entry: Entry) -> str:
    cells = [
        [
            " x ".join(map(str, row["shape"])),
            row["name"],
            row.get("backend", ""),
            spread(row, "ms"),
            spread(row),
        ]
        for row in _rows(entry)
    ]
    columns = ["shape", "layer", "GEMMs", "ms (quartiles)", "over nn.Linear"]
    return table(columns, cells) if cells else ""


def _scale(entry: Entry) -> str:
    import scale_table

    rows = scale_table.rows_of(entry.items)
    return scale_table.markdown(rows) if rows else ""


# part -> (title, text of its results)
_SECTIONS: dict[str, tuple[str, Callable[[Entry], str]]] = {
    "tests": ("Tests that need a GPU", _tests),
    "kernels": ("Quantizers", _kernels),
    "layer": ("One layer, forward and backward", _layer),
    "large": ("Llama-3 8B, a training step", _large),
    "step": ("A training step", _step),
    "fidelity": ("Fidelity", _fidelity),
    "compare": ("Comparison", _compare),
    "native": ("Real FP4 GEMMs", _native),
    "scale": ("From scratch at real size", _scale),
}
