"""The audit gives each message the verdict of the plain rules of tests/spark/world/audit.py."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from duemq.spark_jobs.audit import audit as job
from duemq.spark_jobs.audit.audit import Audit, Summary
from duemq.spark_jobs.audit.events import RangeEvents
from duemq.spark_jobs.audit.figures import STATUSES, UNCLAIMED
from duemq.spark_jobs.audit.matching import match
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.progress import read_progress
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.soak import sampled
from tests.spark.world import audit, faults, oracle
from tests.spark.world.audit import Audit as Judged
from tests.spark.world.audit import Scheduled
from tests.spark.world.faults import AuditFault
from tests.spark.world.load import LEVELS
from tests.spark.world.oracle import Record
from tests.spark.world.stores import SEGMENT, WrittenStore
from tests.unit.spark_jobs.compact_world import new_broker


@dataclass(frozen=True)
class Case:
    """The audit's result for one message."""

    offset: int
    """Physical offset of the record that waits, or waited last."""
    level: int
    status: str
    due_ms: int
    first_ms: int
    deliveries: int


def case_of(message: Scheduled) -> Case:
    assert message.due_ms is not None
    first = message.deliveries[0].store_ms if message.deliveries else 0
    level = message.last.queue_id + 1 if message.last.topic == oracle.SCHEDULE_TOPIC else 0
    verdict = message.verdict
    return Case(message.last.physical_offset, level, verdict, message.due_ms, first, len(message.deliveries))


def cases_of(path: Path) -> tuple[set[Case], set[int]]:
    """Return the result of matching for each message, without Spark, and the offsets of unclaimed deliveries."""
    store = StoreFiles.open(path)
    progress = read_progress(store)
    found = [events for part in plan(store) for events in RangeEvents(store, part, progress)]
    rows = match(np.concatenate([events.waits for events in found]), np.concatenate([events.done for events in found]))
    names = ("physical_offset", "delay_level", "status", "due_ms", "first_ms", "deliveries")
    cases, unclaimed = set(), set()
    for row in rows[list(names)].tolist():
        if row[2] == UNCLAIMED:
            unclaimed.add(row[0])
        else:
            cases.add(Case(row[0], row[1], STATUSES[row[2]], *row[3:]))
    assert len(cases) + len(unclaimed) == len(rows)
    return cases, unclaimed


def check_totals(summary: Summary, expected: Judged) -> None:
    totals = {verdict: getattr(summary, verdict) for verdict in ("delivered", "twice", "cancelled", "pending", "lost")}
    assert totals == {verdict: expected.totals[verdict] for verdict in totals}  # type: ignore[index]
    assert summary.scheduled - summary.destroyed == sum(totals.values()) == len(expected.scheduled)
    assert summary.levels["delivered"] + summary.timers["delivered"] == summary.delivered
    assert sum(summary.levels.values()) + sum(summary.timers.values()) == summary.scheduled
    done = [message for message in expected.scheduled if message.deliveries]
    late = [message.late_ms for message in done]
    assert summary.lateness.count == len(late)
    if late:
        assert summary.lateness.mean_ms == pytest.approx(sum(ms or 0 for ms in late) / len(late), abs=0.01)
        assert summary.lateness.percentiles_ms["p100"] == max(ms or 0 for ms in late)


def test_each_message_of_a_store_is_judged_as_by_the_plain_rules(written: WrittenStore) -> None:
    expected = audit.audit(written.path)
    cases, unclaimed = cases_of(written.path)
    assert cases == set(map(case_of, expected.scheduled))
    assert unclaimed == set()


def test_each_message_of_a_killed_store_is_judged_as_by_the_plain_rules(killed: WrittenStore) -> None:
    expected = audit.audit(killed.path)
    cases, unclaimed = cases_of(killed.path)
    assert cases == set(map(case_of, expected.scheduled))
    assert unclaimed == set()


