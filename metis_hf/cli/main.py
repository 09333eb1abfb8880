"""The `metis-hf` command line."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

try:
    import typer
except ImportError as error:  # pragma: no cover
    raise SystemExit(f'{error.name} is missing; pip install "metis-hf[eval]"') from error

from metis_hf.cli.analyze import analyze
from metis_hf.cli.compare import compare
from metis_hf.cli.demo import demo
from metis_hf.cli.evaluate import evaluate
from metis_hf.cli.export import export
from metis_hf.cli.fidelity import fidelity
from metis_hf.cli.ranks import ranks
from metis_hf.cli.report import report
from metis_hf.cli.schemes import schemes
from metis_hf.shared.messages import MENDABLE, one_line

# Modules that the extra "eval" installs.
_EXTRA = {"lm_eval", "evaluate", "jinja2", "matplotlib", "yaml", "rich", "scipy", "typer"}

# Option names of version 0.2, still accepted: old name -> new name.
_RENAMED = {
    "loss-text": "text", "batch-size": "batch", "length": "sequence-length", "sequences": "limit",
}  # fmt: skip

app = typer.Typer(
    context_settings={"token_normalize_func": lambda name: _RENAMED.get(name, name)},
    help="Train Hugging Face language models in four bits, emulated exactly on CPU and CUDA.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: importing rich would double the startup time
)
app.command()(demo)
app.command()(compare)
app.command("eval")(evaluate)
app.command()(fidelity)
app.command()(ranks)
app.command()(analyze)
app.command()(report)
app.command()(export)
app.command()(schemes)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"metis-hf {version('metis-hf')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; print errors that the user can fix in one line, without traceback."""
    try:
        app()
    except MENDABLE as error:
        if _is_bug(error):
            raise
        print(f"error: {one_line(error)}{_advice(error)}", file=sys.stderr)
        sys.exit(2)


def _is_bug(error: Exception) -> bool:
    """Return whether an error is our bug: a failing own import, or a bare NotImplementedError."""
    own = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "metis_hf"
    return own or (isinstance(error, NotImplementedError) and not str(error))


def _advice(error: Exception) -> str:
    """Return advice to install the extra "eval" if one of its modules is missing, else ""."""
    missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0]
    return '; pip install "metis-hf[eval]"' if missing in _EXTRA else ""


if __name__ == "__main__":
    main()
