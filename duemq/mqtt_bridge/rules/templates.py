"""Templates such as `commands/{key}`: texts with fields in braces. `{{` and `}}` stand for the braces themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from duemq.errors import ArgumentError

_PIECE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")

Value = Callable[[str], str]
"""Returns the value of a field. Raises TemplateError if the message has none."""


class Template:
    """A template. `is_field` returns whether a name is a field, and `known` lists the fields for the error. Raises
    ArgumentError for other names and for single braces."""

    __slots__ = ("_pieces", "fields", "text")

    def __init__(self, text: str, is_field: Callable[[str], bool], known: str) -> None:
        self.text = text
        self._pieces: list[tuple[str, bool]] = []
        """Literal texts and names of fields, each with whether it is a field."""
        for match in _PIECE.finditer(text):
            piece, name = match[0], match[1]
            if name is not None:
                if not is_field(name):
                    raise ArgumentError(
                        f"the template {text!r} has {{{name}}}, which is not a field; known are {known}"
                    )
                self._pieces.append((name, True))
            elif piece in ("{", "}"):
                raise ArgumentError(
                    f"the template {text!r} has a single {piece}; write {piece * 2} for the brace itself"
                )
            else:
                self._pieces.append((piece[:1] if piece in ("{{", "}}") else piece, False))
        self.fields = tuple(name for name, is_name in self._pieces if is_name)

    def __repr__(self) -> str:
        return f"Template({self.text!r})"

    @property
    def is_constant(self) -> bool:
        """Whether the template has no field."""
        return not self.fields

    def render(self, value: Value) -> str:
        """Return the text with the values of the fields. Raises the errors of `value`."""
        return "".join([value(text) if is_name else text for text, is_name in self._pieces])