def test_totals_of_a_store(spark: SparkSession, written: WrittenStore, tmp_path: Path) -> None:
    summary = job.audit(spark, str(written.path), str(tmp_path / "out"))
    expected = audit.audit(written.path)
    check_totals(summary, expected)
    assert summary.is_good
    assert (summary.offenders, summary.unclaimed, summary.expired, summary.damaged) == ([], 0, 0, 0)
    contents = oracle.contents(written.path)
    assert (summary.begin, summary.records) == (0, len(contents.records))
    assert sum(part.records for part in summary.inputs) == summary.records
    assert summary.written_by == ("duemq" if written.kind == "duemq" else "rocketmq")
    assert pq.read_table(tmp_path / "out" / "offenders.parquet").num_rows == 0


def test_totals_of_a_killed_store(spark: SparkSession, killed: WrittenStore) -> None:
    summary = job.audit(spark, str(killed.path))
    check_totals(summary, audit.audit(killed.path))
    assert summary.is_good


def some(before: Judged, topic: str) -> list[Scheduled]:
    return [message for message in before.of("delivered") if message.real_topic.startswith(topic)]


def test_faults_are_found_and_nothing_else(spark: SparkSession, writable: WrittenStore, tmp_path: Path) -> None:
    """The audit finds removed, doubled and delayed deliveries, several of each in one store, and nothing else."""
    path, before = writable.path, audit.audit(writable.path)
    sources = ["levels", "%RETRY%", *(["timers"] if writable.kind != "apache-4.9.7" else [])]
    seeded: list[AuditFault] = []
    for topic in sources:
        chosen = some(before, topic)
        seeded += [faults.remove_delivery(path, chosen[number]) for number in (0, 7, 20)]
        seeded += [faults.double_delivery(path, chosen[number]) for number in (2, 3)]
        seeded += [faults.delay_delivery(path, chosen[5], 12_345)]
    expected = audit.audit(path)
    cases, unclaimed = cases_of(path)
    assert cases == set(map(case_of, expected.scheduled))
    assert unclaimed == set()

    summary = job.audit(spark, str(path), str(tmp_path / "out"))
    check_totals(summary, expected)
    assert not summary.is_good
    assert (summary.lost, summary.twice) == (3 * len(sources), 2 * len(sources))
    assert summary.superfluous == summary.twice
    wrong = {fault.origin_offset: fault for fault in seeded if fault.verdict in ("lost", "twice")}
    last = {message.origin.physical_offset: message.last.physical_offset for message in expected.scheduled}
    listed = {one.physical_offset: (one.what, one.unique_key) for one in summary.offenders}
    assert listed == {last[offset]: (fault.verdict, fault.unique_key) for offset, fault in wrong.items()}
    wrongs = [*expected.of("lost"), *expected.of("twice")]
    assert {one.topic for one in summary.offenders} == {one.real_topic for one in wrongs}
    rows = pq.read_table(tmp_path / "out" / "offenders.parquet").to_pylist()
    assert {row["physical_offset"]: row["status"] for row in rows} == {at: what for at, (what, _) in listed.items()}
    assert {row["deliveries"] for row in rows if row["status"] == "twice"} == {2}
    origins = {message.last.physical_offset: message for message in wrongs}
    for row in rows:
        message = origins[row["physical_offset"]]
        properties = message.last.properties
        assert (row["topic"], row["queue_id"]) == (message.real_topic, int(properties["REAL_QID"]))
        assert (row["unique_key"], row["keys"]) == (message.unique_key, properties.get("KEYS"))
        assert (row["store_ms"], row["due_ms"], row["origin"]) == (message.last.store_ms, message.due_ms, None)
        assert row["due_time"] == datetime.fromtimestamp((message.due_ms or 0) / 1000, UTC)
        ends = [row["delivered_offset"], row["last_delivered_offset"]]
        deliveries = sorted(record.physical_offset for record in message.deliveries)
        assert ends == ([deliveries[0], deliveries[-1]] if deliveries else [None, None])
        assert (row["last_delivered_ms"] is None) == (not deliveries)
        one = next(one for one in summary.offenders if one.physical_offset == row["physical_offset"])
        assert [one.delivered_offset, one.last_delivered_offset] == ends
        times = sorted(record.store_ms for record in message.deliveries)
        assert [one.delivered_ms, one.last_delivered_ms] == ([times[0], times[-1]] if times else [None, None])


