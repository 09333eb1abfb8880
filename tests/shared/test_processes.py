"""Processes that end together, with real ones: SIGTERM that cleans up, children without parents."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
from forked import python

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import sys, time
from metis_hf.shared.processes import end_with_parent
end_with_parent()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    sum(range(1000))  # busy, and prints nothing
"""
# As accelerate's launcher does: the processes it starts share its standard input.
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_children_end_with_their_parent_however_it_ends():
    for child_code in (CHILD, LAUNCHER):
        command = [sys.executable, "-c", PARENT, child_code]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            deadline = time.monotonic() + 60
            while child_code is LAUNCHER and not child.children():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            family = [child, *child.children()]
            parent.kill()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_other_standard_inputs_are_not_watched():
    code = "from metis_hf.shared.processes import end_with_parent as end; end(); print('went on')"
    with open(__file__) as stdin:
        assert python("-c", code, stdin=stdin) == "went on\n"


def test_a_second_sigterm_leaves_the_cleaning_up_alone():
    code = (
        "import signal, time\n"
        "from metis_hf.shared.processes import sigterm_raises\n"
        "with sigterm_raises():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaning', flush=True)\n"
        "        for _ in range(100):\n"
        "            time.sleep(0.01)\n"
        "        print('cleaned', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"cleaning\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b"cleaned\n"
        assert process.wait() == 128 + signal.SIGTERM
