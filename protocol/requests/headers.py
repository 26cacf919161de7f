"""The extension fields of each request and response, typed.

There is a class for each header; its attributes are RocketMQ's field names in Python's spelling. On the wire every
value is text: reading converts it and checks its range, writing converts it back to text and leaves out fields that are
None. Unknown fields are ignored, so that newer clients are understood.

Source: apache/rocketmq common/protocol/header/*.java, 4.9.7; fields that 5.3.3 added are optional or ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, get_args

import msgspec

from duemq.protocol.codes import FLAG_ONEWAY, LANGUAGE, VERSION
from duemq.protocol.errors import FieldError
from duemq.protocol.frames.command import Body, Command
from duemq.protocol.frames.frame import JSON
from duemq.protocol.frames.integers import Int32, Int64
from duemq.protocol.frames.json_header import as_text


class Header(msgspec.Struct, rename="camel", gc=False):
    """Base of all typed headers."""

    def to_ext(self) -> dict[str, str]:
        """Return the extension fields as they are sent on the wire."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: as_text(value) for name, value in fields.items() if value is not None}


class NoFields(Header):
    """A request without extension fields, or whose fields do not matter here."""


# --- sending -----------------------------------------------------------------------------------------------------


class SendMessage(Header):
    """SEND_MESSAGE (10). Times are ms since the epoch; `properties` is RocketMQ's property text."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    batch: bool | None = None
    max_reconsume_times: Int32 | None = None


class SendMessageV2(SendMessage, rename=dict(zip(SendMessage.__struct_fields__, "abcdefghijkml", strict=True))):
    """SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320): SendMessage with names of one letter.

    The fields are declared again because a renaming applies only to the fields that a class declares itself.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    batch: bool | None = None
    max_reconsume_times: Int32 | None = None


class SendMessageResponse(Header):
    """Answer to every kind of send; for a batch the message ids are joined by commas. `recall_handle` (5.x) names a
    message that waits for its time, for RECALL_MESSAGE."""

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    recall_handle: str | None = None


class ConsumerSendMsgBack(Header):
    """CONSUMER_SEND_MSG_BACK (36). `offset` is the physical offset of the message. With `delay_level` 0 the broker
    chooses the level; with a negative level the message goes to the dead-letter queue immediately."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None


class RecallMessage(Header):
    """RECALL_MESSAGE (370): cancel a message that waits for its time. `recall_handle` is from the answer to its
    send."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class RecallMessageResponse(Header):
    """Answer to RECALL_MESSAGE: the client's id (UNIQ_KEY) of the message."""

    msg_id: str


class CancelMessage(Header):
    """CANCEL_MESSAGE (30002, duemq's own). `msg_id`: offset message ids, joined by commas."""

    msg_id: str


class ListPending(Header):
    """LIST_PENDING (30003, duemq's own): list or count waiting messages. A condition that is None selects all; `key` is
    one of KEYS, or the UNIQ_KEY; times are ms since the epoch, `end_ms` is exclusive. `limit`: most messages of a page;
    `cursor`: from the previous answer, for the next page. `count_only`: return only the number of messages.
    `recurring`: select only recurring messages."""

    topic: str | None = None
    key: str | None = None
    begin_ms: Int64 | None = None
    end_ms: Int64 | None = None
    limit: Int32 = 100
    cursor: str | None = None
    count_only: bool = False
    recurring: bool | None = None


class ReportBridge(Header):
    """REPORT_BRIDGE (30006, duemq's own): the figures of an MQTT bridge, in the body. `bridge`: its name."""

    bridge: str


class QueryDueCurve(Header):
    """DUE_CURVE (30004, duemq's own): count the messages that are due in each of `steps` spans of `step_ms` from
    `begin_ms` on (ms since the epoch, by default now), for one topic or for all."""

    step_ms: Int64
    steps: Int32
    topic: str | None = None
    begin_ms: Int64 | None = None


class ChangePending(Header):
    """CHANGE_PENDING (30005, duemq's own). `action`: cancel, reschedule or deliver. For reschedule, either `deliver_ms`
    is the new time, ms since the epoch, or `delay_ms` counts from the time when the broker receives the request. The
    messages are selected either by `msg_id`, offset message ids joined by commas, or by the other fields, as in
    ListPending."""

    action: str
    deliver_ms: Int64 | None = None
    msg_id: str | None = None
    topic: str | None = None
    key: str | None = None
    begin_ms: Int64 | None = None
    end_ms: Int64 | None = None
    delay_ms: Int64 | None = None


