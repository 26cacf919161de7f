"""Calls a method of several interceptors; their errors are logged and affect no message."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from duemq._values.failures import ends_program
from duemq.errors import ArgumentError

T = TypeVar("T")

log = logging.getLogger("duemq.interceptors")


class Hooks(Generic[T]):
    """The methods `name` of the interceptors that override that of `base`, which are called in turn with one argument.
    Raises ArgumentError for an `async def`."""

    def __init__(self, interceptors: Iterable[object], base: type, name: str) -> None:
        self._methods: list[Callable[[T], None]] = []
        for each in interceptors:
            method = getattr(each, name)
            if getattr(type(each), name) is getattr(base, name):
                continue
            if inspect.iscoroutinefunction(method):
                raise ArgumentError(f"{name} of {each!r} is an async function; write `def`")
            self._methods.append(method)
        self._failing: set[Callable[[T], None]] = set()

    def __bool__(self) -> bool:
        return bool(self._methods)

    def __iter__(self) -> Iterator[Callable[[T], None]]:
        return iter(self._methods)

    def call(self, argument: T) -> None:
        """Call all methods. Their exceptions are logged, except those that end the program, which are raised."""
        for method in self._methods:
            try:
                method(argument)
            except BaseException as error:
                if ends_program(error):
                    raise
                self.complain(method)
            else:
                self.resolve(method)

    def complain(self, method: Callable[[T], None]) -> None:
        """Log the exception that a method raised and that is being handled, but only once until the method succeeds."""
        if method not in self._failing:
            self._failing.add(method)
            log.exception("%s failed; messages are processed without it", getattr(method, "__qualname__", method))

    def resolve(self, method: Callable[[T], None]) -> None:
        """Note that the method has succeeded."""
        if self._failing:
            self._failing.discard(method)


def check_interceptors(interceptors: Iterable[object], base: type) -> tuple[object, ...]:
    """Return the interceptors as a tuple. Raises ArgumentError for what is no list of objects or the like, and for
    objects that are not instances of `base`."""
    try:
        elements = None if isinstance(interceptors, (base, str, bytes, Mapping)) else iter(interceptors)
    except TypeError:  # also a NumPy array without dimensions, although it has __iter__
        elements = None
    if elements is None:
        raise ArgumentError(f"interceptors={interceptors!r}: give a list of interceptors")
    given = tuple(elements)
    for each in given:
        if not isinstance(each, base):
            raise ArgumentError(f"interceptors: {each!r} is not of class {base.__name__}")
    return given
