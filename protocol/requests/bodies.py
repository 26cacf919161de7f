"""JSON bodies of requests and responses, typed.

Source: apache/rocketmq common/protocol/{heartbeat,route,body}/*.java at 4.9.7, and their form in fastjson. Unknown
fields are ignored; fields that Java dereferences without a check are always written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.integers import Int32, Int64

T = TypeVar("T")


class BrokerQueue(msgspec.Struct, rename="camel", gc=False, frozen=True, order=True):
    """A queue of a topic on a broker, as RocketMQ's `MessageQueue` in JSON."""

    broker_name: str
    queue_id: Int32
    topic: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that RocketMQ uses for a queue, as a value or as a key of a map."""
        return {"brokerName": self.broker_name, "queueId": self.queue_id, "topic": self.topic}


# --- heartbeat ---------------------------------------------------------------------------------------------------

CLUSTERING = "CLUSTERING"
BROADCASTING = "BROADCASTING"


class SubscriptionData(msgspec.Struct, rename="camel", gc=False):
    """The subscription of a consumer group to a topic. `sub_string`: tags joined by ||, or * for all; `sub_version`
    grows with each change: it is the time of the change, ms since the epoch.

    `tags_set` and `code_set` are the separate tags, and their hashes. Apache's broker does not compute them itself.
    When another member of the group pulls without naming its subscription, as Java members do, that broker filters by
    the tags and hashes in the last heartbeat, and without them would find nothing."""

    topic: str
    sub_string: str | None = "*"
    sub_version: Int64 = 0
    expression_type: str | None = "TAG"
    class_filter_mode: bool = False
    tags_set: list[str] | None = msgspec.field(default_factory=list)
    code_set: list[Int32] | None = msgspec.field(default_factory=list)


_CONSUME_TYPES: Final = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
_MESSAGE_MODELS: Final = (BROADCASTING, CLUSTERING)
_FROM_WHERE: Final = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)

if TYPE_CHECKING:
    EnumName = str
else:
    EnumName = str | int
    """The name of a constant, or its number, which the C++ client sends."""


class ConsumerData(msgspec.Struct, rename="camel", gc=False):
    """A consumer group of which a client is a member. The constants are accepted by name and by number."""

    group_name: str
    consume_type: EnumName | None = "CONSUME_PASSIVELY"
    message_model: EnumName | None = CLUSTERING
    consume_from_where: EnumName | None = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] | None = None
    unit_mode: bool = False

    def __post_init__(self) -> None:
        """Replace the numbers of constants by their names. Raises ValueError, which decoding turns into a
        BodyFormatError."""
        self.consume_type = _constant("consumeType", self.consume_type, _CONSUME_TYPES)
        self.message_model = _constant("messageModel", self.message_model, _MESSAGE_MODELS)
        self.consume_from_where = _constant("consumeFromWhere", self.consume_from_where, _FROM_WHERE)


def _constant(field: str, value: str | int | None, names: tuple[str, ...]) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if 0 <= value < len(names):
        return names[value]
    raise ValueError(f"{field}={value}: the constants are 0 to {len(names) - 1}")


class ProducerData(msgspec.Struct, rename="camel", gc=False):
    """A producer group of which a client is a member."""

    group_name: str


class HeartbeatData(msgspec.Struct, rename="camel", gc=False):
    """Body of HEART_BEAT (34)."""

    client_id: str = msgspec.field(name="clientID")
    producer_data_set: list[ProducerData] | None = None
    consumer_data_set: list[ConsumerData] | None = None


class ConsumerIdList(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to GET_CONSUMER_LIST_BY_GROUP (38): the client ids of a group's members."""

    consumer_id_list: list[str] = msgspec.field(default_factory=list)


class LockBatch(msgspec.Struct, rename="camel", gc=False):
    """Body of LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42)."""

    consumer_group: str
    client_id: str
    mq_set: list[BrokerQueue] | None = None


class LockedQueues(msgspec.Struct, gc=False):
    """Body of the answer to LOCK_BATCH_MQ (41): those of the queues that the client holds now."""

    queues: list[BrokerQueue] | None = msgspec.field(name="lockOKMQSet", default=None)


