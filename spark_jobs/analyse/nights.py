"""A folder of nights: a directory a run, each compared with the one before, and a page that lists them.

    <folder>/index.html             all nights, the last one first
             history.jsonl          a line a run, also of nights that were removed since (see `output`)
             .nights.lock           held while the folder is changed
             2030-01-31T031702Z/    a night: what `output` and the audit write, and night.json
             .night-XXXXXXXX/       a run that has not ended; where it was killed, the next run removes it

A night gets its name when all of its files are there. Only what is known to be of our making is ever removed: of a
directory with the name of a night and a night.json, the files whose names we write; a directory that has any other is
left as it is. Links are not followed.
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
from typing import TYPE_CHECKING, Any, Final

import msgspec

from duemq.spark_jobs.analyse import output
from duemq.spark_jobs.analyse.comparison import Compared, Comparison, Earlier, compare_cluster
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.report import GENERATOR, render_index
from duemq.spark_jobs.report.verdict import verdict_of
from duemq.spark_jobs.store.local_files import is_same, local_path, real_path, reason, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from duemq.spark_jobs.analyse.analysis import Analysis

INDEX: Final = "index.html"
_HISTORY: Final = "history.jsonl"
_LOCK: Final = ".nights.lock"
_NIGHT: Final = "night.json"
_NAME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d{6}Z(-\d+)?")
_PARTIAL: Final = ".night-"
_FORMAT: Final = 1
_OURS: Final = {"report.html", "analysis.json", "comparison.json", "audit.json", "offenders.parquet", _NIGHT}
_TABLES: Final = re.compile(r"\w+\.parquet")
_MAX_NIGHT: Final = 64 << 20
"""Bytes of a night.json that are read."""


class StoreNight(msgspec.Struct):
    """A store of a cluster's night, and the name of the directory that has its own night; None where it could not be
    read."""

    store: str
    name: str | None


class Night(msgspec.Struct, kw_only=True, omit_defaults=True):
    """night.json: what the page of all nights tells of one. Times in ms since the epoch."""

    duemq_night: int
    """The version of this format."""
    run: output.Run
    mood: str
    headline: str
    destroyed: int
    unclaimed: int
    damaged: int
    max_ms: int
    """The latest delivery."""
    compared_ms: int | None
    """When the run was made that it was compared with..."""
    new: int | None
    """...and how many offenders that one did not have."""
    worse: int | None
    """How many figures grew."""
    stores: list[StoreNight] = []
    """Of a cluster; none where this is of one store."""


class Listed(msgspec.Struct):
    """A night and the name of its directory."""

    name: str
    night: Night


class Place:
    """Where a run goes, and what came before it there."""

    def __init__(
        self, store: str, *, out: str | None = None, folder: str | None = None, previous: str | None = None
    ) -> None:
        """`out`: a directory that each run writes anew; or `folder`: of nights. `previous`: a directory with the files
        of an audit of the same store, whatever its name was then, to compare with; by default the last run there of a
        store of that name. Raises JobError."""
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
                    # Who holds this is at work: the system lets go of it however the process ends.
                    self._directory = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise JobError(f"{self._folder}: cannot be written: {reason(error)}") from None
            if previous is None:
                # Of a directory that runs wrote before there were nights, the last run is the one before the first.
                self.earlier = _last_night(self._folder, store) or _last_run(self._folder, store)
        else:
            assert out is not None
            self.out = local_path(out)
            if previous is None:
                self.earlier = _last_run(self.out, store)

    def finish(
        self, analysis: Analysis, *, keep: int | None = None, compared: Sequence[Compared] = ()
    ) -> tuple[str, Comparison | None, list[str]]:
        """Write the files of a run whose audit is written. `keep`: nights that stay, this one among them. `compared`:
        of a cluster its stores beside their own runs before.

        Gives the path of its report, the comparison with the run before, and what could not be removed, a line each.
        Raises JobError."""
        run = output.run_of(analysis)
        comparison = None
        if analysis.stores:
            before = self.earlier.before if self.earlier is not None else None
            comparison = compare_cluster(analysis.audit, compared, before)
        elif self.earlier is not None:
            comparison = self.earlier.compare(analysis.audit, self.out, run.lags)
        if self._folder is None:
            paths = output.write(analysis, self.out, comparison=comparison)
            return next(path for path in paths if path.endswith(".html")), comparison, []
        history = os.path.join(self._folder, _HISTORY)
        try:
            with _locked(self._folder):
                output.write(analysis, self.out, comparison=comparison, history=history, index=f"../{INDEX}")
                night = msgspec.json.encode(_night_of(analysis, run, comparison))
                replace_file(os.path.join(self.out, _NIGHT), msgspec.json.format(night, indent=1))
                name = self._take_name(run.made_ms)
                left = _tidy(self._folder, keep, name)
        except OSError as error:
            raise JobError(f"{self._folder}: cannot be written: {reason(error)}") from None
        return os.path.join(self._folder, name, "report.html"), comparison, left

    def _take_name(self, made_ms: int) -> str:
        """Make the directory of this run a night."""
        assert self._folder is not None
        first = name = f"{datetime.fromtimestamp(made_ms / 1000, UTC):%Y-%m-%dT%H%M%SZ}"
        number = 1
        while os.path.lexists(os.path.join(self._folder, name)):
            number += 1
            name = f"{first}-{number}"
        os.rename(self.out, os.path.join(self._folder, name))
        self.out = os.path.join(self._folder, name)
        _sync(self._folder)
        return name

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the directory; of a run that did not end what there is goes."""
        if self._directory is None or self._folder is None:
            return
        os.close(self._directory)
        self._directory = None
        if os.path.basename(self.out).startswith(_PARTIAL):
            with suppress(OSError):
                _remove(self.out)


