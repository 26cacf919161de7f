"""Apache's C++ client as a process: one JSON request a line in, replies and events out (tests/peers/PROTOCOL.md).

The client is librocketmq.so from the PyPI wheel `rocketmq`, called through the wheel's own ctypes binding, and through
its table of C functions where the binding lacks one. The program needs nothing else of this repository, so it is run as
a file.
"""

import base64
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from zlib import crc32

from rocketmq.client import Message, Producer, PullConsumer, PushConsumer, RecvMessage, SendResult
from rocketmq.exceptions import ffi_check
from rocketmq.ffi import MessageModel, _CMessageQueue, _CPullStatus, dll

Json = dict[str, Any]

_VERSION = "0.4.4"
_STATUS = ["SEND_OK", "FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"]
_PULL_STATUS = {
    _CPullStatus.FOUND: "FOUND",
    _CPullStatus.NO_NEW_MSG: "NO_NEW_MSG",
    _CPullStatus.NO_MATCHED_MSG: "NO_MATCHED_MSG",
    _CPullStatus.OFFSET_ILLEGAL: "OFFSET_ILLEGAL",
    _CPullStatus.BROKER_TIMEOUT: "BROKER_TIMEOUT",
}
_MAX_MESSAGE_SIZE = 4 << 20  # the default of the other libraries and the brokers; this library's is 128 KiB
# At shutdown the library commits finished messages, and a callback that has just told its message has not returned.
_LAST_CALLBACK_S = 0.1
_SUCCESS, _AGAIN = 0, 1
# The log line of a heartbeat while the client knows no broker. Its timer sends one heartbeat 10 ms after the start; a
# producer sends one more during the start itself.
_HEARTBEAT_TO_NOBODY = b"sendheartbeat brokeradd is empty"
_HEARTBEATS_OF_A_PRODUCER, _HEARTBEATS_OF_A_PULL_CONSUMER = 2, 1
_START_TIMEOUT_S = 30
_LOOK_EVERY_S = 0.001
# The C functions return a property by name and cannot list them; a request may ask for more (`property_names`).
_PROPERTIES = [
    "CLUSTER",
    "DELAY",
    "DLQ_ORIGIN_TOPIC",
    "KEYS",
    "MAX_OFFSET",
    "MIN_OFFSET",
    "ORIGIN_MESSAGE_ID",
    "REAL_QID",
    "REAL_TOPIC",
    "RETRY_TOPIC",
    "TAGS",
    "UNIQ_KEY",
    "WAIT",
]


def _text(value: bytes | None) -> str | None:
    return value.decode() if value is not None else None


def _outgoing(topic: str, spec: Json) -> Message:
    message = Message(topic)
    body = base64.b64decode(spec["body"])
    ffi_check(dll.SetByteMessageBody(message, body, len(body)))  # the binding's set_body stops at a zero byte
    if spec.get("tags") is not None:
        message.set_tags(spec["tags"])
    if spec.get("keys") is not None:
        message.set_keys(spec["keys"])
    if spec.get("level"):
        message.set_delay_time_level(spec["level"])
    for name, value in (spec.get("properties") or {}).items():
        message.set_property(name, value)
    return message


def _sent(result: SendResult) -> Json:
    return {"status": _STATUS[result.status], "msg_id": result.msg_id, "queue_offset": result.offset}


def _failure(error: BaseException) -> Json:
    return {"type": type(error).__name__, "message": str(error)}


def _received(message: RecvMessage, names: list[str]) -> Json:
    properties = {name: _text(message.get_property(name)) for name in [*_PROPERTIES, *names]}
    return {
        "receive_time": time.time_ns() // 1_000_000,
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "body": base64.b64encode(message.body or b"").decode(),
        "tags": _text(message.tags) or None,
        "keys": _text(message.keys) or None,
        "properties": {name: value for name, value in properties.items() if value},
        "reconsume_times": message.reconsume_times,
        "msg_id": message.id,
        "born_time": message.born_timestamp,
        "store_time": message.store_timestamp,
        "commitlog_offset": message.commit_log_offset,
    }


