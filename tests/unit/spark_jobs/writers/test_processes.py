"""Processes that run tasks: they know nothing of the script that started them, and end with it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.writers.tasks import Processes
from tests.unit.spark_jobs.compact_world import new_broker
from tests.unit.spark_jobs.writers.simple_tasks import die, print_and_give, sleep_or_not


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end_of(*pids: int) -> bool:
    """Wait for the end of processes; return whether all ended."""
    deadline = time.monotonic() + 20
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_there, pids))


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    for number in range(300):
        broker.send("orders", b"%d" % number * 100)
    broker.close()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "print('begun', __name__)\n"
        "from duemq.spark import compact\n"
        "print(compact(sys.argv[1], sys.argv[2], workers=2).kept)\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "store"), str(tmp_path / "new")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for given, text in ((command, ""), ([sys.executable, "-", *command[2:-1], command[-1] + "er"], script.read_text())):
        done = subprocess.run(given, input=text, capture_output=True, text=True, check=False, env=environment)
        assert (done.stdout, done.stderr, done.returncode) == ("begun __main__\n300\n", "", 0)


def test_they_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """The processes end with a parent that is killed, also in the middle of a task, or while they wait for one."""
    code = (
        "import sys\n"
        "from duemq.spark_jobs.writers.tasks import Processes\n"
        "from tests.unit.spark_jobs.writers.simple_tasks import say_pid_and_sleep\n"
        "Processes(2).run(say_pid_and_sleep, sys.argv[1:])\n"
    )
    files = [tmp_path / "one", tmp_path / "other"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, *map(str, files)], env=environment) as run:
        deadline = time.monotonic() + 30
        while not all(path.exists() and path.read_text().endswith("\n") for path in files):
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.05)
        pids = [int(path.read_text()) for path in files]
        assert all(map(is_there, pids))
        run.kill()
    assert end_of(*pids)


def test_who_interrupts_does_not_wait_for_tasks() -> None:
    processes = Processes(2)

    def interrupt(result: int) -> None:
        raise KeyboardInterrupt

    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.run(sleep_or_not, [60, 0], interrupt)
    finally:
        processes.close()
    assert time.monotonic() - begun < 30


def test_what_goes_wrong_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    processes = Processes(2)
    try:
        assert processes.run(print_and_give, range(5)) == [0, 2, 4, 6, 8]
        assert capfd.readouterr().out == ""
        with pytest.raises(JobError, match="a task ran out of memory"):
            processes.run(die, ["memory"])
        with pytest.raises(ValueError, match="a mistake of ours"):
            processes.run(die, ["error"])
        with pytest.raises(RuntimeError, match="Strange: of nowhere"):
            processes.run(die, ["not pickled"])
    finally:
        processes.close()
    for how, why in (("exit", "ended with exit code 7"), ("kill", "was killed, as the system does when memory runs")):
        processes = Processes(1)
        with pytest.raises(JobError, match=why):
            processes.run(die, [how])
        processes.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody counts threads")
def test_the_daemon_of_sparks_workers_has_one_thread_after_its_imports() -> None:
    """The daemon forks, so its imports must start no thread; and they are done."""
    code = (
        "import os, sys; from duemq.spark_jobs import daemon; daemon.import_first()\n"
        "print(len(os.listdir('/proc/self/task')), {'numpy', 'pyspark.worker', 'duemq.storage.store'} - {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "1 set()\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody tells them")
def test_workers_of_spark_end_with_their_daemon() -> None:
    """Spark's Python workers end with their daemon, however it ends, and also if another process still has a connection
    to them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHON_WORKER_FACTORY_SECRET": "x"}
    environment.pop("PYTHON_UNIX_DOMAIN_ENABLED", None)
    with subprocess.Popen(
        [sys.executable, "-m", "duemq.spark_jobs.daemon", "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as daemon:
        assert daemon.stdout is not None
        (port,) = struct.unpack(">i", daemon.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            (pid,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            assert is_there(pid)
            daemon.kill()
            assert end_of(pid)
