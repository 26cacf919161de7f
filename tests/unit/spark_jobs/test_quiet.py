"""Standard error of good runs, without lines that look like failures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from duemq.spark_jobs.quiet import NoiseFilter, without_noise

WARNING = "WARNING: Using incubator modules: jdk.incubator.vector\n"
BROKEN = (
    "Traceback (most recent call last):\n"
    '  File "/x/pyspark.zip/pyspark/daemon.py", line 264, in manager\n    code = worker(sock, authenticated)\n'
    '  File "/x/pyspark.zip/pyspark/daemon.py", line 95, in worker\n'
    "BrokenPipeError: [Errno 32] Broken pipe\n"
)


@pytest.mark.parametrize(("text", "left"), [(f"before\n{BROKEN}behind\n", "before\nbehind\n"), (WARNING + BROKEN, "")])
def test_what_goes_goes_wherever_it_is_cut(text: str, left: str) -> None:
    for cut in range(1, len(text)):
        assert _passed([text[:cut], text[cut:]]) == left
    assert _passed(list(text)) == left


def _passed(parts: list[str]) -> str:
    noise = NoiseFilter()
    return b"".join([*(noise.passed(each.encode()) for each in parts), noise.rest()]).decode()


@pytest.mark.parametrize(
    ("parts", "left"),
    [
        (["before\n", WARNING, "behind\n"], "before\nbehind\n"),
        ([WARNING[:5], WARNING[5:], "WARN", "ING: else\n"], "WARNING: else\n"),
        ([WARNING, WARNING, "no end"], "no end"),
        (["WARNING: Using"], "WARNING: Using"),
        (["before\n", BROKEN, "behind\n"], "before\nbehind\n"),
        ([BROKEN[:50], BROKEN[50:120], BROKEN[120:], WARNING], ""),
        ([BROKEN.replace("BrokenPipeError", "KeyError")], BROKEN.replace("BrokenPipeError", "KeyError")),
        ([BROKEN.replace("daemon.py", "worker.py")], BROKEN.replace("daemon.py", "worker.py")),
        ([BROKEN[:-3]], BROKEN[:-3]),
    ],
)
def test_of_a_process_that_is_started_meanwhile_noise_goes(
    parts: list[str], left: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os, sys; [os.write(2, part.encode()) for part in sys.argv[1:]]; sys.stdin.read()"
    before = {each.ident for each in threading.enumerate()}
    with without_noise():
        process = subprocess.Popen([sys.executable, "-c", code, *parts], stdin=subprocess.PIPE)
        (copier,) = [each for each in threading.enumerate() if each.ident not in before]
    os.write(2, b"mine\n")
    process.communicate()
    copier.join()
    written = capfd.readouterr().err
    assert written.replace("mine\n", "", 1) == left
    assert "mine\n" in written
