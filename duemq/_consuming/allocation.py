"""Which queues a member of a consumer group reads: each member works that out for itself, so all must agree.

Mirrors AllocateMessageQueueAveragely.java (4.9.7) and the sorting before it in RebalanceImpl.java, exactly: members of
one group may be written in Java and in Python.
"""

from __future__ import annotations

from collections.abc import Iterable

from duemq.messages import MessageQueue


def allocate_averagely(queues: Iterable[MessageQueue], members: Iterable[str], me: str) -> list[MessageQueue]:
    """The queues of one topic that the member `me` reads: a run of neighbours, the first members getting one more.

    `members` are client ids. Empty where `me` is not among them: to the others it does not exist.
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
    """A key that sorts texts as Java does: by their UTF-16 units."""
    return text.encode("utf-16-be", "surrogatepass")


def _queue_order(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    return java_order(queue.topic), java_order(queue.broker), queue.queue_id