class ChangeRecurring(Header):
    """CHANGE_RECURRING (30007, duemq's own). `action`: pause, resume or remove; `name`: the key of the topic's
    recurring message."""

    topic: str
    name: str
    action: str


class ChangeByHandle(Header):
    """CHANGE_BY_HANDLE (30010, duemq's own). `action`, `deliver_ms` and `delay_ms` are as in ChangePending. The
    messages are named by their topic, by offset message ids in `msg_id`, joined by commas, and by UNIQ_KEYs in
    `uniq_key`, in the same order, joined by the character 1, which no property has. A message with another key or topic
    is not the one that is meant: an earlier store at the same address may have given out the same id."""

    action: str
    topic: str
    msg_id: str
    uniq_key: str
    deliver_ms: Int64 | None = None
    delay_ms: Int64 | None = None


# --- receiving ---------------------------------------------------------------------------------------------------

PULL_COMMIT_OFFSET: Final = 1
PULL_SUSPEND: Final = 2
PULL_SUBSCRIPTION: Final = 4


class PullMessage(Header):
    """PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361). `sys_flag` has the PULL_* bits."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str | None = None
    expression_type: str | None = None


class PullMessageResponse(Header):
    """Answer to a pull, whatever its code."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64


class QueryConsumerOffset(Header):
    """QUERY_CONSUMER_OFFSET (14)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None
    """False: if the group has no offset, the answer says so, even if the group would begin at 0. Since 5.0."""


class UpdateConsumerOffset(Header):
    """UPDATE_CONSUMER_OFFSET (15)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


class QueueOfTopic(Header):
    """GET_MAX_OFFSET (30), GET_MIN_OFFSET (31), GET_EARLIEST_MSG_STORETIME (32)."""

    topic: str
    queue_id: Int32


class SearchOffset(Header):
    """SEARCH_OFFSET_BY_TIMESTAMP (29). `boundary_type` (5.x): LOWER or UPPER."""

    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str | None = None


class OffsetResponse(Header):
    """Answer with one queue offset."""

    offset: Int64


class TimestampResponse(Header):
    """Answer with one time, ms since the epoch; -1 if there is no message."""

    timestamp: Int64


class ViewMessage(Header):
    """VIEW_MESSAGE_BY_ID (33): the message at a physical offset."""

    offset: Int64


class ResetOffset(Header):
    """INVOKE_BROKER_TO_RESET_OFFSET (222), and RESET_CONSUMER_CLIENT_OFFSET (220), which does not have the last two
    fields. `timestamp`: ms since the epoch, -1 for the end of each queue. Without `is_force` a group is only set back.
    5.x may name one queue, and an offset in it instead of the time; -1 means none."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False
    queue_id: Int32 | None = None
    offset: Int64 | None = None


# --- clients -----------------------------------------------------------------------------------------------------


class UnregisterClient(Header):
    """UNREGISTER_CLIENT (35)."""

    client_id: str = msgspec.field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class ConsumerGroupName(Header):
    """Requests and notices that name a consumer group only: 38, 40, 203."""

    consumer_group: str


class ProducerGroupName(Header):
    """GET_PRODUCER_CONNECTION_LIST (204)."""

    producer_group: str


class RelayToConsumer(Header):
    """GET_CONSUMER_RUNNING_INFO (307) and CONSUME_MESSAGE_DIRECTLY (309)."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None


# --- topics, groups, statistics ----------------------------------------------------------------------------------