class _Log:
    """The library's log of this process, the only sign that a client has sent the heartbeats of its start.

    A send or a pull during such a heartbeat fails ("No route info of this topic", or an asynchronous failure without a
    text): while the heartbeat connects to the broker, the library counts that connection as missing, and all its tries
    are over before the connection is made.
    """

    def __init__(self) -> None:
        self._directory = Path(os.environ["HOME"]) / "logs" / "rocketmq-cpp"
        self._starting = threading.Lock()

    def _sizes(self) -> dict[Path, int]:
        """Return the size of each of the log's files. The library begins another one at midnight."""
        return {path: path.stat().st_size for path in self._directory.glob(f"{os.getpid()}_rocketmq-cpp.log.*")}

    @contextmanager
    def until_heartbeats(self, count: int) -> Iterator[None]:
        """Run the block, which starts one client, and return when the client has sent the `count` heartbeats of its
        start.

        One client starts at a time, since the log lines do not name their client. Raises TimeoutError.
        """
        with self._starting:
            begin = self._sizes()
            yield
            deadline = time.monotonic() + _START_TIMEOUT_S
            while self._heartbeats_since(begin) < count:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the log in {self._directory} does not tell of the first heartbeats of a client"
                    )
                time.sleep(_LOOK_EVERY_S)

    def _heartbeats_since(self, begin: dict[Path, int]) -> int:
        count = 0
        for path in self._sizes():
            with path.open("rb") as file:
                file.seek(begin.get(path, 0))
                count += file.read().count(_HEARTBEAT_TO_NOBODY)
        return count


_log = _Log()
_pulling = threading.Lock()
"""Held by the one pull consumer: the library has one of each group in a process, and the group may be anybody's."""


class Program:
    """The clients of this process, by handle, and the operations on them."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._writing = threading.Lock()
        self._producers: dict[str, Producer] = {}
        self._consumers: dict[str, PushConsumer] = {}

    def write(self, line: Json) -> None:
        """Write one reply or event."""
        text = json.dumps(line) + "\n"
        with self._writing:
            self._out.write(text)
            self._out.flush()

    def answer(self, request: Json) -> None:
        """Run one request and write its reply."""
        operation: Callable[[Json], Json] | None = getattr(self, f"op_{request['op']}", None)
        try:
            if operation is None:
                raise ValueError(f"no operation {request['op']}")
            self.write({"id": request["id"], "result": operation(request)})
        except Exception as error:  # the caller gets every error
            self.write({"id": request["id"], "error": _failure(error)})

    def op_hello(self, _: Json) -> Json:
        """Return the name and version of this client."""
        return {"client": "cpp", "version": _VERSION}

    def op_producer_start(self, request: Json) -> Json:
        """Start a producer."""
        producer = Producer(request["group"], timeout=request.get("timeout_ms"), max_message_size=_MAX_MESSAGE_SIZE)
        producer.set_namesrv_addr(request["nameserver"])
        if request.get("access_key"):
            producer.set_session_credentials(request["access_key"], request["secret_key"], "")
        ffi_check(dll.SetProducerInstanceName(producer._handle, request["handle"].encode()))
        with _log.until_heartbeats(_HEARTBEATS_OF_A_PRODUCER):
            producer.start()
        self._producers[request["handle"]] = producer
        return {}

    def op_producer_stop(self, request: Json) -> Json:
        """Stop a producer."""
        self._producers.pop(request["handle"]).shutdown()
        return {}

    def op_send(self, request: Json) -> Json:
        """Send messages in one of four ways."""
        producer = self._producers[request["handle"]]
        send = {"sync": self._sync, "async": self._async, "oneway": self._oneway, "batch": self._batch}[request["mode"]]
        return {"results": send(producer, request)}

    def _sync(self, producer: Producer, request: Json) -> list[Json]:
        results = []
        for spec in request["messages"]:
            message = _outgoing(request["topic"], spec)
            try:
                select = _selector(request, spec)
                if select is None:
                    results.append(_sent(producer.send_sync(message)))
                else:
                    results.append(_sent(producer.send_orderly(message, 0, queue_selector=select)))
            except Exception as error:
                results.append({"error": _failure(error)})
        return results

    def _async(self, producer: Producer, request: Json) -> list[Json]:
        if "queue_id" in request or any("sharding" in spec for spec in request["messages"]):
            raise NotImplementedError("the binding cannot choose a queue for an asynchronous send")
        results: list[Json] = [{}] * len(request["messages"])
        open_sends = threading.Semaphore(0)

        def end(n: int, result: Json) -> None:
            results[n] = result
            open_sends.release()

        messages = []  # the library reads them until its callback
        for n, spec in enumerate(request["messages"]):
            messages.append(_outgoing(request["topic"], spec))
            producer.send_async(
                messages[-1],
                lambda result, n=n: end(n, _sent(result)),
                lambda error, n=n: end(n, {"error": _failure(error)}),
            )
        for _ in messages:
            open_sends.acquire()
        return results

    def _oneway(self, producer: Producer, request: Json) -> list[Json]:
        for spec in request["messages"]:
            message = _outgoing(request["topic"], spec)
            select = _selector(request, spec)
            if select is None:
                producer.send_oneway(message)
            else:
                producer.send_oneway_orderly(message, 0, queue_selector=select)
        return [{"status": "SENT"} for _ in request["messages"]]

    def _batch(self, producer: Producer, request: Json) -> list[Json]:
        if "queue_id" in request:
            raise NotImplementedError("the C functions cannot choose a queue for a batch")
        messages = [_outgoing(request["topic"], spec) for spec in request["messages"]]
        try:
            return [_sent(producer.send_batch(messages))]
        except Exception as error:
            return [{"error": _failure(error)}]

    def op_consumer_start(self, request: Json) -> Json:
        """Start a push consumer, whose messages become events."""
        handle = request["handle"]
        fail_first = request.get("fail_first", 0)
        names = request.get("property_names") or []
        model = MessageModel.BROADCASTING if request.get("model") == "broadcast" else MessageModel.CLUSTERING
        consumer = PushConsumer(request["group"], orderly=request.get("orderly", False), message_model=model)
        consumer.set_namesrv_addr(request["nameserver"])
        if request.get("access_key"):
            consumer.set_session_credentials(request["access_key"], request["secret_key"], "")
        consumer.set_instance_name(handle)

        def on_message(_: int, pointer: int) -> int:
            message = RecvMessage(pointer)
            self.write({"event": "message", "consumer": handle, "message": _received(message, names)})
            return _AGAIN if message.reconsume_times < fail_first else _SUCCESS

        for subscription in request["subscriptions"]:
            ffi_check(
                dll.Subscribe(consumer._handle, subscription["topic"].encode(), subscription["expression"].encode())
            )
        consumer._register_callback(on_message)
        consumer.start()
        self._consumers[handle] = consumer
        return {}

    def op_consumer_stop(self, request: Json) -> Json:
        """Stop a push consumer."""
        time.sleep(_LAST_CALLBACK_S)
        self._consumers.pop(request["handle"]).shutdown()
        return {}

    def op_pull(self, request: Json) -> Json:
        """Read one queue from an offset on."""
        with _pull_consumer(request) as consumer, _queues(consumer, request["topic"]) as queues:
            queue = next((q for q in queues if q.queueId == request["queue_id"]), None)
            if queue is None:
                raise LookupError(f"the route of {request['topic']} has no queue {request['queue_id']}")
            pulled = dll.Pull(
                consumer._handle,
                ctypes.pointer(queue),
                request["expression"].encode(),
                ctypes.c_longlong(request["offset"]),
                request["count"],
            )
            try:
                names = request.get("property_names") or []
                found = pulled.size if pulled.pullStatus == _CPullStatus.FOUND else 0
                return {
                    "status": _PULL_STATUS[pulled.pullStatus],
                    "next_offset": pulled.nextBeginOffset,
                    "min_offset": pulled.minOffset,
                    "max_offset": pulled.maxOffset,
                    "messages": [_received(RecvMessage(pulled.msgFoundList[n]), names) for n in range(found)],
                }
            finally:
                dll.ReleasePullResult(pulled)

    def op_queues(self, request: Json) -> Json:
        """Return the queues in the client's route."""
        with _pull_consumer(request) as consumer, _queues(consumer, request["topic"]) as queues:
            return {"queues": sorted(queue.queueId for queue in queues)}


