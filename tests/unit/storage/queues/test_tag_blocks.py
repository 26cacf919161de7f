"""Pulls with tags in long queues, compared with a plain list of tags codes: whatever was looked at before, each pull
passes over messages without the tags only."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.properties import tags_code_of
from duemq.storage.queues.consume_queue import UNIT, ConsumeQueue
from duemq.storage.queues.extension import EXT_ADDRESS_MAX
from duemq.storage.queues.pull import PullStatus, find
from duemq.storage.queues.tag_blocks import BLOCK, TagBlocks, hashes
from tests.crash.simulated_files import SimulatedFiles

SIZE = 100
SEGMENT = 6000 * 20


def code_of(tag: str) -> int:
    return tags_code_of(f"TAGS\x01{tag}\x02")


COMMON = [code_of(f"common{number}") for number in range(12)]
RARE = code_of("rare")


def append(queue: ConsumeQueue, codes: list[int]) -> None:
    for code in codes:
        queue.tail += UNIT.pack(queue.next_offset * SIZE, SIZE, code)
        queue.next_offset += 1


def pulled(queue: ConsumeQueue, codes: frozenset[int], start: int = 0, count: int = 32) -> tuple[list[int], int]:
    """The queue offsets that pulls find from an offset on, up to the end, and the number of pulls."""
    offsets: list[int] = []
    pulls = 0
    while start < queue.next_offset:
        found = find(queue, start, count, 1 << 20, codes, 0)
        pulls += 1
        for begin, size in found.ranges:
            offsets += range(begin // SIZE, (begin + size) // SIZE)
        assert (found.status is PullStatus.FOUND) == bool(found.count)
        assert found.next_offset > start
        start = found.next_offset
    return offsets, pulls


@given(st.data())
def test_pulls_find_what_a_list_has(data: st.DataObject) -> None:
    queue = ConsumeQueue(SimulatedFiles(), "/q", SEGMENT, "topic", 0)
    known = [0, RARE, EXT_ADDRESS_MAX, *COMMON]
    codes: list[int] = []
    dice = random.Random(data.draw(st.integers(0, 1 << 30)))
    for _ in range(data.draw(st.integers(1, 5))):
        few = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
        more = dice.choices(few, k=data.draw(st.integers(1, 3000)))
        if data.draw(st.booleans()):
            more[dice.randrange(len(more))] = data.draw(st.sampled_from(known))
        append(queue, more)
        codes += more
        if data.draw(st.booleans()):
            queue.write_tail()
        if data.draw(st.integers(0, 9)) == 0:
            offset = data.draw(st.integers(0, len(codes)))
            queue.truncate(offset)
            del codes[offset:]
            if not codes:
                return
        for _ in range(data.draw(st.integers(0, 2))):
            pulled(queue, frozenset([RARE]))
        wanted = frozenset(data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)))
        start = data.draw(st.integers(0, len(codes) - 1))
        expected = [n for n in range(start, len(codes)) if codes[n] in wanted or codes[n] <= EXT_ADDRESS_MAX]
        assert pulled(queue, wanted, start, data.draw(st.integers(1, 40)))[0] == expected


def test_a_rare_tag_in_a_long_queue_takes_few_pulls_and_later_fewer() -> None:
    """The third group skips the blocks at which two have looked."""
    queue = ConsumeQueue(SimulatedFiles(), "/q", SEGMENT, "topic", 0)
    codes = (COMMON[:3] * 70_000)[:200_000]
    codes[150_000] = RARE
    append(queue, codes)
    queue.write_tail()
    for _ in range(2):
        assert pulled(queue, frozenset([RARE])) == ([150_000], 4)
    reads = []
    read = ConsumeQueue.read

    def counted(self: ConsumeQueue, offset: int, count: int) -> bytes:
        reads.append((offset, count))
        return read(self, offset, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsumeQueue, "read", counted)
        assert pulled(queue, frozenset([RARE])) == ([150_000], 2)
    assert sum(min(count, 200_000 - offset) for offset, count in reads) < 25 * BLOCK


def known(*filters: tuple[int, np.ndarray]) -> TagBlocks:
    """The filters after two looks at each of some blocks, with their tags codes."""
    blocks = TagBlocks()
    for _ in range(2):
        for block, codes in filters:
            blocks.looked_at(block, codes)
    return blocks


def test_a_filter_never_denies_a_tag_that_a_block_has() -> None:
    codes = np.random.default_rng(7).integers(-(2**31), 2**31, 8 * BLOCK)
    blocks = known((5, codes))
    for block in range(8):
        for code in codes[block * BLOCK : (block + 1) * BLOCK : 100]:
            assert blocks.next_block(5 + block, hashes(np.array([code]))) == 5 + block
    assert blocks.next_block(3, hashes(np.array([1]))) == 3, "of blocks before nothing is known"
    assert blocks.next_block(13, hashes(np.array([1]))) == 13, "nor of those behind"


def test_blocks_become_known_in_any_order() -> None:
    rare = hashes(np.array([RARE]))
    for order in ([0, 1, 2, 3, 40, 41], [41, 40, 3, 2, 1, 0], [3, 0, 41, 1, 40, 2]):
        blocks = known(*((block, np.full(BLOCK, RARE if block == 40 else COMMON[0])) for block in order))
        assert [blocks.next_block(block, rare) for block in (0, 4, 39, 40, 41)] == [4, 4, 39, 40, 42]


def test_one_look_makes_no_filter() -> None:
    blocks = TagBlocks()
    blocks.looked_at(0, np.full(BLOCK, COMMON[0]))
    assert blocks.next_block(0, hashes(np.array([RARE]))) == 0
