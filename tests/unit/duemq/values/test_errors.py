from __future__ import annotations

import pytest

import duemq
from duemq import errors
from duemq.errors import BrokerError, error_of
from duemq.protocol.frames.command import Command

KINDS = {
    1: errors.BrokerFailureError,
    2: errors.BusyError,
    3: errors.NotSupportedError,
    13: errors.MessageRejectedError,
    14: errors.UnavailableError,
    16: errors.NoPermissionError,
    17: errors.TopicNotFoundError,
    22: errors.NotFoundError,
    23: errors.SubscriptionError,
    24: errors.SubscriptionError,
    25: errors.SubscriptionError,
    26: errors.GroupNotFoundError,
    604: errors.IllegalOperationError,
    4711: BrokerError,
}


@pytest.mark.parametrize(("code", "kind"), KINDS.items())
def test_each_code_has_its_error(code: int, kind: type[BrokerError]) -> None:
    error = error_of(Command(code=code, remark="why"), "h:1")
    assert type(error) is kind
    assert (error.code, error.remark, error.address) == (code, "why", "h:1")
    assert f"(code {code}): why" in str(error)


def test_the_retriable_codes_are_those_that_rocketmq_retries() -> None:
    assert {code for code, kind in KINDS.items() if kind.retriable} == {1, 2, 14, 16, 17}


def test_a_code_cannot_belong_to_two_errors() -> None:
    with pytest.raises(TypeError, match="the code 13 already belongs to MessageRejectedError"):
        type("Second", (BrokerError,), {"codes": (13,)})


def test_a_java_remark_is_cut_to_what_a_person_wants() -> None:
    remark = "service not available now. It may be caused by ...\n\tat org.apache.rocketmq.X(X.java:1)"
    assert str(error_of(Command(code=14, remark=remark), "h:1")).endswith(
        "service not available now. It may be caused by"
    )


def test_an_error_without_a_remark_says_what_the_code_means() -> None:
    assert str(error_of(Command(code=17), "h:1")) == "h:1: has no such topic (code 17)"


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.ArgumentError, ValueError)
    assert issubclass(errors.RequestTimeoutError, TimeoutError)
    assert issubclass(errors.ConnectError, ConnectionError)
    assert issubclass(errors.ConnectionLostError, ConnectionError)


def test_the_drawing_shows_every_error() -> None:
    drawing = errors.__doc__ or ""
    values = [*vars(errors).values(), *(getattr(duemq, name) for name in duemq.__all__)]
    kinds = [kind for kind in values if isinstance(kind, type) and issubclass(kind, errors.DueMQError)]
    assert duemq.SendManyError in kinds
    for kind in kinds:
        line = next(line for line in drawing.splitlines() if line.lstrip("│├└─ ").split(" ")[0] == kind.__name__)
        if kind is not errors.DueMQError:
            assert (f"{kind.__name__} *" in line) == kind.retriable
