"""Measures what only a GPU can tell, part by part: `make gpu`.

    python3 benchmarks/gpu.py                            # everything, within 40 minutes
    python3 benchmarks/gpu.py --parts kernels,layer      # these parts
    python3 benchmarks/gpu.py --minutes 9 --out DIR      # ends in time; the same command goes on
    python3 benchmarks/gpu.py --device cpu --quick       # tiny sizes, to see that it runs

It needs python with torch, transformers and accelerate, and installs and downloads nothing. Each
result is written at once, to results/gpu-NAME.json and gpu-NAME.md; what is there is not measured
again. A part that cannot run says why; one that fails has its error there, and the exit status is
1. The same command measures what failed anew, last. One GPU is measured, the first;
CUDA_VISIBLE_DEVICES names another.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from on_gpu import kernels, machine, page, parts, suite
from on_gpu.context import ROOT, Context
from on_gpu.record import (
    DONE,
    FAILED,
    ITSELF,
    WAITING,
    Clock,
    Entry,
    Item,
    Part,
    Record,
    Skipped,
    run_part,
)
from timing import RESULTS, prepare

from metis_hf.shared.processes import sigterm_raises  # on_gpu has made it importable

SCHEMES = ("bf16", "nvfp4", "nvidia", "metis-paper", "metis")  # that `compare` trains


def compare(context: Context) -> Iterator[Item]:
    if context.data is None:
        raise Skipped("no tokens were given: --data DIR, as recipes/prepare_data.py writes it")
    from on_gpu.compare import compare as items

    yield from items(context)


# In the order of their worth, should time not suffice for all.
PARTS: dict[str, Part] = {
    "tests": suite.tests,
    "kernels": kernels.kernels,
    "layer": parts.layers,
    "step": parts.steps,
    "fidelity": parts.fidelity,
    "compare": compare,
    "native": parts.native,
}


def names(text: str) -> list[str]:
    """Comma-separated parts, in the order of PARTS."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in given if name not in PARTS]
    if unknown or not given:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is no part; choose from {', '.join(PARTS)}"
        )
    return [name for name in PARTS if name in given]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="make gpu", description=summary)
    parser.add_argument("--parts", type=names, default=list(PARTS), help="default: all of them")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="after which nothing begins; default 40"
    )
    parser.add_argument("--out", type=Path, help="folder that gets a copy of record and page")
    parser.add_argument("--name", help="of the record; default: the GPU's")
    parser.add_argument("--again", action="store_true", help="measure the parts anew")
    parser.add_argument("--device", type=torch.device, help="default: cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--model", help="fidelity: directory of a causal language model")
    parser.add_argument("--text", type=Path, help="fidelity: UTF-8 file")
    parser.add_argument("--data", type=Path, help="compare: directory of chunked tokens")
    parser.add_argument(
        "--schemes", type=lambda text: tuple(text.split(",")), default=SCHEMES,
        help=f"compare: default {','.join(SCHEMES)}",
    )  # fmt: skip
    parser.add_argument(
        "--train-minutes", type=float, default=12.0, help="compare: all schemes; default 12"
    )
    parser.add_argument(
        "--work", type=Path, help="folder of checkpoints, kept between calls; default runs/gpu-NAME"
    )
    args = parser.parse_args(given)
    if args.device is None:
        if not torch.cuda.is_available():
            parser.error(
                "torch sees no CUDA device; to see that the parts run, add --device cpu --quick"
            )
        args.device = torch.device("cuda")
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text belong together: give both or none")
    return args


