"""Benchmarks of duemq's broker and Apache's 4.9.7. Both are started in turn on this machine, with the same clients. The
cases of timers (figures whose names begin with `timers`, `beside` and `mix`) and of ACL 2.0 (`users`) use Apache's
5.3.3, since 4.9.7 has neither. The cases of the Spark jobs (`spark`) are compared only with naive programs for the same
tasks, those of the MQTT bridge (`mqtt`) with Mosquitto alone, and `python_shape` with aiokafka and Apache Kafka.

    python -m tests.bench [--rounds 2] [--tiny] [--big] [--only CASE ...]      (make bench)

Absolute times are noisy, so look at the ratios: on a small machine client and broker share the processors. Each round
measures Apache's broker and then duemq's; the table shows the median of the rounds. Every run of a client checks its
own result: no message failed, lost, doubled or early. A run of all cases is appended to tests/bench/results.jsonl with
the date and the commit.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from tests.bench.brokers import MakeBroker, apache, ours
from tests.bench.cases import acl as acl_cases
from tests.bench.cases import broker as broker_cases
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
from tests.bench.figures import Figures, median, table

NAMES = (
    *broker_cases.NAMES,
    *client_cases.NAMES,
    *kafka_cases.NAMES,
    *acl_cases.NAMES,
    *tls_cases.NAMES,
    *tag_cases.NAMES,
    *level_cases.NAMES,
    *timer_cases.NAMES,
    *pressure_cases.NAMES,
    *spark_cases.NAMES,
    *mqtt_cases.NAMES,
)
BIG = (timer_cases.BIG, spark_cases.BIG)
RESULTS = Path(__file__).parent / "results.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="only see that it works")
    parser.add_argument("--big", action="store_true", help=f"with {' and '.join(BIG)}: minutes, 12 GB")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="CASE", help=f"some of: {', '.join(NAMES)}")
    arguments = parser.parse_args()
    only = arguments.only or [name for name in NAMES if arguments.big or name not in BIG]
    theirs, mine = asyncio.run(run(arguments.rounds, only, tiny=arguments.tiny))
    print(
        table(
            {
                **broker_cases.FIGURES,
                **client_cases.FIGURES,
                **acl_cases.FIGURES,
                **tls_cases.FIGURES,
                **tag_cases.FIGURES,
                **level_cases.FIGURES,
            },
            theirs,
            mine,
            "Apache 4.9.7",
        )
    )
    of_5 = {**acl_cases.FIGURES_OF_USERS, **timer_cases.FIGURES, **pressure_cases.FIGURES}
    print(table(of_5, theirs, mine, "Apache 5.3.3"))
    print(table(kafka_cases.FIGURES, theirs, mine, "aiokafka"))
    print(table(spark_cases.FIGURES, theirs, mine, "nothing like it"))
    print(table(mqtt_cases.FIGURES, theirs, mine, "Mosquitto only"))
    if not arguments.tiny and not arguments.only:
        record(theirs, mine)
        timer_growth.plot(timer_growth.measure(timer_growth.REAL))


async def run(rounds: int, only: Collection[str], *, tiny: bool) -> tuple[Figures, Figures]:
    """Return the medians of all figures of some cases, Apache's and duemq's."""
    results: dict[str, list[Figures]] = {"apache": [], "duemq": []}
    for number in range(rounds):
        for name, make in (("apache", apache), ("duemq", ours)):

            def say(case: str, name: str = name, number: int = number) -> None:
                print(f"round {number + 1} of {rounds}, {name}: {case}", file=sys.stderr, flush=True)

            with tempfile.TemporaryDirectory(prefix="duemq-bench-") as directory:
                results[name].append(await one_broker(make, Path(directory), only, say, tiny=tiny))
    return median(results["apache"]), median(results["duemq"])


async def one_broker(
    make: MakeBroker, directory: Path, only: Collection[str], say: Callable[[str], None], *, tiny: bool
) -> Figures:
    """Return the figures of some cases for one broker."""
    figures = await broker_cases.run(make, directory, broker_cases.TINY if tiny else broker_cases.REAL, only, say)
    figures |= await client_cases.run(make, directory, client_cases.TINY if tiny else client_cases.REAL, only, say)
    figures |= await kafka_cases.run(make, directory, kafka_cases.TINY if tiny else kafka_cases.REAL, only, say)
    figures |= await acl_cases.run(make, directory, acl_cases.TINY if tiny else acl_cases.REAL, only, say)
    figures |= await tls_cases.run(make, directory, tls_cases.TINY if tiny else tls_cases.REAL, only, say)
    figures |= await tag_cases.run(make, directory, tag_cases.TINY if tiny else tag_cases.REAL, only, say)
    figures |= await level_cases.run(make, directory, level_cases.TINY if tiny else level_cases.REAL, only, say)
    figures |= await timer_cases.run(make, directory, timer_cases.TINY if tiny else timer_cases.REAL, only, say)
    pressure = pressure_cases.TINY if tiny else pressure_cases.REAL
    figures |= await pressure_cases.run(make, directory, pressure, only, say)
    figures |= await spark_cases.run(make, directory, spark_cases.TINY if tiny else spark_cases.REAL, only, say)
    return figures | await mqtt_cases.run(make, directory, mqtt_cases.TINY if tiny else mqtt_cases.REAL, only, say)


def record(theirs: Figures, mine: Figures) -> None:
    """Append the result to the file of results."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    entry = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": f"{platform.machine()}, {platform.python_version()}",
        "apache": theirs,
        "duemq": mine,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
