"""The choice of the connection to close when connections that do not read their responses together hold too much."""

from __future__ import annotations

import random

from duemq.broker.net.limits.output_budget import PATIENCE_SECONDS, OutputBudget
from tests.support.loop import SteppedLoop

LIMIT = 10_000


class Reader:
    """A connection whose client reads as the test says."""

    def __init__(self, budget: OutputBudget) -> None:
        self.budget = budget
        self._held = 0
        self.looks = 0
        self.queued = 2_500_000
        self.reasons: list[str] = []

    @property
    def buffered(self) -> int:
        self.looks += 1
        return self._held

    def drop(self, reason: str) -> None:
        self.reasons.append(reason)
        self._held = 0

    def give(self, size: int) -> None:
        self._held += size
        self.budget.hold(self, size)

    def take(self, size: int) -> None:
        self._held -= size

    @property
    def is_dropped(self) -> bool:
        return bool(self.reasons)


def readers(budget: OutputBudget, *sizes: int) -> list[Reader]:
    made = [Reader(budget) for _ in sizes]
    for reader, size in zip(made, sizes, strict=True):
        reader.give(size)
    return made


def dropped(made: list[Reader]) -> list[int]:
    return [number for number, reader in enumerate(made) if reader.is_dropped]


async def test_who_reads_what_the_kernel_holds_reads(loop: SteppedLoop) -> None:
    """A client that reads from the kernel's buffer counts as reading, long before the kernel takes more bytes, even if
    it holds more than those that read nothing."""
    budget = OutputBudget(loop, LIMIT)
    slow, *strangers = readers(budget, 3000, 2000, 2000, 2000)
    for _ in range(3):
        loop.advance(PATIENCE_SECONDS)
        slow.queued -= 100_000
        strangers += readers(budget, 2000)
        assert not slow.is_dropped
    assert dropped(strangers) == [0, 1, 2]
    loop.advance(PATIENCE_SECONDS)
    readers(budget, 2000)
    assert slow.is_dropped, "it has stopped"


async def test_one_of_those_that_hold_most_goes(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, 1000, 5000, 1000, 2500)
    loop.advance(PATIENCE_SECONDS)
    made += readers(budget, 1000)
    assert (dropped(made), budget.used) == ([1], 5500)
    assert made[1].reasons == [
        "it has not read 5000 bytes of responses for 2 s, and all clients together leave more than "
        "maxUnreadResponseBytes=10000 unread"
    ]


async def test_of_those_that_hold_alike_the_one_that_waits_longest_goes(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = []
    for _ in range(15):
        made += readers(budget, 1000)
        loop.advance(1)
    assert dropped(made) == [0, 1, 2, 3, 4]


async def test_who_was_just_given_much_does_not_go_before_those_that_never_read(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, *[1000] * 9)
    loop.advance(PATIENCE_SECONDS)
    made += readers(budget, 6000)
    assert dropped(made) == [0, 1, 2, 3, 4]
    loop.advance(PATIENCE_SECONDS)
    made += readers(budget, 1000)
    assert dropped(made) == [0, 1, 2, 3, 4, 9], "by now it has had the time"


async def test_where_nobody_has_had_the_time_the_limit_holds_all_the_same(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, *[1000] * 9, 6000)
    assert (dropped(made), budget.used) == ([9], 9000)


async def test_one_answer_above_the_limit_costs_its_own_connection(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, 100, 20_000)
    assert (dropped(made), budget.used) == ([1], 100)


async def test_who_reads_slowly_does_not_go_before_who_does_not_read(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, 4000, 3000, 2900)
    loop.advance(60)
    made[0].take(10)
    made[1].take(10)
    made += readers(budget, 1000)
    assert dropped(made) == [2]
    loop.advance(1)
    made[0].give(1000)
    made += readers(budget, 2000)
    assert dropped(made) == [0, 2], "it took nothing more, and holds most"


async def test_what_was_read_meanwhile_is_seen_before_somebody_is_closed(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, 1000)
    for _ in range(3):
        made[0].give(1000)
    made += readers(budget, 4000)
    loop.advance(60)
    made[0].take(3500)
    made += readers(budget, 4000)
    assert (dropped(made), budget.used) == ([], 500 + 1000 + 8000)


async def test_what_was_given_at_once_counts_until_all_of_it_is_taken(loop: SteppedLoop) -> None:
    """A response counts as a whole until all of it is taken: the socket buffer takes a part at once, but the whole
    stays in memory."""
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, 4000, 4000)
    for reader in made:
        reader.take(3900)
        reader.give(10)
    assert budget.used == 8000 + 2 * 10
    loop.advance(60)
    made += readers(budget, 4000)
    assert dropped(made) == [0]


async def test_whoever_is_given_more_and_takes_some_counts_as_reading(loop: SteppedLoop) -> None:
    budget = OutputBudget(loop, LIMIT)
    made = readers(budget, 4000, 3000)
    loop.advance(60)
    made[0].take(500)
    made[0].give(1000)
    made += readers(budget, 4000)
    assert dropped(made) == [1]


async def test_a_connection_is_found_with_few_looks_however_many_there_are(loop: SteppedLoop) -> None:
    """The connection to close is found with few looks, however many connections there are, even if all of them read a
    byte now and then."""
    budget = OutputBudget(loop, 100_000)
    made = readers(budget, *[1000] * 100)
    for _ in range(500):
        loop.advance(10)
        for reader in made:
            if not reader.is_dropped:
                reader.take(1)
        before = sum(reader.looks for reader in made)
        made += readers(budget, 1000)
        assert sum(reader.looks for reader in made) - before <= 1 + 2 * 32
        assert budget.used <= budget.limit


async def test_many_that_read_do_not_make_one_that_holds_little_go_for_one_that_holds_much(loop: SteppedLoop) -> None:
    """Nobody has had the time, and the most looks are used up at a small connection: one that holds much goes."""
    budget = OutputBudget(loop, 100_000)
    (large,) = readers(budget, 60_000)
    small = readers(budget, *[1000] * 31)
    for reader in small[:30]:
        reader.take(1)
    readers(budget, 20_000)
    assert (large.is_dropped, dropped(small)) == (True, [])


async def test_the_sum_is_that_of_all_accounts(loop: SteppedLoop) -> None:
    """The sum equals that of all accounts in a plain table, over thousands of random steps."""
    chance = random.Random(7)
    budget = OutputBudget(loop, LIMIT)
    made = [Reader(budget) for _ in range(30)]
    for _ in range(5000):
        reader = chance.choice(made)
        action = chance.random()
        if action < 0.5:
            reader.give(chance.randrange(1, 3000))
        elif action < 0.8:
            reader.take(chance.randrange(reader._held + 1))
        else:
            reader.take(reader._held)
            budget.release(reader)
        loop.advance(chance.random())
        noted = [account.held for account in budget._accounts.values()]
        assert budget.used == sum(noted) <= LIMIT
        assert sum(len(holders) for holders in budget._by_size) == len(noted)
    assert any(reader.is_dropped for reader in made)
