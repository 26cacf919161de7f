"""Errors of a peer, as opposed to errors of the broker under test.

PeerError
    MissingToolError    java, mvn, go or the like is not installed
    BuildError          a peer could not be fetched or compiled
    NotInstalledError   a peer is used before it was installed
    StartError          a broker did not come up
    PeerDiedError       a client program ended while a caller was waiting for it
    CallError           a client program answered a request with an error
"""


class PeerError(Exception):
    """Base of everything raised by tests.peers."""


class MissingToolError(PeerError):
    """A program that is needed to build or run the peers is not on the PATH."""

    def __init__(self, tool: str, package: str) -> None:
        self.tool = tool
        self.package = package
        super().__init__(f"{tool} is not on the PATH: install {package}")


class BuildError(PeerError):
    """Fetching or compiling a peer failed; the output of the tool is part of the message."""

    def __init__(self, what: str, command: list[str], output: str) -> None:
        self.what = what
        self.command = command
        self.output = output
        super().__init__(f"{what} could not be built by `{' '.join(command[:4])} ...`:\n{output.strip()[-3000:]}")


class NotInstalledError(PeerError):
    """A peer is used before `python -m tests.peers install` has made it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not installed or out of date: run `make peers` (python -m tests.peers install)")


class StartError(PeerError):
    """A broker did not reach the point where it accepts connections."""

    def __init__(self, what: str, returncode: int | None, output: str) -> None:
        self.returncode = returncode
        self.output = output
        state = "is still running" if returncode is None else f"exited with {returncode}"
        super().__init__(f"{what} did not start ({state}); its last output:\n{output.strip()[-3000:]}")


class PeerDiedError(PeerError):
    """A client program ended while requests or events were awaited."""


class CallError(PeerError):
    """A client program answered a request with an error: the library's own exception.

    `code` is RocketMQ's response code where the library tells it, else None.
    """

    def __init__(self, op: str, kind: str, message: str, code: int | None) -> None:
        self.op = op
        self.kind = kind
        self.message = message
        self.code = code
        super().__init__(f"{op}: {kind}" + (f" (code {code})" if code is not None else "") + f": {message}")
