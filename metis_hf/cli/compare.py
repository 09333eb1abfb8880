"""`metis-hf compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from metis_hf.cli.options import Imports, fail_with, import_sources, split_names
from metis_hf.lab.compare.presets import PRESET_DEFAULTS, PRESETS
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.shared.yaml_file import read_yaml

if TYPE_CHECKING:
    Preset: TypeAlias = str
    Size: TypeAlias = str
else:
    Preset, Size = Literal[tuple(PRESETS)], Literal[tuple(SIZES)]


def _yaml_file(path: Path | None) -> Path | None:
    """Return the path of a YAML file after checking that it can be read (a typer callback)."""
    if path is not None:
        read_yaml(path)
    return path


def compare(
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="Preset to train; default: main, unless schemes or variants are named. "
            "docs/compare.md describes the presets."
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(help="Comma-separated schemes, or all; `metis-hf schemes --all` lists them."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Variant to compare the others with, in addition to the control; default: metis, "
            "if it is among them."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Comma-separated seeds; default: 0,1,2, or 0 with quartet2-30m."),
    ] = None,
    size: Annotated[
        Size | None, typer.Option(help="Model size; default: tiny, or the preset's size.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a transformers checkpoint from which every run starts, instead of a "
            "--size; --data must use its tokenizer."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with these options and more; see docs/compare.md.", callback=_yaml_file
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of .txt or .txt.xz files, or of chunked tokens; default for size tiny: "
            "the source code of Python's standard library."
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            help="Folder of chunked held-out tokens; default: the held-out tokens in --data."
        ),
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Number of training tokens per run.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Comma-separated lm-eval tasks to evaluate each trained model on."),
    ] = None,
    tasks_dir: Annotated[
        Path | None, typer.Option(help="Directory with local data for these tasks.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory; default: runs/compare-<preset>-<size or model>."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Number of runs in parallel; default: one per device or CPU core."),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            help="Command that starts a run on several devices, for example "
            "'accelerate launch ...'."
        ),
    ] = "",
    task: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Train only the K-th of N shares of the runs, with K from 1 to N. N processes on "
            "up to N machines can share one directory. On Slurm, use "
            "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT with --array=1-N.",
        ),
    ] = None,
    times: Annotated[
        bool,
        typer.Option(
            "--times",
            help="After training, time a step of every variant side by side in this process, and "
            "show these times instead of the runs' own. All models are in memory at once.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the runs with their estimated time and memory and any published results; "
            "train nothing.",
        ),
    ] = False,
    device: Annotated[
        Literal["h100", "h200", "cpu"] | None,
        typer.Option(
            help="Device for which --dry-run estimates times; default: this machine, or h200 if "
            "the runs would take this CPU more than a day."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Train several schemes and compare them with error bars.

    All schemes train with the same seeds and data. If interrupted, run the same command again: it
    keeps finished runs and resumes the others. You can add schemes or seeds to a directory later.
    """
    from metis_hf.lab.compare.command import compare_schemes
    from metis_hf.lab.compare.options import given_values

    values = given_values(
        config,
        preset=preset,
        schemes=_split(schemes),
        reference=reference,
        seeds=_seeds(seeds),
        size=size,
        checkpoint=model,
        data=data,
        validation=validation,
        tokens=tokens,
        tasks=_split(tasks),
        tasks_dir=tasks_dir,
    )
    fail_with(
        compare_schemes(
            values,
            out or _default_directory(**values),
            jobs=jobs,
            launcher=launcher,
            share=_share(task),
            times=times,
            dry_run=dry_run,
            device=device,
            imports=import_sources(imports),
        )
    )


def _default_directory(
    preset: str | None = None, size: str | None = None, checkpoint: str | None = None, **_: Any
) -> Path:
    own = PRESET_DEFAULTS.get(preset or "", {}).get("size")
    model = (size or own or "tiny") if checkpoint is None else Path(checkpoint).resolve().name
    if model == preset:  # the preset and its size have the same name
        return Path("runs") / f"compare-{preset}"
    return Path("runs") / f"compare-{preset or 'custom'}-{model}"


def _split(text: str | None) -> list[str] | None:
    return None if text is None else split_names(text)


def _share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal():
        raise ValueError(
            f"--task {text}: expected K/N, for example 1/3 for the first of three shares"
        )
    if not 1 <= int(number) <= int(count):
        raise ValueError(
            f"--task {text}; expected K/N with K from 1 to N; on Slurm, use "
            "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT with --array=1-N"
        )
    return int(number), int(count)


def _seeds(text: str | None) -> list[int] | None:
    parts = _split(text)
    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError:
        raise ValueError(
            f"--seeds {text}: expected whole numbers separated by commas, for example 0,1,2"
        ) from None