def _selector(request: Json, spec: Json) -> Callable[[int, Any, Any], int] | None:
    """Return the function that chooses the queue of a message, or None for the library's choice."""
    if "queue_id" in request:
        queue_id: int = request["queue_id"]
        return lambda size, message, argument: queue_id
    if "sharding" in spec:
        key = crc32(spec["sharding"].encode())
        return lambda size, message, argument: key % size
    return None


@contextmanager
def _pull_consumer(request: Json) -> Iterator[PullConsumer]:
    with _pulling:
        consumer = PullConsumer(request.get("group") or "peer_pull")
        consumer.set_namesrv_addr(request["nameserver"])
        with _log.until_heartbeats(_HEARTBEATS_OF_A_PULL_CONSUMER):
            consumer.start()
        try:
            yield consumer
        finally:
            consumer.shutdown()


@contextmanager
def _queues(consumer: PullConsumer, topic: str) -> Iterator[list[_CMessageQueue]]:
    array = ctypes.POINTER(_CMessageQueue)()
    size = ctypes.c_int()
    ffi_check(
        dll.FetchSubscriptionMessageQueues(
            consumer._handle, topic.encode(), ctypes.pointer(array), ctypes.pointer(size)
        )
    )
    try:
        yield [array[n] for n in range(size.value)]
    finally:
        ffi_check(dll.ReleaseSubscriptionMessageQueue(array))


def main() -> None:
    """Serve requests until standard input ends."""
    # The library sometimes prints to standard output: replies get a descriptor of their own.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = Program(out)
    for line in sys.stdin:
        threading.Thread(target=program.answer, args=(json.loads(line),), daemon=True).start()
    os._exit(0)  # threads of clients that were not stopped would keep the process alive


if __name__ == "__main__":
    main()
