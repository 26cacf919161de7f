"""Starts and ends by queue offsets and by time, in tables and in streams, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.source import source
from duemq.spark_jobs.source.source import Options, RocketmqSource, StoreReader, StoreStreamReader
from tests.soak import examples
from tests.support.copies import copy_tree
from tests.unit.spark_jobs.compact_world import START_MS, Broker, new_broker

QueuePosition = tuple[str, int, int]
"""Topic, queue id and queue offset."""
SCHEMA = StructType(
    [
        StructField("topic", StringType()),
        StructField("queue_id", IntegerType()),
        StructField("queue_offset", LongType()),
        StructField("physical_offset", LongType()),
    ]
)
STEP_MS = 1000


def fill(root: Path, messages: list[tuple[str, int]]) -> Broker:
    """Write a store with one message per second, each with a topic and a queue."""
    broker = new_broker(root)
    for topic, queue in messages:
        broker.send(topic, b"x" * 3000, "", queue)
        broker.clock.advance(STEP_MS)
    broker.close()
    return broker


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of several files: orders has two queues of 60 messages, mails one of 60."""
    root = tmp_path_factory.mktemp("offsets") / "store"
    fill(root, [("orders", 0), ("orders", 1), ("mails", 0)] * 60)
    return root


def rows(batches: Any) -> list[tuple[str, int, int, int]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def positions(found: list[tuple[str, int, int, int]]) -> list[QueuePosition]:
    return sorted(row[:3] for row in found)


def read(*paths: Path | str, **options: object) -> list[QueuePosition]:
    """Return the rows of a table."""
    texts = {name: str(value) for name, value in options.items()}
    source = RocketmqSource({"paths": json.dumps([str(path) for path in paths]), **texts})
    reader = source.reader(SCHEMA)
    assert isinstance(reader, StoreReader)
    return positions([row for part in reader.partitions() for row in rows(reader.read(part))])


class Stream:
    """A stream as Spark drives it: each offset goes through JSON, and a new reader goes on from the last one."""

    def __init__(self, *paths: Path | str) -> None:
        self.paths, self.at = [str(path) for path in paths], ""

    def run(self, batches: int = 1, /, *, tells_start: object = True, **options: object) -> list[list[QueuePosition]]:
        """Run micro-batches of a new query; the first one begins at the checkpoint, if there is one. Spark 4.1 does not
        pass their start, but asks for an empty one when a query goes on."""
        steps = self.steps(tells_start=tells_start, **options)
        return [next(steps) for _ in range(batches)]

    def reader(self, **options: object) -> StoreStreamReader:
        """Return a new query's reader."""
        where = {"paths": json.dumps(self.paths)} if len(self.paths) > 1 else {"path": self.paths[0]}
        source = RocketmqSource({**where, **{name: str(value) for name, value in options.items()}})
        reader = source.streamReader(SCHEMA)
        assert isinstance(reader, StoreStreamReader)
        return reader

    def steps(self, *, tells_start: object = True, **options: object) -> Iterator[list[QueuePosition]]:
        """Do as `run`, one batch at a time."""
        reader = self.reader(**options)
        if self.at and not tells_start:
            assert reader.partitions(json.loads(self.at), json.loads(self.at)) == []
        self.at = self.at or json.dumps(reader.initialOffset())
        while True:
            start = json.loads(self.at)
            end = reader.latestOffset(start) if tells_start else reader.latestOffset()
            end = json.loads(json.dumps(end))
            found = positions([row for part in reader.partitions(start, end) for row in rows(reader.read(part))])
            self.at = json.dumps(end)
            yield found


def stream(path: Path, **options: object) -> list[QueuePosition]:
    (found,) = Stream(path).run(**options)
    return found


def offsets_of(found: list[QueuePosition], topic: str, queue: int) -> list[int]:
    return [offset for name, number, offset in found if (name, number) == (topic, queue)]


def test_each_queue_begins_at_its_offset(store: Path) -> None:
    asked = {"orders": {"0": 23, "1": -2}}
    expected = [("orders", 0, n) for n in range(23, 60)] + [("orders", 1, n) for n in range(60)]
    assert read(store, startingOffsets=json.dumps(asked)) == expected
    assert stream(store, startingOffsets=json.dumps(asked)) == expected
    with_topics = {"topics": "mails,orders", "startingOffsets": json.dumps({**asked, "mails": {"0": 59}})}
    assert read(store, **with_topics) == [("mails", 0, 59), *expected]
    assert stream(store, **with_topics) == [("mails", 0, 59), *expected]


def test_words_stand_for_all_queues(store: Path) -> None:
    everything = read(store)
    assert len(everything) == 180
    assert read(store, startingOffsets="earliest", endingOffsets="latest") == everything
    assert stream(store, startingOffsets="Earliest") == everything
    assert stream(store, startingOffsets="latest") == []
    assert stream(store, startingOffsets='{"orders":{"0":-1,"1":-1}}') == []
    assert stream(store, startingOffsets='{"orders":{"0":-1,"1":58}}') == [("orders", 1, 58), ("orders", 1, 59)]


def test_tables_end_where_they_are_told(store: Path) -> None:
    ends = json.dumps({"orders": {"0": 10, "1": -1}})
    found = read(store, startingOffsets='{"orders":{"0":5,"1":57}}', endingOffsets=ends)
    assert found == [("orders", 0, n) for n in range(5, 10)] + [("orders", 1, n) for n in (57, 58, 59)]
    assert len(read(store, endingOffsets=ends)) == 70
    assert read(store, startingOffsets='{"orders":{"0":60,"1":60}}') == []
    assert read(store, endingOffsets='{"orders":{"0":0,"1":0}}') == []


def test_times_by_queue(store: Path) -> None:
    # Every third message is of orders/0, beginning with the first.
    at = START_MS + 30 * STEP_MS
    asked = json.dumps({"orders": {"0": at, "1": at + 1}})
    expected = [("orders", 0, n) for n in range(10, 60)] + [("orders", 1, n) for n in range(10, 60)]
    assert read(store, startingOffsetsByTimestamp=asked) == expected
    assert stream(store, startingOffsetsByTimestamp=asked) == expected
    ends = json.dumps({"orders": {"0": at, "1": at + 2 * STEP_MS}})
    assert offsets_of(read(store, endingOffsetsByTimestamp=ends), "orders", 0) == list(range(10))
    assert offsets_of(read(store, endingOffsetsByTimestamp=ends), "orders", 1) == list(range(11))


def test_a_time_for_all(store: Path) -> None:
    at = START_MS + 90 * STEP_MS
    expected = read(store, startingTimestamp=at)
    assert len(expected) == 90
    assert stream(store, startingTimestamp=at) == expected
    assert stream(store, startingTimestamp=at, topics="mails") == [row for row in expected if row[0] == "mails"]
    assert read(store, startingTimestamp=at, endingTimestamp=at + STEP_MS) == expected[-60:-59]


def test_a_restart_goes_by_its_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "store"
    broker = fill(root, [("orders", 0), ("orders", 1)] * 40)
    query = Stream(root)
    small = {"maxOffsetsPerTrigger": 7}
    first = query.run(startingOffsets='{"orders":{"0":30,"1":39}}', **small)
    assert [len(batch) for batch in first] == [7]
    again = Broker(root, broker.clock)
    for _ in range(5):
        again.send("orders", b"y", "", 2)
        again.send("orders", b"y", "", 1)
    again.close()
    # Options do not count then: the query goes on, with queues that came since from their first message.
    rest = query.run(3, topics="orders", startingOffsets="latest", **small)
    assert [len(batch) for batch in rest] == [7, 7, 0]
    found = sorted(row for batch in (*first, *rest) for row in batch)
    expected = [("orders", 0, n) for n in range(30, 40)] + [("orders", 1, n) for n in range(39, 45)]
    assert found == expected + [("orders", 2, n) for n in range(5)]
    assert "from" not in json.loads(query.at)


def test_a_restart_with_a_spark_that_does_not_tell_where_it_is(tmp_path: Path) -> None:
    root = tmp_path / "store"
    broker = fill(root, [("orders", 0), ("orders", 1)] * 40)
    query = Stream(root)
    options = {"startingOffsets": '{"orders":{"0":30,"1":35}}', "maxOffsetsPerTrigger": 4, "tells_start": False}
    found = query.run(2, **options)
    found += query.run(2, **options)
    assert [len(batch) for batch in found] == [4, 4, 4, 3]
    again = Broker(root, broker.clock)
    again.send("orders", b"y", "", 0)
    again.close()
    found += query.run(2, **options)
    expected = [("orders", 0, n) for n in range(30, 41)] + [("orders", 1, n) for n in range(35, 40)]
    assert sorted(row for batch in found for row in batch) == expected


def test_a_topic_that_was_deleted_and_made_again(tmp_path: Path) -> None:
    """A topic that was deleted and made again is read from its new offsets: its queues count from 0 again, and records
    from before have offsets that the new ones have, too."""
    root = tmp_path / "store"
    broker = fill(root, [("orders", 0)] * 30)
    query = Stream(root)
    options = {"startingOffsets": '{"orders":{"0":25}}', "maxOffsetsPerTrigger": 2}
    found = query.run(**options)
    again = Broker(root, broker.clock)
    again.owned.durability.remove_topic("orders", lambda error: None)
    again.owned.settle()
    for _ in range(20):
        again.send("orders", b"new", "", 0)
    again.close()
    assert offsets_of(read(root), "orders", 0) == sorted([*range(30), *range(20)])
    for reading in (read, stream):
        assert offsets_of(reading(root, startingOffsets='{"orders":{"0":5}}'), "orders", 0) == list(range(5, 20))
    with pytest.raises(JobError, match="says 21 for queue 0 of orders, which ends at 20"):
        read(root, startingOffsets='{"orders":{"0":21}}')
    assert "from" in json.loads(query.at)
    found += query.run(15, **options)
    assert sorted(row[2] for batch in found for row in batch) == sorted([*range(25, 30), *range(20)])


def test_a_message_before_that_was_withdrawn(tmp_path: Path) -> None:
    """A withdrawn message before the start does not matter, although its unit does not give the position of its
    record."""
    broker = new_broker(tmp_path / "store")
    for number in range(4):
        waiting = broker.schedule(4, b"x", str(number))
        if number == 1:
            broker.cancel(waiting)
    broker.close()
    found = read(tmp_path / "store", startingOffsets='{"SCHEDULE_TOPIC_XXXX":{"3":2}}')
    assert found == [("SCHEDULE_TOPIC_XXXX", 3, 2), ("SCHEDULE_TOPIC_XXXX", 3, 3)]


def test_several_stores(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    fill(other, [("orders", 0), ("bills", 0)] * 20)
    latest = json.dumps({"orders": {"0": -2, "1": -2}})
    each = {str(store): {"orders": {"0": 50, "1": 60}}, str(other): {"orders": {"0": 19}, "bills": {"0": 18}}}
    found = read(store, other, startingOffsets=json.dumps(each))
    expected = [("bills", 0, 18), ("bills", 0, 19), ("orders", 0, 19)] + [("orders", 0, n) for n in range(50, 60)]
    assert found == sorted(expected)
    each = {str(store): {"orders": {"0": 60, "1": 60}}, str(other): {"bills": {"0": 18}}}
    assert read(store, other, startingOffsets=json.dumps(each)) == [("bills", 0, 18), ("bills", 0, 19)]
    with pytest.raises(JobError, match=rf"^{other}: the option startingOffsets names queue 1 of orders, which has"):
        read(store, other, startingOffsets=latest)
    # A topic that only one of the brokers has.
    assert read(store, other, startingOffsets='{"bills": {"0": 17}}') == [("bills", 0, n) for n in (17, 18, 19)]
    with pytest.raises(JobError, match=f"the option startingOffsets does not name the store {other}, which is read$"):
        read(store, other, startingOffsets=json.dumps({str(store): each[str(store)]}))


def test_a_stream_of_several_stores(tmp_path: Path) -> None:
    brokers = {name: fill(tmp_path / name, [("orders", 0), (name, 0)] * 20) for name in ("a-1", "a-2")}
    for options in ({"startingOffsets": '{"orders": {"0": 15}}'}, {"startingTimestamp": START_MS + 30 * STEP_MS}):
        expected = read(tmp_path / "a-1", tmp_path / "a-2", **options)
        for paths in ((tmp_path / "a-1", tmp_path / "a-2"), (f"{tmp_path}/a-[12]",)):
            assert Stream(*paths).run(**options) == [expected]
            found = Stream(*paths).run(12, maxOffsetsPerTrigger=4, **options)
            assert max(map(len, found)) == 4
            assert sorted(row for rows in found for row in rows) == expected
    of_one = {"startingOffsets": '{"a-2": {"0": 18}}'}
    assert Stream(f"{tmp_path}/a-*").run(**of_one) == [[("a-2", 0, 18), ("a-2", 0, 19)]]
    only = Stream(f"{tmp_path}/a-[13]")
    only.run(startingOffsets="latest")
    query = Stream(f"{tmp_path}/a-*")
    query.run(startingOffsets="latest")
    fill(tmp_path / "a-3", [("new", 0)] * 3)
    assert only.run() == [[("new", 0, 0), ("new", 0, 1), ("new", 0, 2)]]
    again = Broker(tmp_path / "a-1", brokers["a-1"].clock)
    again.send("orders", b"y", "", 0)
    again.close()
    assert query.run(startingOffsets="latest") == [[("new", 0, 0), ("new", 0, 1), ("new", 0, 2), ("orders", 0, 20)]]
    shutil.rmtree(tmp_path / "a-2")
    with pytest.raises(JobError, match=r"a-2: the checkpoint has this store, which is no longer among those"):
        query.run()
    assert query.run(failOnDataLoss="false") == [[]]
    query.paths = [str(tmp_path / "a-1")]
    with pytest.raises(JobError, match="the checkpoint is of another list of stores"):
        query.run()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no JSON of topics and queues, such as"),
        ("[]", "is no JSON of topics and queues, such as"),
        ("23", "is no JSON of topics and queues, such as"),
        ("now", "is no JSON of topics and queues, such as"),
        ('{"orders": 23}', "has no queues for orders; write it as"),
        ('{"orders": {"0": "23"}}', 'says "23" for queue 0 of orders; write it as'),
        ('{"orders": {"0": -3}}', "says -3 for queue 0 of orders; write it as"),
        ('{"orders": {"0": true}}', "says true for queue 0 of orders; write it as"),
        ('{"orders": {"0": 1e3}}', "says 1000.0 for queue 0 of orders; write it as"),
        ('{"orders": {"one": 1}}', "says 1 for queue one of orders; write it as"),
        ('{"nothing": {"0": 1}}', "names nothing: the store has no queue of such a topic"),
        ('{"orders": {"0": 1}}', "does not name queue 1 of orders; -2 is the earliest, -1 the latest"),
        ('{"orders": {"0": 1, "1": 1, "7": 1}}', "names queue 7 of orders, which has queues 0, 1"),
        ('{"orders": {"0": 61, "1": 1}}', "says 61 for queue 0 of orders, which ends at 60; failOnDataLoss=false"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(store: Path, text: str, why: str) -> None:
    for reading in (read, stream):
        with pytest.raises(JobError) as caught:
            reading(store, startingOffsets=text)
        assert why in str(caught.value)
        assert "startingOffsets" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets=latest is for streams"),
        ({"startingOffsets": '{"orders":{"0":-1,"1":0}}'}, "startingOffsets has -1, the latest, which is for streams"),
        ({"endingOffsets": "earliest"}, "endingOffsets=earliest is no JSON"),
        ({"endingOffsets": '{"orders":{"0":-2,"1":0}}'}, "endingOffsets says -2 for queue 0 of orders"),
        ({"startingOffsets": "earliest", "startingTimestamp": 1}, "startingOffsets and startingTimestamp both say"),
        ({"endingOffsets": "latest", "endingOffset": 1}, "endingOffsets and endingOffset both say"),
        ({"startingOffset": '{"orders":{"0":1}}'}, "startingOffsets takes queue offsets"),
        ({"topics": "mails", "startingOffsets": '{"orders":{"0":1,"1":1}}'}, "names orders, which the option topics"),
        (
            {"topics": "mails,orders", "startingOffsets": '{"mails":{"0":1}}'},
            "does not name orders, which the option",
        ),
        ({"table": "pending", "startingOffsets": "earliest"}, "the table pending has no option startingOffsets"),
        ({"startingOffsetsByTimestamp": '{"orders":{"0":-1,"1":0}}'}, "says -1 for queue 0 of orders"),
    ],
)
def test_what_a_table_is_not_asked(store: Path, options: dict[str, object], why: str) -> None:
    with pytest.raises(JobError) as caught:
        read(store, **options)
    assert why in str(caught.value)


def test_a_stream_has_no_end(store: Path) -> None:
    by_queue = '{"orders":{"0":1,"1":1}}'
    for name, text in (("endingOffsets", by_queue), ("endingOffsetsByTimestamp", by_queue), ("endingTimestamp", "1")):
        with pytest.raises(JobError, match=f"a stream has no option {name}"):
            stream(store, **{name: text})


def test_what_expired(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    copy_tree(store, root)
    files = sorted((root / "commitlog").iterdir())
    for path in files[:2]:
        path.unlink()
    left = offsets_of(read(root), "orders", 0)
    assert 0 < left[0] < 59
    with pytest.raises(
        JobError, match=rf"says 0 for queue 0 of orders, which begins at {left[0]}: what was before that"
    ):
        read(root, startingOffsets='{"orders":{"0":0,"1":-2}}')
    found = read(root, startingOffsets='{"orders":{"0":0,"1":999}}', failOnDataLoss="false")
    assert found == [("orders", 0, n) for n in left]


def test_files_that_cannot_have_any_are_not_read(store: Path) -> None:
    def ranges(**options: str) -> int:
        return len(StoreReader(Options({"path": str(store), **options}), SCHEMA).partitions())

    assert ranges() > 4
    assert ranges(startingOffsets='{"orders":{"0":59,"1":59}}') == 1
    assert ranges(endingOffsets='{"orders":{"0":1,"1":1}}') == 1


@examples(1 / 2)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2)), min_size=1, max_size=60),
    st.lists(st.integers(0, 1 << 30), min_size=6, max_size=6),
    st.integers(0, 9),
)
def test_tables_and_streams_agree_with_a_plain_count(
    tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[str, int]], numbers: list[int], batch: int
) -> None:
    root = tmp_path_factory.mktemp("any") / "store"
    fill(root, messages)
    counts = {message: messages.count(message) for message in messages}
    asked: dict[str, dict[str, int]] = {}
    expected = []
    for (topic, queue), count in counts.items():
        start = numbers[(topic == "b") * 3 + queue] % (count + 2) - 1
        asked.setdefault(topic, {})[str(queue)] = -2 if start < 0 else start
        expected += [(topic, queue, offset) for offset in range(max(start, 0), count)]
    options = {"startingOffsets": json.dumps(asked)}
    assert read(root, **options) == sorted(expected)
    found = Stream(root).run(62, maxOffsetsPerTrigger=batch, **options)
    assert sorted(row for rows in found for row in rows) == sorted(expected)
    assert batch == 0 or max(len(rows) for rows in found) <= batch
    shutil.rmtree(root.parent)


