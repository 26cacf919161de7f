"""Figures of a process, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def bytes_read(pid: int) -> int:
    """Bytes that a process has read so far, from the disk or from memory."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@dataclass(frozen=True)
class Memory:
    """Memory in MiB: all resident memory, and the part that is not file cache."""

    resident: float
    anonymous: float


def memory(pid: int) -> Memory:
    """Memory of a process."""
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(("VmRSS", "RssAnon"))
    )
    kilobytes = {name: int(value.split()[0]) for name, value in status.items()}
    return Memory(kilobytes["VmRSS"] / 1024, kilobytes["RssAnon"] / 1024)
