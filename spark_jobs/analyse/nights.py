"""A folder of nights: one directory for each run, each compared with the one before, and a page that lists them.

    <folder>/index.html             all nights, the last one first
             history.jsonl          a line for each run, even of nights that were removed since (see `output`)
             .nights.lock           held while the folder is changed
             2030-01-31T031702Z/    a night: the files of `output` and of the audit, and night.json
             .night-XXXXXXXX/       a run that has not ended; if it was killed, the next run removes this

A night gets its name when all of its files are written. Only files written by these jobs are ever removed: a directory
must have the name of a night and a night.json, and in it only files with names that a run writes are removed. A
directory with any other file is left as it is. Links are not followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from duemq.spark_jobs.analyse import output
from duemq.spark_jobs.analyse.comparison import Compared, Comparison, Earlier, compare_cluster, read_before, stores_of
from duemq.spark_jobs.analyse.history import HISTORY, Lag, Listed, Night, RunFigures, StoreNight, read_history, run_of
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.report import GENERATOR, render_index
from duemq.spark_jobs.report.verdict import verdict_of
from duemq.spark_jobs.store.local_files import is_local, is_same, local_path, real_path, reason
from duemq.storage.files import OsFiles
from duemq.storage.regular_files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from duemq.spark_jobs.analyse.analysis import Analysis

INDEX: Final = "index.html"
_LOCK: Final = ".nights.lock"
_NIGHT: Final = "night.json"
_NAME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d{6}Z(-\d+)?")
_PARTIAL: Final = ".night-"
_FORMAT: Final = 1
_OURS: Final = {"report.html", "analysis.json", "comparison.json", "audit.json", "offenders.parquet", _NIGHT}
_TABLES: Final = re.compile(r"\w+\.parquet")
_MAX_NIGHT: Final = 64 << 20
"""Most bytes of a night.json that are read."""


class RunOutput:
    """The directory in which a run writes its files, with the run that wrote there before it."""

    def __init__(
        self, store: str, *, out: str | None = None, folder: str | None = None, previous: str | None = None
    ) -> None:
        """`out`: a directory that each run overwrites; or `folder`: a folder of nights. `previous`: a directory with
        the files of an audit of the same store, whatever its name was then, to compare with; by default the last run in
        `out` or `folder` of a store of this name. Raises JobError."""
        self._folder = local_path(folder) if folder is not None else None
        self._directory: int | None = None
        self.earlier: Earlier | None = None
        if previous is not None:
            self.earlier = Earlier(previous, _lags_in(local_path(previous)))
        if self._folder is not None:
            try:
                os.makedirs(self._folder, exist_ok=True)
                _check_index(self._folder)
                self.out = os.path.join(self._folder, f"{_PARTIAL}{secrets.token_hex(4)}")
                with _locked(self._folder):
                    _remove_leftovers(self._folder)
                    os.mkdir(self.out)
                    # Its holder is a run at work: the system releases the lock however the process ends.
                    self._directory = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise JobError(f"{self._folder}: cannot be written: {reason(error)}") from None
            if previous is None:
                # If runs used the folder as their `out` before it had nights, the last such run precedes the first
                # night.
                self.earlier = _last_night(self._folder, store) or _last_run(self._folder, store)
        else:
            assert out is not None
            self.out = local_path(out)
            if previous is None:
                self.earlier = _last_run(self.out, store)

    def finish(
        self, analysis: Analysis, *, keep: int | None = None, compared: Sequence[Compared] = ()
    ) -> tuple[str, Comparison | None, list[str]]:
        """Write the files of a run whose audit is written. `keep`: number of nights to keep, including this one.
        `compared`: for a cluster its stores, compared with their own runs before.

        Return the path of its report, the comparison with the run before, and a line for each night that could not be
        removed. Raises JobError."""
        run = run_of(analysis)
        comparison = None
        if analysis.stores:
            before = self.earlier.before if self.earlier is not None else None
            comparison = compare_cluster(analysis.audit, compared, before)
        elif self.earlier is not None:
            comparison = self.earlier.compare(analysis.audit, self.out, run.lags)
        if self._folder is None:
            paths = output.write(analysis, self.out, comparison=comparison)
            return next(path for path in paths if path.endswith(".html")), comparison, []
        history = os.path.join(self._folder, HISTORY)
        try:
            with _locked(self._folder):
                output.write(analysis, self.out, comparison=comparison, history=history, index=f"../{INDEX}")
                night = msgspec.json.encode(_night_of(analysis, run, comparison))
                OsFiles().write_whole(os.path.join(self.out, _NIGHT), msgspec.json.format(night, indent=1))
                name = self._take_name(run.made_ms)
                output.note(run, history)
                left = _tidy(self._folder, keep, name)
        except OSError as error:
            raise JobError(f"{self._folder}: cannot be written: {reason(error)}") from None
        return os.path.join(self._folder, name, "report.html"), comparison, left

    def _take_name(self, made_ms: int) -> str:
        """Rename the directory of this run to a night, and return the name."""
        assert self._folder is not None
        first = name = f"{datetime.fromtimestamp(made_ms / 1000, UTC):%Y-%m-%dT%H%M%SZ}"
        number = 1
        while os.path.lexists(os.path.join(self._folder, name)):
            number += 1
            name = f"{first}-{number}"
        os.rename(self.out, os.path.join(self._folder, name))
        self.out = os.path.join(self._folder, name)
        OsFiles().sync_directory(self._folder)
        return name

    def __enter__(self) -> RunOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory; remove it if the run did not end."""
        if self._directory is None or self._folder is None:
            return
        os.close(self._directory)
        self._directory = None
        if os.path.basename(self.out).startswith(_PARTIAL):
            with suppress(OSError):
                _remove(self.out)


