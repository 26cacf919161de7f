"""Names of topics that RocketMQ's brokers and clients treat in their own way. Mirrors common/topic/TopicValidator.java
and common/MixAll.java (4.9.7, 5.3.3)."""

from __future__ import annotations

import re
from typing import Final

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
"""The topic in which messages with a delay level wait: level n in queue n - 1."""
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
"""The topic in which messages with a timer wait, all in queue 0."""
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""The topic of half messages: those of transactions that are not committed."""
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""The topic of the records that end half messages."""
RETRY_PREFIX: Final = "%RETRY%"
"""The name of a group's retry topic is this prefix and the group's name."""
DLQ_PREFIX: Final = "%DLQ%"
"""The name of a group's dead-letter topic is this prefix and the group's name."""

NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
"""The names of topics and groups that RocketMQ's TopicValidator accepts."""
NOT_FOR_CLIENTS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        TIMER_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)
"""Topics that only brokers themselves write to: they refuse the sends of clients."""
