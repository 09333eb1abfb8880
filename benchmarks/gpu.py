"""Run the measurements that need a GPU, part by part: `make gpu`.

    python3 benchmarks/gpu.py                            # everything, within 40 minutes
    python3 benchmarks/gpu.py --parts kernels,layer      # these parts
    python3 benchmarks/gpu.py --minutes 9 --out DIR      # stop in time; repeat to continue
    python3 benchmarks/gpu.py --parts scale --text DIR   # runs from scratch, DIR of .txt or .txt.xz
    python3 benchmarks/gpu.py --device cpu --quick       # tiny sizes, to see that it runs

The script needs python with torch, transformers and accelerate, and installs and downloads nothing.
Each result is written to results/gpu-NAME.json and gpu-NAME.md as soon as it is measured, and is
not measured again. If a part cannot run, the record has the reason. If a part fails, the record has
the error and the exit status is 1; the same command then measures the failed items again, last.
Only the first GPU is measured; select another with CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from on_gpu import ROOT, kernels, machine, page, parts, suite
from on_gpu.context import Context
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
from timing import RESULTS, device, prepare

from metis_hf.data.chunked import read_meta  # importing on_gpu made metis_hf importable
from metis_hf.schemes import scheme_names
from metis_hf.shared.processes import sigterm_raises

SCHEMES = ("bf16", "nvfp4", "nvidia", "metis-paper", "metis")  # for the part `compare`


def compare(context: Context) -> Iterator[Item]:
    if context.data is None:
        raise Skipped("no tokens were given; pass --data DIR, from recipes/prepare_data.py")
    from on_gpu.compare import compare as items

    yield from items(context)


def large(context: Context) -> Iterator[Item]:
    from on_gpu.large import large as items

    yield from items(context)


def scale(context: Context) -> Iterator[Item]:
    from on_gpu.scale import scale as items

    yield from items(context)


# Most valuable first, in case the time is not enough for all.
PARTS: dict[str, Part] = {
    "tests": suite.tests,
    "kernels": kernels.kernels,
    "layer": parts.layers,
    "large": large,
    "step": parts.steps,
    "fidelity": parts.fidelity,
    "compare": compare,
    "native": parts.native,
    "scale": scale,
}


def known_names(text: str, what: str, known: Sequence[str]) -> list[str]:
    """Parse comma-separated names, each of them in `known`."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is not a {what}; choose from {', '.join(known)}"
        )
    return given


def names(text: str) -> list[str]:
    """Parse comma-separated parts, and return them in the order of PARTS."""
    given = known_names(text, "part", list(PARTS))
    return [name for name in PARTS if name in given]


def schemes(text: str) -> tuple[str, ...]:
    """Parse comma-separated schemes."""
    return tuple(known_names(text, "scheme", scheme_names()))


def first_device(name: str) -> torch.device:
    """Parse --device; of the GPUs only the first is visible."""
    if name.startswith("cuda:") and name != "cuda:0":
        raise argparse.ArgumentTypeError(
            f"{name!r} is not visible, because only the first GPU is measured. Omit --device, "
            f"and select another GPU with CUDA_VISIBLE_DEVICES={name.removeprefix('cuda:')}"
        )
    return device(name)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="make gpu", description=summary)
    parser.add_argument(
        "--parts", type=names, default=list(PARTS), help="comma-separated parts; default: all"
    )
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="start nothing after so many; default: 40"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for record and page; also copied to the checkout"
    )
    parser.add_argument("--name", help="name of the record; default: name of the GPU")
    parser.add_argument("--again", action="store_true", help="measure the parts again")
    parser.add_argument("--device", type=first_device, help="device to measure; default: cuda")
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to check that everything runs"
    )
    parser.add_argument("--model", help="for fidelity: directory of a causal language model")
    parser.add_argument("--text", type=Path, help="for fidelity: UTF-8 file; for scale: folder")
    parser.add_argument("--data", type=Path, help="for compare and scale: chunked tokens")
    parser.add_argument(
        "--peers", type=Path, help="for layer: checkouts of other libraries, see CONTRIBUTING.md"
    )
    parser.add_argument(
        "--schemes", type=schemes, default=SCHEMES,
        help=f"for compare: comma-separated schemes; default: {','.join(SCHEMES)}",
    )  # fmt: skip
    parser.add_argument(
        "--train-minutes", type=float, default=12.0, help="for compare, in total; default: 12"
    )
    parser.add_argument(
        "--work", type=Path, help="folder kept between calls; default: runs/gpu-NAME"
    )
    args = parser.parse_args(given)
    if args.device is None:
        if not torch.cuda.is_available():
            parser.error(
                "torch sees no CUDA device; to check that the parts run, add --device cpu --quick"
            )
        args.device = torch.device("cuda")
    if (args.model is None) == (args.text is not None and not args.text.is_dir()):
        parser.error(
            "--model and --text belong together: give both or neither. The part scale takes "
            "--text without --model: a folder of .txt or .txt.xz files"
        )
    try:
        _check_inputs(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def _check_inputs(args: argparse.Namespace) -> None:
    """Refuse missing inputs before any part is measured."""
    if args.model is not None and not Path(args.model).is_dir():
        raise FileNotFoundError(f"--model {args.model} is not a directory")
    if args.model is not None and not args.text.is_file():
        raise FileNotFoundError(f"--text {args.text} is not a file")
    if args.peers is not None and not args.peers.is_dir():
        raise FileNotFoundError(f"--peers {args.peers} is not a directory of checkouts")
    if args.data is not None:
        read_meta(args.data)


class Places:
    """Files of a call: `record` and `page`, in `--out` if given, and their `copies`.

    The copies are in the checkout, which may be read-only.
    """

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        record, text = f"gpu-{name}.json", f"gpu-{name}.md"
        own = (RESULTS / record, RESULTS.parent / text)
        folder = args.out
        if args.quick and folder is None:
            folder = Path(tempfile.gettempdir()) / "metis-benchmarks"
        self.record, self.page = own if folder is None else (folder / record, folder / text)
        # A quick run does not overwrite the checkout's records.
        self.copies = () if args.quick or folder is None else own

    def write(self, record: Record, name: str) -> None:
        """Write the record, its page, and copies of both."""
        record.write()
        self.page.write_text(page.page(record, name, list(PARTS)))
        with contextlib.suppress(OSError):
            for path, copy in zip((self.record, self.page), self.copies):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)