def nights(folder: str) -> list[Listed]:
    """Return the nights in a folder, the last one first. Unreadable ones, or those of another format, are left out."""
    found = []
    for name in os.listdir(folder):
        if _NAME.fullmatch(name):
            night = _read_night(os.path.join(folder, name))
            if night is not None:
                found.append(Listed(name, night))
    return sorted(found, key=lambda one: (one.night.run.made_ms, one.name), reverse=True)


def _night_of(analysis: Analysis, run: RunFigures, comparison: Comparison | None) -> Night:
    summary = analysis.audit
    verdict = verdict_of(summary)
    return Night(
        duemq_night=_FORMAT,
        run=run,
        mood=verdict.mood,
        headline=verdict.headline,
        destroyed=summary.destroyed,
        unclaimed=summary.unclaimed,
        damaged=summary.damaged,
        max_ms=summary.lateness.percentiles_ms.get("p100", 0),
        compared_ms=comparison.made_ms if comparison else None,
        new=sum(comparison.new.values()) if comparison else None,
        worse=len(comparison.worse) if comparison else None,
        # Their reports are beside this night's own directory.
        stores=[
            StoreNight(one.store, one.report and os.path.basename(os.path.dirname(one.report)))
            for one in analysis.stores
        ],
    )


def _read_night(directory: str) -> Night | None:
    if not _is_directory(directory):
        return None
    try:
        night = msgspec.json.decode(read_regular(os.path.join(directory, _NIGHT), _MAX_NIGHT), type=Night)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return night if night.duemq_night == _FORMAT else None


# --- the run before


def last_stores(cluster: str, *, out: str | None = None, folder: str | None = None) -> list[str]:
    """Return the stores of a cluster in its last run, including those that could not be read; none if the last run is
    unknown. `out`, `folder`: where that run wrote, as for `RunOutput`."""
    directory = folder if folder is not None else out
    if directory is None or not is_local(directory) or not os.path.isdir(local_path(directory)):
        return []
    directory = local_path(directory)
    for listed in nights(directory) if folder is not None else ():
        if is_same(listed.night.run.store, cluster):
            return [one.store for one in listed.night.stores]
    with suppress(JobError):
        before = read_before(directory)
        return stores_of(before) if is_same(before.store, cluster) else []
    return []


