"""Paths and URIs that jobs are given: their names, what they match, and whether they are the same store."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store import hadoop
from duemq.storage import file_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_SCHEME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_COLORS: Final = re.compile(r"\x1b\[[0-9;]*m")
_SYSTEM_SAYS: Final = re.compile(r"Detail: \[errno \d+\] ([^\n]+)|([^\n↳]+) \(os error \d+\)")
"""Texts of pyarrow and of libraries in Rust that contain the system's error text."""
_CREDENTIALS: Final = re.compile(r"^([^:/]+://)[^/?]*@")


def is_local(path: str) -> bool:
    """Return whether a path or URI lies in this machine's file system."""
    return not _SCHEME.match(path) or path.startswith("file://")


def shown(path: str) -> str:
    """Return a path or URI as it may be shown and written down: without the credentials that a URI of S3 may have."""
    if is_local(path):
        return path
    return _CREDENTIALS.sub(r"\1", path).partition("?")[0]


def local_path(path: str) -> str:
    """Return a path of this machine's file system, for data that is read and written only there. Raises JobError for
    the URI of another file system, which would otherwise become a directory with a strange name."""
    if not is_local(path):
        raise JobError(f"{shown(path)}: this has to be a directory of this machine, or one that is mounted, not a URI")
    return path.removeprefix("file://")


def reason(error: Exception) -> str:
    """Return why something failed, in one line: the system's text, also where a library wraps it in a text of its
    own."""
    text = _COLORS.sub("", getattr(error, "strerror", None) or str(error))
    found = _SYSTEM_SAYS.search(text)
    if found is not None:
        return (found[1] or found[2]).strip()
    return (text.strip().splitlines() or [type(error).__name__])[0]


def real_path(path: str) -> str:
    """Return the one name of a directory, however it was given: on this machine its absolute path without links; for a
    URI the part that may be shown, without slashes at its end."""
    if not is_local(path):
        return shown(path).rstrip("/")
    return os.path.realpath(local_path(path))


def is_same(one: str, other: str) -> bool:
    """Return whether two names are of the same store. Relative ones are looked up from the working directory."""
    return real_path(one) == real_path(other)


def refuse_within(store: str, *outputs: str | None) -> None:
    """Refuse paths for output that lie in the store that a job reads, since brokers act on the files that they find
    there. In a store on this machine directories may be links or mounts; their targets count as the store too. Raises
    JobError."""
    if is_local(store):
        inside = _directories_of(local_path(store))
    for output in outputs:
        if output is None:
            continue
        is_inside = is_local(store) and is_local(output) and not inside.isdisjoint(_identities_above(real_path(output)))
        if is_inside or f"{real_path(output)}/".startswith(f"{real_path(store)}/"):
            raise JobError(f"{shown(output)}: lies in the store that is read, {shown(store)}; give a path outside it")


_DEEPEST: Final = 3
"""Depth below a store's root down to which a broker's directory may be a link: consumequeue/TOPIC/QUEUE."""


def _directories_of(root: str) -> set[tuple[int, int]]:
    """Return the directories of a store as (device, inode), without those that the store itself lies in, to which a
    link may lead."""
    found, level = set[tuple[int, int]](), [root]
    for depth in range(_DEEPEST + 1):
        below = []
        for path in level:
            with suppress(OSError):  # missing, or not readable for this user
                status = os.stat(path)
                if depth < _DEEPEST and (status.st_dev, status.st_ino) not in found:
                    with os.scandir(path) as entries:
                        below += [entry.path for entry in entries if entry.is_dir()]
                found.add((status.st_dev, status.st_ino))
        level = below
    return found - set(_identities_above(os.path.dirname(os.path.realpath(root))))


def _identities_above(path: str) -> Iterator[tuple[int, int]]:
    """Yield a directory and those that it lies in as (device, inode), without missing ones."""
    while True:
        with suppress(OSError):
            status = os.stat(path)
            yield status.st_dev, status.st_ino
        if path == (path := os.path.dirname(path)):
            return