class CreateTopic(Header):
    """UPDATE_AND_CREATE_TOPIC (17). `perm` bits: 1 inherit, 2 write, 4 read."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    topic_sys_flag: Int32 | None = None
    order: bool = False
    attributes: str | None = None


class TopicName(Header):
    """Requests that name a topic only: 105, 202, 215, 216, 300, 351."""

    topic: str


class GetRouteInfo(Header):
    """GET_ROUTEINFO_BY_TOPIC (105)."""

    topic: str
    accept_standard_json_only: bool | None = None


class DeleteSubscriptionGroup(Header):
    """DELETE_SUBSCRIPTIONGROUP (207). 4.9 says removeOffset, 5.x cleanOffset."""

    group_name: str
    remove_offset: bool | None = None
    clean_offset: bool | None = None


class Group(Header):
    """GET_SUBSCRIPTIONGROUP_CONFIG (352)."""

    group: str


class GetConsumeStats(Header):
    """GET_CONSUME_STATS (208)."""

    consumer_group: str
    topic: str | None = None


class GetBrokerConsumeStats(Header):
    """GET_BROKER_CONSUME_STATS (317). `is_order`: only topics whose messages are ordered."""

    is_order: bool = False


class GroupOfTopic(Header):
    """Requests that name a topic and a consumer group: 303, 345."""

    topic: str
    group: str


class QueryCorrectionOffset(Header):
    """QUERY_CORRECTION_OFFSET (308). `filter_groups`: groups that are left out, separated by commas."""

    compare_group: str
    topic: str
    filter_groups: str | None = None


class QueryConsumeQueue(Header):
    """QUERY_CONSUME_QUEUE (321): `count` units from queue offset `index` on."""

    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str | None = None


class CloneGroupOffset(Header):
    """CLONE_GROUP_OFFSET (314). `offline`: also for topics to which the source group, which is online, does not
    subscribe."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class ViewBrokerStatsData(Header):
    """VIEW_BROKER_STATS_DATA (315): `stats_name` is a name of RocketMQ's Stats, such as TOPIC_PUT_NUMS."""

    stats_name: str
    stats_key: str


class CreateAccessConfig(Header):
    """UPDATE_AND_CREATE_ACL_CONFIG (50): an account of plain_acl.yml. The permissions are joined by commas."""

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool = False
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None


class DeleteAccessConfig(Header):
    """DELETE_ACL_CONFIG (51)."""

    access_key: str


