"""A well-behaved client beside the attack: it sends numbered messages and pulls them, and notices any refusal, answer
out of order, or message lost, doubled or changed."""

from __future__ import annotations

import random
import threading
from typing import Self

from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.records import record
from duemq.protocol.requests.headers import PullMessageResponse, SendMessageResponse, decode_ext
from tests.fuzz.client import RawClient
from tests.fuzz.live import LiveBroker
from tests.support.wire import pull, send

TOPIC = "Witness"
_LARGE = 300_000
_PAUSE_SECONDS = 0.005
"""Between two rounds: a client that pauses notices all that one without pauses does, and leaves the processor to the
attack."""


class Witness:
    """A thread that runs inside `with`; at the end everything it sent has been read back."""

    def __init__(self, broker: LiveBroker) -> None:
        self._broker = broker
        self._random = random.Random(7)
        self._stopped = threading.Event()
        self._rounds = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self.rounds = 0
        self.sent = 0
        self.read = 0
        self.most_anonymous_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_rounds(2)
        self.first_anonymous_bytes = self._broker.anonymous_bytes
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise AssertionError(f"the well-behaved client was disturbed: {self._error!r}") from self._error
        assert self.sent == self.read

    @property
    def growth_bytes(self) -> int:
        """The broker's peak memory above that at the start."""
        return self.most_anonymous_bytes - self.first_anonymous_bytes

    def wait_rounds(self, count: int) -> None:
        """Wait until the witness has sent and read `count` more times."""
        with self._rounds:
            wanted = self.rounds + count
            self._rounds.wait_for(lambda: self.rounds >= wanted or not self._thread.is_alive())

    def _run(self) -> None:
        try:
            with RawClient(self._broker.port) as sender, RawClient(self._broker.port) as reader:
                while not self._stopped.is_set():
                    self._send(sender)
                    self._pull(reader)
                    self._count()
                    self._stopped.wait(_PAUSE_SECONDS)
                while self.read < self.sent:
                    self._pull(reader)
        except BaseException as error:
            self._error = error
        self._count()

    def _count(self) -> None:
        self.most_anonymous_bytes = max(self.most_anonymous_bytes, self._broker.anonymous_bytes)
        with self._rounds:
            self.rounds += 1
            self._rounds.notify_all()

    @staticmethod
    def _body(number: int) -> bytes:
        size = _LARGE if number % 50 == 49 else number % 1000
        return b"%d:" % number + bytes(size)

    def _send(self, client: RawClient) -> None:
        numbers = range(self.sent, self.sent + self._random.randrange(1, 20))
        commands = [send(TOPIC, self._body(number), properties="TAGS\x01w\x02WAIT\x01true") for number in numbers]
        assert client.send(b"".join(codec.encode(command) for command in commands))
        for number, command in zip(numbers, commands, strict=True):
            answer = client.response()
            assert answer.code == ResponseCode.SUCCESS, answer
            assert answer.opaque == command.opaque
            assert decode_ext(SendMessageResponse, answer.ext).queue_offset == number
        self.sent = numbers.stop

    def _pull(self, client: RawClient) -> None:
        answer = client.ask(pull(TOPIC, self.read, group="witnesses", subscription="w"))
        assert answer.code == ResponseCode.SUCCESS, answer
        for message in record.decode_all(bytes(answer.body)):
            assert message.queue_offset == self.read
            assert message.body == self._body(self.read)
            self.read += 1
        assert decode_ext(PullMessageResponse, answer.ext).next_begin_offset == self.read