def run(args: argparse.Namespace, known: dict[str, Part], say: Callable[[str], None]) -> int:
    """Run the requested parts, and return the exit status."""
    clock = Clock(args.minutes)
    name = args.name or machine.name_of(args.device)
    places = Places(args, name)
    facts, commit = machine.facts(args.device, args.quick), machine.commit(ROOT)
    record = Record(places.record, facts, machine.IDENTITY, *places.copies[:1])
    record.begin_call(args.minutes, commit)
    work = args.work or ROOT / "runs" / f"gpu-{name}{'-quick' if args.quick else ''}"
    context = Context(
        device=args.device,
        quick=args.quick,
        clock=clock,
        entry=record.part,
        work=work,
        model=args.model,
        text=args.text,
        data=args.data,
        tokens=_tokens_of_scale(args, work),
        peers=args.peers,
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

    if not args.again:
        for part in args.parts:
            record.check(part, context.options.get(part))
    places.write(record, name)  # fail before measuring if the record cannot be written
    if args.again:
        _measure_anew(context, args.parts, record, lambda part: measure(part, set()), say)
    else:
        failed = {part: record.part(part).errors.keys() - {ITSELF} for part in args.parts}
        for part in args.parts:
            measure(part, failed[part])
        # Failed items come last: one that always fails must not block the others.
        for part in args.parts:
            if failed[part] and clock.left() > 0:
                measure(part, record.part(part).errors.keys() - failed[part])
    places.write(record, name)
    for path in (places.record, places.page):
        say(str(path))
    entries = [record.part(part) for part in args.parts]
    if clock.left() <= 0 and any(entry.state == WAITING or entry.reason for entry in entries):
        command = "the same command without --again" if args.again else "the same command"
        say(f"the minutes are over: run {command} to continue from here")
    return int(any(entry.state == FAILED for entry in entries))


def _tokens_of_scale(args: argparse.Namespace, work: Path) -> Any:
    """Read the tokens of the part `scale` before anything is measured; None without a text."""
    text = args.text if args.model is None else None
    data = args.data if args.parts == ["scale"] else None  # otherwise --data is for `compare`
    if "scale" not in args.parts or (text is None and data is None and not args.quick):
        return None
    from on_gpu.scale import open_text

    return open_text(text, data, args.quick, work)


def _measure_anew(
    context: Context,
    parts: Sequence[str],
    record: Record,
    measure: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Measure parts again; old results with the same options stay until new ones replace them."""
    clock = context.clock
    for part in parts:
        old = record.part(part)
        has_any = bool(old.items or old.errors)
        if has_any and clock.left() <= 0:
            say(f"{part}: not measured again, no time was left; its earlier results are kept")
            continue
        same = context.options.get(part, old.options) == old.options
        new = record.parts[part] = old.anew() if has_any and same else Entry()
        before = clock.measured
        measure(part)
        if has_any and clock.measured == before:
            record.parts[part] = old
            if not new.errors.items() <= old.errors.items():
                old.state, old.reason = new.state, new.reason
                old.errors |= new.errors
            say(f"{part}: not measured again; its earlier results are kept")


def main() -> None:
    # Set before CUDA starts: Trainer would split batches over several GPUs.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # A kernel must not be timed while the reference silently runs in its place.
    warnings.filterwarnings("error", message="the reference takes over")
    args = arguments()
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device.index or 0)  # set_device does not accept "cuda" alone
    else:
        prepare(torch.get_num_threads())
    try:
        with sigterm_raises():  # so that pytest's processes end with this one
            status = run(args, PARTS, lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        sys.exit(f"make gpu: {error}")
    sys.exit(status)


if __name__ == "__main__":
    main()