def reset_offset_body(offsets: Mapping[BrokerQueue, int], *, as_list: bool = False) -> bytes:
    """Encode the body of RESET_CONSUMER_CLIENT_OFFSET (220) and of the answer to INVOKE_BROKER_TO_RESET_OFFSET (222):
    for each queue, the queue offset at which a group is to continue. `as_list`: in the form that the C++ client
    reads."""
    if as_list:
        entries = [{**queue.to_json(), "offset": offset} for queue, offset in offsets.items()]
        return fastjson.dumps({"offsetTable": entries})
    table = fastjson.dump_object_keys((queue.to_json(), offset) for queue, offset in offsets.items())
    return b'{"offsetTable":%b}' % table


class _ResetOffsets(msgspec.Struct, rename="camel"):
    offset_table: dict[str, Int64] = {}
    """Queue offsets, by queue; the queue is JSON text."""


def read_reset_offset_body(body: bytes | bytearray | memoryview) -> dict[BrokerQueue, int]:
    """Decode the offsets in the form of the body that Java and Go clients get. Raises BodyFormatError."""
    table = decode(body, _ResetOffsets).offset_table
    return {decode(queue.encode(), BrokerQueue): offset for queue, offset in table.items()}


# --- routes ------------------------------------------------------------------------------------------------------


class QueueData(msgspec.Struct, rename="camel", gc=False):
    """The numbers of a topic's queues at one broker. `perm` bits: 1 inherit, 2 write, 4 read."""

    broker_name: str
    perm: Int32
    read_queue_nums: Int32
    write_queue_nums: Int32
    topic_sys_flag: Int32 = 0


class BrokerData(msgspec.Struct, rename="camel", gc=False):
    """A broker and its replicas: `broker_addrs` maps broker ids (0 is the primary) to "host:port"."""

    broker_addrs: dict[Int64, str]
    broker_name: str
    cluster: str = ""

    def to_json(self, *, strict: bool) -> bytes:
        """Return the JSON text; unless `strict`, with the broker ids unquoted, the only form that older clients
        read."""
        addresses = (
            fastjson.dumps({str(number): address for number, address in self.broker_addrs.items()})
            if strict
            else fastjson.dump_int_keys(self.broker_addrs)
        )
        return b'{"brokerAddrs":%b,"brokerName":%b,"cluster":%b}' % (
            addresses,
            fastjson.dumps(self.broker_name),
            fastjson.dumps(self.cluster),
        )