def nights(folder: str) -> list[Listed]:
    """The nights in a folder, the last one first. What cannot be read, or is of another making, is left out."""
    found = []
    for name in os.listdir(folder):
        if _NAME.fullmatch(name):
            night = _read_night(os.path.join(folder, name))
            if night is not None:
                found.append(Listed(name, night))
    return sorted(found, key=lambda one: (one.night.run.made_ms, one.name), reverse=True)


def _night_of(analysis: Analysis, run: output.Run, comparison: Comparison | None) -> Night:
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
        with open(os.path.join(directory, _NIGHT), "rb") as file:
            night = msgspec.json.decode(file.read(_MAX_NIGHT), type=Night)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return night if night.duemq_night == _FORMAT else None


# --- what came before


def _last_night(folder: str, store: str) -> Earlier | None:
    """The last night of a store that can be read."""
    for listed in nights(folder):
        if is_same(listed.night.run.store, store):
            with suppress(JobError):
                return Earlier(os.path.join(folder, listed.name), listed.night.run.lags)
    return None


def _last_run(out: str, store: str) -> Earlier | None:
    """The run whose files a directory has, if that was of the same store."""
    with suppress(JobError):
        earlier = Earlier(out, _lags_in(out))
        return earlier if is_same(earlier.before.store, store) else None
    return None


def _lags_in(directory: str) -> list[output.Lag]:
    """Lags of consumer groups that the last run into a directory saw; none where nothing tells them."""
    night = _read_night(directory)
    runs = [night.run] if night is not None else output.read_history(os.path.join(directory, _HISTORY))
    return runs[-1].lags if runs else []


# --- what goes


def _tidy(folder: str, keep: int | None, tonight: str) -> list[str]:
    """Write the page of the nights that stay, `keep` of each store, and remove the others; gives a line for each that
    could not be. The night with the name `tonight` stays, also where the clock was ahead when others were made."""
    found = nights(folder)
    stay, go, seen = list[Listed](), list[Listed](), Counter[str]()
    for listed in sorted(found, key=lambda listed: listed.name != tonight):
        store = listed.night.run.store
        # Nights of before have the path as it was given: who knows where a relative one led.
        store = real_path(store) if os.path.isabs(store) else os.path.normpath(store)
        seen[store] += 1
        (stay if keep is None or seen[store] <= keep else go).append(listed)
    # What a cluster's report links stays with it.
    linked = {one.name for listed in stay for one in listed.night.stores}
    names = {listed.name for listed in stay} | linked
    stay = [listed for listed in found if listed.name in names]
    go = [listed for listed in go if listed.name not in names]
    replace_file(os.path.join(folder, INDEX), render_index(stay).encode())
    left = []
    for listed in go:
        path = os.path.join(folder, listed.name)
        try:
            foreign = _remove(path)
        except OSError as error:
            left.append(f"{path}: cannot be removed: {reason(error)}")
        else:
            if foreign is not None:
                left.append(f"{path}: is left, for it has {foreign}, which is not of a night")
    return left


def _remove(directory: str) -> str | None:
    """Remove a directory of ours, night.json last, so that what is left of it is known again. Gives the name of a file
    that is not ours, for which all of it stays. Raises OSError."""
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
    """Remove what runs left that were killed."""
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
            continue  # its run is still at work, or it is not ours to remove
        finally:
            os.close(directory)


# --- files


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Wait for other runs that change the folder."""
    file = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _is_directory(path: str) -> bool:
    """Whether something is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _check_index(folder: str) -> None:
    """Raises JobError where a directory has a page that this would replace, and which is somebody else's."""
    try:
        with open(os.path.join(folder, INDEX), "rb") as file:
            head = file.read(4096)
    except FileNotFoundError:
        return
    if GENERATOR.encode() not in head:
        raise JobError(f"{folder}: has an {INDEX} that is not of nights; give a directory of their own")


def _sync(directory: str) -> None:
    file: Any = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
