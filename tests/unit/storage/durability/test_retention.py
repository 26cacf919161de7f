"""Which files of the commitlog may go."""

from __future__ import annotations

import pytest

from duemq.storage.current import Current
from duemq.storage.durability.retention import Retention, RetentionConfig
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import SimulatedFiles
from tests.unit.storage.conftest import append, make_store

SEGMENT = 4096


@pytest.fixture
def store() -> MessageStore:
    store = make_store("/s", SimulatedFiles(), segment_size=SEGMENT)
    store.open()
    for number in range(15):
        append(store, "t", 0, bytes(3000), now_ms=1000 * number)
    return store


def retention(store: MessageStore, used: float, *, clean_forcibly: bool = True) -> Retention:
    config = RetentionConfig(reserved_hours=1, delete_when="", clean_forcibly=clean_forcibly)
    found = Retention(Current(config), store.files, store.log)
    found.used_ratio = used
    return found


def test_ten_expired_files_go_at_a_time(store: MessageStore) -> None:
    late = 2 * 3_600_000
    assert retention(store, 0.8).deletable_before(late) == 10 * SEGMENT
    assert retention(store, 0.1).deletable_before(late) == 0, "deleteWhen names no hour"
    assert retention(store, 0.1).deletable_before(late, at_any_hour=True) == 10 * SEGMENT


def test_a_file_goes_when_its_youngest_record_has_expired(store: MessageStore) -> None:
    """The first record of the next file is no older."""
    assert retention(store, 0.8).deletable_before(3_600_000 + 3000) == 2 * SEGMENT
    assert retention(store, 0.8).deletable_before(3_600_000 + 3001) == 3 * SEGMENT


def test_where_the_disk_is_full_the_oldest_file_goes_though_it_has_not_expired(store: MessageStore) -> None:
    assert retention(store, 0.86).deletable_before(0) == SEGMENT
    assert retention(store, 0.86, clean_forcibly=False).deletable_before(0) == 0