def test_what_came_from_files_that_have_expired_is_not_lost(spark: SparkSession, writable: WrittenStore) -> None:
    """The audit does not count messages as lost if their origin was in the first files, which retention has removed."""
    before = oracle.contents(writable.path)
    first = 2 * SEGMENT
    assert before.end > first
    for path in (writable.path / "commitlog").iterdir():
        if int(path.name) < first:
            path.unlink()
    expected = audit.audit(writable.path)
    gone = [m for m in audit_of(before, writable.path) if m.last.physical_offset < first]
    left_behind = [m for m in gone if any(d.physical_offset >= first for d in m.deliveries)]
    summary = job.audit(spark, str(writable.path))
    assert summary.begin == first
    check_totals(summary, expected)
    assert summary.lost == 0
    # duemq's deliveries name their origin; for RocketMQ's, the store time minus the delay is before the first record.
    deliveries = sum(d.physical_offset >= first for m in left_behind for d in m.deliveries)
    assert (summary.expired, summary.unclaimed) == (deliveries, 0)


def audit_of(contents: oracle.Contents, path: Path) -> list[Scheduled]:
    return audit.audit(path, contents).scheduled


def test_a_replaced_message_is_cancelled_and_the_new_one_is_its_own(duemq_store: WrittenStore) -> None:
    cases, _ = cases_of(duemq_store.path)
    by_offset = {case.offset: case for case in cases}
    replacing = [sent for sent in duemq_store.sent if ("TIMER_REPLACE", "true") in sent.properties]
    assert len(replacing) == 7
    result = audit.audit(duemq_store.path)
    for sent in replacing:
        (message,) = result.by_key(sent.unique_key)
        case = by_offset[message.last.physical_offset]
        assert (case.status, case.due_ms) == (sent.outcome, sent.deliver_ms)


# --- the summary


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, bytes]]:
    """Pairs of private and public keys made by openssl."""
    directory = tmp_path_factory.mktemp("keys")
    found = {}
    for name in ("ours", "other"):
        private, public = directory / f"{name}.pem", directory / f"{name}.pub"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
        found[name] = private.read_bytes(), public.read_bytes()
    return found


def test_a_signed_summary_is_verified(
    spark: SparkSession, duemq_store: WrittenStore, tmp_path: Path, keys: dict[str, tuple[bytes, bytes]]
) -> None:
    private, public = keys["ours"]
    summary = job.audit(spark, str(duemq_store.path), str(tmp_path), key=private)
    text = (tmp_path / "audit.json").read_bytes()
    assert job.verify(text, public) == summary
    assert job.verify(text) == summary
    with pytest.raises(JobError, match="not for this summary, or not by this key"):
        job.verify(text, keys["other"][1])
    for name, value in (("lost", 1), ("end", 5), ("store", "elsewhere"), ("inputs_sha256", "00")):
        changed = json.loads(text) | {name: value}
        with pytest.raises(JobError, match="digest differs"):
            job.verify(json.dumps(changed).encode(), public)
    # A forger can make a digest, but not a signature.
    forged = msgspec.structs.replace(summary, delivered=summary.delivered + 1)
    signature = forged.signature
    job.sign(forged, None)
    forged.signature = signature
    assert job.verify(msgspec.json.encode(forged)).delivered == summary.delivered + 1
    with pytest.raises(JobError, match="not for this summary"):
        job.verify(msgspec.json.encode(forged), public)
    job.sign(forged, keys["other"][0])
    with pytest.raises(JobError, match="not by this key"):
        job.verify(msgspec.json.encode(forged), public)


