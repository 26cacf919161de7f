"""A real `duemq serve` process, with its log and its memory."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.peers import warm
from tests.peers.ports import free_broker_port, free_port

HOST = "127.0.0.1"
PATIENCE_SECONDS = 60.0
"""Seconds to wait for an event before the test fails."""

Line = dict[str, Any]


class LiveBroker:
    """See the module. Every line that it prints is kept; one that is no JSON is kept as {"not_json": text}."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.port = free_broker_port()
        self.nameserver_port = free_port()
        usual = ["mappedFileSizeCommitLog=67108864", "diskSpaceWarningLevelRatio=1.0"]
        command = [str(Path(sys.executable).with_name("duemq")), "serve", "--store", str(directory / "store")]
        command += ["--host", HOST, "--port", str(self.port), "--nameserver-port", str(self.nameserver_port)]
        # Clients that never make a request are what these tests are about.
        command += ["--set", "maxNewConnections=20000", "--set", "maxNewConnectionSeconds=3600"]
        command += ["--log-format", "json"]
        for setting in (*usual, *settings):
            command += ["--set", setting]
        self._lines: list[Line] = []
        self._changed = threading.Condition()
        reading, writing = os.pipe()
        self._output = os.fdopen(reading, "rb")
        self._pid, self._ending = warm.server().start(command, writing, os.environ)
        os.close(writing)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for raw in self._output:
            text = raw.decode(errors="replace").rstrip("\n")
            try:
                line: Line = json.loads(text)
            except ValueError:
                line = {"not_json": text}
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_until_listening(self) -> None:
        self.wait_for(lambda lines: any(line.get("event") == "listening" for line in lines))

    def wait_for(self, holds: Callable[[list[Line]], bool]) -> None:
        """Wait until a condition on the log holds."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: holds(self._lines) or not self._reader.is_alive(), timeout=PATIENCE_SECONDS
            )
            assert done, f"waited in vain; the last lines: {self._lines[-5:]}"
            assert holds(self._lines), f"the broker stopped; its last lines: {self._lines[-5:]}"

    @property
    def lines(self) -> list[Line]:
        """The lines logged so far."""
        with self._changed:
            return list(self._lines)

    def about(self, local_port: int) -> list[Line]:
        """The lines logged about the client with this port."""
        return [line for line in self.lines if line.get("peer") == f"{HOST}:{local_port}"]

    @property
    def anonymous_bytes(self) -> int:
        """Resident memory, without file pages."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def check_log(self) -> None:
        """Check that the broker logged nothing unexpected."""
        for line in self.lines:
            assert "not_json" not in line, f"not a log line: {line['not_json']}"
            assert "exception" not in line, f"an exception: {line}"
            assert line.get("event") not in ("request_failed", "housekeeping_failed", "append_failed"), line

    def stop(self) -> int:
        """Stop the broker; return its exit code."""
        os.kill(self._pid, signal.SIGTERM)
        self._ending.settimeout(PATIENCE_SECONDS)
        try:
            code = warm.read_number(self._ending)
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
            self._ending.settimeout(None)
            code = warm.read_number(self._ending)
        self._ending.close()
        self._reader.join(PATIENCE_SECONDS)
        self._output.close()
        return code


def seed() -> int:
    """Return the seed of the test's random choices: DUEMQ_FUZZ_SEED, or any number; printed, so that a failing test
    shows it."""
    number = int(os.environ.get("DUEMQ_FUZZ_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DUEMQ_FUZZ_SEED={number}")
    return number
