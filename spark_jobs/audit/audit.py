"""The audit: whether every scheduled message was delivered once, and when.

    <out>/audit.json           the summary, see `Summary`
    <out>/offenders.parquet    a row for each message that was lost, destroyed or delivered more than once, and for each
                               delivery whose message is not in the log

The summary states what was read: the SHA-256 of each range of the commitlog, and of all of them together in order. It
has a digest of itself, and a signature (Ed25519) if a key is given; `verify` checks both.

Keeps invariant 25 of ARCHITECTURE.md.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from duemq.spark_jobs.audit import lateness
from duemq.spark_jobs.audit.figures import STATUSES, UNCLAIMED, Figures
from duemq.spark_jobs.audit.incremental import Kept
from duemq.spark_jobs.audit.kept import Folder, directory_of
from duemq.spark_jobs.audit.matching import BUCKET_BYTES, Matching, RangeFound, StoreFindings, find, read_range
from duemq.spark_jobs.audit.shuffle import BySpark, Shuffle
from duemq.spark_jobs.audit.starts import StartOutcome, starts
from duemq.spark_jobs.audit.steps import POINTS, step_of
from duemq.spark_jobs.compact.state import compacted_to
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.source import tables
from duemq.spark_jobs.store.local_files import local_path, reason, refuse_within
from duemq.spark_jobs.store.progress import destroyed, read_progress
from duemq.spark_jobs.store.ranges import at_offsets, begin_ms_of, first_store_ms, plan, records_at
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import Range
from duemq.storage.files import OsFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

    Session = SparkSession | Callable[[], SparkSession]
    """A session, or a function that returns one, which is called only if Spark is needed."""

DESTROYED: Final = "destroyed"
MAX_LISTED: Final = 100
"""Number of offending messages in the summary; offenders.parquet has all."""
PARTITION_BYTES: Final = 128 << 20
RANGE_BYTES: Final = 64 << 20
"""Bytes of the commitlog in a range. Ranges are short since the next run reads the last one again."""
PERCENTILES: Final = (50, 90, 99, 99.9, 100)


def warn(text: str) -> None:
    """Raise a line of text as a Python warning."""
    warnings.warn(text, stacklevel=2)


class Lateness(msgspec.Struct):
    """Lateness of delivered messages: store time of the delivery minus deliver time, in ms."""

    count: int
    early: int
    mean_ms: float
    percentiles_ms: dict[str, int]


class Offender(msgspec.Struct, omit_defaults=True):
    """An offending message. Times in ms since the epoch."""

    what: str
    """lost, twice, destroyed, or unclaimed: a delivery whose message is not in the log."""
    physical_offset: int
    kind: str
    topic: str | None
    unique_key: str | None
    keys: str | None
    store_ms: int | None
    due_ms: int | None
    deliveries: int
    delivered_ms: int | None
    """Store time of its first delivery."""
    delivered_offset: int | None
    """Physical offset of its first delivery."""
    last_delivered_ms: int | None
    last_delivered_offset: int | None
    store: str | None = None
    """In a cluster's audit, the store of the message."""


class Input(msgspec.Struct, omit_defaults=True):
    """A range of the commitlog that was read; in a cluster's audit a store, with its own `inputs_sha256`."""

    start: int
    end: int
    sha256: str
    records: int
    store: str | None = None


class Missing(msgspec.Struct):
    """A store of a cluster that could not be read."""

    store: str
    why: str


class Cluster(msgspec.Struct):
    """The stores of a cluster's audit. Each is matched by itself; the figures are of all of them together."""

    stores: list[str]
    """All stores, in order, including the missing ones."""
    missing: list[Missing]
    """Stores that are in no figure."""


