from __future__ import annotations

import asyncio

from duemq import MessageQueue, ReceivedMessage
from duemq._consuming.lanes import OrderedInbox
from duemq.messages import next_try
from tests.unit.duemq.values.test_message import QUEUE, Settled
from tests.unit.duemq.values.test_message import received as make_message

OTHER = MessageQueue("demo", "broker-a", 4)


def messages(count: int, queue: MessageQueue = QUEUE) -> list[ReceivedMessage]:
    stored = make_message()._stored
    return [ReceivedMessage(stored, queue, 0, Settled()) for _ in range(count)]


async def test_one_message_of_a_queue_is_handed_out_at_a_time() -> None:
    inbox = OrderedInbox(10, 10_000)
    first, second = messages(2)
    (other,) = messages(1, OTHER)
    inbox.put([first])
    assert await inbox.get() is first
    inbox.put([second])  # another pull while the first is handled
    inbox.put([other])
    assert inbox.get_more(9) == [other]
    assert not inbox.is_idle(QUEUE)
    inbox.release(first)
    assert inbox.is_idle(QUEUE)
    assert inbox.get_more(9) == [second]
    inbox.release(second)
    inbox.release(other)
    assert (inbox.messages, inbox.bytes) == (0, 0)


async def test_a_message_that_comes_again_is_the_first_of_its_queue_after_its_pause() -> None:
    inbox = OrderedInbox(10, 10_000)
    first, second = messages(2)
    inbox.put([first, second])
    assert await inbox.get() is first
    again = next_try(first, counts=True)
    inbox.put_again(first, again, 0.001)
    assert inbox.is_idle(QUEUE)
    assert inbox.get_more(9) == []
    inbox.put_again(first, next_try(first, counts=True), 0)  # it was settled already
    assert await inbox.get() is again
    assert inbox.get_more(9) == []
    inbox.release(again)
    assert inbox.get_more(9) == [second]
    assert inbox.messages == 1


async def test_each_queue_has_its_share_of_the_room() -> None:
    inbox = OrderedInbox(10, 10_000)
    inbox.put(messages(1, OTHER))
    inbox.put(messages(4))
    await inbox.wait_for_room(QUEUE)
    inbox.put(messages(1))
    waiting = asyncio.ensure_future(inbox.wait_for_room(QUEUE))
    await asyncio.sleep(0)
    assert not waiting.done()
    await inbox.wait_for_room(OTHER)
    held = next(message for message in inbox.get_more(9) if message.queue == QUEUE)
    await asyncio.sleep(0)
    assert not waiting.done(), "what is handed out counts"
    inbox.release(held)
    await waiting


async def test_it_is_full_by_bytes_too() -> None:
    inbox = OrderedInbox(10, 300)
    inbox.put(messages(2))
    waiting = asyncio.ensure_future(inbox.wait_for_room(QUEUE))
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.discard(QUEUE)
    await waiting
    assert (inbox.messages, inbox.bytes) == (0, 0)


async def test_nothing_of_a_paused_queue_is_handed_out() -> None:
    inbox = OrderedInbox(10, 10_000)
    first, second = messages(2)
    inbox.put([first])
    inbox.pause(QUEUE)
    inbox.put([second])
    assert inbox.get_more(9) == []
    inbox.resume(QUEUE)
    assert inbox.get_more(9) == [first]
    inbox.pause(QUEUE)
    inbox.release(first)
    assert inbox.get_more(9) == []
    inbox.resume(QUEUE)
    assert inbox.get_more(9) == [second]


async def test_after_a_discard_the_message_that_is_handed_out_still_comes_before_others() -> None:
    inbox = OrderedInbox(10, 10_000)
    first, second, news = messages(3)
    inbox.put([first, second])
    assert await inbox.get() is first
    inbox.discard(QUEUE)
    inbox.put([news])
    assert inbox.get_more(9) == []
    inbox.release(first)
    assert inbox.get_more(9) == [news]


async def test_messages_of_a_lost_queue_are_passed_over() -> None:
    inbox = OrderedInbox(10, 10_000)
    settled = Settled()
    lost = [ReceivedMessage(make_message()._stored, QUEUE, 0, settled) for _ in range(2)]
    inbox.put(lost)
    settled.dropped = True
    (other,) = messages(1, OTHER)
    inbox.put([other])
    assert await inbox.get() is other
    assert inbox.messages == 1


async def test_closed_it_tells_everybody() -> None:
    inbox = OrderedInbox(10, 10_000)
    inbox.put(messages(2))
    held = await inbox.get()
    waiting = [asyncio.ensure_future(inbox.get()) for _ in range(2)]
    await asyncio.sleep(0)
    inbox.close()
    assert await asyncio.gather(*waiting) == [None, None]
    assert held is not None
    inbox.put_again(held, next_try(held, counts=True), 0)
    inbox.put(messages(1))
    assert inbox.get_more(9) == []
    assert inbox.is_idle(QUEUE)
