"""`metis-hf export`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from metis_hf.cli.options import Imports, import_sources, utf8_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Directory of a Metis checkpoint or, with --calibrate or --scheme, a dense model."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output directory.")],
    format: Annotated[
        Literal["dense", "compressed-tensors", "modelopt"],
        typer.Option(help="Format of the export."),
    ] = "dense",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Dtype of unpacked tensors.")
    ] = "bfloat16",
    low_rank: Annotated[
        Literal["fold", "side-file"],
        typer.Option(
            help="Fold the low-rank part of split weights into the packed weights, or write it to "
            "a side file."
        ),
    ] = "fold",
    share_scales: Annotated[
        bool,
        typer.Option(
            "--share-scales/--own-scales",
            help="Use one tensor scale for layers that inference engines fuse, or one scale per "
            "layer as in training.",
        ),
    ] = True,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT",
            help="Quantize the model, and calibrate the input scales on this text or .jsonl file.",
            callback=utf8_file,
        ),
    ] = None,
    scheme: Annotated[
        Literal["w4a4", "w4a16"] | None,
        typer.Option(help="Scheme to quantize the model to.", show_default="w4a4"),
    ] = None,
    calibration_sequences: Annotated[
        int | None,
        typer.Option(help="Maximum number of calibration sequences.", show_default="128"),
    ] = None,
    calibration_length: Annotated[
        int | None,
        typer.Option(help="Length of a calibration sequence in tokens.", show_default="512"),
    ] = None,
    calibration_method: Annotated[
        Literal["mse", "amax", "percentile"] | None,
        typer.Option(help="Method for choosing the input scales.", show_default="mse"),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Module to leave unquantized, by name or regular expression; repeatable.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device for calibration, for example cuda.", show_default="a GPU if available"
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Held-out text or .jsonl file to measure the loss on.", callback=utf8_file
        ),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="JSON file with metrics for the model card.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Export a model for software that does not use metis_hf.

    Exports a Metis checkpoint as it is. With --calibrate TEXT and a packed --format, exports any
    model in NVFP4 with quantized inputs. Prints the error of each choice and the code that loads
    the export.
    """
    import_sources(imports)
    quantizes = calibrate is not None or scheme is not None
    given: dict[str, Any] = {
        "sequences": calibration_sequences,
        "length": calibration_length,
        "method": calibration_method,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for options, used, of in (
        ([f"--calibration-{name}" for name in given], calibrate is not None, "--calibrate TEXT"),
        (["--exclude"] * bool(exclude), quantizes, "--calibrate TEXT or --scheme"),
        (["--device"] * bool(device), quantizes, "--calibrate TEXT or --scheme"),
        (["--own-scales"] * (not share_scales), format != "dense", "a packed --format"),
    ):
        if options and not used:
            raise ValueError(f"{options[0]} does nothing without {of}; leave it out, or give both")
    if quantizes and format == "dense":
        raise ValueError(
            "--calibrate and --scheme quantize the model, but --format dense does not; choose "
            "--format compressed-tensors or modelopt"
        )
    from rich.console import Console

    from metis_hf.deploy import export_checkpoint, load_metis_model
    from metis_hf.deploy.report import HEADER, LOSS_HEADER, loss_rows, report_rows
    from metis_hf.lab.show.table import terminal_table

    console = Console(markup=False)
    load: Callable[[str | Path], PreTrainedModel] = load_metis_model
    if quantizes:
        from metis_hf.lab.calibrated import Calibration, calibrated_model
        from metis_hf.lab.show.progress import TaskProgress
        from metis_hf.shared.devices import device_of

        calibration = Calibration(
            text=calibrate,
            scheme=scheme,
            device=str(device_of(device)),
            exclude=tuple(exclude or ()),
            **given,
        )
        load = partial(
            calibrated_model,
            calibration=calibration,
            report=console.print,
            progress=TaskProgress(console),
        )
    report = export_checkpoint(
        checkpoint,
        out,
        format=format,
        dtype=dtype,
        low_rank=low_rank,
        share_scales=share_scales,
        text=text,
        results=results,
        load=load,
    )
    title = "Errors of the exported weights relative to those that the checkpoint represents"
    console.print(terminal_table(HEADER, list(report_rows(report)), title=title))
    if report.held_out:
        console.print(terminal_table(LOSS_HEADER, list(loss_rows(report)), title="Loss"))
    for note in report.notes:
        console.print(note, highlight=False)
    summary = f"{out}: {report.bytes:,} bytes, {len(report.packed)} layers in NVFP4. Load it:"
    serving = [f"Serve it:\n{report.serving}"] if report.serving else []
    for lines in (summary, report.loading, *serving):  # a path is never broken into lines
        console.print(lines, soft_wrap=True, markup=False, highlight=False)
