"""The audit: whether every scheduled message was delivered once, and when.

    <out>/audit.json           the summary, see `Summary`
    <out>/offenders.parquet    a row for each message that was lost or delivered more than once, and for each delivery
                               whose message is not in the log

The summary tells what was read: the SHA-256 of each range of the commitlog, and of all of them together in order. It
has a digest of itself, and a signature (Ed25519) where a key is given; `verify` checks both.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_jobs import lateness, tables
from spark_jobs.cases import find
from spark_jobs.errors import JobError
from spark_jobs.figures import STATUSES, UNCLAIMED, Figures
from spark_jobs.files import local_path, replace_file
from spark_jobs.progress import read_progress
from spark_jobs.ranges import Range, first_store_ms, plan, records_at
from spark_jobs.store_files import StoreFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

MAX_LISTED: Final = 100
"""Offending messages that the summary names; offenders.parquet has all."""
STEPS_MS: Final = (1000, 10_000, 60_000, 300_000, 900_000, 3_600_000, 6 * 3_600_000, 86_400_000, 7 * 86_400_000)
MAX_POINTS: Final = 1500
"""Of a curve."""
PARTITION_BYTES: Final = 128 << 20
PERCENTILES: Final = (50, 90, 99, 99.9, 100)


class Lateness(msgspec.Struct):
    """Of what was delivered: store time of the delivery minus deliver time, in ms."""

    count: int
    early: int
    mean_ms: float
    percentiles_ms: dict[str, int]


class Offender(msgspec.Struct):
    """A message of which something is wrong. Times in ms since the epoch."""

    what: str
    """lost, twice, or unclaimed: a delivery whose message is not in the log."""
    physical_offset: int
    kind: str
    topic: str | None
    unique_key: str | None
    keys: str | None
    store_ms: int
    due_ms: int | None
    deliveries: int
    delivered_ms: int | None


class Input(msgspec.Struct):
    """A range of the commitlog that was read."""

    start: int
    end: int
    sha256: str
    records: int


class Summary(msgspec.Struct, kw_only=True):
    """audit.json. The statuses add up to `scheduled`."""

    store: str
    written_by: str
    is_running: bool
    made_ms: int
    begin: int
    end: int
    records: int
    scheduled: int
    delivered: int
    cancelled: int
    pending: int
    lost: int
    twice: int
    levels: dict[str, int]
    """The statuses of messages of delay levels alone..."""
    timers: dict[str, int]
    """...and of timers."""
    overdue: int
    """Of those pending, due before the last record was stored."""
    superfluous: int
    """Deliveries beyond the first."""
    unclaimed: int
    """Deliveries whose message is not in the log, though its place is..."""
    expired: int
    """...or is not, the file having expired."""
    lateness: Lateness
    damaged: int
    damages: list[tuple[int, int, str]]
    """Physical offset, bytes, reason; at most some thousands."""
    offenders: list[Offender]
    inputs: list[Input]
    inputs_sha256: str
    digest: str = ""
    """SHA-256 of this text with `digest` and `signature` empty."""
    signature: str = ""
    """Ed25519, of the digest; hexadecimal."""

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost."""
        return self.lost == 0


