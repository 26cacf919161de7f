"""Commands of duemq in one process, one after the other: Spark's Java takes some 15 s of processor time to start, which
all of them then share. What each prints on standard output and standard error, Java's own lines too, is kept apart by
lines that the process prints between them.

    with Commands() as commands:
        done = commands.run("spark", "sql", store, query, cwd=directory)
        done = commands.run_code("print(1)", cwd=directory)

    python -m tests.spark.world.commands     read commands from standard input, one JSON text a line
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

ROOT: Final = Path(__file__).parents[3]
_END: Final = "\x1eend of a command: "


class Commands:
    """The process, started with the first command; `environment` is its own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**environment, "PYTHONPATH": str(ROOT)}
        self._process: subprocess.Popen[str] | None = None
        self._readers = ThreadPoolExecutor(2)

    def run(self, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run one command in a directory, and return its exit code and all that was printed meanwhile."""
        return self._ask(["duemq", *map(str, arguments)], cwd)

    def run_code(self, code: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run Python code as `python -c` does, with names of its own; its Spark session ends with it."""
        return self._ask(["-c", *map(str, arguments), code], cwd)

    def _ask(self, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.world.commands"],
                cwd=ROOT, env=self._environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps([str(cwd), command]) + "\n")
        process.stdin.flush()
        told = [self._readers.submit(_until_end, stream) for stream in (process.stdout, process.stderr)]
        (stdout, code), (stderr, _) = (one.result() for one in told)
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.communicate()
        self._readers.shutdown()


def _until_end(stream: IO[str]) -> tuple[str, int]:
    """Read what one command prints; return it and the exit code. Without the last line the process has ended."""
    lines = []
    for line in stream:
        before, end, code = line.partition(_END)
        lines.append(before)
        if end:
            return "".join(lines), int(code)
    return "".join(lines), -1


def _run(command: list[str]) -> int:
    program, *arguments = command
    try:
        if program == "duemq":
            from duemq.cli import main

            main(arguments, prog_name=program)
        else:
            _run_code(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _run_code(arguments: list[str]) -> None:
    """Run the code in the last argument with the ones before."""
    *arguments, code = arguments
    sys.argv = ["-c", *arguments]
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
        if session is not None:
            session.stop()


def _start_java_here() -> None:
    """Have Java started in this directory, which stays, and not in that of a command, which ends with its test."""
    context: Any = importlib.import_module("pyspark.core.context")
    launch, here = context.launch_gateway, os.getcwd()

    def launch_here(*arguments: Any, **options: Any) -> Any:
        there = os.getcwd()
        os.chdir(here)
        try:
            return launch(*arguments, **options)
        finally:
            os.chdir(there)

    context.launch_gateway = launch_here


def main() -> None:
    """See the module."""
    _start_java_here()
    for line in sys.stdin:
        directory, command = json.loads(line)
        os.chdir(directory)
        code = _run(command)
        os.chdir(ROOT)
        for stream in (sys.stdout, sys.stderr):
            print(f"{_END}{code}", file=stream, flush=True)


if __name__ == "__main__":
    main()