def test_what_was_read_can_be_checked_against_the_files(spark: SparkSession, duemq_store: WrittenStore) -> None:
    summary = job.audit(spark, str(duemq_store.path))
    for part in summary.inputs:
        path = duemq_store.path / "commitlog" / f"{part.start - part.start % SEGMENT:020d}"
        data = path.read_bytes()[part.start % SEGMENT :][: part.end - part.start]
        assert part.sha256 == sha256(data).hexdigest()
    assert (summary.inputs[0].start, summary.inputs[-1].end) == (summary.begin, summary.end)


def test_damages_are_told_and_the_rest_is_judged(spark: SparkSession, writable: WrittenStore) -> None:
    before = oracle.contents(writable.path)
    # Zeros from the body of a record to that of a later one; the audit itself does not compute checksums.
    found = faults.stretches(before.records[len(before.records) // 2 :], 6)
    fault = faults.zero_stretch(writable.path, *next(pair for pair in found if len(pair[0].body) > 900))
    summary = job.audit(spark, str(writable.path))
    assert summary.damaged == 1
    assert [damage[0] for damage in summary.damages] == [fault.damage_at]
    check_totals(summary, audit.audit(writable.path))


def test_records_with_wrong_bytes_are_told_where_one_looks(
    spark: SparkSession, writable: WrittenStore, tmp_path: Path
) -> None:
    assert job.audit(spark, str(writable.path), check_bodies=True).corrupt == 0
    before = audit.audit(writable.path)
    flipped = [before.of("pending")[0].last, before.of("delivered")[0].deliveries[0]]
    for record in flipped:
        faults.flip_byte(writable.path, record)
    summary = job.audit(spark, str(writable.path))
    assert (summary.corrupt, summary.corruptions, summary.is_good) == (None, [], True)
    summary = job.audit(spark, str(writable.path), check_bodies=True)
    told = [(offset, size) for offset, size, _ in summary.corruptions]
    assert told == sorted((record.physical_offset, record.size) for record in flipped)
    assert (summary.corrupt, summary.is_good, summary.damaged) == (2, False, 0)
    check_totals(summary, before)


def test_what_waits_and_was_destroyed_is_told(spark: SparkSession, writable: WrittenStore, tmp_path: Path) -> None:
    """The audit reports waiting messages whose records were destroyed: the queues still list them."""
    before = audit.audit(writable.path)
    waits = {message.last.physical_offset: message for message in before.of("pending")}
    records = oracle.contents(writable.path).records

    def waiting_in(pair: tuple[Record, Record]) -> int:
        return sum(pair[0].physical_offset <= at <= pair[1].physical_offset for at in waits)

    # The zeros begin in a body: if only the properties of a record are zeros, the audit reads the rest.
    pairs = [pair for pair in faults.stretches(records, 30) if 88 <= pair[0].size // 2 < 88 + len(pair[0].body)]
    fault = faults.zero_stretch(writable.path, *max(pairs, key=waiting_in))
    gone = {offset: waits[offset] for offset in fault.lost if offset in waits}
    assert gone
    summary = job.audit(spark, str(writable.path), str(tmp_path / "out"))
    assert summary.destroyed == len(gone) == sum(part["destroyed"] for part in (summary.levels, summary.timers))
    assert summary.levels["destroyed"] == sum(message.level > 0 for message in gone.values())
    # The other verdicts are unchanged. If a roll's record is gone, the older record remains: pending by its own time,
    # or lost by RocketMQ's wheel, which has the newer one; the plain rules look into the wheel.
    after = audit.audit(writable.path).totals
    assert all(getattr(summary, verdict) == after[verdict] for verdict in ("delivered", "twice", "cancelled"))
    assert summary.pending + summary.lost == after["pending"] + after["lost"]
    assert not summary.is_good
    told = {one.physical_offset for one in summary.offenders if one.what == "destroyed"}
    assert told == set(gone)
    rows = pq.read_table(tmp_path / "out" / "offenders.parquet").to_pylist()
    assert {row["physical_offset"] for row in rows if row["status"] == "destroyed"} == set(gone)


@pytest.mark.parametrize("number", sampled([0, 1, -1], [0, -1]))
def test_a_commitlog_file_that_was_emptied_is_no_retention(
    spark: SparkSession, writable: WrittenStore, number: int
) -> None:
    """The audit reports an emptied commitlog file as damage, with a bad verdict, even if it is the first one: it does
    not count it as removed by retention."""
    before = StoreFiles.open(writable.path)
    files, end, is_ours = before.segments, before.records_end(), before.written_by == "duemq"
    (writable.path / files[number].path).write_bytes(b"")
    summary = job.audit(spark, str(writable.path))
    begin = files[number].first_offset
    told = (begin, (end if number == -1 else files[number].end) - begin, "the file was cut to 0 bytes")
    assert (summary.begin, summary.damaged, summary.damages) == (0, 1, [told])
    assert summary.expired == 0
    assert not summary.is_good
    # Brokers refuse to start, except 5.3.3 and duemq where a kill may have left the file; duemq also refuses if its
    # checkpoint relies on a position in it.
    told_of_starts = [reason for start in summary.starts for reason in start.reasons if "has 0 bytes" in reason]
    assert len(told_of_starts) == (1 + is_ours if number == -1 else 3)


def test_the_table_of_levels_is_told_though_the_newest_records_are_gone(writable: WrittenStore) -> None:
    before = read_progress(StoreFiles.open(writable.path)).delays_ms
    records = {record.physical_offset: record for record in oracle.contents(writable.path).records}
    for topic, queue_id in oracle.queues(writable.path):
        if topic == oracle.SCHEDULE_TOPIC:
            for unit in oracle.consume_queue(writable.path, topic, queue_id)[1:][-20:]:
                faults.zero_record(writable.path, records[unit.physical_offset])
    assert read_progress(StoreFiles.open(writable.path)).delays_ms == before


def test_an_audit_of_nothing_that_waits(spark: SparkSession, tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    broker.send("orders", b"body")
    broker.close()
    with_none = Audit(spark, str(tmp_path / "store"))
    summary = job.summarise(with_none)
    assert (summary.records, summary.scheduled, summary.lateness.count) == (1, 0, 0)
    assert summary.is_good


# --- how many waiting messages a broker finds when it starts on the store

SCHEDULE = f"consumequeue/{oracle.SCHEDULE_TOPIC}"
LOST = {
    "queues of the levels": (SCHEDULE,),
    "timer log and wheel": ("timerlog", "timerwheel"),
    "delayOffset.json": ("config/delayOffset.json", "config/delayOffset.json.bak"),
}


def unreachable(written: WrittenStore, lost: str, pending: dict[bool, int]) -> int:
    """Number of waiting messages, in levels (True) or with a timer, that the broker that wrote the store does not find
    without some files, as observed with the brokers themselves: see tests/interop/stores/test_repair.py."""
    if written.kind == "duemq" or lost == "delayOffset.json":
        return 0
    return pending[lost == "queues of the levels"]


@pytest.mark.parametrize("lost", LOST)
def test_what_waits_and_will_not_be_found_is_told(spark: SparkSession, writable: WrittenStore, lost: str) -> None:
    pending = Counter(one.level > 0 for one in audit.audit(writable.path).of("pending"))
    for name in LOST[lost]:
        path = writable.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    summary = job.audit(spark, str(writable.path), delay_levels=LEVELS)
    assert summary.pending == pending.total()
    expected = unreachable(writable, lost, pending)
    assert summary.unreachable == expected
    assert summary.is_good == (expected == 0)
    (own,) = [start for start in summary.starts if start.wrote_it]
    assert own.broker == writable.kind.removeprefix("apache-")
    assert (own.finds, own.misses) == (summary.pending - expected, expected)
    if writable.kind != "duemq" and lost == "delayOffset.json":
        assert own.again == summary.levels["delivered"]
        assert own.reasons[0].startswith(f"config/delayOffset.json is missing: {own.broker} starts level 1 at 0")
    elif expected:
        assert any(LOST[lost][0] in reason for reason in own.reasons)
    else:
        assert own.reasons == []
