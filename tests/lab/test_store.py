"""Results on disk are found again, and nothing that is there is lost or mixed up."""

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

import pytest

from metis_hf.lab import store as stores
from metis_hf.lab.store import DamagedRecord, Store, numerics_digest, source_digest, task_key

FORK = multiprocessing.get_context("fork")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked")


def hold(folder, name, held):
    with Store(folder).hold(name):
        code = "import sys; sys.stdin.read()"
        subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)
        held.set()
        time.sleep(60)


def die_in_write(folder):
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    Store(folder).put("task", "other", {"loss": 2.0})


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds `tmp_path`, or one task of it."""
    started = []

    def start(name=""):
        held = FORK.Event()
        process = FORK.Process(target=hold, args=(tmp_path, name, held), daemon=True)
        process.start()
        started.append(process)
        assert held.wait(60)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def free(store, name=""):
    try:
        with store.hold(name):
            return True
    except ValueError:
        return False


class TestRecords:
    def test_a_record_is_found_under_its_key_alone(self, tmp_path):
        store, key = Store(tmp_path / "new"), task_key("text", 1)
        assert store.get("runs/metis/loss", key) is None
        store.put("runs/metis/loss", key, {"loss": 1.5, "curve": [1, None]})
        again = Store(tmp_path / "new")
        assert again.get("runs/metis/loss", key) == {"loss": 1.5, "curve": [1, None]}
        assert again.get("runs/metis/loss", task_key("text", 2)) is None
        found = again.find("runs/metis/loss")
        assert found.key == key
        assert {"versions", "device", "commit"} <= found.made.keys()

    def test_no_name_leads_out_of_the_directory(self, tmp_path):
        store = Store(tmp_path / "out")
        for name in ("../x", "a/../../x", "/x", "a:b*?", "x" * 60, "."):
            store.put(name, "key", {"a": name})
            assert store.get(name, "key") == {"a": name}
            assert [path.name for path in tmp_path.iterdir()] == ["out"]

    @forks
    def test_a_process_that_dies_in_a_write_leaves_what_was_there(self, tmp_path):
        store = Store(tmp_path)
        store.put("task", "key", {"loss": 1.0})
        process = FORK.Process(target=die_in_write, args=(tmp_path,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert store.get("task", "key") == {"loss": 1.0}
        store.put("task", "other", {"loss": 2.0})
        assert [path.name for path in tmp_path.iterdir()] == ["task.json"]

    def test_a_full_disk(self, tmp_path, monkeypatch):
        store = Store(tmp_path)
        store.put("task", "key", {"loss": 1.0})

        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device; .* kept.*task\.json"):
            store.put("task", "other", {"loss": 2.0})
        assert store.get("task", "key") == {"loss": 1.0}
        assert len(list(tmp_path.iterdir())) == 1

    def test_what_is_no_record_is_named_with_a_way_out(self, tmp_path):
        for content, error, said in (
            ('{"loss": 1.', DamagedRecord, "is not a valid JSON file"),
            ("[1]", DamagedRecord, "is not the record of 'task'"),
            ('{"loss": 1.0}', DamagedRecord, "is not the record of 'task'"),
            ('{"store": {"format": 1, "name": "b", "key": ""}}', DamagedRecord, "not the record"),
            ('{"store": {"format": 99}}', ValueError, "has format 99, written by another version"),
        ):
            (tmp_path / "task.json").write_text(content)
            with pytest.raises(error, match=rf"task\.json.*{said}.*; delete it .*another --to$"):
                Store(tmp_path, "--to").get("task", "key")


class TestClaim:
    def test_the_same_experiment_goes_on(self, tmp_path):
        for inputs in ({"data": "1", "model": "2"}, {"data": "1", "more": "3"}, None):
            Store(tmp_path).claim({"steps": 3, "training": {"seed": 0}}, inputs)
        assert json.loads((tmp_path / "settings.json").read_text())["steps"] == 3
        assert len(json.loads((tmp_path / "inputs.json").read_text())) == 3

    def test_another_is_refused_by_what_differs(self, tmp_path):
        store, settings = Store(tmp_path, "--to"), {"steps": 3, "training": {"seed": 0}}
        store.claim(settings, {"data": "1", "model": "2"})
        said = r"training.seed: 0 there, 1 now\). Choose another --to, or delete the directory"
        with pytest.raises(ValueError, match=said):
            store.claim({"steps": 3, "training": {"seed": 1}})
        with pytest.raises(ValueError, match=r"^model changed after .*; choose another --to"):
            store.claim(settings, {"data": "1", "model": "0", "more": "3"})


@forks
class TestHold:
    def test_a_second_writer_is_told_of_the_first_until_that_is_gone(self, holder, tmp_path):
        process = holder()
        name = rf"{tmp_path} is in use by process {process.pid} on {socket.gethostname()}, since "
        with pytest.raises(ValueError, match=rf"{name}.*choose another --to$"):
            Store(tmp_path, "--to").hold().__enter__()
        process.kill()  # its child lives on
        process.join()
        assert free(Store(tmp_path))

    def test_tasks_are_held_one_by_one(self, holder, tmp_path):
        holder("runs/a")
        store = Store(tmp_path)
        with pytest.raises(ValueError, match=rf"{tmp_path}/runs/a is in use by process \d+"):
            store.hold("runs/a").__enter__()
        with store.hold("runs/b"), store.hold():
            store.claim({})

    def test_forks_hold_nothing_and_give_nothing_back(self, tmp_path):
        """Pools that `Dataset.map` forks notice no parent's end, and run on to the block's end."""
        started, end = FORK.Event(), FORK.Event()
        block = Store(tmp_path).hold()

        def stay():
            started.set()
            end.wait(60)

        with block:
            leaving = FORK.Process(target=block.__exit__, args=(None, None, None))
            leaving.start()
            leaving.join()
            assert leaving.exitcode == 0
            with pytest.raises(ValueError, match=f"process {os.getpid()} on"):
                Store(tmp_path).hold().__enter__()
            staying = FORK.Process(target=stay, daemon=True)
            staying.start()
            assert started.wait(60)
        assert free(Store(tmp_path))
        end.set()
        staying.join()

    @pytest.mark.parametrize("make", [os.symlink, os.link])
    def test_a_link_in_the_directory_changes_no_file_outside(self, tmp_path, make):
        victim = tmp_path / "victim"
        victim.write_text("precious")
        for name in (".lock", ".lock.json", ".lock.json.tmp"):
            out = tmp_path / f"out{name}"
            out.mkdir()
            make(victim, out / name)
            if name == ".lock":
                with pytest.raises(ValueError, match=r"\.lock is a link to another file"):
                    Store(out).hold().__enter__()
            else:
                assert free(Store(out))
        assert victim.read_text() == "precious"

    def test_a_file_system_without_locks(self, tmp_path, monkeypatch):
        """Another host's process cannot be asked, and the message says what lets go."""
        fcntl = pytest.importorskip("fcntl")

        def none(*arguments):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", none)
        store = Store(tmp_path)
        with store.hold():
            assert not free(store)
            holder = {"pid": 1, "host": "elsewhere", "since": "x"}
            (tmp_path / ".lock.json").write_text(json.dumps(holder))
            said = re.escape(f"; if it has ended, delete {tmp_path / '.lock.soft'}") + "$"
            with pytest.raises(ValueError, match=said):
                store.hold().__enter__()
        assert free(store)


class TestKeys:
    def test_comments_and_docstrings_are_no_code(self, tmp_path):
        file, found = tmp_path / "a.py", []
        for text in ("x = 1", '"""Say."""\n# why\nx  =  1\n', "x = 2"):
            file.write_text(text)
            found.append(source_digest(tmp_path))
        assert found[0] == found[1] != found[2]

    def test_another_transformers_computes_other_numbers(self, monkeypatch):
        numerics_digest.cache_clear()
        before, version = task_key("a"), stores.importlib.metadata.version
        with monkeypatch.context() as patch:
            patch.setattr(stores.importlib.metadata, "version", lambda name: version(name) + "+1")
            numerics_digest.cache_clear()
            other = task_key("a")
        numerics_digest.cache_clear()
        assert task_key("a") == before != other
