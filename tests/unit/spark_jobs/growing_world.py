"""A store that grows step by step, and the findings of jobs in it: a duemq broker in this process writes it, and jobs
read a copy of it, which is changed in place as brokers and disks change files; as duemq's, as if Apache's broker had
written it, or as if that had written it up to a physical offset."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duemq.spark_jobs.analyse.analyse import analyse
from duemq.spark_jobs.audit import audit, incremental
from duemq.spark_jobs.audit.audit import Audit
from duemq.spark_jobs.audit.shuffle import Here
from duemq.spark_jobs.store import ranges
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import walks
from tests.support.copies import copy_file, copy_tree
from tests.support.messages import HOST
from tests.unit.broker.commands.test_repair import PREPARED_AT
from tests.unit.spark_jobs.compact_world import TABLE, Broker, new_broker

SEGMENT = 24 << 10
RANGE = 8 << 10
TABLES = (TABLE.text, "2s 5s 30s 1h")
MADE_MS = 1_800_000_000_000
PLAIN = b"a message of the middle length, or so"


class World:
    """A broker's store, and the copy that jobs read."""

    def __init__(self, root: Path, seed: int, *, is_apache: bool, ours_from: int = 0) -> None:
        """`ours_from`: records before this physical offset are Apache's."""
        self.chance = random.Random(seed)
        self.copy = root / "store"
        self.state = root / "state"
        self.is_apache = is_apache
        self._ours_from = ours_from
        self.table = TABLES[0]
        self.told: list[str] = []
        self._root = root
        self._broker = new_broker(root / "broker", SEGMENT)
        self._files = 0
        self._passed = [0, 0, 0, 0]
        self._zeroed: list[tuple[int, int]] = []
        self._cut: int | None = None
        self._begin = 0
        self._waits: list[int] = []
        self._number = 0
        self._time = 1_600_000_000
        self.clock = self._broker.clock
        # So far ahead that curves keep their step while the rest becomes due.
        self.send()
        self.clock.advance(40 * 86_400_000)

    # --- events of brokers

    def send(self) -> None:
        """Send a plain message, now and then one that was sent before."""
        key = f"p{self.chance.randrange(40)}"
        self._broker.send("orders", PLAIN * self.chance.randrange(1, 9), f"UNIQ_KEY\x01{key}\x02KEYS\x01{key[:2]}")

    def schedule(self, key: str = "", level: int = 0) -> None:
        """Schedule a message with a delay level."""
        self._number += 1
        key = key or f"l{self._number if self.chance.random() < 0.8 else self._number // 2}"
        self._waits.append(self._broker.schedule(level or self.chance.choice([1, 2, 3, 4]), PLAIN, key))

    def timer(self, key: str = "", wait_ms: int = 0, born_ms: int = 7) -> None:
        """Schedule a message with a timer."""
        self._number += 1
        due = self.clock.now_ms() + (wait_ms or self.chance.choice([1500, 40_000, 900_000, 40_000_000]))
        self._waits.append(self._broker.timer(due, PLAIN, key or f"t{self._number}", born_ms=born_ms))

    def cancel(self) -> None:
        """Cancel a message, if it still waits."""
        if self._waits:
            try:
                self._broker.cancel(self.chance.choice(self._waits))
            except AssertionError:
                return

    def pass_time(self, ms: int = 0) -> None:
        """Let time pass, with its deliveries."""
        self._broker.pass_time(ms or self.chance.choice([500, 6000, 60_000, 1_000_000]))

    def deliver_again(self) -> None:
        """Append a delivery that names an origin: any message, or none."""
        if self._waits:
            origin = self.chance.choice([*self._waits[-3:], self.chance.choice(self._waits), 17])
            self._broker.send("orders", PLAIN, "UNIQ_KEY\x01again\x02REAL_TOPIC\x01orders", 3, prepared=origin)

    def send_on(self, key: str = "") -> None:
        """Append a delivery as RocketMQ's broker writes it, without the name of its origin."""
        key = key or f"l{self.chance.randrange(self._number + 1)}"
        text = f"DELAY\x011\x02UNIQ_KEY\x01{key}\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
        store = self._broker.store
        store.appender.begin(self.clock.now_ms())
        store.appender.add(store.ensure_queue("orders", 3), PLAIN, text.encode(), 0, 7, HOST, 8, 0, 0, 0)
        store.appender.commit()

    # --- other events

    def zero(self) -> None:
        """Replace a stretch of an older file with zeros."""
        files = sorted(self.copy.glob("commitlog/*"))
        if len(files) > 2:
            path = self.chance.choice(files[:-1])
            self._zeroed.append((int(path.name) + self.chance.randrange(SEGMENT), self.chance.randrange(1, 2000)))

    def expire(self) -> None:
        """Remove the first file."""
        files = sorted(self.copy.glob("commitlog/*"))
        if len(files) > 2:
            self._begin = int(files[1].name)

    def cut(self) -> None:
        """Lose the end of the log, once."""
        end = StoreFiles.open(str(self.copy)).records_end()
        self.cut_at(max(self._begin, end - self.chance.randrange(3 * RANGE)))

    def cut_at(self, offset: int | None) -> None:
        """End the log at a physical offset until the next step; None for no cut."""
        self._cut = offset

    def replace(self) -> None:
        """Replace the files with others of the same content, as a restore does."""
        copy_tree(self.copy, self._root / "restored")
        shutil.rmtree(self.copy)
        (self._root / "restored").rename(self.copy)

    def other_table(self) -> None:
        """Use another table of delays, as given by the operator."""
        self.table = TABLES[1 - TABLES.index(self.table)]

    def step(self) -> str:
        """Do one random event; return its name."""
        usual = [self.send, self.schedule, self.timer, self.timer, self.pass_time]
        rare = [self.cancel] if self.chance.random() < 0.7 else [self.cancel, self.deliver_again, self.send_on]
        for _ in range(self.chance.choice([0, 3, 20, 40, 80])):
            self.chance.choice(usual if self.chance.random() < 0.93 else rare)()
        self._cut = None
        strange: list[Callable[[], None]] = [self.zero, self.expire, self.cut, self.replace, self.other_table]
        happens = self.chance.choice(strange) if self.chance.random() < 0.3 and self.copy.exists() else None
        if happens is not None:
            happens()
        self.publish()
        return happens.__name__ if happens is not None else ""

    # --- the copy

    def publish(self) -> None:
        """Make the copy equal to the broker's present store, in place; changed files get a new time."""
        self._broker.close()
        source = self._broker.root
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source)
            if path.is_file() and name.parts[0] != "commitlog":
                (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
                copy_file(path, self.copy / name)
        texts = {int(path.name): bytearray(path.read_bytes()) for path in sorted((source / "commitlog").iterdir())}
        if self.is_apache or self._ours_from:
            self._forget_origins(texts)
        if self.is_apache:
            self._forget_books()
        for offset, size in self._zeroed:
            for base, data in texts.items():
                low, high = max(offset, base) - base, min(offset + size, base + len(data)) - base
                if low < high:
                    data[low:high] = bytes(high - low)
        folder = self.copy / "commitlog"
        folder.mkdir(exist_ok=True)
        self._time += 60
        for base, data in texts.items():
            if self._cut is not None and base + len(data) > self._cut:
                data[max(0, self._cut - base) :] = bytes(len(data) - max(0, self._cut - base))
            self._put(folder / f"{base:020d}", data, is_gone=base < self._begin or (base > 0 and not any(data)))
        self._broker = Broker(self._broker.root, self.clock, SEGMENT)

    def _put(self, path: Path, data: bytearray, *, is_gone: bool) -> None:
        if is_gone:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != data:
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.write(data)
            os.utime(path, (self._time, self._time))

    def _forget_origins(self, texts: dict[int, bytearray]) -> None:
        store = StoreFiles.open(str(self._broker.root))
        for part in ranges.plan(store):
            for found in walks(store, part, check_crc=False):
                for offset in found.records.physical_offset.tolist():
                    if self.is_apache or offset < self._ours_from:
                        base = max(base for base in texts if base <= offset)
                        texts[base][offset - base + PREPARED_AT : offset - base + PREPARED_AT + 8] = bytes(8)

    def _forget_books(self) -> None:
        (self.copy / "lock").write_bytes(b"lock")
        for name in ("checkpoint", "queuecheck"):
            (self.copy / name).unlink(missing_ok=True)
        # The files that a broker writes every few seconds, or that were put back.
        self._passed = [self.chance.randrange(99) if self.chance.random() < 0.1 else at + 2 for at in self._passed]
        table = {str(level): at for level, at in enumerate(self._passed, 1)}
        (self.copy / "config" / "delayOffset.json").write_text(json.dumps({"offsetTable": table}))

    # --- all of it again

    def keep(self, directory: Path) -> dict[str, Any]:
        """Close the broker and copy all files to a new directory. Return what `put_back`, which opens the broker again,
        needs beside the files."""
        self._broker.close()
        copy_tree(self._root, directory)
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "_broker"}

    def put_back(self, directory: Path, kept: dict[str, Any]) -> None:
        """Make the files and this object what they were when `keep` returned, and open the broker."""
        shutil.rmtree(self._root)
        copy_tree(directory, self._root)
        vars(self).update(copy.deepcopy(kept))
        self._broker = Broker(self._broker.root, self.clock, SEGMENT)

    # --- jobs

    def found(self, state: Path | None, **options: Any) -> bytes:
        """Return all findings of an analysis, and the output of an audit."""
        out = self._root / "out"
        shutil.rmtree(out, ignore_errors=True)
        analysis = analyse(
            lambda: pytest.fail("Spark was wanted"),
            str(self.copy),
            delay_levels=self.table,
            out=str(out),
            state=str(state) if state else None,
            tell=self.told.append,
            made_ms=MADE_MS,
            **options,
        )
        return msgspec.json.encode(analysis) + b"\n" + (out / "offenders.parquet").read_bytes()


def same(found: bytes, expected: bytes, when: object) -> None:
    """Check that the findings of two runs are the same, byte for byte; the failure says where they differ."""
    if found == expected:
        return
    one, other = (json.loads(text.split(b"\n", 1)[0]) for text in (found, expected))
    names = [name for name in one if name != "audit" and one[name] != other[name]]
    names += [f"audit.{name}" for name in one["audit"] if one["audit"][name] != other["audit"][name]]
    first = next((name for name in names if not name.endswith("digest")), None)
    path = first.split(".") if first else []
    for part in path:
        one, other = one[part], other[part]
    pytest.fail(f"{when}: {names} differ; {first}: {one!r:.2000}\n{other!r:.2000}")


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranges and buckets of some KiB, so that nothing needs Spark."""
    monkeypatch.setattr(ranges, "CHUNK_SIZE", RANGE)
    monkeypatch.setattr(audit, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(audit, "BUCKET_BYTES", 3 * RANGE)
    monkeypatch.setattr(incremental, "_GROUP_ROWS", 8)
    monkeypatch.setattr(Audit, "_shuffle", lambda _: Here())