def test_a_store_of_several_names_is_read_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    (store.parent / "link").symlink_to(store.name)
    expected = read(store)
    name = Path(store.name)
    several: list[list[Path | str]] = [[f"{name}/", name], ["link", name], [f"./{name}", store, "link"]]
    for names in several:
        assert read(*names) == expected
        query = Stream(*names)
        assert query.run() == [expected]
        # A checkpoint may be of a run that read it by each of these names, or by another one.
        at = next(iter(json.loads(query.at)["stores"].values()))
        query.at = json.dumps({"stores": {str(name): at for name in names}})
        assert query.run() == [[]]
        query.at = json.dumps({"stores": {"link": at}})
        assert query.run() == [[]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"startingOffsets": ""}, "startingOffsets= is no JSON of topics and queues"),
        ({"startingOffsets": " "}, "startingOffsets=  is no JSON of topics and queues"),
        ({"startingOffsets": "{}"}, "startingOffsets={} is no JSON of topics and queues"),
        ({"endingOffsets": ""}, "endingOffsets= is no JSON of topics and queues"),
        ({"startingOffsetsByTimestamp": ""}, "startingOffsetsByTimestamp= is no JSON of topics and queues"),
        ({"endingOffsetsByTimestamp": "latest"}, "endingOffsetsByTimestamp=latest is no JSON of topics and queues"),
        ({"startingOffsets": '{"orders":{}}'}, "startingOffsets has no queues for orders"),
        ({"startingOffsets": '{"orders":{"0":1,"1":1,"0":9}}'}, 'startingOffsets says "0" twice'),
        ({"startingOffsets": '{"mails":{"0":1},"orders":{"0":1,"1":1},"mails":{"0":9}}'}, 'says "mails" twice'),
        ({"startingOffsets": '{"orders":{"0":1,"1":1,"00":9}}'}, "startingOffsets says queue 0 of orders twice"),
        ({"startingOffsets": '{"orders":{"0":NaN,"1":1}}'}, "startingOffsets says NaN for queue 0 of orders"),
        ({"startingOffsets": '{"orders":{"0":null,"1":1}}'}, "startingOffsets says null for queue 0 of orders"),
        (
            {"startingOffsets": '{"orders":{"0":99999999999999999999,"1":1}}'},
            "startingOffsets says 99999999999999999999",
        ),
        (
            {"endingOffsets": '{"orders":{"0":61,"1":1}}'},
            "endingOffsets says 61 for queue 0 of orders, which ends at 60",
        ),
        (
            {"startingOffsets": '{"orders":{"0":9,"1":30}}', "endingOffsets": '{"orders":{"0":9,"1":29}}'},
            "startingOffsets says 30 for queue 1 of orders, which endingOffsets ends before, at 29",
        ),
        (
            {
                "startingOffsetsByTimestamp": '{"orders":{"0":9,"1":30}}',
                "endingOffsetsByTimestamp": '{"orders":{"0":9,"1":29}}',
            },
            "says 30 for queue 1 of orders, which endingOffsetsByTimestamp ends before, at 29",
        ),
        ({"startingTimestamp": 30, "endingTimestamp": 29}, "startingTimestamp=30 is behind endingTimestamp=29"),
        ({"startingOffset": 30, "endingOffset": 29}, "startingOffset=30 is behind endingOffset=29"),
    ],
)
def test_what_says_nothing_or_two_things_is_refused(store: Path, options: dict[str, object], why: str) -> None:
    with pytest.raises(JobError) as caught:
        read(store, **options)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_start_may_be_the_end(store: Path) -> None:
    at = '{"orders":{"0":30,"1":60}}'
    assert read(store, startingOffsets=at, endingOffsets=at) == []
    assert read(store, startingTimestamp=30, endingTimestamp=30) == []


