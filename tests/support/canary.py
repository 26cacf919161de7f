"""Secrets of the tests, and where they must not show up.

Each secret key, password and passphrase that a test gives to duemq begins with CANARY. While the tests run, this looks
for it in all that duemq shows: what each test prints and logs, the output and the audit log of each process, its
command line and those of its children, and each answer that a broker in the test's process gives. The test that runs
when one is found fails (`tests/conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command

CANARY: Final = "canary-secret"
_BYTES: Final = CANARY.encode()

_SHOWN_BY: Final = frozenset(
    {
        RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG,  # to administrators
        RequestCode.AUTH_GET_USER,  # to super users
        RequestCode.AUTH_LIST_USER,
        RequestCode.GET_KV_CONFIG,  # what clients have put there
        RequestCode.GET_KVLIST_BY_NAMESPACE,
    }
)
"""Requests whose answers have secrets, for those who may see them; the tests of these look at who may."""

_found: list[str] = []


def take() -> list[str]:
    """Return where the canary was found since the last call."""
    found = _found[:]
    _found.clear()
    return found


def look(where: str, shown: bytes | str) -> None:
    """Look at something that duemq has shown."""
    if (_BYTES in shown) if isinstance(shown, bytes) else (CANARY in shown):
        text = shown.decode(errors="replace") if isinstance(shown, bytes) else shown
        at = text.index(CANARY)
        _found.append(f"{where}: ...{text[max(0, at - 200) : at + 100]}...")


def look_at_files(paths: Iterable[Path]) -> None:
    """Look at the files that are there."""
    for path in paths:
        if path.exists():
            look(str(path), path.read_bytes())


def look_at_processes(pid: int) -> None:
    """Look at the command lines of a process and of its children, which every user of the machine may see."""
    try:
        look(f"the command line of the process {pid}", Path(f"/proc/{pid}/cmdline").read_bytes())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        look_at_processes(int(child))


def is_asked_for(command: Command) -> bool:
    """Return whether the answer to a request may have a secret."""
    # Who gives a secret for an access key is told in the answer what there is no account for.
    return command.code in _SHOWN_BY or CANARY in command.ext.get("AccessKey", "")