def size_text(size: float) -> str:
    """Return a number of bytes as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def each_once(paths: Iterable[str], tell: Callable[[str], None] = lambda _: None) -> list[str]:
    """Return the stores that some paths and URIs name, each once, in order: two names are of one store if they lead to
    the same commitlog on the disk. Of its names the first one without links is used, else the first; `tell` is called
    with one line for each other name."""
    names: dict[object, list[str]] = {}
    for path in paths:
        of_store = names.setdefault(_identity(path), [])
        if path not in of_store:
            of_store.append(path)
    found = []
    for of_store in names.values():
        name = next((one for one in of_store if is_local(one) and _is_real(one)), of_store[0])
        found.append(name)
        for other in of_store:
            if other != name:
                tell(f"{shown(other)} is {shown(name)} by another name, and is read once")
    return found


def _identity(path: str) -> object:
    """Return a value that two names of a store have in common. A URI's credentials and settings are part of it, since
    they may name another file system."""
    if not is_local(path):
        base, mark, query = path.partition("?")
        return f"{base.rstrip('/')}{mark}{query}"
    with suppress(OSError):
        status = os.stat(os.path.join(local_path(path), file_names.COMMITLOG))
        if status.st_ino:
            return status.st_dev, status.st_ino
    return real_path(path)


def _is_real(path: str) -> bool:
    return os.path.abspath(local_path(path)) == real_path(path)


def file_system(uri: str) -> tuple[Any, str]:
    """Return pyarrow's file system for a URI that is not of this machine, and the path in it."""
    from pyarrow import fs

    found: tuple[Any, str] = hadoop.connect(uri) if uri.startswith(hadoop.SCHEMES) else fs.FileSystem.from_uri(uri)
    return found


def expand(path: str) -> list[str]:
    """Return the directories that a path or URI with wildcards (*, [...], and in paths ?) names, in order; the path
    itself where it has none, or where a directory has exactly that name. Raises JobError where nothing matches."""
    if not glob.has_magic(path.partition("?")[0] if not is_local(path) else path):
        return [path]
    if is_local(path):
        plain = local_path(path)
        found = [plain] if os.path.isdir(plain) else sorted(filter(_may_be_directory, glob.glob(plain)))
    else:
        found = _expand_remote(path)
    if not found:
        raise JobError(f"{shown(path)}: there is no such directory")
    return found


def _may_be_directory(path: str) -> bool:
    """Return whether a path is a directory, or a link that leads nowhere at the moment, since its disk may be
    missing."""
    return os.path.isdir(path) or (os.path.islink(path) and not os.path.exists(path))


def distinct_names(pattern: str, paths: Sequence[str]) -> list[str]:
    """Return names for the directories that a pattern names (`expand`), usable as names of files and directories: from
    each path, the parts that match the pattern's wildcards. The name of a path does not depend on the other matches."""
    wild = [glob.has_magic(part) for part in _parts(pattern)]
    found = []
    for path in paths:
        parts = _parts(path)
        mine = [part for part, is_wild in zip(parts, wild, strict=False) if is_wild]
        found.append("+".join(quote(part, safe="") for part in (mine if len(parts) == len(wild) else parts)))
    return found


def _parts(path: str) -> list[str]:
    base = local_path(path) if is_local(path) else path.partition("?")[0]
    return [part for part in base.split("/") if part]


def _expand_remote(uri: str) -> list[str]:
    # Credentials and settings of the file system follow a question mark, which is not a wildcard here.
    base, mark, query = uri.partition("?")
    head, *parts = base.split("/")[2:]
    begin = f"{base.partition('://')[0]}://{head}"
    while parts and not glob.has_magic(parts[0]):
        begin = f"{begin}/{parts.pop(0)}"
    found = [begin]
    for part in parts:
        if glob.has_magic(part):
            found = [
                f"{folder}/{name}"
                for folder in found
                for name in _folders(f"{folder}{mark}{query}")
                if fnmatch.fnmatchcase(name, part)
            ]
        else:
            found = [f"{folder}/{part}" for folder in found if part in _folders(f"{folder}{mark}{query}")]
    return sorted(f"{folder}{mark}{query}" for folder in found)


def _folders(uri: str) -> list[str]:
    from pyarrow import fs

    try:
        system, root = file_system(uri)
        entries = system.get_file_info(fs.FileSelector(root, allow_not_found=True))
    except (OSError, ValueError) as error:
        raise JobError(f"{shown(uri)}: cannot be read: {error}") from None
    return [entry.base_name for entry in entries if entry.type == fs.FileType.Directory]
