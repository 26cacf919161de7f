"""Short ways to build the commands of tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from duemq.protocol.codes import FLAG_ONEWAY, RequestCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, FrameReader
from duemq.protocol.requests.headers import (
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
    Header,
    PullMessage,
    SendMessage,
    SendMessageV2,
)

_opaques = itertools.count(1)

BORN_MS = 1_700_000_000_000


def request(
    code: int, header: Header | None = None, body: bytes = b"", *, oneway: bool = False, version: int = 407
) -> Command:
    """A request with an opaque of its own."""
    return Command(
        code=code,
        opaque=next(_opaques),
        flag=FLAG_ONEWAY if oneway else 0,
        version=version,
        language="JAVA",
        ext=header.to_ext() if header is not None else {},
        body=body,
    )


ADDED = {"CLUSTER": "DefaultCluster", "MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
"""The properties that a broker of a test adds to each message."""
ADDED_TEXT = "\x02".join(f"{name}\x01{value}" for name, value in ADDED.items())


def send(
    topic: str,
    body: bytes = b"body",
    *,
    queue_id: int = 0,
    properties: str | None = None,
    oneway: bool = False,
    v1: bool = False,
    version: int = 407,
    code: int | None = None,
    sys_flag: int = 0,
    flag: int = 0,
    batch: bool | None = None,
    reconsume_times: int | None = None,
    max_reconsume_times: int | None = None,
    default_topic: str = "TBW102",
    default_queues: int = 4,
) -> Command:
    """A send request, version 2 unless `v1`."""
    header_type, usual = (SendMessage, RequestCode.SEND_MESSAGE) if v1 else (SendMessageV2, RequestCode.SEND_MESSAGE_V2)
    header = header_type(
        producer_group="producers",
        topic=topic,
        default_topic=default_topic,
        default_topic_queue_nums=default_queues,
        queue_id=queue_id,
        sys_flag=sys_flag,
        born_timestamp=BORN_MS,
        flag=flag,
        properties=properties,
        reconsume_times=reconsume_times,
        batch=batch,
        max_reconsume_times=max_reconsume_times,
    )
    return request(code if code is not None else usual, header, body, oneway=oneway, version=version)


def pull(
    topic: str,
    offset: int = 0,
    *,
    queue_id: int = 0,
    group: str = "consumers",
    subscription: str | None = "*",
    suspend_ms: int | None = None,
    count: int = 32,
    sys_flag: int | None = None,
    commit_offset: int = 0,
    expression_type: str | None = "TAG",
    sub_version: int = 0,
) -> Command:
    """A pull request with its subscription; the broker may hold it for `suspend_ms`."""
    if sys_flag is None:
        sys_flag = PULL_SUBSCRIPTION | (PULL_SUSPEND if suspend_ms is not None else 0)
    header = PullMessage(
        consumer_group=group,
        topic=topic,
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=sys_flag,
        commit_offset=commit_offset,
        suspend_timeout_millis=suspend_ms or 0,
        sub_version=sub_version,
        subscription=subscription,
        expression_type=expression_type,
    )
    return request(RequestCode.PULL_MESSAGE, header)


def encode_all(commands: Iterable[Command], frame_codec: int = JSON) -> bytes:
    """Encode commands as the bytes of one stream."""
    return b"".join(codec.encode(command, frame_codec) for command in commands)


def decode_all(data: bytes) -> Iterator[tuple[int, Command]]:
    """Decode the commands of a stream, each with the codec of its header."""
    reader = FrameReader()
    for frame in reader.receive_data(data):
        yield frame[0], codec.decode(frame)
    assert reader.error is None, reader.error
    assert not reader.buffered, "the stream ends within a frame"
