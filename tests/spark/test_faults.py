"""The faults are as described, and the oracle finds exactly those."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.spark.world import audit, faults, oracle
from tests.spark.world.audit import Audit, Scheduled
from tests.spark.world.faults import AuditFault, DiskFault
from tests.spark.world.oracle import Contents, Record
from tests.spark.world.stores import SEGMENT, WrittenStore


def some(before: Audit, real_topic: str) -> list[Scheduled]:
    """Delivered messages for a topic, or for topics with this prefix."""
    return [message for message in before.of("delivered") if message.real_topic.startswith(real_topic)]


def sources(store: WrittenStore) -> list[str]:
    return ["levels", "%RETRY%", *(["timers"] if store.kind != "apache-4.9.7" else [])]


def check_audit(before: Audit, after: Audit, expected: list[AuditFault]) -> None:
    """Check that the expected messages, and only they, have another verdict, lateness or deliveries."""

    def facts(message: Scheduled) -> AuditFault:
        offsets = tuple(record.physical_offset for record in message.deliveries)
        return AuditFault(message.origin.physical_offset, message.unique_key, message.verdict, message.late_ms, offsets)

    changed = set(map(facts, after.scheduled)) - set(map(facts, before.scheduled))
    assert changed == set(expected)
    assert after.totals.total() == before.totals.total()
    assert after.orphans == []


def check_contents(before: Contents, after: Contents, fault: DiskFault) -> None:
    """Check that the expected records, and only they, are damaged."""
    assert [record for record in before.records if record.physical_offset not in fault.lost] == after.records
    (damage,) = after.damages
    assert damage.physical_offset == fault.damage_at
    if fault.resumes_at is not None:
        assert damage.physical_offset + damage.size == fault.resumes_at


def test_a_removed_delivery_is_a_lost_message(writable: WrittenStore) -> None:
    before = audit.audit(writable.path)
    expected = [
        faults.remove_delivery(writable.path, some(before, topic)[number])
        for topic in sources(writable)
        for number in (0, 7, 20)
    ]
    after = audit.audit(writable.path)
    check_audit(before, after, expected)
    assert after.totals["lost"] == len(expected)
    assert oracle.contents(writable.path).damages == []


def test_a_doubled_delivery_is_found(writable: WrittenStore) -> None:
    before = audit.audit(writable.path)
    expected = [faults.double_delivery(writable.path, some(before, topic)[5]) for topic in sources(writable)]
    check_audit(before, audit.audit(writable.path), expected)
    contents = oracle.contents(writable.path)
    assert contents.damages == []
    at = {record.physical_offset: record for record in contents.records}
    for fault in expected:
        twin = at[fault.deliveries[-1]]
        unit = oracle.consume_queue(writable.path, twin.topic, twin.queue_id)[-1]
        assert (unit.physical_offset, unit.size, unit.queue_offset) == (
            twin.physical_offset,
            twin.size,
            twin.queue_offset,
        )


def test_doubled_deliveries_may_go_into_a_new_file(writable: WrittenStore) -> None:
    before = audit.audit(writable.path)
    message = max(before.of("delivered"), key=lambda one: one.origin.size)
    contents = oracle.contents(writable.path)
    size = message.deliveries[0].size
    assert size > 200_000
    for _ in range((SEGMENT - contents.end % SEGMENT) // size + 1):
        faults.double_delivery(writable.path, message)
    after = oracle.contents(writable.path)
    assert after.damages == []
    assert after.end_markers == contents.end_markers + 1
    assert after.end % SEGMENT == size


def test_a_late_delivery_is_late_by_that_much(writable: WrittenStore) -> None:
    before = audit.audit(writable.path)
    expected = [faults.delay_delivery(writable.path, some(before, topic)[3], 12_345) for topic in sources(writable)]
    check_audit(before, audit.audit(writable.path), expected)


def middle(contents: Contents) -> Record:
    return next(one for one in contents.records[len(contents.records) // 3 :] if len(one.body) > 10)


def test_a_flipped_byte_damages_one_record(writable: WrittenStore) -> None:
    before = oracle.contents(writable.path)
    fault = faults.flip_byte(writable.path, middle(before))
    after = oracle.contents(writable.path)
    check_contents(before, after, fault)
    assert after.damages[0].reason == "checksum of the body"


@pytest.mark.parametrize("how", ["zeros", "cut"])
def test_a_torn_tail_is_damage_and_ends_the_log(writable: WrittenStore, how: Literal["zeros", "cut"]) -> None:
    before = oracle.contents(writable.path)
    fault = faults.tear_tail(writable.path, how)
    assert len(fault.lost) >= 3
    check_contents(before, oracle.contents(writable.path), fault)


def test_reading_goes_on_behind_a_stretch_of_zeros(writable: WrittenStore) -> None:
    before = oracle.contents(writable.path)
    number = before.records.index(middle(before))
    fault = faults.zero_stretch(writable.path, *next(faults.stretches(before.records[number:], 10)))
    assert len(fault.lost) == 10
    check_contents(before, oracle.contents(writable.path), fault)


def test_a_file_of_zeros_in_the_middle_is_damage(writable: WrittenStore) -> None:
    before = oracle.contents(writable.path)
    with (writable.path / "commitlog" / f"{SEGMENT:020d}").open("r+b") as file:
        file.write(bytes(SEGMENT))
    after = oracle.contents(writable.path)
    assert [(one.physical_offset, one.size) for one in after.damages] == [(SEGMENT, SEGMENT)]
    assert after.records == [one for one in before.records if one.physical_offset // SEGMENT != 1]