class Places(argparse.Namespace):
    """Files of a call: `record`, `page`, and `copies`, a folder or None, with `copy` in it."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        super().__init__()
        results, pages, self.copies = RESULTS, RESULTS.parent, args.out
        if args.quick:  # replaces no record
            results = pages = args.out or Path(tempfile.gettempdir()) / "metis-benchmarks"
            self.copies = None
        self.record, self.page = results / f"gpu-{name}.json", pages / f"gpu-{name}.md"
        self.copy = None if self.copies is None else self.copies / self.record.name

    def write(self, record: Record, name: str) -> None:
        """Write the record, its page, and copies of both."""
        record.write()
        self.page.write_text(page.page(record, name, list(PARTS)))
        if self.copies is not None:
            self.copies.mkdir(parents=True, exist_ok=True)
            for path in (self.record, self.page):
                shutil.copy(path, self.copies)


def run(args: argparse.Namespace, known: dict[str, Part], say: Callable[[str], None]) -> int:
    """Run the parts that are asked for; returns the exit status."""
    clock = Clock(args.minutes)
    name = args.name or machine.name_of(args.device)
    places = Places(args, name)
    facts, commit = machine.facts(args.device, args.quick), machine.commit(ROOT)
    record = Record(places.record, facts, machine.IDENTITY, places.copy)
    record.begin_call(args.minutes, commit)
    context = Context(
        device=args.device,
        quick=args.quick,
        clock=clock,
        entry=record.part,
        work=args.work or ROOT / "runs" / f"gpu-{name}{'-quick' if args.quick else ''}",
        model=args.model,
        text=args.text,
        data=args.data,
        schemes=args.schemes,
        train_minutes=args.train_minutes,
    )

    def measure(part: str, leave: set[str]) -> None:
        entry = record.part(part)
        if entry.state != DONE and clock.left() > 0:
            entry.options = context.options.get(part, entry.options)
            run_part(
                part, known[part], context, entry, clock,
                written=lambda: places.write(record, name),
                say=lambda line: say(f"[{clock.passed():5.0f} s] {line}"),
                commit=commit,
                leave=leave,
            )  # fmt: skip
        say(f"{part}: {entry.state}" + (f" ({entry.reason})" if entry.reason else ""))

    if args.again:
        _measure_anew(args.parts, record, clock, lambda part: measure(part, set()), say)
    else:
        for part in args.parts:
            record.check(part, context.options.get(part))
        failed = {part: record.part(part).errors.keys() - {ITSELF} for part in args.parts}
        for part in args.parts:
            measure(part, failed[part])
        # Last, or what fails each time would keep all others from their turn.
        for part in args.parts:
            if failed[part] and clock.left() > 0:
                measure(part, record.part(part).errors.keys() - failed[part])
    places.write(record, name)
    for path in (places.record, places.page):
        say(str(path if places.copies is None else places.copies / path.name))
    entries = [record.part(part) for part in args.parts]
    if clock.left() <= 0 and any(entry.state == WAITING or entry.reason for entry in entries):
        command = "the same command without --again" if args.again else "the same command"
        say(f"the minutes are over: {command} goes on where this one stopped")
    return int(any(entry.state == FAILED for entry in entries))


def _measure_anew(
    parts: Sequence[str],
    record: Record,
    clock: Clock,
    measure: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Measure parts from nothing; results that nothing replaces stay."""
    for part in parts:
        old = record.part(part)
        if old.items and clock.left() <= 0:
            say(f"{part}: not measured anew, no time was left; its earlier results stay")
            continue
        new = record.parts[part] = Entry()
        before = clock.measured
        measure(part)
        if old.items and clock.measured == before:
            record.parts[part] = old
            if new.errors:
                old.state, old.reason = new.state, new.reason
                old.errors |= new.errors
            say(f"{part}: not measured anew; its earlier results stay")


def main() -> None:
    # Before CUDA starts. Trainer would split batches over several GPUs.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    args = arguments()
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device.index or 0)  # it takes no "cuda" alone
    else:
        prepare(torch.get_num_threads())
    try:
        with sigterm_raises():  # pytest's processes end with this one
            status = run(args, PARTS, lambda line: print(line, flush=True))
    except ValueError as error:
        sys.exit(f"make gpu: {error}")
    sys.exit(status)


if __name__ == "__main__":
    main()