class TopicRoute(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to GET_ROUTEINFO_BY_TOPIC (105)."""

    broker_datas: list[BrokerData]
    queue_datas: list[QueueData]
    order_topic_conf: str | None = None

    def to_json(self, *, strict: bool) -> bytes:
        """Return the JSON text; see BrokerData.to_json."""
        order = b'"orderTopicConf":%b,' % fastjson.dumps(self.order_topic_conf) if self.order_topic_conf else b""
        return b'{"brokerDatas":[%b],"filterServerTable":{},%b"queueDatas":%b}' % (
            b",".join(broker.to_json(strict=strict) for broker in self.broker_datas),
            order,
            fastjson.dumps(self.queue_datas),
        )


class ClusterInfo(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to GET_BROKER_CLUSTER_INFO (106), for decoding: brokers by name, and names of brokers by
    cluster. For encoding see `cluster_info`."""

    broker_addr_table: dict[str, BrokerData] = msgspec.field(default_factory=dict)
    cluster_addr_table: dict[str, list[str]] = msgspec.field(default_factory=dict)


def cluster_info(brokers: Iterable[BrokerData], clusters: Mapping[str, Iterable[str]]) -> bytes:
    """Encode the body of the answer to GET_BROKER_CLUSTER_INFO (106): always with unquoted broker ids."""
    table = b",".join(
        b"%b:%b" % (fastjson.dumps(broker.broker_name), broker.to_json(strict=False)) for broker in brokers
    )
    names = {cluster: list(members) for cluster, members in clusters.items()}
    return b'{"brokerAddrTable":{%b},"clusterAddrTable":%b}' % (table, fastjson.dumps(names))


# --- topics and groups -------------------------------------------------------------------------------------------


class DataVersion(msgspec.Struct, rename="camel", gc=False):
    """The edition of a table; readers compare it only for equality. `timestamp`: ms since the epoch."""

    timestamp: Int64 = 0
    counter: Int64 = 0
    state_version: Int64 = 0

    def to_json(self) -> dict[str, int]:
        """Return the fields as 4.9.7 writes them; the state version, which only 5.x knows, is included only if it is
        not 0."""
        fields = {"counter": self.counter, "timestamp": self.timestamp}
        return {**fields, "stateVersion": self.state_version} if self.state_version else fields


CancelOutcome = Literal["CANCELLED", "ALREADY_DELIVERED", "ALREADY_CANCELLED", "NO_LONGER_WAITS", "NEVER_EXISTED"]


class CancelledMessage(msgspec.Struct, rename="camel", gc=False):
    """The outcome for one message of a CANCEL_MESSAGE, whose answer has a list of these."""

    msg_id: str
    result: CancelOutcome


class PendingRecurrence(msgspec.Struct, rename="camel", gc=False, omit_defaults=True):
    """The times at which a waiting message recurs; see `protocol.records.recurrence`. Times are ms since the epoch;
    `every_ms` is 0 with `cron`; `count`: the number of deliveries that are left."""

    every_ms: Int64 = 0
    cron: str = ""
    zone: str = ""
    start_ms: Int64 | None = None
    end_ms: Int64 | None = None
    count: Int64 | None = None
    is_paused: bool = False


class PendingEntry(msgspec.Struct, rename="camel", gc=False, omit_defaults=True):
    """A waiting message. Times are ms since the epoch; `delay_level` is 0 for a message with a timer; `keys` is as in
    the property KEYS; `body_size` is in bytes, as stored; `recurrence` is None for a message that is delivered only
    once."""

    msg_id: str
    unique_key: str | None
    topic: str
    queue_id: Int32
    deliver_ms: Int64
    delay_level: Int32
    keys: str | None
    tags: str | None
    body_size: Int32
    born_ms: Int64
    store_ms: Int64
    recurrence: PendingRecurrence | None = None


class PendingPage(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to LIST_PENDING. `cursor` is for the next page, None if there is none; `counted` is the number
    of messages in this page or, if only a count was requested, of all selected messages."""

    messages: list[PendingEntry]
    cursor: str | None
    counted: Int64


class DueCurveBody(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to DUE_CURVE: the number of messages due in each span of `step_ms` from `begin_ms` (ms since
    the epoch) on."""

    begin_ms: Int64
    step_ms: Int64
    counts: list[Int64]


ChangeOutcome = Literal[
    "CANCELLED",
    "RESCHEDULED",
    "DELIVERED_NOW",
    "ALREADY_DELIVERED",
    "ALREADY_CANCELLED",
    "NO_LONGER_WAITS",
    "NEVER_EXISTED",
]


class ChangedEntry(msgspec.Struct, rename="camel", gc=False):
    """The outcome for one message of a CHANGE_PENDING."""

    msg_id: str
    result: ChangeOutcome


class ChangedMessages(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to CHANGE_PENDING: the number of messages by result, and the first 1000 of the messages."""

    counts: dict[ChangeOutcome, Int64]
    messages: list[ChangedEntry]


RecurringOutcome = Literal["PAUSED", "RESUMED", "REMOVED", "UNCHANGED", "NOT_FOUND"]


class ChangedRecurring(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to CHANGE_RECURRING. UNCHANGED: the message was to be paused and was paused before, or was to
    be resumed and was not paused. `deliver_ms`: the time of its next delivery, ms since the epoch, if it was
    resumed; else None."""

    result: RecurringOutcome
    deliver_ms: Int64 | None


class TopicConfig(msgspec.Struct, rename="camel", gc=False):
    """A topic as a broker declares it. `attributes` are 5.x's. In a table the key is the topic's name, whatever
    `topic_name` says."""

    topic_name: str = ""
    read_queue_nums: Int32 = 16
    write_queue_nums: Int32 = 16
    perm: Int32 = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: dict[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as 4.9.7 writes them, plus the attributes if there are any."""
        fields: dict[str, Any] = {
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queue_nums,
            "topicFilterType": self.topic_filter_type,
            "topicName": self.topic_name,
            "topicSysFlag": self.topic_sys_flag,
            "writeQueueNums": self.write_queue_nums,
        }
        return {**fields, "attributes": self.attributes} if self.attributes else fields


class GroupAttributes(msgspec.Struct, rename="camel", gc=False):
    """The part of 5.x's body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP that changes attributes: +name or -name, with
    values."""

    attributes: dict[str, str] | None = None


class SubscriptionGroupConfig(msgspec.Struct, rename="camel", gc=False):
    """A consumer group as a broker keeps it."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: Int32 = 1
    retry_max_times: Int32 = 16
    broker_id: Int64 = 0
    which_broker_when_consume_slowly: Int64 = 1
    notify_consumer_ids_changed_enable: bool = True


class TopicConfigList(msgspec.Struct, rename="camel", gc=False):
    """The body of UPDATE_AND_CREATE_TOPIC_LIST (18). The attributes are changes: +name or -name, with values."""

    topic_config_list: list[TopicConfig]


class GroupConfigList(msgspec.Struct, rename="camel", gc=False):
    """The body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225)."""

    group_config_list: list[SubscriptionGroupConfig]


class GroupAttributesList(msgspec.Struct, rename="camel", gc=False):
    """The part of the body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST that changes attributes."""

    group_config_list: list[GroupAttributes]


# --- reading and writing -----------------------------------------------------------------------------------------


MAX_REQUEST_BYTES: Final = 1024 * 1024
"""Size of the largest JSON body of a request; a heartbeat of a thousand groups has a tenth of it."""
LOOSE_LIMIT = 1024 * 1024
"""Size of the largest body that is read as fastjson's JSON, which takes about a second per megabyte."""


def decode(
    body: bytes | bytearray | memoryview, body_type: type[T], *, strict: bool = False, loose_limit: int = LOOSE_LIMIT
) -> T:
    """Decode a typed JSON body. `strict`: only as strict JSON, which clients send. `loose_limit`: most bytes that are
    read as fastjson's JSON. Raises BodyFormatError."""
    try:
        return msgspec.json.decode(body, type=body_type, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if strict:
            raise BodyFormatError(f"a {body_type.__name__} body: {error}") from None
    try:
        return msgspec.convert(fastjson.loads(body, loose_limit=loose_limit), body_type, strict=False)
    except msgspec.ValidationError as error:
        raise BodyFormatError(f"a {body_type.__name__} body: {error}") from None


def decode_request(body: bytes | bytearray | memoryview, body_type: type[T]) -> T:
    """Decode the typed JSON body of a request, which is strict JSON of at most MAX_REQUEST_BYTES. Raises
    BodyFormatError."""
    check_size(body, body_type.__name__)
    return decode(body, body_type, strict=True)


def check_size(body: bytes | bytearray | memoryview, what: str) -> None:
    """Raise BodyFormatError for a request's body that is larger than MAX_REQUEST_BYTES."""
    if len(body) > MAX_REQUEST_BYTES:
        raise BodyFormatError(f"a {what} body of {len(body)} bytes: at most {MAX_REQUEST_BYTES} are taken")


def decompress(body: bytes | bytearray | memoryview, limit: int) -> bytes:
    """Return the content of a zlib stream, which may have at most `limit` bytes after decompression. Raises
    BodyFormatError."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(body, limit)
    except zlib.error as error:
        raise BodyFormatError(f"a compressed body that does not unpack: {error}") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise BodyFormatError(f"a compressed body that is torn or has more than {limit} bytes unpacked")
    return data
