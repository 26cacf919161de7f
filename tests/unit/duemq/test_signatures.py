"""Classes and methods that have the same parameters declare each of them in the same words.

`duemq.Consumer` and `duemq.sync.Consumer` differ only in the types of the handler and the listeners, so each declares
the parameters itself: help, editors and the reference then show them with their types and defaults. These tests find
where two such declarations differ."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_overloads

import pytest

import duemq
from duemq import Message, Producer, sync

PRIVATE = {"_monotonic", "_ready", "_exclusive", "_client_id", "_in_hand"}
"""Parameters of the client's classes that only the client itself gives."""


def parameters(call: Any, without: set[str] = PRIVATE) -> list[inspect.Parameter]:
    """The parameters with defaults and annotations, without the modules in front of the names of types."""
    return [
        each.replace(annotation=str(each.annotation).replace("_consumer.", "").replace("_messages.", ""))
        for each in inspect.signature(call).parameters.values()
        if each.name not in without
    ]


@pytest.mark.parametrize("name", ["Producer", "Admin", "Consumer"])
def test_the_facade_has_the_parameters_of_the_client(name: str) -> None:
    """Help and editors show them."""
    assert parameters(getattr(sync, name)) == parameters(getattr(duemq, name))


def test_the_facades_consumer_passes_all_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def consumer(group: str, on_message: object, **options: object) -> None:
        given.update(options, group=group, on_message=on_message)

    wanted = {each.name: object() for each in parameters(sync.Consumer)}
    changed: Mapping[str, Any] = {"on_message": print, "on_assigned": print, "on_revoked": print, "concurrency": 3}
    monkeypatch.setattr("duemq.consumer.Consumer", consumer)
    sync.Consumer(**{**wanted, **changed})
    assert {name: value for name, value in given.items() if name not in {*changed, "_ready"}} == {
        name: value for name, value in wanted.items() if name not in changed
    }
    assert given["concurrency"] == 3
    for name in ("on_message", "on_assigned", "on_revoked"):
        assert given[name] not in (None, print), "it is called in a thread"


def overloads_of(path: str, name: str) -> list[str]:
    """The declarations of a method with overloads in a file of the client, without `async` and modules."""
    source = Path(duemq.__file__).with_name(path).read_text(encoding="utf-8").replace("_messages.", "")
    return [
        ast.unparse(node.args)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name == name and [ast.unparse(each) for each in node.decorator_list] == ["overload"]
    ]


@pytest.mark.parametrize("name", ["send", "send_oneway"])
def test_the_facade_has_the_overloads_of_the_client(name: str) -> None:
    declared = overloads_of("producer.py", name)
    assert len(declared) == 2
    assert overloads_of("sync.py", name) == declared


@pytest.mark.parametrize("name", ["send", "send_oneway"])
def test_a_send_has_the_parameters_of_its_overload(name: str) -> None:
    method = getattr(Producer, name)
    assert parameters(method, {"topic", "body"}) == parameters(get_overloads(method)[1], {"topic", "body"})


def test_a_send_has_the_fields_of_a_message() -> None:
    fields = {field.name: (field.type, field.default) for field in dataclasses.fields(Message)}
    fields["properties"] = ("Mapping[str, str] | None", None)  # a message has none by an empty mapping
    send = {each.name: each for each in parameters(get_overloads(Producer.send)[1], {"self", "retries", "timeout"})}
    assert list(send) == list(fields)
    for name, (annotation, default) in fields.items():
        assert send[name].annotation == annotation
        assert send[name].default == (inspect.Parameter.empty if default is dataclasses.MISSING else default)


def test_a_send_without_an_answer_has_the_parameters_of_a_send() -> None:
    only_of_send = {"message_id", "retries"}
    for oneway, send in zip(get_overloads(Producer.send_oneway), get_overloads(Producer.send), strict=True):
        assert parameters(oneway) == parameters(send, only_of_send)