class Audit:
    """What was read of a store, and what became of its scheduled messages."""

    def __init__(
        self, session: SparkSession, path: str, *, delay_levels: str | None = None, with_usage: bool = False
    ) -> None:
        """Reads the whole store; `with_usage`: looks at more of it. Raises JobError where there is none."""
        self.store = StoreFiles.open(path, unflushed=True)
        try:
            self.progress = read_progress(self.store, delay_levels)
        except ValueError as error:
            raise JobError(f"the table of delay levels: {error}") from None
        if self.store.is_running:
            # What was done by then is in the commitlog, if one looks for its end after that.
            self.store = StoreFiles.open(path, unflushed=True)
        # A partition of a shuffle is one bucket of matching, or few.
        partitions = max(4, (self.store.readable_end - self.store.segments[0].first_offset) // PARTITION_BYTES)
        session.conf.set("spark.sql.shuffle.partitions", str(partitions))
        ranges = plan(self.store)
        self.step_ms = _step(self.store, ranges)
        """Of curves over time."""
        self.found = find(session, self.store, self.progress, ranges, step_ms=self.step_ms, with_usage=with_usage)
        self.reads, self.figures = self.found.reads, self.found.figures
        self.last_ms = max((read["last_ms"] for read in self.reads), default=0)
        """When the last record was stored."""
        self.topics: dict[int, str] = {}
        """Names of topics by their hash."""
        for read in self.reads:
            self.topics.update((int(key), name) for key, name in read["topics"].items())


def audit(
    session: SparkSession,
    path: str,
    out: str | None = None,
    *,
    delay_levels: str | None = None,
    key: bytes | None = None,
) -> Summary:
    """Audit a store; write the files to the directory `out`. `key`: a private Ed25519 key in PEM, to sign with.

    Raises JobError."""
    work = Audit(session, path, delay_levels=delay_levels)
    summary = summarise(work)
    finish(work, summary, out, key)
    return summary


def finish(work: Audit, summary: Summary, out: str | None, key: bytes | None) -> None:
    """Sign a summary, and write the files where there is a directory to write them to. Raises JobError."""
    sign(summary, key)
    if out is None:
        return
    out = local_path(out)
    offenders = offenders_table(work.figures.offenders, work.topics)
    try:
        os.makedirs(out, exist_ok=True)
        pq.write_table(offenders, os.path.join(out, "offenders.parquet"), compression="zstd")
        replace_file(os.path.join(out, "audit.json"), msgspec.json.format(msgspec.json.encode(summary), indent=1))
    except OSError as error:
        raise JobError(f"{out}: cannot be written: {error.strerror or error}") from None


def summarise(work: Audit) -> Summary:
    """The summary, not yet signed."""
    store, reads, figures = work.store, work.reads, work.figures
    inputs = [Input(read["start"], read["end"], read["sha256"], read["records"]) for read in reads]
    damages = [(int(a), int(b), str(c)) for read in reads for a, b, c in read["damages"]]
    damages += [(offset, size, "a file is missing") for offset, size in store.gaps()]
    counts = {name: figures.count(status) for status, name in enumerate(STATUSES)}
    unclaimed = counts.pop("unclaimed")
    overdue = figures.pending[(figures.pending["second"] + 1) * 1000 <= work.last_ms]
    return Summary(
        store=store.path,
        written_by=store.written_by,
        is_running=store.is_running,
        made_ms=time.time_ns() // 1_000_000,
        begin=store.segments[0].first_offset,
        end=store.readable_end,
        records=sum(part.records for part in inputs),
        scheduled=sum(counts.values()),
        delivered=counts["delivered"],
        cancelled=counts["cancelled"],
        pending=counts["pending"],
        lost=counts["lost"],
        twice=counts["twice"],
        levels=_counts(figures, is_level=True),
        timers=_counts(figures, is_level=False),
        overdue=int(overdue["count"].sum()),
        superfluous=figures.superfluous,
        unclaimed=unclaimed - figures.expired,
        expired=figures.expired,
        lateness=_lateness(figures),
        damaged=sum(read["damaged"] for read in reads) + len(store.gaps()),
        damages=damages,
        offenders=_listed(work),
        inputs=inputs,
        inputs_sha256=hashlib.sha256("".join(part.sha256 for part in inputs).encode()).hexdigest(),
    )


def _counts(figures: Figures, *, is_level: bool) -> dict[str, int]:
    return {name: figures.count(status, is_level=is_level) for status, name in enumerate(STATUSES[:UNCLAIMED])}


def _lateness(figures: Figures) -> Lateness:
    rows = figures.late_by_level.copy()
    rows["key"] = 0
    for _, found in lateness.stats(lateness.added([rows]), PERCENTILES):
        names = (f"p{percent:g}" for percent in PERCENTILES)
        return Lateness(
            found.number, found.early, round(found.mean, 3), dict(zip(names, found.percentiles, strict=True))
        )
    return Lateness(0, 0, 0.0, {})


def _step(store: StoreFiles, ranges: list[Range]) -> int:
    """A step that cuts the time in which the store was written into some hundred points."""
    times = [ms for ms in (first_store_ms(store, part) for part in (*ranges[:1], *ranges[-1:])) if ms is not None]
    span = (times[-1] - times[0]) * len(ranges) // max(1, len(ranges) - 1) if len(times) > 1 else 0
    return next((step for step in STEPS_MS if span // step < MAX_POINTS), STEPS_MS[-1])


def _listed(work: Audit) -> list[Offender]:
    """The first of the offending messages, with what their records tell."""
    found = {
        int(case["physical_offset"]): Offender(
            what=STATUSES[case["status"]],
            physical_offset=int(case["physical_offset"]),
            kind="delivery" if case["status"] == UNCLAIMED else "level" if case["delay_level"] else "timer",
            topic=None,
            unique_key=None,
            keys=None,
            store_ms=int(case["at_ms"]),
            due_ms=None if case["status"] == UNCLAIMED else int(case["due_ms"]),
            deliveries=int(case["deliveries"]),
            delivered_ms=int(case["first_ms"]) or None,
        )
        for case in work.figures.offenders[:MAX_LISTED]
    }
    for records in records_at(work.store, np.array(sorted(found), np.int64)):
        batch = tables.Batch(records)
        columns = [batch.column(name).to_pylist() for name in ("real_topic", "unique_key", "keys")]
        for offset, topic, unique, keys in zip(records.physical_offset.tolist(), *columns, strict=True):
            offender = found[offset]
            offender.topic, offender.unique_key, offender.keys = topic, unique, keys
    return list(found.values())


def offenders_table(offenders: NDArray[Any], topics: dict[int, str]) -> pa.Table:
    """Offending cases as a table."""
    status = [STATUSES[value] for value in offenders["status"]]
    topic = [topics.get(value) for value in offenders["topic_hash"].tolist()]
    names = ("physical_offset", "size", "at_ms", "due_ms", "delay_level", "deliveries", "first_ms", "last_ms", "origin")
    columns = {name: pa.array(np.ascontiguousarray(offenders[name])) for name in names}
    return pa.table({"status": pa.array(status, pa.string()), "topic": pa.array(topic, pa.string()), **columns})


# --- the digest and the signature


def _text(summary: Summary) -> bytes:
    bare = msgspec.structs.replace(summary, digest="", signature="")
    return msgspec.json.encode(bare, order="sorted")


def sign(summary: Summary, key: bytes | None) -> None:
    """Fill in the digest, and the signature where there is a key: a private Ed25519 key in PEM. Raises JobError."""
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
        raise JobError("the key to sign with is no Ed25519 key: openssl genpkey -algorithm ed25519")
    return key


def verify(text: bytes, public_key: bytes | None = None) -> Summary:
    """The summary in the text of an audit.json, checked: by its digest, and by its signature where a public key (PEM)
    is given. Raises JobError where something does not fit."""
    try:
        summary = msgspec.json.decode(text, type=Summary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JobError(f"this is no audit.json: {error}") from None
    digest = hashlib.sha256(_text(summary)).digest()
    if digest.hex() != summary.digest:
        raise JobError("the summary was changed after it was made: its digest is another")
    joined = "".join(part.sha256 for part in summary.inputs)
    if hashlib.sha256(joined.encode()).hexdigest() != summary.inputs_sha256:
        raise JobError("the summary's inputs do not have the hash that it says")
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
        raise JobError("the public key is no Ed25519 key")
    if not summary.signature:
        raise JobError("the summary is not signed")
    try:
        key.verify(bytes.fromhex(summary.signature), digest)
    except (InvalidSignature, ValueError):
        raise JobError("the signature is not of this summary, or not by this key") from None
