"""NOTIFY_CONSUMER_IDS_CHANGED (40): the members of a consumer group are notified to rebalance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from duemq.broker.net.connection import Connection
from duemq.broker.net.request_turns import IsOver, RequestTurns
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import ConsumerGroupName


class MemberNotifications:
    """Notifies the members of groups, some in each turn of the loop. Belongs to the event loop."""

    def __init__(self, turns: RequestTurns, connections_of: Callable[[str], Iterable[Connection]]) -> None:
        """`connections_of`: returns the connections of a group's members, none if there is no such group."""
        self._turns = turns
        self._connections_of = connections_of
        self._changed: OrderedDict[str, None] = OrderedDict()
        """Groups whose members are still to be notified."""
        self._to_tell: Iterator[Connection] = iter(())
        """The connections of the remaining members of the group being notified, `_telling`."""
        self._telling = ""
        self._has_work = False

    def add(self, group: str) -> None:
        """Queue a group whose members must rebalance: they are notified once, however many come and go in a turn of the
        loop."""
        self._changed[group] = None
        if not self._has_work:
            self._has_work = True
            self._turns.add(self, is_little=True)

    def work(self, is_over: IsOver) -> bool:
        """Notify some members, until `is_over`; return whether there may be more. Does not raise."""
        while True:
            connection = next(self._to_tell, None)
            if connection is not None:
                ext = ConsumerGroupName(self._telling).to_ext()
                connection.notify(Command(code=RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext=ext))
            elif self._changed:
                self._telling, _ = self._changed.popitem(last=False)
                self._to_tell = iter(self._connections_of(self._telling))
            else:
                self._has_work = False
                return False
            if is_over():
                return True
