"""A consumer's subscription to a topic."""

from __future__ import annotations

import msgspec

from duemq._values.checks import check_topic
from duemq.errors import ArgumentError
from duemq.protocol.records.properties import java_hash, tags_in
from duemq.protocol.requests.bodies import SubscriptionData

ALL_TAGS = "*"


class Subscription(msgspec.Struct, frozen=True):
    """A topic, and the tags of the messages that the consumer wants."""

    topic: str
    tags: frozenset[str]
    """Empty: all messages, including those without a tag."""
    version: int
    """The time when the subscription was made, ms since the epoch; larger than that of the one it replaces."""

    @property
    def text(self) -> str:
        """The subscription as requests have it: tags joined by ||, or *."""
        return " || ".join(sorted(self.tags)) or ALL_TAGS

    def wants(self, tags: str | None) -> bool:
        """Whether the consumer wants a message with this tag. Brokers compare only the hashes of tags, so the consumer
        compares the tags."""
        return not self.tags or tags in self.tags

    def to_data(self) -> SubscriptionData:
        """Return the subscription in the form of a heartbeat."""
        tags = sorted(self.tags)
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.text,
            sub_version=self.version,
            tags_set=tags,
            code_set=[java_hash(tag) for tag in tags],
        )


def make_subscription(topic: str, tags: str, version: int) -> Subscription:
    """Return a subscription. `tags`: "*" for all, or tags joined by ||. Raises ArgumentError."""
    check_topic(topic)
    if not isinstance(tags, str):
        raise ArgumentError(f"tags must be a string, such as 'a || b', not {tags!r}")
    wanted = frozenset(tags_in(tags))
    if not wanted or (ALL_TAGS in wanted and len(wanted) > 1):
        raise ArgumentError(f"invalid tags {tags!r}: write * for all, or tags joined by ||")
    return Subscription(topic, wanted - {ALL_TAGS}, version)
