"""Help and errors of usage come before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from forked import python

from metis_hf.cli import main as program
from metis_hf.shared.devices import device_of

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "rich", "lm_eval", "datasets", "peft")
COMMANDS = (
    "demo", "compare", "eval", "fidelity", "ranks", "analyze", "report", "export", "schemes",
)  # fmt: skip

CODE = f"""
import contextlib, io, json, sys
from metis_hf.cli.main import main

ended = []
for arguments in json.load(sys.stdin):
    sys.argv, printed, code = ["metis-hf", *arguments], io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as end:
            code = end.code
    ended.append((code, printed.getvalue()))
print(json.dumps([ended, [name for name in {HEAVY} if name in sys.modules]]))
"""


def start(*commands):
    """Run commands in one process that imports nothing heavy; return (exit code, text) of each."""
    ended, imported = json.loads(python("-c", CODE, input=json.dumps(commands)))
    assert imported == []
    return ended


def test_version():
    ((code, printed),) = start(["--version"])
    assert (code, printed) == (0, f"metis-hf {version('metis-hf')}\n")


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "absent", "--loss-text", "absent", "--batch-size", "2"],
        ["fidelity", "absent", "--text", __file__, "--length=5"],
        ["analyze", "absent", "--sequences", "3", "--out", "absent"],
    ],
    ids=lambda command: command[0],
)
def test_options_of_the_version_before_are_still_read(command):
    done = subprocess.run(
        [sys.executable, "-m", "metis_hf.cli.main", *command], capture_output=True, text=True
    )
    assert done.returncode
    assert "No such option" not in done.stderr
    assert "absent" in done.stderr


def test_schemes_are_listed():
    for code, printed in start(["schemes"], ["schemes", "--all"]):
        assert code == 0
        assert "  nvfp4-rne " in printed


def test_help():
    (code, printed), *each = start(["--help"], *([command, "--help"] for command in COMMANDS))
    assert code == 0
    listed = printed.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert not [line for line in listed if line.endswith("...")]  # no summary is cut
    for command, (code, printed) in zip(COMMANDS, each, strict=True):
        assert code == 0
        assert f"Usage: metis-hf {command}" in printed
        assert "--import FILE_OR_MODULE" in printed
    compare = " ".join(each[COMMANDS.index("compare")][1].split())
    assert "default: main, unless schemes or variants are named" in compare


def test_errors_of_usage_and_files_that_cannot_be_read(tmp_path):
    binary, broken = tmp_path / "binary.txt", tmp_path / "broken.yaml"
    binary.write_bytes(b"\xff\xfe")
    broken.write_bytes(b"schemes: [a, b\nx: : y\n")
    unread = f"error: {binary} is not UTF-8 text"
    cases = {
        "nonsense": "No such command 'nonsense'",
        "compare --no-such": "No such option: --no-such",
        "compare --preset mian": "'mian' is not one of 'main', 'demo'",
        "compare --size 1b": "'1b' is not one of 'tiny', 'demo', '130m', '1b1', '8b'",
        "demo --steps many": "Invalid value for '--steps'",
        "export run": "Missing option '--out'",
        "export run --out x --format gguf": "'gguf' is not one of",
        "eval run --precision fp4": "'fp4' is not one of",
        "eval run --batch big": "--batch 'big'; expected auto",
        f"fidelity m --text {binary}": unread,
        f"ranks m --budget 9 --text {binary}": unread,
        f"analyze m --out x --text {binary}": unread,
        f"export m --out x --text {binary}": unread,
        f"export m --out x --calibrate {binary}": unread,
        f"compare --config {binary}": unread,
        f"compare --config {broken}": f"error: {broken} is not YAML: while parsing a flow",
    }
    for command, (code, printed) in zip(cases, start(*map(str.split, cases)), strict=True):
        assert code == 2, command
        assert cases[command] in " ".join(printed.split()), command


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


def test_devices_that_this_machine_has_not():
    for name in ("foo", "meta", "cuda:99"):
        message = f"device='{name}' cannot be used here .*choose cpu, or"
        with pytest.raises(ValueError, match=message):
            device_of(name)
    assert device_of("cpu").type == "cpu"
