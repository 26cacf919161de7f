"""The JSON tables beside the messages: config/topics.json, subscriptionGroup.json, consumerOffset.json,
delayOffset.json, kvConfig.json, each with its previous edition in <name>.bak.

    {
     "crc32": 2212294583,                    of the file's name and all bytes after this line
     "dataVersion": {"counter": 1, ...},
     "topicConfigTable": {
      "orders": {...},                       one entry per line
      ...
     }
    }

RocketMQ writes these files with fastjson: with tabs, and with integer keys without quotes. It also reads strict JSON,
which is what duemq writes. RocketMQ ignores the checksum, and drops it when it writes the file. So a file without one
is accepted, unless it has the main key of another table. Earlier versions of duemq left the name out of the checksum.
The owner of a table keeps fields that duemq does not know.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import structlog

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.frames import fastjson
from duemq.storage import file_names
from duemq.storage.errors import StoreFormatError
from duemq.storage.files import Files

log = structlog.get_logger(__name__)

_CHECKSUM: Final = "crc32"
_HEAD: Final = re.compile(rb'\{\n "crc32": ([0-9]{1,10})(,?)\n')
_CONTENTS: Final = {
    os.path.basename(file_names.TOPICS): "topicConfigTable",
    os.path.basename(file_names.SUBSCRIPTION_GROUPS): "subscriptionGroupTable",
    os.path.basename(file_names.CONSUMER_OFFSETS): "offsetTable",
    os.path.basename(file_names.DELAY_OFFSETS): "offsetTable",
    os.path.basename(file_names.KV_CONFIG): "configTable",
}
"""The main key of each table: where there is no checksum, it shows whether a file is in another table's place."""
_BY_HAND: Final = f'If it was changed by hand, remove its line "{_CHECKSUM}"'

Table = dict[str, Any]


class ConfigFile:
    """One table. `write` may wait for the disk and may run in any thread, once at a time."""

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self.backup = path + file_names.BACKUP
        self._files = files
        self._is_backup_better = False
        """Whether the file is damaged or empty, so that it must not become the backup."""
        self.is_newest = True
        """Whether `read` found the newest edition of the table; otherwise it found an earlier edition, or nothing."""

    def read(self) -> Table:
        """Return the table. It comes from the backup, with a warning, if the file is missing, empty or damaged; it is
        empty if neither file exists.

        Raises StoreFormatError if at least one of the files exists but neither is readable: a start without a table
        that existed would lose it. Raises OSError.
        """
        why = ""
        self.require_files()
        for path in (self.path, self.backup):
            data = self._files.read_whole(path)
            if data is None:
                continue
            try:
                if not data.strip():
                    raise BodyFormatError("is empty")
                table = decode_table(data, self.path)
            except BodyFormatError as error:
                why = why or str(error)
                continue
            self.is_newest = path == self.path
            if not self.is_newest:
                self._is_backup_better = True
                log.warning("table_taken_from_backup", file=self.path, backup=path, reason=why or "missing")
            return table
        if why:
            raise StoreFormatError(self.path, f"{why}; and {self.backup} is missing or no better. {_BY_HAND}")
        self.is_newest = False
        return {}

    def require_files(self) -> None:
        """Check that the file and its backup are regular files or do not exist, and that their directory is one or does
        not exist. Raises StoreFormatError, OSError."""
        self._files.require_directory(os.path.dirname(self.path))
        self._files.require_file(self.path)
        self._files.require_file(self.backup)

    def write(self, table: Table) -> None:
        """Replace the table, durably; the old edition becomes the backup. Raises OSError."""
        self._files.make_directories(os.path.dirname(self.path))
        if self._files.exists(self.path) and not self._is_backup_better:
            self._files.link(self.path, self.backup)
        self._files.write_whole(self.path, encode_table(table, self.path))
        self._is_backup_better = False
        self.is_newest = True


def encode_table(table: Table, path: str) -> bytes:
    """Return the bytes of a table's file. The table may contain encoded JSON as msgspec.Raw. `path`: of the table,
    whose name the checksum covers."""
    rest = b"".join((b",\n".join(_sections(table)), b"\n}\n"))
    return b'{\n "%b": %d%b\n%b' % (_CHECKSUM.encode(), _checksum(rest, path), b"," if table else b"", rest)


def _sections(table: Table) -> Iterator[bytes]:
    dumps = fastjson.dumps
    for name, value in table.items():
        if isinstance(value, dict) and any(isinstance(entry, dict | msgspec.Raw) for entry in value.values()):
            entries = b",\n".join(b"  %b: %b" % (dumps(str(key)), dumps(entry)) for key, entry in value.items())
            yield b" %b: {\n%b\n }" % (dumps(name), entries)
        else:
            yield b" %b: %b" % (dumps(name), dumps(value))


def _checksum(rest: bytes, path: str) -> int:
    return zlib.crc32(rest, zlib.crc32(os.path.basename(path).encode()))


def decode_table(data: bytes, path: str) -> Table:
    """Decode a table written by duemq or RocketMQ. `path`: of the table, or of its backup. Raises BodyFormatError if
    the table is damaged, or is another table."""
    path = path.removesuffix(file_names.BACKUP)
    head = _HEAD.match(data)
    rest = data[head.end() :] if head is not None else b""
    if head is not None and int(head[1]) not in (_checksum(rest, path), zlib.crc32(rest)):
        raise BodyFormatError("differs from what was written, or is the table of another file: its checksum is wrong")
    table = fastjson.loads(data)
    if not isinstance(table, dict):
        raise BodyFormatError("is not a JSON object")
    if table.pop(_CHECKSUM, None) is not None and head is None:
        raise BodyFormatError("differs from what was written: its checksum is in another place")
    content = _CONTENTS.get(os.path.basename(path))
    others = table.keys() & set(_CONTENTS.values()) - {content}
    if content is not None and content not in table and others:
        raise BodyFormatError(f"is another table: it has {min(others)} and no {content}")
    return table
