"""The answers to requests that failed: which code and remark an error has, and what becomes of an answer that was made
before its messages could not be stored or made durable."""

from __future__ import annotations

from typing import Final

from duemq.broker.errors import Refused
from duemq.protocol.codes import ResponseCode
from duemq.protocol.errors import ProtocolError
from duemq.protocol.frames import codec
from duemq.protocol.frames.frame import FrameReader
from duemq.storage.errors import RecordIllegal, StoreClosed, StoreError, StoreFull, has_no_room

_FLUSH_TIMEOUT: Final = "the disk did not confirm the message in time"


def outcome_of(error: Exception) -> tuple[int, str]:
    """Return the response code and remark for an error: the one place that maps errors of the store to codes."""
    if isinstance(error, Refused):
        return error.code, error.remark
    if isinstance(error, RecordIllegal):
        remark = f"the message is illegal, maybe msg body or properties length not matched. {error}"
        return ResponseCode.MESSAGE_ILLEGAL, remark
    if isinstance(error, StoreFull | StoreClosed):
        return ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {error}"
    if has_no_room(error):
        return ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: the disk is full: {error}"
    if isinstance(error, StoreError):
        return ResponseCode.SERVICE_NOT_AVAILABLE, f"the message store is broken: {error}"
    if isinstance(error, ProtocolError):
        return ResponseCode.SYSTEM_ERROR, str(error)
    return ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}"


def not_stored(answers: list[bytes], error: StoreError) -> list[bytes]:
    """Return the answers to sends that could not be written. Answers that are not a success stay as they are."""
    code, remark = outcome_of(error)
    return [_replaced(answer, code, remark, keep_fields=False, of_all=False) for answer in answers]


def timed_out(answers: list[bytes], *, of_all: bool = False) -> list[bytes]:
    """Return the answers to requests whose flush takes too long: stored, but maybe not durable yet. Clients read the
    position of the message from these too. Answers that are not a success stay as they are, unless `of_all`."""
    code = ResponseCode.FLUSH_DISK_TIMEOUT
    return [_replaced(answer, code, _FLUSH_TIMEOUT, keep_fields=True, of_all=of_all) for answer in answers]


def _replaced(answer: bytes, code: int, remark: str, *, keep_fields: bool, of_all: bool) -> bytes:
    (frame,) = FrameReader().receive_data(answer)
    command = codec.decode(frame)
    if command.code != ResponseCode.SUCCESS and not of_all:
        return answer
    command.code, command.remark = code, remark
    if not keep_fields:
        command.ext = {}
    return codec.encode(command, frame[0])