class Summary(msgspec.Struct, kw_only=True):
    """audit.json. The statuses add up to `scheduled`."""

    store: str
    """Path or URI; for a cluster the pattern of its stores."""
    written_by: str
    is_running: bool
    made_ms: int
    begin: int
    end: int
    """`begin` and `end`: physical offsets; for a cluster 0, and the bytes of all its commitlogs."""
    records: int
    scheduled: int
    delivered: int
    cancelled: int
    pending: int
    lost: int
    twice: int
    destroyed: int
    """Messages that wait according to the broker's files, but whose records cannot be read."""
    unreachable: int
    """Pending messages that a start on the store as it is will not find, by the broker that had the store last."""
    starts: list[StartOutcome]
    """What each broker would find; empty if one has the store open."""
    levels: dict[str, int]
    """The statuses of messages of delay levels."""
    timers: dict[str, int]
    """The statuses of messages of timers."""
    overdue: int
    """Pending messages that were due before the last record was stored."""
    superfluous: int
    """Deliveries beyond the first of a message."""
    unclaimed: int
    """Deliveries whose message is not in the log, although the log has the physical offset at which it would lie."""
    expired: int
    """Deliveries whose message was in an expired part of the log."""
    lateness: Lateness
    damaged: int
    damages: list[tuple[int, int, str]]
    """Physical offset, bytes, reason; at most some thousands."""
    corrupt: int | None
    """Records with wrong checksums, or that disagree with their consume queues; None if that was not checked."""
    corruptions: list[tuple[int, int, str]]
    """The corrupt records: physical offset, bytes, reason; at most some thousands."""
    offenders: list[Offender]
    inputs: list[Input]
    inputs_sha256: str
    cluster: Cluster | msgspec.UnsetType = msgspec.UNSET
    """Unset in the audit of one store."""
    digest: str = ""
    """SHA-256 of this summary as JSON with sorted keys, with `digest` and `signature` empty."""
    signature: str = ""
    """Ed25519 signature of the digest, hexadecimal; empty if not signed."""

    @property
    def stores(self) -> list[str]:
        """The stores of a cluster; empty in the audit of one store."""
        return self.cluster.stores if isinstance(self.cluster, Cluster) else []

    @property
    def missing(self) -> list[Missing]:
        """Stores of a cluster that could not be read."""
        return self.cluster.missing if isinstance(self.cluster, Cluster) else []

    @property
    def is_good(self) -> bool:
        """Whether nothing is lost, destroyed, corrupt, or unreachable."""
        return self.lost == self.destroyed == self.unreachable == 0 and not self.corrupt


