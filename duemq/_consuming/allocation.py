"""Which queues a member of a consumer group reads. Each member computes this for itself, so the results must agree.

Mirrors exactly AllocateMessageQueueAveragely.java (4.9.7), and the sorting before it in RebalanceImpl.java: a group may
have both Java and Python members.
"""

from __future__ import annotations

from collections.abc import Iterable

from duemq.messages import MessageQueue


def allocate_averagely(queues: Iterable[MessageQueue], members: Iterable[str], me: str) -> list[MessageQueue]:
    """Return the queues of one topic that the member `me` reads: consecutive queues, as many for each member, except
    that the first members get one more if the queues do not divide evenly.

    `members` are client ids. Empty if `me` is not among them: the other members then leave no queues to it.
    """
    ordered = sorted(queues, key=_queue_order)
    ids = sorted(members, key=java_order)
    if me not in ids or not ordered:
        return []
    index = ids.index(me)
    share, rest = divmod(len(ordered), len(ids))
    start = index * share + min(index, rest)
    return ordered[start : start + share + (index < rest)]


def java_order(text: str) -> bytes:
    """Return a key that sorts strings as Java does: by their UTF-16 code units."""
    return text.encode("utf-16-be", "surrogatepass")


def _queue_order(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    return java_order(queue.topic), java_order(queue.broker), queue.queue_id
