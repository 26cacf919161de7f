"""Recognises the kind of a store's file: by its directory and name, or else by its first bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from duemq.broker.dump import databases, logs, tables
from duemq.broker.dump.source import NAME_DIGITS, Source
from duemq.protocol.dump import MAGIC_AT
from duemq.protocol.dump_output import shown_path
from duemq.protocol.records.record import MAGICS
from duemq.scheduler.timers.files import wheel
from duemq.storage import file_names
from duemq.storage.queues import check, index_file

BEGIN: Final = -(2**63)
END: Final = 2**80
"""Behind all positions: a damaged name, of 20 digits, may be beyond 2**63."""

_COMMITLOG, _QUEUE, _EXTENSION, _TIMERS = "commitlog", "consume queue", "consume queue's extension", "timer log"
_WHEEL, _INDEX, _TABLE, _AUDIT, _UNKNOWN = "timer wheel", "index", "table", "audit log", "bytes"
_CHECKPOINT, _QUEUE_CHECK = file_names.CHECKPOINT, file_names.QUEUE_CHECK
_TIMER_CHECK: Final = os.path.basename(file_names.TIMER_CHECK)
"""These kinds are called like their only file."""
_BY_NAME: Final = {
    file_names.CHECKPOINT: _CHECKPOINT,
    file_names.QUEUE_CHECK: _QUEUE_CHECK,
    os.path.basename(file_names.TIMER_CHECK): _TIMER_CHECK,
    os.path.basename(file_names.TIMER_METRICS): _TABLE,
    file_names.TIMER_WHEEL: _WHEEL,
}
_BY_DIRECTORY: Final = {
    file_names.COMMITLOG: _COMMITLOG,
    file_names.CUT: _COMMITLOG,
    file_names.TIMER_LOG: _TIMERS,
}
_INDEX_DIGITS: Final = 17
_SIDE_SUFFIXES: Final = (file_names.BACKUP, ".tmp", ".new")
"""Suffixes of files that will replace others, and of backups."""
_AUDIT_NAME: Final = re.compile(r"audit\.log(\.[0-9]+)?")
_AUDIT_BEGIN: Final = b'{"time":"'
"""First bytes of an entry of the audit log, whose files the setting auditLogPath may name."""
_AT_FIRST: Final = 64
_OF_ANY_SIZE: Final = (_COMMITLOG, _QUEUE, _EXTENSION, _TIMERS, _AUDIT, _UNKNOWN)
"""Kinds of which an empty file is not damaged: their sizes are settings, or they grow."""
_PLAIN: Final[dict[str, Callable[[Source], Iterator[str]]]] = {
    _CHECKPOINT: tables.checkpoint_file,
    _QUEUE_CHECK: tables.queue_check,
    _TIMER_CHECK: tables.timer_check,
    _TABLE: tables.table,
    _AUDIT: tables.audit,
    _UNKNOWN: tables.unknown,
}
_POSITIONED: Final[dict[str, Callable[[Source, int, int], Iterator[str]]]] = {
    _QUEUE: logs.queue,
    _EXTENSION: logs.extension,
    _TIMERS: logs.timers,
    _WHEEL: tables.timer_wheel,
    _INDEX: tables.index,
}


def kind_of(source: Source) -> str:
    """Return the kind of a file, in words. Raises OSError."""
    name = source.name
    for end in _SIDE_SUFFIXES:
        name = name.removesuffix(end)
    parents = [*source.parents, "", "", ""]
    if name in _BY_NAME:
        return _BY_NAME[name]
    if _AUDIT_NAME.fullmatch(name):
        return _AUDIT
    if name.endswith(".json"):
        return _TABLE
    if name.isdecimal() and len(name) == NAME_DIGITS:
        if parents[0] in _BY_DIRECTORY:
            return _BY_DIRECTORY[parents[0]]
        if parents[2] == file_names.CONSUME_QUEUES:
            return _QUEUE
        if parents[2] == file_names.QUEUE_EXTENSIONS:
            return _EXTENSION
    if name.isdecimal() and len(name) == _INDEX_DIGITS and parents[0] == file_names.INDEX:
        return _INDEX
    return _by_content(source)


def _by_content(source: Source) -> str:
    begin = source.read(0, _AT_FIRST)[:_AT_FIRST]
    if MAGICS.match(begin, MAGIC_AT):
        return _COMMITLOG
    if begin.startswith(check.MAGIC):
        return _QUEUE_CHECK
    if begin.startswith(_AUDIT_BEGIN):
        return _AUDIT
    if begin.lstrip()[:1] == b"{":
        return _TABLE
    return {wheel.FILE_SIZE: _WHEEL, index_file.FILE_SIZE: _INDEX}.get(source.size, _UNKNOWN)


def lines(
    path: str, start: int = BEGIN, end: int = END, limit: int | None = None, *, with_bodies: bool = False
) -> Iterator[str]:
    """Yield the lines of a file: its kind and size, then its content, at most `limit` lines of it. `start`, `end`: see
    `dump.__main__`. Never raises because of a file's content; raises OSError if the file cannot be read."""
    if databases.is_database(path):
        yield from islice(databases.lines(path), limit if limit is None else limit + 1)
        return
    if databases.is_database(os.path.dirname(os.path.abspath(path))):
        yield f"{shown_path(path)}: a file of a RocksDB database; only its directory as a whole can be shown"
        return
    with Source(path) as source:
        kind = kind_of(source)
        yield f"{shown_path(path)}: {kind}, {source.size} bytes"
        if not source.size and kind in _OF_ANY_SIZE:
            yield from islice(["empty"], limit)
            return
        rows = (
            logs.commitlog(source, start, end, with_bodies=with_bodies)
            if kind == _COMMITLOG
            else (_PLAIN[kind](source) if kind in _PLAIN else _POSITIONED[kind](source, start, end))
        )
        yield from islice(rows, limit)
