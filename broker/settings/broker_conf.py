"""The configuration file: a .properties file, read as `java.util.Properties` does, by the library javaproperties.

`=`, `:` or a blank ends a name; # and ! start comments; a backslash at the end of a line continues it on the next one;
`\\u00e4` is a character by its number. If a name occurs more than once, its last entry counts.

It differs from Java in three ways. The file is read as UTF-8, and only a file that is not valid UTF-8 as ISO 8859-1,
which Java assumes for each; that makes no difference for ASCII. Blanks at the end of a value are dropped. And an entry
without a name, or with neither separator nor value, is refused, while Java assumes an empty text.

The library is imported on first use, to change a file or to read one with a backslash: importing it takes a tenth of
the time that a broker needs to start.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from duemq.broker.errors import ConfigError

if TYPE_CHECKING:
    from javaproperties import PropertiesElement

_MAX_REPEATED: Final = 100
_UP_TO_VALUE: Final = re.compile(r"[ \t\f]*(?:\\\r?\n[ \t\f]*|\\.|[^\\=:\s])*[ \t\f]*[=:]?[ \t\f]*", re.DOTALL)
"""Matches the part of an entry before the value: the name and the separator."""


_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LAST_CONTINUATION: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:\r\n|\r|\n)?\Z")
"""Matches an odd number of backslashes at the end of a text, and a line end behind them; group 1 is without the last
backslash."""
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_PLAIN_LINE: Final = re.compile(r"[ \t\f]*(?:|[#!].*|([^=: \t\f]*)(?:[ \t\f]*[=:]|[ \t\f])?[ \t\f]*(.*))", re.DOTALL)
"""Matches a line without a backslash: an empty one, a comment, or an entry, with its name and its value."""


class Property(NamedTuple):
    """The value of a property, and the line at which its entry begins, from 1 on."""

    value: str
    line: int


class _Entry(NamedTuple):
    line: int
    """Number of its first line, from 1 on."""
    source: str
    name: str
    value: str


def properties(text: str, source: str) -> dict[str, Property]:
    """Return the properties in a text by their names; errors refer to the text as `source`. Raises ConfigError."""
    found = {}
    for entry in _entries(text, source) if "\\" in text else _plain_entries(text):
        written = entry.source.strip()
        if not entry.name or (not entry.value and re.search(r"[=:\s]", written) is None):
            raise ConfigError(f"{source}, line {entry.line}: {written[:_MAX_REPEATED]!r} is not NAME=VALUE")
        if not is_unicode(entry.name + entry.value):
            raise ConfigError(
                f"{source}, line {entry.line}: {written[:_MAX_REPEATED]!r} has one half of a character that takes two "
                "\\u escapes"
            )
        found[entry.name] = Property(entry.value.strip(), entry.line)
    return found


def parse(text: str, source: str) -> dict[str, str]:
    """Return the values in a text by the names of the properties, as `properties` does."""
    return {name: found.value for name, found in properties(text, source).items()}


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: whether it has no lone surrogates, as from a wrong \\u escape or from an argument
    or variable that is not UTF-8."""
    return _LONE_SURROGATE.search(text) is None


def _plain_entries(text: str) -> Iterator[_Entry]:
    """Yield the entries of a text without a backslash: each is one line, and its characters stand for themselves."""
    for number, line in enumerate(_LINE_END.split(text), 1):
        found = _PLAIN_LINE.fullmatch(line)
        if found is not None and found[1] is not None:
            yield _Entry(number, line, found[1], found[2])


def _entries(text: str, source: str) -> Iterator[_Entry]:
    """Yield the entries of any text. Raises ConfigError."""
    from javaproperties import KeyValue

    for line, element in _elements(text, source):
        if isinstance(element, KeyValue):
            yield _Entry(line, element.source, element.key, element.value)


def read(path: str) -> dict[str, str]:
    """Return the values in a file by the names of the properties. Raises ConfigError."""
    return parse(_read(path).text, path)


def read_properties(path: str) -> dict[str, Property]:
    """Return the properties in a file, with their lines, by their names. Raises ConfigError."""
    return properties(_read(path).text, path)


def save(path: str, changes: Mapping[str, str]) -> None:
    """Change properties in a file, durably: readers see either the old or the new text, even after a crash. May wait
    for the disk. Raises ConfigError if the file cannot be read, OSError if it cannot be written."""
    path = os.path.realpath(path)
    before = _read(path)
    text = changed(before.text, changes, path)
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", encoding=before.encoding, newline="") as file:
            os.fchmod(file.fileno(), os.stat(path).st_mode & 0o7777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def changed(text: str, changes: Mapping[str, str], source: str) -> str:
    """Return a text with changed values: in the entries that have the properties, else in new lines at the end. The
    rest of the text stays as it is. Errors refer to the text as `source`. Raises ConfigError; also if the result would
    not be read as intended."""
    from javaproperties import Comment, KeyValue

    entries = [element for _, element in _elements(text, source)]
    sources, new = [element.source for element in entries], list[str]()
    at = {element.key: number for number, element in enumerate(entries) if isinstance(element, KeyValue)}
    for name, value in changes.items():
        if name in at:
            source = sources[at[name]]
            begin = _UP_TO_VALUE.match(source)
            end = source[len(source.rstrip("\r\n")) :]
            head = begin[0].rstrip("\r\n") if begin is not None else ""
            if value[:1] in ("", "=", ":") and not head.rstrip().endswith(("=", ":")):
                head += "="  # a bare name would be refused, and the value's first character read as a separator
            sources[at[name]] = f"{head}{_escaped(value)}{end}"
        else:
            new.append(f"{name}={_escaped(value)}\n")
    if new and entries:
        if not isinstance(entries[-1], Comment):
            # A backslash at the end of the text continues the last entry with nothing; it must not continue it with the
            # new line.
            sources[-1] = _LAST_CONTINUATION.sub(r"\1\n", sources[-1])
        if not sources[-1].endswith(("\n", "\r")):
            sources[-1] += "\n"
    sources += new
    result = "".join(sources)
    if parse(result, source) != parse(text, source) | {name: value.strip() for name, value in changes.items()}:
        raise ConfigError(f"{source} cannot be changed without changing other properties too: change it by hand")
    return result


def _elements(text: str, source: str) -> Iterator[tuple[int, PropertiesElement]]:
    """Yield the entries, comments and blank lines of a text, each with the number of its first line, from 1 on. Raises
    ConfigError."""
    import javaproperties

    line = 1
    elements = javaproperties.parse(text)
    while True:
        try:
            element = next(elements, None)
        except ValueError as error:  # a \\u that is not followed by four digits
            raise ConfigError(f"{source}, line {line}: {error}") from None
        if element is None:
            return
        yield line, element
        line += len(_LINE_END.findall(element.source))


def _escaped(value: str) -> str:
    """Return a value escaped so that Java reads it back in either of the two encodings."""
    from javaproperties import escape

    escaped = escape(value)
    for character in ":=#!":
        escaped = escaped.replace(f"\\{character}", character)  # only names need these escaped
    return escaped


class _File(NamedTuple):
    text: str
    encoding: str


def _read(path: str) -> _File:
    """Return the text of a file, without a byte order mark, and its encoding. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror or error}") from None
    encoding = "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        return _File(data.decode(encoding), encoding)
    except UnicodeDecodeError:
        return _File(data.decode("iso8859-1"), "iso8859-1")
