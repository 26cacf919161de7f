"""Fixtures of the Spark jobs' tests: stores of real brokers, and Spark.

    peers           tests.spark.world.peers.Peers: Apache's Java clients, and the event loop of all that talks to them
    commands        tests.spark.world.commands.Commands: one process that runs `duemq` several times
    stores          tests.spark.world.stores.Stores: `stores.get(kind, end)`, written from the begin of the session on
    written         each kind in turn, stopped cleanly
    killed          each kind in turn, killed while it delivered
    duemq_store, apache_497_store, apache_533_store    one of them, stopped cleanly
    writable        a copy of `written` of this test's own, for faults
    spark           one session for all tests, as the command line makes it: two tasks at a time, little memory

Apache's Java client fills all of them, so tests that use one are interop tests: they have that mark, and are tried
again as the interop tests are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.soak import sampled
from tests.spark.world import spark_home
from tests.spark.world.commands import Commands
from tests.spark.world.peers import Peers
from tests.spark.world.stores import KINDS, End, Kind, Stores, WrittenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

spark_home.use()

_HERE = Path(__file__).parent
_FIXTURES = {"peers", "stores", "written", "killed", "writable", "duemq_store", "apache_497_store", "apache_533_store"}

_KINDS_OF: dict[str, set[Kind]] = {
    "duemq_store": {"duemq"}, "apache_497_store": {"apache-4.9.7"}, "apache_533_store": {"apache-5.3.3"},
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents and _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.interop)
        elif item.path.name == "test_stream.py":
            # Spark gives the Python process of a stream 10 s to start, most of which it compiles: too few when three
            # test runs share two processors. There is no setting for it.
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=["Python worker failed to connect back"]))


def _kinds_of(item: pytest.Item) -> set[Kind]:
    """Return the kinds of stores that a test needs."""
    callspec, names = getattr(item, "callspec", None), getattr(item, "fixturenames", ())
    given = callspec.params if callspec is not None else {}
    kinds = {given[name] for name in ("written", "killed") if name in given}
    kinds |= {given["kind"]} if "stores" in names and "kind" in given else set()
    return kinds.union(*(_KINDS_OF.get(name, set()) for name in names))


@pytest.fixture(scope="session", autouse=True)
def _stores_begun(request: pytest.FixtureRequest) -> None:
    """Have the brokers write while tests that need no store run."""
    items = [item for item in request.session.items if _HERE in item.path.parents]
    kinds = set().union(*map(_kinds_of, items))
    if kinds:
        request.getfixturevalue("stores").begin(kinds)


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    with Peers(tmp_path_factory.mktemp("clients")) as peers:
        yield peers


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    with Commands(spark_home.of_a_user()) as commands:
        yield commands


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory, peers: Peers) -> Stores:
    return Stores(tmp_path_factory.mktemp, peers)


@pytest.fixture(params=KINDS)
def written(stores: Stores, request: pytest.FixtureRequest) -> WrittenStore:
    return _store(stores, request, request.param)


@pytest.fixture(params=sampled(KINDS, ("duemq", "apache-5.3.3")))
def killed(stores: Stores, request: pytest.FixtureRequest) -> WrittenStore:
    return _store(stores, request, request.param, "kill")


@pytest.fixture
def duemq_store(stores: Stores, request: pytest.FixtureRequest) -> WrittenStore:
    return _store(stores, request, "duemq")


@pytest.fixture
def apache_497_store(stores: Stores, request: pytest.FixtureRequest) -> WrittenStore:
    return _store(stores, request, "apache-4.9.7")


@pytest.fixture
def apache_533_store(stores: Stores, request: pytest.FixtureRequest) -> WrittenStore:
    return _store(stores, request, "apache-5.3.3")


def _store(stores: Stores, request: pytest.FixtureRequest, kind: Kind, end: End = "stop") -> WrittenStore:
    """Return a store of the session. A test tried again gets a new one if Apache's broker wrote it, since the failure
    may be in the files; a wrong store of duemq's stays wrong."""
    if kind != "duemq" and getattr(request.node, "execution_count", 1) > 1:
        stores.forget(kind)
    return stores.get(kind, end)


@pytest.fixture
def writable(written: WrittenStore, tmp_path: Path) -> WrittenStore:
    return replace(written, path=written.copy(tmp_path / "store"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from duemq.spark_jobs.session import make_session

    scratch = str(tmp_path_factory.mktemp("spark"))
    settings = {"spark.sql.shuffle.partitions": "2", "spark.local.dir": scratch, "spark.sql.warehouse.dir": scratch}
    session = make_session("duemq tests", master="local[2]", memory="768m", settings=settings, for_jobs=True)
    yield session
    session.stop()