def _last_night(folder: str, store: str) -> Earlier | None:
    """Return the last readable night of a store; None without one."""
    for listed in nights(folder):
        if is_same(listed.night.run.store, store):
            with suppress(JobError):
                return Earlier(os.path.join(folder, listed.name), listed.night.run.lags)
    return None


def _last_run(out: str, store: str) -> Earlier | None:
    """Return the run whose files a directory has, if it was of the same store."""
    with suppress(JobError):
        earlier = Earlier(out, _lags_in(out))
        return earlier if is_same(earlier.before.store, store) else None
    return None


def _lags_in(directory: str) -> list[Lag]:
    """Return the lags of consumer groups in the last run into a directory; none if unknown."""
    night = _read_night(directory)
    runs = [night.run] if night is not None else read_history(os.path.join(directory, HISTORY))
    return runs[-1].lags if runs else []


# --- removal


def _tidy(folder: str, keep: int | None, tonight: str) -> list[str]:
    """Write the page of the nights that stay, `keep` of each store, and remove the others; return a line for each that
    could not be removed. The night named `tonight` stays, even if the clock was ahead when others were made."""
    found = nights(folder)
    stay, go, seen = list[Listed](), list[Listed](), Counter[str]()
    for listed in sorted(found, key=lambda listed: listed.name != tonight):
        store = listed.night.run.store
        # Older nights have the path as it was given; it is unknown where a relative one led.
        store = real_path(store) if os.path.isabs(store) else os.path.normpath(store)
        seen[store] += 1
        (stay if keep is None or seen[store] <= keep else go).append(listed)
    # Nights linked from a cluster's report stay with it.
    linked = {one.name for listed in stay for one in listed.night.stores}
    names = {listed.name for listed in stay} | linked
    stay = [listed for listed in found if listed.name in names]
    go = [listed for listed in go if listed.name not in names]
    OsFiles().write_whole(os.path.join(folder, INDEX), render_index(stay).encode())
    left = []
    for listed in go:
        path = os.path.join(folder, listed.name)
        try:
            foreign = _remove(path)
        except OSError as error:
            left.append(f"{path}: cannot be removed: {reason(error)}")
        else:
            if foreign is not None:
                left.append(f"{path}: is kept, since it has {foreign}, which is not part of a night")
    return left


def _remove(directory: str) -> str | None:
    """Remove the directory of a run, night.json last, so that remains can still be recognised. If it has a file that no
    run writes, keep everything and return its name. Raises OSError."""
    tables = os.path.join(directory, "parquet")
    ours: list[str] = []
    theirs: list[str] = []
    for parent in (directory, *([tables] if _is_directory(tables) else [])):
        for entry in os.scandir(parent):
            name = entry.name.removesuffix(".tmp")
            is_known = name in _OURS if parent == directory else bool(_TABLES.fullmatch(name))
            if entry.path == tables and entry.is_dir(follow_symlinks=False):
                continue
            (ours if is_known and entry.is_file(follow_symlinks=False) else theirs).append(entry.path)
    if theirs:
        return os.path.relpath(min(theirs), directory)
    for path in sorted(ours, key=lambda path: os.path.basename(path) == _NIGHT):
        if os.path.basename(path) == _NIGHT and _is_directory(tables):
            os.rmdir(tables)
        os.unlink(path)
    if _is_directory(tables):
        os.rmdir(tables)
    os.rmdir(directory)
    return None


def _remove_leftovers(folder: str) -> None:
    """Remove the directories of killed runs."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if not name.startswith(_PARTIAL) or not _is_directory(path):
            continue
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        except OSError:
            continue  # its run is still at work, or this user may not remove it
        finally:
            os.close(directory)


# --- files


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock the folder; waits for other runs that change it."""
    file = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _is_directory(path: str) -> bool:
    """Return whether a path is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _check_index(folder: str) -> None:
    """Raise JobError if a folder has an index page that was not written by these jobs, and would be replaced."""
    try:
        head = read_regular(os.path.join(folder, INDEX), 4096)
    except FileNotFoundError:
        return
    if GENERATOR.encode() not in head:
        raise JobError(f"{folder}: has an {INDEX} that was not written for nights; give a directory only for nights")