class UpdateGlobalWhiteAddrs(Header):
    """UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53): patterns of addresses, joined by commas, and the file for them, by default
    conf/plain_acl.yml."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


class AclConfigVersion(Header):
    """Answer to GET_BROKER_CLUSTER_ACL_INFO (52). The versions are JSON: the version of conf/plain_acl.yml, and those
    of all files by their paths."""

    version: str
    all_acl_file_version: str
    broker_name: str
    broker_addr: str
    cluster_name: str


class Username(Header):
    """AUTH_CREATE_USER (3001), AUTH_UPDATE_USER (3002), AUTH_DELETE_USER (3003) and AUTH_GET_USER (3004)."""

    username: str = ""


class ListUsers(Header):
    """AUTH_LIST_USER (3005): list the users whose names contain `filter`; all users if it is None."""

    filter: str | None = None


class SubjectName(Header):
    """AUTH_CREATE_ACL (3006), AUTH_UPDATE_ACL (3007) and AUTH_GET_ACL (3009). `subject`: `User:` and a name."""

    subject: str = ""


class DeleteAcl(Header):
    """AUTH_DELETE_ACL (3008): delete the entry for one resource of a subject, or all entries if `resource` is None.
    `policy_type`: Custom by default."""

    subject: str = ""
    policy_type: str | None = None
    resource: str | None = None


class ListAcls(Header):
    """AUTH_LIST_ACL (3010): list the entries whose resources contain `resource_filter`, of the subjects whose keys
    contain `subject_filter`."""

    subject_filter: str | None = None
    resource_filter: str | None = None


class MoveClock(Header):
    """MOVE_CLOCK (30001, duemq's own). `advance_millis`: how far to move the clock ahead, in ms, 0 or more."""

    advance_millis: Int64


class MoveClockResponse(Header):
    """Answer to MOVE_CLOCK: the time on the clock now, ms since the epoch."""

    now: Int64


# --- name server -------------------------------------------------------------------------------------------------


class RegisterBroker(Header):
    """REGISTER_BROKER (103). `body_crc32` 0 means "not checked"."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: Int64
    compressed: bool = False
    body_crc32: Int32 = msgspec.field(default=0, name="bodyCrc32")


class BrokerIdentity(Header):
    """UNREGISTER_BROKER (104), QUERY_DATA_VERSION (322)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class ClusterName(Header):
    """GET_TOPICS_BY_CLUSTER (224)."""

    cluster: str


class KVKey(Header):
    """GET_KV_CONFIG (101), DELETE_KV_CONFIG (102)."""

    namespace: str
    key: str


class BrokerName(Header):
    """WIPE_WRITE_PERM_OF_BROKER (205) and ADD_WRITE_PERM_OF_BROKER (327)."""

    broker_name: str


class WipedTopics(Header):
    """Answer to WIPE_WRITE_PERM_OF_BROKER: the number of the broker's topics."""

    wipe_topic_count: Int32


class WritableTopics(Header):
    """Answer to ADD_WRITE_PERM_OF_BROKER: the number of the broker's topics."""

    add_topic_count: Int32


class KVEntry(Header):
    """PUT_KV_CONFIG (100)."""

    namespace: str
    key: str
    value: str


class KVNamespace(Header):
    """GET_KVLIST_BY_NAMESPACE (219)."""

    namespace: str


# --- decoding ----------------------------------------------------------------------------------------------------

H = TypeVar("H", bound=Header)

_PATH = re.compile(r" - at `\$\.?(?:extFields)?\.?([^`]*)`")
_NUMBER = re.compile(r"(?:\+|(-?))0*([0-9]+)", re.ASCII)
_MISSING = re.compile(r"required field `([^`]*)`")


if TYPE_CHECKING:
    Flag = int
else:
    Flag = Literal[0, FLAG_ONEWAY]
    """Flags with which the fast way of decoding takes a frame for a request. With any other flag the frame is decoded
    the slow way: it may be a response, whose code means something else."""


class Request(msgspec.Struct, Generic[H], gc=False, kw_only=True):
    """A request with typed extension fields, as handlers receive it. See `Command` for the other attributes."""

    code: Int32
    header: H = msgspec.field(name="extFields")
    opaque: Int32 = 0
    flag: Flag = 0
    version: Int32 = 0
    language: str | None = None
    codec: int = JSON
    body: Any = b""
    """A `Body`; typed loosely because the JSON decoder builds this class. It is always set from the frame."""
    now_ms: int = 0
    """The time when the request came, ms since the epoch by the messages' clock; set by the router."""


class RequestDecoder(Generic[H]):
    """Decodes the frames of one request code, its header typed as `header_type`.

    A JSON header is decoded in one pass, which is what the hot path needs. Headers of other codecs, and headers that
    this pass refuses, are decoded by way of a `Command`, which is as lenient as RocketMQ and finds out which field is
    wrong.
    """

    def __init__(self, header_type: type[H]) -> None:
        self.header_type = header_type

    @cached_property
    def decode_json(self) -> Callable[[bytes], Request[H]]:
        """Returns the request in the JSON header of a frame; the caller sets `codec` and `body`. Raises
        msgspec.MsgspecError, RecursionError or UnicodeDecodeError if the slow way, `from_command`, is needed. The
        decoder is made on first use, which takes up to a millisecond."""
        return msgspec.json.Decoder(Request[self.header_type], strict=False).decode  # type: ignore[name-defined]

    def from_command(self, command: Command, codec: int) -> Request[H]:
        """Return the request in a command. Raises FieldError."""
        return Request(
            code=command.code,
            header=decode_ext(self.header_type, command.ext),
            opaque=command.opaque,
            flag=command.flag,
            version=command.version,
            language=command.language,
            codec=codec,
            body=command.body,
        )


def decode_ext(header_type: type[H], ext: dict[str, str]) -> H:
    """Convert extension fields to a typed header. Raises FieldError, which names the field."""
    try:
        return msgspec.convert(ext, header_type, strict=False)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.convert(_as_java_reads(header_type, ext), header_type, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        missing, path = _MISSING.search(text), _PATH.search(text)
        field = missing[1] if missing else path[1] if path else ""
        raise FieldError(field, "is missing" if missing else _PATH.sub("", text)) from None


def _as_java_reads(header_type: type[Header], ext: dict[str, str]) -> dict[str, str]:
    """Return fields rewritten so that they are read as Java reads them: its parseBoolean takes anything but "true" for
    false, and its number parsers accept a plus sign and leading zeros."""
    result = dict(ext)
    for name, is_number in _no_texts(header_type).items():
        text = ext.get(name)
        if text is None:
            continue
        if not is_number:
            result[name] = "true" if text.lower() == "true" else "false"
        elif number := _NUMBER.fullmatch(text):
            result[name] = f"{number[1] or ''}{number[2]}"
    return result


@cache
def _no_texts(header_type: type[Header]) -> dict[str, bool]:
    """Return the names of a header's fields that are not text, each with whether it is a number; the others are
    booleans."""
    kinds = {}
    for field in msgspec.structs.fields(header_type):
        types = (field.type, *get_args(field.type))
        if str not in types:
            kinds[field.encode_name] = bool not in types
    return kinds


def response(code: int, remark: str | None = None, header: Header | None = None, body: Body = b"") -> Command:
    """Return a response without opaque and flag, which the router fills in."""
    return Command(
        code=code,
        remark=remark,
        ext=header.to_ext() if header is not None else {},
        body=body,
        language=LANGUAGE,
        version=VERSION,
    )
