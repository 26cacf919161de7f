"""A headless Chromium, driven through pipes: the DevTools protocol as JSON texts that end with a NUL byte, on the file
descriptors 3 and 4 of the browser. No network, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.peers import tools

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Page:
    """A tab. `errors`: errors in the page's console; `requests`: addresses that the page requested."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._seen: list[str] = []
        self.errors: list[str] = []
        self.requests: list[str] = []

    def attach(self) -> None:
        """Create the tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = 60, **params: Any) -> Any:
        """Run one command and return its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(timeout)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _read(self, timeout: float) -> Any:
        """Return the next message; events are recorded."""
        deadline = time.monotonic() + timeout
        while b"\0" not in self._rest:
            if not select.select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._read_fd, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._rest += chunk
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case str(method):
                self._seen.append(method)
        return message

    def open(self, path: Path, *, dark: bool = False, width: int = 1400, height: int = 1000) -> None:
        """Open a file, and wait until it is loaded."""
        self.errors.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.prefer(dark=dark)
        self._seen.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._read(60)

    def prefer(self, *, dark: bool) -> None:
        """Change the colour scheme."""
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, or of its promise once that is resolved."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "the script failed"))
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(picture["data"])

    def pdf(self) -> bytes:
        """Return the page in print form."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def chromium() -> Iterator[Page]:
    """Run a browser with one tab. Raises MissingToolError if there is none."""
    program = tools.find("chromium")
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()

    def place() -> None:
        # The pipes may have these very numbers: move copies out of the way first.
        first, second = os.dup(to_browser), os.dup(from_browser)
        os.dup2(first, 3)
        os.dup2(second, 4)

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,  # noqa: PLW1509 - no locks are taken in it
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            page = Page(from_us, to_us)
            page.attach()
            yield page
        finally:
            os.close(from_us)
            os.close(to_us)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