class Audit:
    """The data read from a store, and the outcome of its scheduled messages."""

    def __init__(
        self,
        session: Session,
        path: str,
        *,
        delay_levels: str | None = None,
        with_usage: bool = False,
        check_bodies: bool = False,
        state: str | None = None,
        anew: bool = False,
        tell: Callable[[str], None] = warn,
    ) -> None:
        """Read the whole store. `with_usage`: also collect what the store is used for; `check_bodies`: also check the
        checksums of all records, and their units. `state`: a directory in which each run keeps its results for the
        next; ranges kept there of this store are not read again, unless `anew`. `tell`: called with a line if kept
        results cannot be used, or none can be kept. Raises NoStore if there is no store, JobError."""
        self._session = session
        self.delay_levels = delay_levels
        self.store = StoreFiles.open(path, unflushed=True)
        try:
            self.progress = read_progress(self.store, delay_levels)
        except ValueError as error:
            raise JobError(f"the table of delay levels: {error}") from None
        if self.store.is_running:
            # The end of the commitlog is looked up after the progress, so that it has every delivery that the progress
            # counts.
            self.store = StoreFiles.open(path, unflushed=True)
        folder = _folder(state, self.store, tell) if state is not None else None
        try:
            self.found = (
                self._read(with_usage=with_usage, check=check_bodies)
                if folder is None
                else self._read_more(folder, with_usage=with_usage, check=check_bodies, anew=anew, tell=tell)
            )
        finally:
            if folder is not None:
                folder.close()
        self.reads, self.figures = self.found.reads, self.found.figures
        self.damages = [(int(a), int(b), str(c)) for read in self.reads for a, b, c in read["damages"]]
        """Stretches that cannot be read: physical offset, bytes, reason."""
        self.damages += self.store.gaps()
        self.corrupt = sum(read["corrupt"] for read in self.reads) if check_bodies else None
        self.corruptions = [(int(a), int(b), str(c)) for read in self.reads for a, b, c in read["corruptions"]]
        """The corrupt records: physical offset, bytes, reason. `corrupt` is their number, None if not checked."""
        since = int(self.reads[-1]["start"]) if self.reads else 0
        self.destroyed = destroyed(self.store, [(offset, offset + size) for offset, size, _ in self.damages], since)
        self.starts = starts(self.store, self.figures, self.damages)
        """Which waiting messages each broker finds if it starts on the store."""
        self.last_ms = max((read["last_ms"] for read in self.reads), default=0)
        """Store time of the last record, ms since the epoch."""
        self.topics: dict[int, str] = {}
        """Names of topics by their hash."""
        for read in self.reads:
            self.topics.update((int(key), name) for key, name in read["topics"].items())

    def _read(self, *, with_usage: bool, check: bool) -> StoreFindings:
        store, progress, ranges = self.store, self.progress, plan(self.store, RANGE_BYTES)
        self.step_ms = _step(store, ranges)
        """Step of curves over time, ms."""
        begin = store.segments[0].first_offset
        buckets = max(1, (store.readable_end - begin) // BUCKET_BYTES)
        matching = Matching(begin, self.step_ms, buckets, begin_ms=begin_ms_of(store), compacted_to=compacted_to(store))

        def load(number: int) -> RangeFound:
            return read_range(store, ranges[number], progress, with_usage=with_usage, check=check)

        return find(self._shuffle(), load, len(ranges), matching).found

    def _read_more(
        self, folder: Folder, *, with_usage: bool, check: bool, anew: bool, tell: Callable[[str], None]
    ) -> StoreFindings:
        kept = Kept(
            folder,
            self.store,
            self.progress,
            self._shuffle,
            with_usage=with_usage,
            check=check,
            anew=anew,
            tell=tell,
            range_size=RANGE_BYTES,
            bucket_bytes=BUCKET_BYTES,
        )
        self.step_ms = _step(self.store, kept.ranges)
        return kept.find(self.step_ms)

    def _shuffle(self) -> Shuffle:
        # A partition has one bucket of matching, or a few.
        size = self.store.readable_end - self.store.segments[0].first_offset
        session = self._session() if callable(self._session) else self._session
        return BySpark(session, max(4, size // PARTITION_BYTES))


def _folder(state: str, store: StoreFiles, tell: Callable[[str], None]) -> Folder | None:
    """Open the folder of kept results of a store; None if it cannot be had, which is passed to `tell`."""
    path = directory_of(local_path(state), store.path)
    try:
        return Folder.open(path)
    except BlockingIOError:
        tell(f"{path}: another run is using it; this one reads everything, and keeps nothing")
    except OSError as error:
        tell(f"{path}: nothing can be kept for the next run: {reason(error)}")
    return None


def audit(
    session: Session,
    path: str,
    out: str | None = None,
    *,
    delay_levels: str | None = None,
    key: bytes | None = None,
    check_bodies: bool = False,
    state: str | None = None,
    anew: bool = False,
    tell: Callable[[str], None] = warn,
    made_ms: int | None = None,
) -> Summary:
    """Audit a store; write the files to the directory `out`. `key`: a private Ed25519 key in PEM, to sign with.
    `check_bodies`: also check the checksums of all records, and their units. `state`: a directory in which each run
    keeps its results for the next one of the same store, which then reads only new records; `anew`: read everything
    anyway, as `check_bodies` does. `tell`: called with a line if kept results cannot be used; a warning by default.
    `made_ms`: the time of the audit in the summary, ms since the epoch; now by default. Raises JobError."""
    refuse_within(path, out, state)
    work = Audit(session, path, delay_levels=delay_levels, check_bodies=check_bodies, state=state, anew=anew, tell=tell)
    summary = summarise(work, made_ms)
    finish(work, summary, out, key)
    return summary


def finish(work: Audit, summary: Summary, out: str | None, key: bytes | None) -> None:
    """Sign a summary, and write the files if `out` is given. Raises JobError."""
    sign(summary, key)
    if out is None:
        return
    write(summary, offenders_table(work), out)


def write(summary: Summary, offenders: pa.Table, out: str) -> None:
    """Write the files of an audit to a directory. Raises JobError."""
    out = local_path(out)
    try:
        os.makedirs(out, exist_ok=True)
        pq.write_table(offenders, os.path.join(out, "offenders.parquet"), compression="zstd")
        OsFiles().write_whole(
            os.path.join(out, "audit.json"), msgspec.json.format(msgspec.json.encode(summary), indent=1)
        )
    except OSError as error:
        raise JobError(f"{out}: cannot be written: {reason(error)}") from None


def summarise(work: Audit, made_ms: int | None = None) -> Summary:
    """Return the summary, not yet signed. `made_ms`: the time of the audit, ms since the epoch; now by default."""
    store, reads, figures = work.store, work.reads, work.figures
    inputs = [Input(read["start"], read["end"], read["sha256"], read["records"]) for read in reads]
    counts = {name: figures.count(status) for status, name in enumerate(STATUSES)}
    unclaimed = counts.pop("unclaimed")
    overdue = figures.pending[(figures.pending["second"] + 1) * 1000 <= work.last_ms]
    return Summary(
        store=store.path,
        written_by=store.written_by,
        is_running=store.is_running,
        made_ms=time.time_ns() // 1_000_000 if made_ms is None else made_ms,
        begin=store.segments[0].first_offset,
        end=store.readable_end,
        records=sum(part.records for part in inputs),
        scheduled=sum(counts.values()) + len(work.destroyed),
        delivered=counts["delivered"],
        cancelled=counts["cancelled"],
        pending=counts["pending"],
        lost=counts["lost"],
        twice=counts["twice"],
        destroyed=len(work.destroyed),
        unreachable=sum(start.misses for start in work.starts if start.wrote_it),
        starts=work.starts,
        levels=_counts(work, is_level=True),
        timers=_counts(work, is_level=False),
        overdue=int(overdue["count"].sum()),
        superfluous=figures.superfluous,
        unclaimed=unclaimed - figures.expired,
        expired=figures.expired,
        lateness=lateness_of([figures]),
        damaged=sum(read["damaged"] for read in reads) + len(store.gaps()),
        damages=work.damages,
        corrupt=work.corrupt,
        corruptions=work.corruptions,
        offenders=_listed(work),
        inputs=inputs,
        inputs_sha256=hashlib.sha256("".join(part.sha256 for part in inputs).encode()).hexdigest(),
    )


def _counts(work: Audit, *, is_level: bool) -> dict[str, int]:
    found = {name: work.figures.count(status, is_level=is_level) for status, name in enumerate(STATUSES[:UNCLAIMED])}
    found[DESTROYED] = int(np.count_nonzero((work.destroyed["delay_level"] > 0) == is_level))
    return found


def lateness_of(parts: Sequence[Figures]) -> Lateness:
    """Return the lateness of all deliveries, of one store or of several."""
    rows = np.concatenate([part.late_by_level for part in parts])
    rows["key"] = 0
    for _, found in lateness.stats(lateness.added([rows]), PERCENTILES):
        names = (f"p{percent:g}" for percent in PERCENTILES)
        return Lateness(
            found.number, found.early, round(found.mean, 3), dict(zip(names, found.percentiles, strict=True))
        )
    return Lateness(0, 0, 0.0, {})


def _step(store: StoreFiles, ranges: list[Range]) -> int:
    """Return a step, in ms, that cuts the time in which the store was written into at most POINTS points."""
    times = [ms for ms in (first_store_ms(store, part) for part in (*ranges[:1], *ranges[-1:])) if ms is not None]
    span = (times[-1] - times[0]) * len(ranges) // max(1, len(ranges) - 1) if len(times) > 1 else 0
    return step_of(span, POINTS)


def _listed(work: Audit) -> list[Offender]:
    """Return the first offending messages, with fields of their records."""
    cases = work.figures.offenders[:MAX_LISTED]
    told = {name: values.to_pylist() for name, values in _told_of(work.store, cases).items()}
    found = [
        Offender(
            what=STATUSES[case["status"]],
            physical_offset=int(case["physical_offset"]),
            kind="delivery" if case["status"] == UNCLAIMED else "level" if case["delay_level"] else "timer",
            topic=told["topic"][at],
            unique_key=told["unique_key"][at],
            keys=told["keys"][at],
            store_ms=int(case["at_ms"]),
            due_ms=None if case["status"] == UNCLAIMED else int(case["due_ms"]),
            deliveries=int(case["deliveries"]),
            **_deliveries(case),
        )
        for at, case in enumerate(cases)
    ]
    gone = [
        Offender(
            what=DESTROYED,
            physical_offset=offset,
            kind="level" if level else "timer",
            topic=None,
            unique_key=None,
            keys=None,
            store_ms=None,
            due_ms=due_ms or None,
            deliveries=0,
            delivered_ms=None,
            delivered_offset=None,
            last_delivered_ms=None,
            last_delivered_offset=None,
        )
        for offset, _, level, due_ms in work.destroyed[: MAX_LISTED - len(found)].tolist()
    ]
    return [*found, *gone]


def _deliveries(case: Any) -> dict[str, Any]:
    """Return times and offsets of the first and the last delivery of a case, for an Offender."""
    is_delivered, is_twice = case["deliveries"] > 0, case["deliveries"] > 1
    return {
        "delivered_ms": int(case["first_ms"]) if is_delivered else None,
        "delivered_offset": int(case["first_offset"]) if is_delivered else None,
        "last_delivered_ms": int(case["last_ms"]) if is_twice else None,
        "last_delivered_offset": int(case["last_offset"]) if is_twice else None,
    }


def offenders_table(work: Audit) -> pa.Table:
    """Return the table of offending cases and destroyed messages, with fields of their records if those can be read."""
    cases, destroyed = work.figures.offenders, work.destroyed
    gone = np.zeros(len(destroyed), cases.dtype)
    for name in ("physical_offset", "size", "delay_level", "due_ms"):
        gone[name] = destroyed[name]
    gone["origin"] = -1
    status = [STATUSES[value] for value in cases["status"]] + [DESTROYED] * len(gone)
    is_unclaimed = np.concatenate([cases["status"] == UNCLAIMED, np.zeros(len(gone), np.bool_)])
    rows = np.concatenate([cases, gone])
    kind = np.where(is_unclaimed, "delivery", np.where(rows["delay_level"] > 0, "level", "timer"))
    told = _told_of(work.store, cases)
    columns = {
        "status": pa.array(status, pa.string()),
        "kind": pa.array(kind.tolist(), pa.string()),
        **{name: pa.chunked_array([values, pa.nulls(len(gone), values.type)]) for name, values in told.items()},
        "physical_offset": pa.array(np.ascontiguousarray(rows["physical_offset"])),
        "size": pa.array(np.ascontiguousarray(rows["size"])),
        "delay_level": pa.array(rows["delay_level"].tolist(), pa.int32()),
        **_time_columns("store", rows["at_ms"], rows["at_ms"] > 0),
        **_time_columns("due", rows["due_ms"], (rows["due_ms"] > 0) & ~is_unclaimed),
        "deliveries": pa.array(np.ascontiguousarray(rows["deliveries"])),
    }
    is_delivered = rows["deliveries"] > 0
    for name, source in (("delivered", "first"), ("last_delivered", "last")):
        columns[f"{name}_offset"] = pa.array(np.ascontiguousarray(rows[f"{source}_offset"]), mask=~is_delivered)
        columns |= _time_columns(name, rows[f"{source}_ms"], is_delivered)
    columns["origin"] = pa.array(np.ascontiguousarray(rows["origin"]), mask=rows["origin"] < 0)
    return pa.table(columns)


def _time_columns(name: str, ms: NDArray[np.int64], known: NDArray[np.bool_]) -> dict[str, pa.Array]:
    """Return a time as ms since the epoch, and as a timestamp; null where it is not known."""
    found = pa.array(np.ascontiguousarray(ms), mask=~known)
    return {f"{name}_ms": found, f"{name}_time": found.cast(pa.timestamp("ms", "UTC"))}


_TOLD: Final = {
    "topic": ("real_topic", pa.string()),
    "queue_id": ("real_queue_id", pa.int32()),
    "unique_key": ("unique_key", pa.string()),
    "keys": ("keys", pa.string()),
}
"""By column of the offenders: the column of the table of messages, and its type."""


def _told_of(store: StoreFiles, cases: NDArray[Any]) -> dict[str, pa.Array]:
    """Return fields of the records of cases: real topic and queue, unique key and keys; null where there is none."""
    order = np.argsort(cases["physical_offset"], kind="stable")
    offsets, sizes = (cases[name][order].astype(np.int64) for name in ("physical_offset", "size"))
    found: dict[str, list[Any]] = {name: [None] * len(cases) for name in _TOLD}
    has_size = sizes > 0
    # The size is unknown for a delivery without a message, so each of these is read by itself.
    all_records = chain(at_offsets(store, offsets[has_size], sizes[has_size]), records_at(store, offsets[~has_size]))
    for records in all_records:
        batch = tables.RecordColumns(records)
        rows = order[np.searchsorted(offsets, records.physical_offset)].tolist()
        for name, (column, _) in _TOLD.items():
            for row, value in zip(rows, batch.column(column).to_pylist(), strict=True):
                found[name][row] = value
    return {name: pa.array(values, _TOLD[name][1]) for name, values in found.items()}


# --- the digest and the signature


def _text(summary: Summary) -> bytes:
    bare = msgspec.structs.replace(summary, digest="", signature="")
    return msgspec.json.encode(bare, order="sorted")


def sign(summary: Summary, key: bytes | None) -> None:
    """Set the digest, and the signature if there is a key: a private Ed25519 key in PEM. Raises JobError."""
    digest = hashlib.sha256(_text(summary)).digest()
    summary.digest = digest.hex()
    if key is None:
        return
    private = _private_key(key)
    summary.signature = private.sign(digest).hex()


def _private_key(pem: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise JobError(f"the key to sign with is not readable: {error}; openssl genpkey -algorithm ed25519") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise JobError("the key to sign with is not an Ed25519 key: openssl genpkey -algorithm ed25519")
    return key


def verify(text: bytes, public_key: bytes | None = None) -> Summary:
    """Return the summary in the text of an audit.json after checking it: its digest, its inputs, and its signature if a
    public key (PEM) is given. Raises JobError if one of them is wrong."""
    try:
        summary = msgspec.json.decode(text, type=Summary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JobError(f"this is not an audit.json: {error}") from None
    digest = hashlib.sha256(_text(summary)).digest()
    if digest.hex() != summary.digest:
        raise JobError("the summary was changed after it was made: its digest differs")
    joined = "".join(part.sha256 for part in summary.inputs)
    if hashlib.sha256(joined.encode()).hexdigest() != summary.inputs_sha256:
        raise JobError("the summary's inputs do not have the hash that it states")
    if public_key is not None:
        _check_signature(summary, digest, public_key)
    return summary


def _check_signature(summary: Summary, digest: bytes, public_key: bytes) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(public_key)
    except ValueError as error:
        raise JobError(f"the public key is not readable: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise JobError("the public key is not an Ed25519 key")
    if not summary.signature:
        raise JobError("the summary is not signed")
    try:
        key.verify(bytes.fromhex(summary.signature), digest)
    except (InvalidSignature, ValueError):
        raise JobError("the signature is not for this summary, or not by this key") from None
