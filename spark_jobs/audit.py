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
import pyarrow.parquet as pq

from spark_jobs import tables
from spark_jobs.cases import CANCELLED, DELIVERED, LOST, PENDING, STATUSES, TWICE, UNCLAIMED, cases_of
from spark_jobs.errors import JobError
from spark_jobs.files import replace_file
from spark_jobs.progress import read_progress
from spark_jobs.ranges import plan, records_at
from spark_jobs.store_files import StoreFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_LISTED: Final = 100
"""Offending messages that the summary names; offenders.parquet has all."""
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
    """An audit at work: what was read of a store, and the cases made of it. Close it, or use it with `with`."""

    def __init__(
        self, session: SparkSession, path: str, *, delay_levels: str | None = None, with_usage: bool = False
    ) -> None:
        """Reads the whole store; `with_usage`: looks at more of it. Raises JobError where there is none."""
        from pyspark import StorageLevel

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
        found = cases_of(session, self.store, self.progress, plan(self.store), with_usage=with_usage)
        self.found = found
        self._kept = [found.parts, found.cases.persist(StorageLevel.MEMORY_AND_DISK)]
        self.cases: DataFrame = found.cases
        """See `cases.Cases`."""
        self.reads = found.reads()
        """What was read, in order: see `cases.Cases.reads`."""
        self.topics: dict[int, str] = {}
        """Names of topics by their hash."""
        for read in self.reads:
            self.topics.update((int(key), name) for key, name in read["topics"].items())

    def close(self) -> None:
        """Give back what Spark keeps."""
        for frame in self._kept:
            frame.unpersist()

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    with Audit(session, path, delay_levels=delay_levels) as work:
        summary = summarise(work)
        finish(work, summary, out, key)
    return summary


def finish(work: Audit, summary: Summary, out: str | None, key: bytes | None) -> None:
    """Sign a summary, and write the files where there is a directory to write them to. Raises JobError."""
    sign(summary, key)
    if out is None:
        return
    offenders = _offending(work).toArrow().sort_by("physical_offset")
    try:
        os.makedirs(out, exist_ok=True)
        pq.write_table(offenders, os.path.join(out, "offenders.parquet"), compression="zstd")
        replace_file(os.path.join(out, "audit.json"), msgspec.json.format(msgspec.json.encode(summary), indent=1))
    except OSError as error:
        raise JobError(f"{out}: cannot be written: {error.strerror or error}") from None


def summarise(work: Audit) -> Summary:
    """The summary, not yet signed."""
    from pyspark.sql import functions as f

    store, reads = work.store, work.reads
    begin = store.segments[0].first_offset
    last_ms = max((read["last_ms"] for read in reads), default=0)
    rows = (
        work.cases.groupBy("status", (f.col("delay_level") > 0).alias("is_level"))
        .agg(
            f.count(f.lit(1)).alias("count"),
            f.sum(f.greatest(f.col("deliveries") - 1, f.lit(0))).alias("superfluous"),
            f.count(f.when(f.col("due_ms") <= last_ms, 1)).alias("due"),
            f.count(f.when((f.col("origin") >= 0) & (f.col("origin") < begin), 1)).alias("expired"),
        )
        .collect()
    )
    by_kind: dict[bool, dict[str, int]] = {kind: dict.fromkeys(STATUSES, 0) for kind in (True, False)}
    for row in rows:
        if row.status != UNCLAIMED:
            by_kind[row.is_level][row.status] += row["count"]
    total = {status: by_kind[True][status] + by_kind[False][status] for status in STATUSES}
    unclaimed = [row for row in rows if row.status == UNCLAIMED]
    expired = sum(row.expired for row in unclaimed)
    inputs = [Input(read["start"], read["end"], read["sha256"], read["records"]) for read in reads]
    damages = [(int(a), int(b), str(c)) for read in reads for a, b, c in read["damages"]]
    damages += [(offset, size, "a file is missing") for offset, size in store.gaps()]
    return Summary(
        store=store.path,
        written_by=store.written_by,
        is_running=store.is_running,
        made_ms=time.time_ns() // 1_000_000,
        begin=begin,
        end=store.readable_end,
        records=sum(part.records for part in inputs),
        scheduled=sum(total.values()),
        delivered=total[DELIVERED],
        cancelled=total[CANCELLED],
        pending=total[PENDING],
        lost=total[LOST],
        twice=total[TWICE],
        levels=by_kind[True],
        timers=by_kind[False],
        overdue=sum(row.due for row in rows if row.status == PENDING),
        superfluous=sum(row.superfluous for row in rows),
        unclaimed=sum(row["count"] for row in unclaimed) - expired,
        expired=expired,
        lateness=_lateness(work),
        damaged=sum(read["damaged"] for read in reads) + len(store.gaps()),
        damages=damages,
        offenders=_listed(work),
        inputs=inputs,
        inputs_sha256=hashlib.sha256("".join(part.sha256 for part in inputs).encode()).hexdigest(),
    )


def _lateness(work: Audit) -> Lateness:
    from pyspark.sql import functions as f

    late = f.col("first_ms") - f.col("due_ms")
    row = (
        work.cases.where(f"status in ('{DELIVERED}', '{TWICE}')")
        .agg(
            f.count(f.lit(1)).alias("count"),
            f.count(f.when(late < 0, 1)).alias("early"),
            f.avg(late).alias("mean"),
            f.percentile_approx(late, [p / 100 for p in PERCENTILES], f.lit(10_000)).alias("percentiles"),
        )
        .first()
    )
    assert row is not None
    names = [f"p{p:g}" for p in PERCENTILES]
    percentiles = dict(zip(names, row.percentiles or [], strict=False))
    return Lateness(row["count"], row.early, round(row.mean or 0.0, 3), percentiles)


def _offending(work: Audit) -> DataFrame:
    begin = work.store.segments[0].first_offset
    stray = f"status = '{UNCLAIMED}' and (origin < 0 or origin >= {begin})"
    return work.cases.where(f"status in ('{LOST}', '{TWICE}') or {stray}")


def _listed(work: Audit) -> list[Offender]:
    """The first of the offending messages, with what their records tell."""
    rows = _offending(work).orderBy("physical_offset").limit(MAX_LISTED).collect()
    found = {
        row.physical_offset: Offender(
            what=row.status,
            physical_offset=row.physical_offset,
            kind="delivery" if row.status == UNCLAIMED else "level" if row.delay_level else "timer",
            topic=None,
            unique_key=None,
            keys=None,
            store_ms=row.at_ms,
            due_ms=None if row.status == UNCLAIMED else row.due_ms,
            deliveries=row.deliveries,
            delivered_ms=row.first_ms or None,
        )
        for row in rows
    }
    for records in records_at(work.store, np.array(sorted(found), np.int64)):
        batch = tables.Batch(records)
        columns = [batch.column(name).to_pylist() for name in ("real_topic", "unique_key", "keys")]
        for offset, topic, unique, keys in zip(records.physical_offset.tolist(), *columns, strict=True):
            offender = found[offset]
            offender.topic, offender.unique_key, offender.keys = topic, unique, keys
    return list(found.values())


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
    except msgspec.DecodeError as error:
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
