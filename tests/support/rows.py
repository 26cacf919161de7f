"""The content of a store as lines of text, for the messages of failing tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from duemq.broker.dump.kinds import lines
from duemq.protocol.dump import shown

_MOST: Final = 60
_LONGEST: Final = 600
_SMALL: Final = ("checkpoint", "config/delayOffset.json", "config/timercheck", "config/consumerOffset.json")


def about(store: Path, bodies: Iterable[bytes]) -> str:
    """The records of a store's commitlog that have one of the given bodies, as lines."""
    wanted = {f" body={shown(body)}" for body in bodies}
    found = [
        line
        for path in sorted((store / "commitlog").iterdir())
        for line in lines(str(path), with_bodies=True)
        if any(line.endswith(each) for each in wanted)
    ]
    return _joined(f"{len(found)} records of {store} have these bodies:", found[:_MOST])


def newest(store: Path) -> str:
    """The newest content of a store: the ends of its commitlog and its timer log, and the broker's progress files."""
    found = [line for name in _SMALL if (store / name).exists() for line in lines(str(store / name))]
    for name in ("commitlog", "timerlog"):
        files = sorted((store / name).iterdir()) if (store / name).is_dir() else []
        last = deque[str](maxlen=_MOST // 2)
        for path in files[-2:]:
            last.extend(lines(str(path)))
        found += last
    return _joined(f"python -m duemq.broker.dump {store} shows all of it; the newest:", found)


def _joined(head: str, found: list[str]) -> str:
    return "\n  ".join([head, *(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..." for line in found)])
