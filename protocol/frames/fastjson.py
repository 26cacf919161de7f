"""JSON as Java's fastjson writes it, which is not always JSON.

    {0:"127.0.0.1:10911"}                                 integer keys without quotes
    {{"brokerName":"b","queueId":1,"topic":"T"}:{...}}    objects as keys

RocketMQ writes such text into its configuration files and some bodies, and reads strict JSON as well. `loads` reads
both: a key that is not a string becomes a string with its JSON text (`"0"`, `'{"brokerName":"b",...}'`).
`dump_object_keys` and `dump_int_keys` write the forms that RocketMQ's clients are known to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from duemq.protocol.errors import BodyFormatError

_TOKEN: Final = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*")|([{}\[\],:])|([^\s{}\[\],:"]+))', re.DOTALL)
_MAX_DEPTH: Final = 100

dumps = msgspec.json.encode
"""Encodes strict JSON, which RocketMQ's readers accept, too."""


def loads(text: bytes | bytearray | memoryview | str, *, loose_limit: int | None = None) -> Any:
    """Decode a value from strict JSON or from fastjson's. Raises BodyFormatError.

    fastjson's dialect is read token by token, at about 1 MB/s: `loose_limit` limits the number of bytes read that way.
    """
    try:
        return msgspec.json.decode(text)
    except UnicodeDecodeError as error:
        raise BodyFormatError(f"JSON that is not UTF-8: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        if loose_limit is not None and len(text) > loose_limit:
            raise BodyFormatError(
                f"JSON that does not parse: {error}. JSON with keys other than text is read only up to {loose_limit} "
                "bytes"
            ) from None
    try:
        loose = text if isinstance(text, str) else bytes(text).decode()
        return msgspec.json.decode(_to_strict(loose))
    except UnicodeDecodeError as error:
        raise BodyFormatError(f"JSON that is not UTF-8: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyFormatError(f"JSON that does not parse: {error}") from None


def _to_strict(text: str) -> str:
    converter = _Converter(text)
    strict = converter.value(0)
    if text[converter.position :].strip():
        raise BodyFormatError(f"JSON with more text after its end, at character {converter.position}")
    return strict


class _Converter:
    """Copies loose JSON token by token, turning keys that are not strings into strings."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_in_key = False
        self.position = 0

    def value(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise BodyFormatError(f"JSON nested deeper than {_MAX_DEPTH}")
        token = self._next()
        if token == "{":
            return self._object(depth)
        if token == "[":
            return self._array(depth)
        if token in ("}", "]", ",", ":"):
            raise BodyFormatError(f"JSON with {token!r} where a value is due, before character {self.position}")
        return token

    def _object(self, depth: int) -> str:
        members: list[str] = []
        while not self._take("}"):
            if members and not self._take(","):
                raise BodyFormatError(f"JSON without a comma at character {self.position}")
            if members and self._take("}"):
                break
            key = self._key(depth + 1)
            if not self._take(":"):
                raise BodyFormatError(f"JSON without a colon at character {self.position}")
            members.append(f"{key}:{self.value(depth + 1)}")
        return "{" + ",".join(members) + "}"

    def _key(self, depth: int) -> str:
        """Return a key as a string. Raises BodyFormatError if the key is an object whose own keys are not all strings:
        the content of an object key is escaped, which would double its length with each further level."""
        if self._is_in_key:
            key = self._next()
            if not key.startswith('"'):
                raise BodyFormatError(
                    f"JSON with a key that is not text within a key, before character {self.position}"
                )
            return key
        self._is_in_key = True
        key = self.value(depth)
        self._is_in_key = False
        return key if key.startswith('"') else dumps(key).decode()

    def _array(self, depth: int) -> str:
        elements: list[str] = []
        while not self._take("]"):
            if elements and not self._take(","):
                raise BodyFormatError(f"JSON without a comma at character {self.position}")
            elements.append(self.value(depth + 1))
        return "[" + ",".join(elements) + "]"

    def _take(self, punctuation: str) -> bool:
        match = _TOKEN.match(self._text, self.position)
        if match is None or match[2] != punctuation:
            return False
        self.position = match.end()
        return True

    def _next(self) -> str:
        match = _TOKEN.match(self._text, self.position)
        if match is None:
            raise BodyFormatError(f"JSON that ends or breaks at character {self.position}")
        self.position = match.end()
        return match[0].strip()


def dump_object_keys(entries: Iterable[tuple[Mapping[str, Any], Any]]) -> bytes:
    """Encode a map whose keys are objects, in the form that the Java and Go clients read: {{...}:value,...}."""
    return b"{" + b",".join(dumps(key) + b":" + dumps(value) for key, value in entries) + b"}"


def dump_int_keys(entries: Mapping[int, Any]) -> bytes:
    """Encode a map whose keys are integers, without quotes: {0:"a"}."""
    return b"{" + b",".join(b"%d:%b" % (key, dumps(value)) for key, value in entries.items()) + b"}"
