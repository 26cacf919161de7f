"""The features that client libraries lack, each with the reason.

A test that needs one of these is skipped for that client, and pytest's summary shows the reason; no test is skipped for
a client without an entry here.
"""

from enum import Enum

CLIENTS = ("java-4.9.7", "java-5.3.3", "go", "cpp")


class Can(Enum):
    """A feature that not every client library has."""

    ASYNC_TO_QUEUE = "send asynchronously to a chosen queue"
    BATCH = "send a batch"
    BATCH_TO_QUEUE = "send a batch to a chosen queue"
    BINARY_BODY = "tell a received body that has a zero byte in it"
    CONSUME_FROM = "choose where a new group begins"
    CONSUMER_OFFSET = "tell the offset that the broker has for a group"
    LIST_PROPERTIES = "tell the properties of a message without knowing their names"
    MAX_RECONSUME_TIMES = "set how many times a message is tried again"
    OFFSET_MSG_ID = "tell the broker's own message id"
    OFFSETS = "ask for the first, the last and the offset at a time"
    PRODUCER_KNOWN = "be known to the broker as a producer from the first message on"
    RECALL = "recall a message that waits for its time"
    RESET_OFFSET = "be told by an admin of another language to go back"
    RESULT_QUEUE = "tell the queue in a send result"
    RESPONSE_CODE = "tell the broker's response code as a number"
    SHOW_EACH_TRY = "show a message that was pulled together with one that failed"
    STORE_WHAT_IS_CONSUMED = "store the offsets of all consumed messages when it is closed"
    TIMER_METHODS = "set a time with methods of its own (it can as properties)"
    COMPRESS = "choose the size from which bodies are compressed"


_BINDING = "the C functions of librocketmq (wheel rocketmq 0.4.4)"

GAPS: dict[str, dict[Can, str]] = {
    "java-4.9.7": {
        Can.RECALL: "recall came with 5.3; the handle in the answer is not looked at",
        Can.TIMER_METHODS: "timers came with 5.0",
    },
    "java-5.3.3": {},
    "go": {
        Can.OFFSETS: "rocketmq-client-go v2.1.2 keeps these requests to itself",
        Can.RECALL: "rocketmq-client-go v2.1.2 has no such request",
        Can.RESPONSE_CODE: "rocketmq-client-go v2.1.2 has the code only in the text of its errors",
        Can.STORE_WHAT_IS_CONSUMED: (
            "rocketmq-client-go v2.1.2 may get a second try before it notes that the first was sent back; if it is "
            "closed between the two, it stores an offset that is too low"
        ),
        Can.TIMER_METHODS: "rocketmq-client-go v2.1.2 has methods for levels only",
    },
    "cpp": {
        Can.ASYNC_TO_QUEUE: "the wheel's binding has no asynchronous ordered send",
        Can.BATCH: (
            "librocketmq sends a batch as code 10 with batch=1, and RocketMQ's brokers take only `true` for yes: they "
            "store one message whose body is the encoded batch"
        ),
        Can.BATCH_TO_QUEUE: f"{_BINDING} have no queue argument for a batch",
        Can.BINARY_BODY: f"{_BINDING} give a body as a C string",
        Can.CONSUME_FROM: f"{_BINDING} do not set consumeFromWhere; it is always CONSUME_FROM_LAST_OFFSET",
        Can.CONSUMER_OFFSET: f"{_BINDING} have no offset query",
        Can.LIST_PROPERTIES: f"{_BINDING} give a property by name and cannot list them",
        Can.MAX_RECONSUME_TIMES: f"{_BINDING} do not set it; the group's retryMaxTimes counts",
        Can.OFFSET_MSG_ID: f"{_BINDING} give one id only, the client's",
        Can.OFFSETS: f"{_BINDING} have no offset query",
        Can.PRODUCER_KNOWN: "librocketmq sends its first heartbeat before it has a route, the next 30 s later",
        Can.RECALL: "librocketmq is older than recall, and does not keep the handle",
        Can.RESET_OFFSET: (
            "librocketmq wants the offsets of code 220 as a list, which RocketMQ's brokers send only when the admin is "
            "a C++ client as well; duemq sends it, but then librocketmq sometimes hangs when it is shut down"
        ),
        Can.RESULT_QUEUE: f"{_BINDING} give status, id and offset of a sent message only",
        Can.SHOW_EACH_TRY: (
            "librocketmq consumes what it pulled as one batch, whatever its batch size is set to: the first failure "
            "sends all of it back, unseen"
        ),
        Can.TIMER_METHODS: "librocketmq is older than timers",
        Can.RESPONSE_CODE: f"{_BINDING} have the code only in the text of the errors",
        Can.COMPRESS: f"{_BINDING} set a level, not a size",
    },
}


def gap(client: str, can: Can) -> str | None:
    """Return why a client lacks a feature, or None if it has it."""
    return GAPS[client].get(can)
