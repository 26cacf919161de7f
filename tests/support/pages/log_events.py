"""The log events of the broker: those that its code logs, found in the source, and those that docs/log-events.md has.

Most events are named where they are logged. Others are passed by name to a function or class that logs them, such as
`Router.complain` and `Retry`. A name with an underscore in front counts within its module only.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = ROOT / "docs" / "log-events.md"
PACKAGES: Final = ("broker", "scheduler", "storage", "protocol")
_LEVELS: Final = {"info": "info", "warning": "warning", "error": "error", "exception": "error", "critical": "error"}
_FLOODED: Final = "_often"
"""`Router.complain` logs an event with this suffix for the lines that it left out."""
_FIELDS_OF_FLOODED: Final = {"not_logged"}


@dataclass
class Event:
    """What the lines of an event have: the levels and fields that all or some of them have."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    has_more: bool = False
    """Whether lines have further fields, which the code does not name where it logs them."""

    def add(self, levels: Iterable[str], fields: Iterable[str], *, has_more: bool = False) -> None:
        """Add what further lines of the event have."""
        self.levels.update(levels)
        self.fields.update(fields)
        self.has_more |= has_more


class _Line(NamedTuple):
    """A call that logs a line; `levels` has one for each of the events that the expression `event` may be, or one."""

    call: ast.Call
    event: ast.expr
    levels: list[str]


class _Passes(NamedTuple):
    """Something that logs an event whose name is its argument number `place`, without `self`."""

    place: int
    levels: list[str]
    fields: set[str]


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Passing = dict[tuple[Path | None, str], _Passes]
"""By the module, None for public names, and the name."""


def _functions(tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    """Yield each function with the name by which it is called: that of its class for `__init__`."""
    for node in ast.walk(tree):
        for inner in node.body if isinstance(node, ast.ClassDef | ast.Module) else ():
            if isinstance(inner, _Function):
                is_constructor = isinstance(node, ast.ClassDef) and inner.name == "__init__"
                yield node.name if isinstance(node, ast.ClassDef) and is_constructor else inner.name, inner


def _lines(node: ast.AST) -> Iterator[_Line]:
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if not isinstance(call.func.value, ast.Name) or call.func.value.id != "log":
            continue
        if call.func.attr == "log":
            levels = [each.attr.lower() for each in ast.walk(call.args[0]) if isinstance(each, ast.Attribute)]
            yield _Line(call, call.args[1], levels)
        elif call.func.attr in _LEVELS:
            yield _Line(call, call.args[0], [_LEVELS[call.func.attr]])


def _names(event: ast.expr) -> list[str]:
    """Return the events that an expression names: one text, or either of two."""
    if isinstance(event, ast.IfExp):
        return [*_names(event.body), *_names(event.orelse)]
    return [event.value] if isinstance(event, ast.Constant) and isinstance(event.value, str) else []


def _fields(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg is not None}


def _has_more(call: ast.Call) -> bool:
    return any(keyword.arg is None for keyword in call.keywords)


def _passed_to(passing: _Passing, path: Path, call: ast.AST) -> tuple[_Passes, ast.expr] | None:
    """Return what logs the event that a call passes to it, and the expression for the event."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
        return None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
    to = passing.get(_key(path, name))
    return (to, call.args[to.place]) if to is not None and len(call.args) > to.place else None


def _key(path: Path, name: str) -> tuple[Path | None, str]:
    return (path if name.startswith("_") else None), name


def _passing(trees: dict[Path, ast.Module]) -> _Passing:
    """Return everything to which events are passed. Raises ValueError for a line whose events cannot be found."""
    passing: _Passing = {}

    def add(path: Path, name: str, function: _Function, parameter: str, levels: list[str], fields: set[str]) -> None:
        parameters = [each.arg for each in function.args.args if each.arg != "self"]
        passing[_key(path, name)] = _Passes(parameters.index(parameter), levels, fields)

    functions = [(path, name, function) for path, tree in trees.items() for name, function in _functions(tree)]
    for path, name, function in functions:
        for call, event, levels in _lines(function):
            if isinstance(event, ast.Name):
                add(path, name, function, event.id, levels, _fields(call))
            elif isinstance(event, ast.Attribute):
                parameter = event.attr.removeprefix("_")  # `self._event = event` in the constructor
                constructors = [each for each in functions if each[0] == path and each[2].name == "__init__"]
                for _, class_name, constructor in constructors:
                    if f"self.{event.attr} = {parameter}" in ast.unparse(constructor):
                        add(path, class_name, constructor, parameter, levels, _fields(call))
            elif not _names(event) and _FLOODED not in ast.unparse(event):
                raise ValueError(f"{path}, line {call.lineno}: {ast.unparse(call)}")
    for path, name, function in functions:  # one that only passes its own argument on
        for node in ast.walk(function):
            found = _passed_to(passing, path, node)
            if found and isinstance(found[1], ast.Name) and found[1].id in [each.arg for each in function.args.args]:
                add(path, name, function, found[1].id, found[0].levels, found[0].fields)
    return passing


def sources() -> list[Path]:
    """Return the files of the broker's code."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def logged() -> dict[str, Event]:
    """Return the events that the broker's code logs."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    passing = _passing(trees)
    events: dict[str, Event] = defaultdict(Event)
    for path, tree in trees.items():
        for call, event, levels in _lines(tree):
            _add(events, _names(event), levels, call)
        for node in ast.walk(tree):
            found = _passed_to(passing, path, node)
            if found is not None and isinstance(node, ast.Call):
                to, event = found
                for name in _names(event):
                    events[name].add(to.levels, to.fields | _fields(node))
                    if ast.unparse(node.func).endswith(".complain"):
                        events[name + _FLOODED].add(to.levels, _FIELDS_OF_FLOODED)
            elif isinstance(node, ast.Dict):  # `logs.py` makes one line without a logger, with its level elsewhere
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                if "event" in keys:
                    for name in _names(node.values[keys.index("event")]):
                        events[name].add({"warning"}, {str(key) for key in keys} - {"event"})
    return dict(events)


def _add(events: dict[str, Event], names: Sequence[str], levels: Sequence[str], call: ast.Call) -> None:
    of_each = levels if len(levels) == len(names) else list(levels) * len(names)
    for name, level in zip(names, of_each, strict=True):
        events[name].add({level}, _fields(call), has_more=_has_more(call))


def documented(page: str) -> dict[str, Event]:
    """Return the events in the tables of the page, whose rows have the event, its level, its fields, what happened, and
    what to do. Raises ValueError for an event with two rows."""
    events: dict[str, Event] = {}
    for line in page.splitlines():
        cells = re.split(r"\s*\|\s*", line.strip("| "))
        if not line.startswith("| `") or len(cells) != 5:
            continue
        names, fields = (re.findall(r"`(\w+)`", cell) for cell in (cells[0], cells[2]))
        for name in names:
            if name in events:
                raise ValueError(f"{name} has two rows")
            events[name] = Event(set(re.findall(r"\w+", cells[1])), set(fields))
    return events
