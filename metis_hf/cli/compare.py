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
            help="Default: main, unless schemes or variants are named. docs/compare.md says what "
            "they train."
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(help="Comma-separated, or all; `metis-hf schemes --all` lists them."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Variant that the others are compared with beside the control; default: metis, "
            "if it takes part."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Comma-separated; default 0,1,2, or 0 with quartet2-30m.")
    ] = None,
    size: Annotated[Size | None, typer.Option(help="Default: tiny, or the preset's.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint directory of transformers that every run starts from, instead of a "
            "--size; --data has to be of its tokenizer."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML with these options and more; see docs/compare.md.", callback=_yaml_file
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder of .txt or .txt.xz files, or chunked tokens; default at size tiny: the "
            "standard library's sources."
        ),
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="Chunked held-out tokens; default: the ones in --data.")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Training tokens of each run.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval tasks for every trained model, comma-separated.")
    ] = None,
    tasks_dir: Annotated[Path | None, typer.Option(help="Local data of these tasks.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory; default runs/compare-<preset>-<size or model>.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs side by side; default: one per device or CPU core.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="Starts a run on several devices: 'accelerate launch ...'.")
    ] = "",
    task: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Train the K-th of N shares of the runs, K from 1; N processes, on as many "
            "machines, may work in one directory. On Slurm: "
            "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT of --array=1-N.",
        ),
    ] = None,
    times: Annotated[
        bool,
        typer.Option(
            "--times",
            help="Afterwards time a step of every variant side by side in this process, and show "
            "these times rather than the runs' own. All models are in memory at once.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the runs, how long they take, in how much memory, and what is published "
            "of them; train nothing.",
        ),
    ] = False,
    device: Annotated[
        Literal["h100", "h200", "cpu"] | None,
        typer.Option(
            help="Of the times that --dry-run says; default: as this machine, but h200 for what "
            "its CPU takes more than a day for."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Train several schemes alike and compare them with error bars.

    All schemes train with the same seeds and data. If interrupted, run the same command again:
    finished runs are kept, others resume. You can add schemes or seeds to a directory later.
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
        raise ValueError(f"--task {text}: expected K/N, the K-th of N shares, as in 1/3")
    if not 1 <= int(number) <= int(count):
        raise ValueError(
            f"--task {text}; expected K/N with K from 1 to N, as in "
            "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT of --array=1-N"
        )
    return int(number), int(count)


def _seeds(text: str | None) -> list[int] | None:
    parts = _split(text)
    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"--seeds {text}: expected whole numbers, as in 0,1,2") from None
