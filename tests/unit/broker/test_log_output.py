"""A log that cannot be written affects nothing: no line raises, none waits, and the lines left out are counted."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import structlog

from duemq.broker import logs
from duemq.broker.log_output import LogOutput, write_last


class Descriptor:
    """Takes written bytes, unless it is told to fail or to wait."""

    def __init__(self) -> None:
        self.taken = b""
        self.failures: list[OSError] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.most = 1000

    def write(self, descriptor: int, data: bytes) -> int:
        self.is_open.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.taken += bytes(data[: self.most])
        return min(len(data), self.most)


def _tell(lost: int, why: str) -> str:
    return f"<{lost} lost: {why}>\n"


def _output(to: Descriptor, max_waiting: int = 1000) -> LogOutput:
    return LogOutput(2, _tell, max_waiting=max_waiting, write=to.write)


def test_lines_are_written_in_order_and_whole() -> None:
    to = Descriptor()
    to.most = 3
    output = _output(to)
    for number in range(100):
        output.write(f"line {number} é\n")
    output.close(10)
    assert to.taken.decode() == "".join(f"line {number} é\n" for number in range(100))


def test_a_reader_that_waits_holds_nobody_up() -> None:
    to = Descriptor()
    to.is_open.clear()
    output = _output(to, 100)
    for _ in range(1000):
        output.write("0123456789")
    to.is_open.set()
    output.close(10)
    text = to.taken.decode()
    told = text[text.index("<") : text.index(">")]
    lost = int(told[1:].split()[0])
    assert told.endswith("lost: lines were logged faster than they were written")
    assert text.count("0123456789") == 1000 - lost
    assert lost >= 980, "no more wait than there is room for, and one on its way"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF])
def test_lines_that_fail_are_counted_and_told(number: int) -> None:
    to = Descriptor()
    to.failures = [OSError(number, os.strerror(number)) for _ in range(3)]
    output = _output(to)
    for line in ("a\n", "b\n", "c\n", "d\n"):
        output.write(line)
    output.close(10)
    text = to.taken.decode()
    assert text.endswith("d\n")
    assert "3 lost" in text
    assert os.strerror(number) in text


def test_the_end_waits_for_a_while_only() -> None:
    to = Descriptor()
    to.is_open.clear()
    output = _output(to)
    output.write("a\n")
    output.close(0.01)
    to.is_open.set()


@contextmanager
def _log(log_format: str) -> Iterator[tuple[structlog.typing.FilteringBoundLogger, int]]:
    """A logger as a broker has it, and the descriptor from which its lines can be read."""
    before = structlog.get_config()
    reader, writer = os.pipe()
    try:
        with logs.logging_to(writer, log_format):
            yield structlog.get_logger(), reader
    finally:
        structlog.configure(**before)
        os.close(reader)
        os.close(writer)


class Untellable:
    """A value whose text form raises."""

    def __repr__(self) -> str:
        raise MemoryError


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_line_that_cannot_be_made_is_counted(log_format: str) -> None:
    with _log(log_format) as (log, reader):
        log.warning("odd", value=Untellable())
        log.warning("usual", value=1)
        text = ""
        while "usual" not in text:
            text += os.read(reader, 65536).decode()
    lost, usual = text.splitlines()
    assert "log_lines_lost" in lost
    assert "odd could not be logged: MemoryError" in lost
    assert "usual" in usual
    if log_format == "json":
        assert json.loads(lost)["lines"] == 1


def test_last_words_wait_for_nobody() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    write_last(b"the end\n", writer)
    os.close(reader)
    write_last(b"the end\n", writer)
    os.close(writer)
    write_last(b"the end\n", writer)
