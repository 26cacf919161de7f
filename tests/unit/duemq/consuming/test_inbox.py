from __future__ import annotations

import asyncio

from duemq import MessageQueue, ReceivedMessage
from duemq._consuming.inbox import Inbox
from duemq.messages import next_try
from tests.unit.duemq.values.test_message import QUEUE, Settled
from tests.unit.duemq.values.test_message import received as make_message


def lost_message() -> ReceivedMessage:
    settled = Settled()
    settled.dropped = True
    message = make_message()
    return ReceivedMessage(message._stored, QUEUE, 0, settled)


async def test_messages_come_out_as_they_went_in() -> None:
    inbox = Inbox(10, 10_000)
    first, second = make_message(), make_message()
    inbox.put([first, second])
    assert [await inbox.get(), await inbox.get()] == [first, second]


async def test_it_is_full_by_messages_until_one_is_released() -> None:
    inbox, message = Inbox(2, 10_000), make_message()
    inbox.put([message])
    await inbox.wait_for_room(QUEUE)
    inbox.put([make_message(), make_message()])  # one pull may exceed the bound
    waiting = asyncio.ensure_future(inbox.wait_for_room(QUEUE))
    await asyncio.sleep(0)
    inbox.release(message)
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.release(message)
    await waiting
    assert (inbox.messages, inbox.bytes) == (1, message.stored_size)


async def test_it_is_full_by_bytes() -> None:
    inbox, message = Inbox(10, 200), make_message()
    inbox.put([message])
    waiting = asyncio.ensure_future(inbox.wait_for_room(QUEUE))
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.release(message)
    await waiting


async def test_messages_of_a_lost_queue_are_passed_over() -> None:
    inbox, message = Inbox(10, 10_000), make_message()
    inbox.put([lost_message(), message])
    assert await inbox.get() is message
    assert inbox.messages == 1


async def test_closed_it_drops_what_waits_and_tells_everybody() -> None:
    inbox = Inbox(10, 10_000)
    waiting = [asyncio.ensure_future(inbox.get()) for _ in range(3)]
    await asyncio.sleep(0)
    inbox.close()
    inbox.put([make_message()])
    inbox.put_again(make_message(), make_message(), 0)
    assert await asyncio.gather(*waiting) == [None, None, None]
    assert await inbox.get() is None


async def test_what_is_there_can_be_had_at_once() -> None:
    inbox = Inbox(10, 10_000)
    messages = [make_message() for _ in range(4)]
    assert inbox.get_more(5) == []
    inbox.put([messages[0], lost_message(), *messages[1:]])
    assert inbox.get_more(2) == messages[:2]
    assert inbox.get_more(5) == messages[2:]
    assert inbox.messages == 4
    inbox.close()
    assert inbox.get_more(5) == []
    assert await inbox.get() is None


async def test_what_is_paused_is_set_aside_and_takes_no_room_of_others() -> None:
    inbox = Inbox(2, 10_000)
    first, second, third = (make_message() for _ in range(3))
    other = ReceivedMessage(first._stored, MessageQueue("demo", "broker-a", 4), 0, Settled())
    inbox.put([first, second])
    inbox.put([other])
    inbox.pause(QUEUE)
    await inbox.wait_for_room(QUEUE)
    inbox.put([third])
    assert inbox.get_more(9) == [other]
    assert (inbox.messages, inbox.bytes) == (1, other.stored_size)
    inbox.resume(QUEUE)
    assert inbox.get_more(9) == [first, second, third]
    assert inbox.messages == 4


async def test_a_message_that_comes_again_waits_while_its_queue_is_paused() -> None:
    inbox, message = Inbox(10, 10_000), make_message()
    inbox.put([message])
    assert inbox.get_more(1) == [message]
    inbox.pause(QUEUE)
    again = next_try(message, counts=False)
    inbox.put_again(message, again, 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (inbox.get_more(1), inbox.messages) == ([], 0)
    inbox.resume(QUEUE)
    assert (inbox.get_more(1), inbox.messages) == ([again], 1)


async def test_what_waits_of_a_queue_that_is_gone_takes_no_room() -> None:
    other = MessageQueue("demo", "broker-a", 7)
    inbox, waits = Inbox(2, 10_000), make_message()
    kept = ReceivedMessage(waits._stored, other, 0, Settled())
    inbox.put([waits])
    inbox.put([kept])
    inbox.discard(QUEUE)
    async with asyncio.timeout(5):
        await inbox.wait_for_room(QUEUE)
    assert (inbox.get_more(2), inbox.messages) == ([kept], 1)


async def test_what_was_set_aside_of_a_queue_that_is_gone_is_dropped() -> None:
    inbox = Inbox(10, 10_000)
    inbox.put([make_message()])
    inbox.pause(QUEUE)
    inbox.discard(QUEUE)
    inbox.resume(QUEUE)
    assert (inbox.get_more(1), inbox.messages) == ([], 0)
