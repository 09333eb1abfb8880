"""A directory that another process holds is refused; a lock ends with its process."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from metis_hf.shared import locks
from metis_hf.shared.locks import LOCK_FILE, hold_directory

HOLD = """
import subprocess, sys
from metis_hf.shared.locks import hold_directory

with hold_directory(sys.argv[1]):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                             stdin=subprocess.PIPE, pass_fds=())
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_the_process_is_named_until_it_is_gone(holder, tmp_path):
    name = rf"in use by process {holder.pid} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\d "
    with pytest.raises(ValueError, match=name), hold_directory(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with hold_directory(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK_FILE).read_text() == ""


def test_a_directory_is_made_and_given_back(tmp_path):
    place = tmp_path / "a" / "b"
    for _ in range(2):
        with pytest.raises(KeyError), hold_directory(place):
            raise KeyError
    assert place.is_dir()


def test_the_message_names_the_option(tmp_path):
    with (
        hold_directory(tmp_path),
        pytest.raises(ValueError, match="choose another --output_dir"),
        hold_directory(tmp_path, "--output_dir"),
    ):
        pass


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked")


def _work(started, end):
    started.set()
    end.wait(60)


@needs_fork
def test_workers_that_a_killed_process_leaves_hold_nothing(tmp_path):
    """A manager and a pool, as `Dataset.map(num_proc=...)` forks them, notice no parent's end."""
    context = multiprocessing.get_context("fork")
    started, end = context.Event(), context.Event()
    with hold_directory(tmp_path):
        worker = context.Process(target=_work, args=(started, end), daemon=True)
        worker.start()
        assert started.wait(60)
    try:  # given back, while the worker lives on
        with hold_directory(tmp_path):
            pass
    finally:
        end.set()
        worker.join()


def _leave(block):
    block.__exit__(None, None, None)


@needs_fork
def test_a_fork_that_leaves_the_block_gives_nothing_back(tmp_path):
    """It runs on to the end of the block as its parent does, which still works there."""
    block = hold_directory(tmp_path)
    with block:
        worker = multiprocessing.get_context("fork").Process(target=_leave, args=(block,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def no_locks(*args):
    raise OSError(errno.ENOLCK, "No locks available")


class TestWithoutLocks:
    """Where the platform or the file system has none, the process in the file must be gone."""

    @pytest.fixture(autouse=True, params=["platform", "file system"])
    def _without(self, request, monkeypatch):
        if request.param == "platform":
            monkeypatch.setattr(locks, "fcntl", None)
        else:
            monkeypatch.setattr(locks.fcntl, "flock", no_locks)

    def write(self, tmp_path, **changes):
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": "x"}
        holder["taken"] = time.time()
        (tmp_path / LOCK_FILE).write_text(json.dumps(holder | changes))

    def refused(self, tmp_path):
        try:
            with hold_directory(tmp_path):
                return False
        except ValueError:
            return True

    def test_a_running_process(self, tmp_path):
        self.write(tmp_path)
        with pytest.raises(ValueError, match=r"choose another --out$"), hold_directory(tmp_path):
            pass

    def test_a_process_that_is_gone(self, tmp_path):
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        self.write(tmp_path, pid=process.pid)
        assert not self.refused(tmp_path)
        assert not self.refused(tmp_path)  # given back

    def test_another_process_of_that_number(self, tmp_path):
        self.write(tmp_path, taken=psutil.Process().create_time() - 60)
        assert not self.refused(tmp_path)

    def test_another_host_cannot_be_asked(self, tmp_path):
        """A process there may have been killed: the message says what lets go of its directory."""
        self.write(tmp_path, host="elsewhere")
        said = re.escape(f"; if it has ended, delete {tmp_path / LOCK_FILE}") + "$"
        with pytest.raises(ValueError, match=said), hold_directory(tmp_path):
            pass
        (tmp_path / LOCK_FILE).unlink()
        assert not self.refused(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
    def test_a_file_that_names_nobody(self, text, tmp_path):
        (tmp_path / LOCK_FILE).write_text(text.replace("1", f'"{socket.gethostname()}"'))
        assert not self.refused(tmp_path)
