"""The benchmarks' cases of delays at their smallest, with duemq's broker alone, so that they keep working between
releases.

Each case checks its own run: each message delivered once, none early.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench import profile
from tests.bench.brokers import MakeBroker, apache, ours
from tests.bench.cases import acl as acl_cases
from tests.bench.cases import clients as client_cases
from tests.bench.cases import kafka as kafka_cases
from tests.bench.cases import levels as level_cases
from tests.bench.cases import mqtt as mqtt_cases
from tests.bench.cases import pressure as pressure_cases
from tests.bench.cases import spark as spark_cases
from tests.bench.cases import tags as tag_cases
from tests.bench.cases import timer_growth
from tests.bench.cases import timers as timer_cases
from tests.bench.cases import tls as tls_cases

# The cases that take longest are tried by the soak alone: they are the tests' own programs, which `make bench` runs.
# Cases of one group share the broker's stores, which take seconds to fill and to become due.
ALONE = [("overdue", "drain_latency", "paths"), ("overdue_levels",), ("steady",), ("pending",)]
WITH_JAVA = [("overdue_java",)]


@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param(names, marks=pytest.mark.soak) if len(names) > 1 else names for names in ALONE),
        *(pytest.param(names, marks=[pytest.mark.interop, pytest.mark.soak]) for names in WITH_JAVA),
    ],
    ids="+".join,
)
async def test_a_case_of_levels_gives_its_figures(names: tuple[str, ...], tmp_path: Path) -> None:
    said: list[str] = []
    figures = await level_cases.run(ours, tmp_path, level_cases.TINY, names, said.append)
    assert tuple(said) == names
    assert figures
    assert set(figures) <= set(level_cases.FIGURES)
    assert all(value >= 0 for value in figures.values()), figures
    assert figures.get("steady_refused", 0) == 0


def test_every_case_of_levels_is_exercised_here() -> None:
    assert {name for names in ALONE + WITH_JAVA for name in names} == set(level_cases.NAMES)


@pytest.mark.soak
async def test_the_case_of_the_python_client_gives_its_figures(tmp_path: Path) -> None:
    said: list[str] = []
    figures = await client_cases.run(ours, tmp_path, client_cases.TINY, client_cases.NAMES, said.append)
    assert tuple(said) == client_cases.NAMES
    assert set(figures) == set(client_cases.FIGURES)


@pytest.mark.soak
async def test_the_case_of_access_control_gives_its_figures(tmp_path: Path) -> None:
    said: list[str] = []
    figures = await acl_cases.run(ours, tmp_path, acl_cases.TINY, acl_cases.NAMES, said.append)
    assert tuple(said) == acl_cases.NAMES
    assert set(figures) == {*acl_cases.FIGURES, *acl_cases.FIGURES_OF_USERS}


async def test_the_case_of_tls_gives_its_figures(tmp_path: Path) -> None:
    said: list[str] = []
    figures = await tls_cases.run(ours, tmp_path, tls_cases.TINY, tls_cases.NAMES, said.append)
    assert tuple(said) == tls_cases.NAMES
    assert set(figures) == set(tls_cases.FIGURES)


async def test_the_case_of_tags_gives_its_figures(tmp_path: Path) -> None:
    said: list[str] = []
    figures = await tag_cases.run(ours, tmp_path, tag_cases.TINY, tag_cases.NAMES, said.append)
    assert tuple(said) == tag_cases.NAMES
    assert len(figures) == 6


@pytest.mark.soak
async def test_the_cases_of_timers_give_their_figures(tmp_path: Path) -> None:
    said: list[str] = []
    figures = await timer_cases.run(ours, tmp_path, timer_cases.TINY, timer_cases.NAMES, said.append)
    assert tuple(said) == timer_cases.NAMES
    assert set(figures) == set(timer_cases.FIGURES)
    assert all(value >= 0 for value in figures.values()), figures


@pytest.mark.soak
async def test_the_cases_of_pressure_give_their_figures(tmp_path: Path) -> None:
    said: list[str] = []
    figures = await pressure_cases.run(ours, tmp_path, pressure_cases.TINY, pressure_cases.NAMES, said.append)
    assert tuple(said) == pressure_cases.NAMES
    assert set(figures) == set(pressure_cases.FIGURES)
    assert all(value >= 0 for value in figures.values()), figures


@pytest.mark.parametrize("make", [ours, pytest.param(apache, marks=pytest.mark.soak)], ids=["duemq", "aiokafka"])
async def test_the_case_of_asyncio_clients_gives_its_figures(make: MakeBroker, tmp_path: Path) -> None:
    said: list[str] = []
    figures = await kafka_cases.run(make, tmp_path, kafka_cases.TINY, kafka_cases.NAMES, said.append)
    assert tuple(said) == kafka_cases.NAMES
    assert set(figures) == set(kafka_cases.FIGURES)
    assert all(value > 0 for value in figures.values()), figures


@pytest.mark.parametrize("make", [ours, apache], ids=["with the bridge", "Mosquitto alone"])
async def test_the_cases_of_the_mqtt_bridge_give_their_figures(make: MakeBroker, tmp_path: Path) -> None:
    said: list[str] = []
    figures = await mqtt_cases.run(make, tmp_path, mqtt_cases.TINY, mqtt_cases.NAMES, said.append)
    assert said == list(mqtt_cases.NAMES)
    of_bridge = {name for name in mqtt_cases.FIGURES if name.endswith(("_cpu_us", "_mib"))}
    assert set(figures) == set(mqtt_cases.FIGURES) - (of_bridge if make is apache else set())
    assert all(value >= 0 for value in figures.values()), figures


@pytest.mark.parametrize(
    "name",
    [
        # Four Spark sessions, whose jobs tests/spark runs as well.
        pytest.param(spark_cases.spark_jobs.__name__, marks=pytest.mark.soak),
        spark_cases.spark_naive.__name__,
    ],
)
async def test_a_case_of_the_spark_jobs_gives_its_figures(name: str, tmp_path: Path) -> None:
    """Each case of the Spark jobs returns its figures, except that of growing stores, which repeats the others."""
    said: list[str] = []
    figures = await spark_cases.run(ours, tmp_path, spark_cases.TINY, (name,), said.append)
    assert said == [name]
    assert figures
    assert set(figures) <= set(spark_cases.FIGURES)
    assert all(value > 0 for value in figures.values()), figures


def test_every_case_of_the_spark_jobs_but_that_of_growth_is_exercised_here() -> None:
    names = {spark_cases.spark_jobs.__name__, spark_cases.spark_naive.__name__, spark_cases.BIG}
    assert names == set(spark_cases.NAMES)


def test_the_growth_of_the_timer_wheel_is_plotted() -> None:
    points = timer_growth.measure(timer_growth.TINY)
    assert tuple(point.pending for point in points) == timer_growth.TINY.pending
    ElementTree.fromstring(timer_growth.svg(points))


@pytest.mark.parametrize("name", profile.CASES)
async def test_a_profile_names_our_functions(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    await profile.measure(name, 4 * profile.READ)
    told = capsys.readouterr().out
    assert f"{name}: " in told
    assert re.search(r"duemq/(broker|protocol|storage|scheduler)/", told)
