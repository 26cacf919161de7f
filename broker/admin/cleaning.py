"""Requests to remove what is no longer needed: expired files, and queues without a topic. The broker removes expired
files by itself; an administrator may not want to wait for that."""

from __future__ import annotations

from duemq.broker.access.permission import ADMINISTER
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.tables.topics import Topics
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import NoFields, Request, response
from duemq.storage.durability.owner import Durability
from duemq.storage.store import MessageStore


class CleaningHandlers:
    """Handles requests to remove files."""

    def __init__(self, store: MessageStore, topics: Topics, durability: Durability) -> None:
        self._store = store
        self._topics = topics
        self._durability = durability

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, NoFields, ADMINISTER, self.clean_queues)
        router.add(RequestCode.DELETE_EXPIRED_COMMITLOG, NoFields, ADMINISTER, self.delete_commitlog)
        router.add(RequestCode.CLEAN_UNUSED_TOPIC, NoFields, ADMINISTER, self.clean_topics)

    def clean_queues(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Look now for files that may be removed."""
        self._durability.expire_now(at_any_hour=False)
        return response(ResponseCode.SUCCESS)

    def delete_commitlog(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Delete expired commitlog files now, whatever the hours in deleteWhen."""
        self._durability.expire_now(at_any_hour=True)
        return response(ResponseCode.SUCCESS)

    def clean_topics(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Remove the queues of topics that no longer exist, which a store copied from another broker may have."""
        for name in [name for name in self._store.queues if name not in self._topics.table]:
            self._durability.remove_topic(name, lambda _: None)
        return response(ResponseCode.SUCCESS)
