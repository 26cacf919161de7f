"""With access control, a sender changes his own messages by their handles, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from duemq import AccessDeniedError, ChangeResult, MessageHandle, Producer
from tests.peers.brokers.duemq import DuemqBroker
from tests.support.access import ADMIN, USER, write_accounts


async def test_a_sender_changes_his_own_messages_by_handle(tmp_path: Path) -> None:
    """The account `application` may send to topicB, and nothing else."""
    write_accounts(tmp_path)
    broker = DuemqBroker(tmp_path / "broker", {"aclEnable": "true", "rocketmqHome": str(tmp_path)}, is_warm=True)
    await broker.start()
    async with (
        Producer(broker.nameserver, access_key=ADMIN[0], secret_key=ADMIN[1]) as admin,
        Producer(broker.nameserver, access_key=USER[0], secret_key=USER[1]) as sender,
    ):
        others = await admin.send("topicA", b"of others", delay="1h")
        await admin.send("topicB", b"makes the topic")
        timer = await sender.send("topicB", b"timer", delay="1h")
        level = await sender.send("topicB", b"level", level=18)
        for sent in (timer, level):
            assert sent.handle is not None
            assert (await sender.reschedule(sent.handle, delay="2h")).result is ChangeResult.RESCHEDULED
            assert (await sender.cancel(sent.handle)).result is ChangeResult.CANCELLED
            assert (await sender.deliver_now(sent.handle)).result is ChangeResult.ALREADY_CANCELLED
            with pytest.raises(AccessDeniedError, match="role operate"):
                await sender.cancel(sent.offset_message_id)
        assert others.handle is not None
        with pytest.raises(AccessDeniedError):
            await sender.cancel(others.handle)
        forged = MessageHandle("topicB", others.handle.broker, others.message_id, others.offset_message_id)
        assert (await sender.cancel(forged)).result is ChangeResult.NEVER_EXISTED
        assert (await admin.cancel(others.handle)).result is ChangeResult.CANCELLED
    await broker.stop()
