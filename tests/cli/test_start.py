"""Help and errors of usage come before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from metis_hf.cli import main as program
from metis_hf.cli.options import device_or_best

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "rich", "lm_eval", "datasets", "peft")
COMMANDS = (
    "demo", "compare", "eval", "fidelity", "ranks", "analyze", "report", "export", "schemes",
)  # fmt: skip

CODE = f"""
import sys
from metis_hf.cli.main import main
sys.argv[0] = "metis-hf"
try:
    main()
except SystemExit as end:
    print("exit", end.code)
print("imported", *[name for name in {HEAVY} if name in sys.modules])
"""


def start(*arguments):
    """Run `metis-hf` and return (exit code, what it printed, heavy modules that it imported)."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True
    )
    *printed, code, imported = done.stdout.splitlines()
    return code.split()[1], "\n".join(printed) + done.stderr, imported.split()[1:]


def test_help_lists_the_commands():
    code, printed, imported = start("--help")
    assert (code, imported) == ("0", [])
    listed = printed.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert not [line for line in listed if line.endswith("...")]  # no summary is cut


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command):
    code, printed, imported = start(command, "--help")
    assert (code, imported) == ("0", [])
    assert f"Usage: metis-hf {command}" in printed
    assert "--import FILE_OR_MODULE" in printed


def test_help_says_what_compare_trains_without_options():
    _, printed, _ = start("compare", "--help")
    assert "default main, unless schemes or variants are named" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["compare", "--no-such"], "No such option: --no-such"),
        (["compare", "--preset", "mian"], "preset 'mian' is not known; choose from main"),
        (
            ["compare", "--size", "1b"],
            "size '1b' is not known; choose from tiny, demo, 130m, 1b1, 8b",
        ),
        (["demo", "--steps", "many"], "Invalid value for '--steps'"),
        (["export", "run"], "Missing option '--out'"),
        (["export", "run", "--out", "x", "--format", "gguf"], "'gguf' is not one of"),
        (["eval", "run", "--precision", "fp4"], "'fp4' is not one of"),
        (["eval", "run", "--batch-size", "big"], "batch-size 'big'; expected auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_of_usage(arguments, message):
    code, printed, imported = start(*arguments)
    assert (code, imported) == ("2", [])
    assert message in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["fidelity", "m", "--text"], b"\xff\xfe", "is not UTF-8 text"),
        (["ranks", "m", "--budget", "9", "--text"], b"\xff\xfe", "is not UTF-8 text"),
        (["analyze", "m", "--out", "x", "--text"], b"\xff\xfe", "is not UTF-8 text"),
        (["export", "m", "--out", "x", "--text"], b"\xff\xfe", "is not UTF-8 text"),
        (["export", "m", "--out", "x", "--calibrate"], b"\xff\xfe", "is not UTF-8 text"),
        (["compare", "--config"], b"\xff\xfe", "is not UTF-8 text"),
        (["compare", "--config"], b"schemes: [a, b\nx: : y\n", "is not YAML: while parsing a flow"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_files_that_cannot_be_read_are_named(arguments, content, message, tmp_path):
    file = tmp_path / "given.txt"
    file.write_bytes(content)
    code, printed, imported = start(*arguments, str(file))
    assert (code, imported) == ("2", [])
    assert f"error: {file} {message}" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.pyplot"),
            "No module named 'matplotlib'; pip install \"metis-hf[eval]\"",
        ),
        (ModuleNotFoundError("No module named 'own'", name="own"), "No module named 'own'"),
        (ImportError("evaluation needs lm_eval"), "evaluation needs lm_eval"),
        (NotImplementedError("FSDP2 instead"), "FSDP2 instead"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, line, monkeypatch, capsys):
    _raise(error, monkeypatch)
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'metis_hf.x'", name="metis_hf.x"),
        ImportError("cannot import name 'x' from 'metis_hf'", name="metis_hf"),
        NotImplementedError(),
    ],
)
def test_a_bug_keeps_its_traceback(error, monkeypatch):
    _raise(error, monkeypatch)
    with pytest.raises(type(error)):
        program.main()


def _raise(error, monkeypatch):
    def app():
        raise error

    monkeypatch.setattr(program, "app", app)


@pytest.mark.parametrize("name", ["foo", "meta", "cuda:99"])
def test_devices_that_this_machine_has_not(name):
    with pytest.raises(ValueError, match=f"device='{name}' cannot be used here .*choose cpu, or"):
        device_or_best(name)
    assert device_or_best("cpu") == "cpu"
