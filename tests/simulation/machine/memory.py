"""Counts a broker's memory: all objects reachable from it, except the simulated machine."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

_NOT_ITS_OWN = (type, ModuleType, CodeType, BuiltinFunctionType, asyncio.AbstractEventLoop)


def held_by(root: object) -> Counter[str]:
    """Return the bytes of the objects reachable from `root`, by the names of their types."""
    seen: set[int] = set()
    found: Counter[str] = Counter()
    left: list[Any] = [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _NOT_ITS_OWN):
            continue
        seen.add(id(each))
        kind = type(each)
        if kind.__module__.startswith("tests.") and each is not root:
            continue
        found[f"{kind.__module__}.{kind.__qualname__}"] += _size_of(each)
        left.extend(_referents(each))
    return found


def _size_of(each: Any) -> int:
    if isinstance(each, msgspec.Raw):  # sys.getsizeof leaves out its buffer
        return memoryview(each).nbytes
    return sys.getsizeof(each)


def _referents(each: Any) -> list[Any]:
    match each:
        case FunctionType():
            return [*(each.__closure__ or ()), *(each.__defaults__ or ())]
        case MethodType():
            return [each.__self__, each.__func__]
        case FrameType():
            return list(each.f_locals.values())
        case _:
            return gc.get_referents(each)