def test_stores_that_are_not_read_are_not_named(store: Path, tmp_path: Path) -> None:
    fill(tmp_path / "other", [("orders", 0)] * 3)
    mine = {"orders": {"0": 1, "1": 1}}
    for asked, why in (
        (
            {str(store): mine, f"{tmp_path}/none": mine},
            f"startingOffsets names the store {tmp_path}/none, which is not",
        ),
        ({str(store): mine, f"{store}/": mine}, f"startingOffsets names the store {store}/ twice"),
    ):
        for reading in (read, stream):
            with pytest.raises(JobError) as caught:
                reading(store, startingOffsets=json.dumps(asked))
            assert why in str(caught.value)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_stream_passes_over_no_file_that_is_gone_or_cut(
    store: Path, tmp_path: Path, number: int, *, is_emptied: bool
) -> None:
    store = Path(shutil.copytree(store, tmp_path / "store"))
    query = Stream(store)
    files = sorted((store / "commitlog").iterdir())
    every = stream(store)
    if is_emptied:
        files[number].write_bytes(b"")
    else:
        files[number].unlink()
    if number or is_emptied:
        why = "the file was cut to 0 bytes" if is_emptied else "a file is missing"
        begin, behind = int(files[number].name), int(files[number + 1].name)
        with pytest.raises(
            JobError, match=rf"offset {begin} to {behind} can no longer be read \({why}\): put the file back"
        ):
            query.run()
    left = Stream(store).run(failOnDataLoss="false")[0]
    assert 0 < len(left) < len(every)


