"""A consumer's subscription to a topic."""

from __future__ import annotations

import msgspec

from duemq._values.checks import check_topic
from duemq.errors import ArgumentError
from duemq.protocol.records.properties import java_hash
from duemq.protocol.requests.bodies import SubscriptionData

ALL_TAGS = "*"


class Subscription(msgspec.Struct, frozen=True):
    """A topic, and the tags of the messages wanted."""

    topic: str
    tags: frozenset[str]
    """Empty: all messages, also those without a tag."""
    version: int
    """Grows with each change; ms since the epoch when it was made."""

    @property
    def text(self) -> str:
        """As the wire says it: tags joined by ||, or *."""
        return " || ".join(sorted(self.tags)) or ALL_TAGS

    def wants(self, tags: str | None) -> bool:
        """Whether a message with this tag is wanted: brokers compare only the hashes of tags."""
        return not self.tags or tags in self.tags

    def to_data(self) -> SubscriptionData:
        """As a heartbeat carries it."""
        tags = sorted(self.tags)
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.text,
            sub_version=self.version,
            tags_set=tags,
            code_set=[java_hash(tag) for tag in tags],
        )


def make_subscription(topic: str, tags: str, version: int) -> Subscription:
    """`tags`: "*" for all, or tags joined by ||. Raises ArgumentError."""
    check_topic(topic)
    if not isinstance(tags, str):
        raise ArgumentError(f"tags are a text, such as 'a || b', not {tags!r}")
    wanted = frozenset(tag.strip() for tag in tags.split("||")) - {""}
    if not wanted or (ALL_TAGS in wanted and len(wanted) > 1):
        raise ArgumentError(f"the tags {tags!r}; write * for all, or tags joined by ||")
    return Subscription(topic, wanted - {ALL_TAGS}, version)
