"""`python -m tests.bench.profile` also with few messages."""

from __future__ import annotations

import subprocess
import sys

import pytest


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bench.profile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_fewer_messages_than_a_read_has() -> None:
    done = profile("sends", "--messages", "10")
    assert done.returncode == 0, done.stderr
    assert "us of CPU a message, 64 messages" in done.stdout


@pytest.mark.parametrize("messages", ["0", "-1"])
def test_no_messages(messages: str) -> None:
    done = profile("sends", "--messages", messages)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        f"python -m tests.bench.profile: error: --messages {messages}: give 1 or more",
    )