def test_spark_that_wants_all_at_once_gets_all(store: Path) -> None:
    """A stream gives everything when Spark wants all at once, as for Trigger.Once: a micro-batch asks for its limit,
    and the answer counts."""
    every = sum(len(found) for found in Stream(store).run())
    for limits, default in (
        ({"maxOffsetsPerTrigger": 7}, ReadMaxRows(7)),
        ({"maxBytesPerTrigger": 5 << 20}, ReadMaxBytes(5 << 20)),
        ({}, ReadAllAvailable()),
    ):
        reader = Stream(store).reader(**limits)
        assert reader.getDefaultReadLimit() == default
        start = reader.initialOffset()
        for limit, count in ((ReadAllAvailable(), every), (default, limits.get("maxOffsetsPerTrigger", every))):
            end = json.loads(json.dumps(reader.latestOffset(start, limit)))
            found = [row for part in reader.partitions(start, end) for row in rows(reader.read(part))]
            assert len(found) == count


def test_a_batch_that_may_be_the_last_one_before_the_end_is_told_once(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch that may be the last one before the end is reported once: Spark before 4.2 ends a query with
    Trigger.AvailableNow after one micro-batch, whatever is left."""
    Stream(store).run(2, maxOffsetsPerTrigger=7)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(source, "ENDS_AFTER_ONE", True)
    Stream(store).run(2, tells_start=False)
    assert capsys.readouterr().err == ""
    limited = Stream(store)
    for _ in range(2):
        limited.run(3, tells_start=False, maxOffsetsPerTrigger=7)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"duemq: {store}: this micro-batch ends before the store does, and Spark before 4.2 ends"
        )
    # A batch that was planned before a crash comes first, and alone.
    reader = limited.reader()
    start, end = reader.initialOffset(), json.loads(limited.at)
    assert reader.partitions(end, end) == []
    assert capsys.readouterr().err == ""
    assert reader.partitions(start, end)
    assert "start it again until nothing comes" in capsys.readouterr().err


@pytest.mark.parametrize("reading", [read, stream])
def test_rows_that_are_missing_are_told_on_standard_error(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reading: Any
) -> None:
    """Missing rows are reported on standard error, for damage and for a missing file; without any, nothing is
    printed."""
    whole = reading(store)
    assert capsys.readouterr().err == ""
    damaged = tmp_path / "damaged"
    shutil.copytree(store, damaged)
    files = sorted((damaged / "commitlog").iterdir())
    data = bytearray(files[1].read_bytes())
    data[10_000:20_000] = bytes(10_000)
    files[1].write_bytes(data)
    found = reading(damaged)
    assert len(found) < len(whole)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"duemq: {damaged}: [\d,]+ bytes of the commitlog from physical offset \d+ on could not be read, "
        r"and have no rows \(.+\): see the table damaged",
        line,
    )
    files[1].unlink()
    options = {"failOnDataLoss": False} if reading is stream else {}
    assert len(reading(damaged, **options)) < len(found)
    if reading is read:
        assert "have no rows (a file is missing): see the table damaged" in capsys.readouterr().err
