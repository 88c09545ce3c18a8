import subprocess
import sys
import time

import pytest

from stream.processes import Usage, descendants, has_processes, machine_cpu_s, usage

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not has_processes(), reason="no /proc on this system"),
]

BUSY = "import sys, time; e = time.process_time() + 0.3\nwhile time.process_time() < e: pass\n"
WAIT = "print('done', flush=True); sys.stdin.read()"


def test_a_child_is_found_and_its_processor_time_counted() -> None:
    import os

    command = [sys.executable, "-c", BUSY + WAIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert sys.executable in descendants(os.getpid())[child.pid]
        took = usage([child.pid])
        child.kill()
    assert took.cpu_s >= 0.3 - 0.02  # the kernel counts in hundredths
    assert 0 < took.resident_mib <= took.peak_mib


def test_what_is_gone_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        pass
    deadline_s = time.monotonic() + 5.0
    while usage([child.pid]) != Usage():
        assert time.monotonic() < deadline_s


def test_the_machine_takes_at_least_what_this_process_does() -> None:
    begin_s, own_s = machine_cpu_s(), time.process_time()
    while time.process_time() < own_s + 0.3:
        pass
    assert machine_cpu_s() - begin_s >= 0.3 - 0.05


def test_usage_adds_up() -> None:
    one = Usage(cpu_s=1.0, resident_mib=2.0, peak_mib=3.0)
    assert one + one == Usage(cpu_s=2.0, resident_mib=4.0, peak_mib=6.0)
