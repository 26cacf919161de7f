"""Checks of the machine: disk, memory, open files, the clock, ports."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from duemq.broker.doctor.findings import Finding, error, ok, warning
from duemq.broker.settings.config import BrokerConfig

_MIB: Final = 1024 * 1024
_LEAST_MEMORY: Final = 256 * _MIB
_LEAST_FREE: Final = 5 * 1024 * _MIB
_LEAST_FILES: Final = 65_536
_FIRST_YEAR_MS: Final = 1_767_225_600_000
"""2026-01-01, in ms since the epoch. duemq is younger, so a clock that shows an earlier time is wrong."""
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "overlay"})
_REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"})
_TIME_ERROR: Final = 5


def disk(config: BrokerConfig, mounts: Path = Path("/proc/mounts")) -> Iterator[Finding]:
    """Check the file systems of the store."""
    about = "disk"
    for path in dict.fromkeys((config.store_root, config.commitlog_directory or config.store_root)):
        there = _existing(path)
        if not os.access(there, os.W_OK | os.X_OK):
            yield error(about, f"{there} is not writable", "make it writable for the broker's user")
            continue
        found = os.statvfs(there)
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        used = 1 - found.f_bfree / found.f_blocks if found.f_blocks else 0.0
        text = f"{path}: {free // _MIB} of {total // _MIB} MiB are free"
        if used >= config.disk_warning_ratio:
            yield error(
                about,
                f"{text}, which is too little: diskSpaceWarningLevelRatio={config.disk_warning_ratio}",
                "make room: messages are refused",
            )
        elif used * 100 >= config.disk_max_used_ratio:
            yield warning(
                about,
                f"{text}: the disk is fuller than diskMaxUsedSpaceRatio={config.disk_max_used_ratio}",
                "make room: expired files are removed at any hour, and soon the oldest messages",
            )
        elif free < _LEAST_FREE:
            yield warning(about, text, "keep some gigabytes free: a file of the commitlog takes one")
        else:
            yield ok(about, text)
        kind = _file_system(there, mounts)
        if kind in _IN_MEMORY:
            yield warning(about, f"{path} is on {kind}, which is lost with the machine or container", "use a volume")
        elif kind in _REMOTE:
            yield warning(
                about,
                f"{path} is on {kind}, where locks and syncs may not be reliable",
                "use a local disk or a block device",
            )


def memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    """Check the memory that is available to the broker."""
    available = _meminfo(meminfo).get("MemAvailable", 0)
    limit = _number(cgroup / "memory.max")
    if limit is not None:
        used = _number(cgroup / "memory.current") or 0
        available = min(available, max(0, limit - used))
    text = f"{available // _MIB} MiB are available"
    if available < _LEAST_MEMORY:
        yield warning(
            "memory", text, f"give the broker {_LEAST_MEMORY // _MIB} MiB or more; the page cache makes pulls fast"
        )
    else:
        yield ok("memory", text)


def open_files(config: BrokerConfig) -> Iterator[Finding]:
    """Check the limit of open files, which bounds connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{hard} files and connections may be open"
    if hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES:
        yield ok("open files", text if hard != resource.RLIM_INFINITY else "any number may be open")
    else:
        yield warning(
            "open files", text, f"raise the limit to {_LEAST_FILES} or more (ulimit -n, LimitNOFILE of a systemd unit)"
        )
    if hard != resource.RLIM_INFINITY and config.max_connections > hard:
        yield warning(
            "open files",
            f"maxConnections={config.max_connections} is more than the limit of {hard} open files",
            "raise that limit, or lower maxConnections",
        )


class _Timex(ctypes.Structure):
    """`struct timex` of Linux, as far as it is needed; the rest is room."""

    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 508))


def clock(now_ms: int) -> Iterator[Finding]:
    """Check the machine's clock, by which messages are delivered."""
    if now_ms < _FIRST_YEAR_MS:
        yield error("clock", "the clock is years behind", "set it before the broker starts: timers depend on it")
        return
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex()))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        yield warning(
            "clock", "this system does not say whether the clock is synchronised", "check that (chronyc, ntpq)"
        )
    elif state == _TIME_ERROR:
        yield warning(
            "clock",
            "the clock is not synchronised",
            "run chrony, systemd-timesyncd or ntpd; in a VM the host may do it",
        )
    else:
        yield ok("clock", "the clock is synchronised")


def ports(config: BrokerConfig) -> Iterator[Finding]:
    """Check whether the ports are free."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    taken = []
    for port in config.ports:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as failure:
                taken.append(f"{port} ({failure.strerror})")
    if taken:
        yield warning(
            "ports",
            f"on {config.host}, these ports cannot be listened on: {', '.join(taken)}",
            "stop the process that has them; if it is the broker itself, all is well",
        )
    else:
        yield ok("ports", f"{', '.join(map(str, config.ports))} are free")


def _existing(path: str) -> str:
    """Return a path, or the nearest directory above it that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or "."
    return path


def _file_system(path: str, mounts: Path) -> str:
    """Return the type of the file system that a path is on; an empty text if it is unknown."""
    path, best, kind = os.path.realpath(path), "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, at, found, *_ = line.split(" ")
        is_below = path == at or path.startswith(at.rstrip("/") + "/")
        if is_below and len(at) >= len(best):
            best, kind = at, found
    return kind


def _meminfo(path: Path) -> dict[str, int]:
    """Return the table of /proc/meminfo, in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) >= 2}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
