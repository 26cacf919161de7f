"""The commands under `duemq spark`. Exit code 0: done, and nothing lost; 1: an audit found lost messages; 2: the job
could not be done, which one line on stderr tells."""

from __future__ import annotations

import functools
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, ParamSpec

import click

from spark_jobs.cli_output import (
    print_archived,
    print_compacted,
    print_forecast,
    print_summary,
    print_table,
    size_text,
    time_text,
)
from spark_jobs.errors import JobError
from spark_jobs.files import local_path, shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


P = ParamSpec("P")
LOST: Final = 1
FAILED: Final = 2
_LIBRARIES: Final = ("pyspark", "pyarrow", "numpy", "pandas", "rich", "cryptography", "jinja2")
PACKAGES: Final = ("protocol", "storage", "scheduler", "spark_jobs")
"""What tasks on a cluster need of us."""


def _fail(text: str) -> NoReturn:
    click.echo(f"duemq: {text}", err=True)
    sys.exit(FAILED)


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Tell in one line what a user can do something about."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except JobError as error:
            _fail(str(error))
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in _LIBRARIES:
                _fail(f"the Spark jobs need the package {error.name}: pip install 'duemq[spark]'")
            raise
        except Exception as error:
            found = _told_by_spark(error)
            if found is None:
                raise
            _fail(found)

    return wrapper


def _told_by_spark(error: Exception) -> str | None:
    """The JobError that a task ended with, which Spark wraps in text of its own; or what Spark says itself."""
    if not type(error).__module__.startswith(("pyspark", "py4j")):
        return None
    text = str(error)
    for line in reversed(text.splitlines()):
        for name in ("JobError: ", "NoStore: "):
            if name in line:
                return line.split(name, 1)[1].strip()
    if os.environ.get("DUEMQ_TRACEBACK"):
        return None
    # Of a task's exception what it says, which is behind its traceback.
    _, _, task = text.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in task.splitlines() if line.strip() and not line.startswith(" ")]
    return f"Spark: {lines[0].strip() if lines else type(error).__name__} (DUEMQ_TRACEBACK=1 shows all of it)"


def spark_options(command: Callable[P, None]) -> Callable[P, None]:
    """The options of commands that start Spark."""
    master = click.option("--master", metavar="URL", help="Where Spark runs; local[*], or what spark-submit says.")
    memory = click.option("--memory", metavar="SIZE", help="Memory of Spark's driver, such as 2g; 1536m.")
    conf = click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark's; may be repeated.")
    return master(memory(conf(command)))


levels_option = click.option(
    "--delay-levels", metavar="TABLE", help="The broker's messageDelayLevel, where the store does not tell it."
)
store_argument = click.argument("store", metavar="STORE")


@contextmanager
def _session(
    name: str, master: str | None, memory: str | None, conf: tuple[str, ...], *, for_jobs: bool = True
) -> Iterator[SparkSession]:
    from spark_jobs.session import make_session

    settings = {}
    for item in conf:
        key, separator, value = item.partition("=")
        if not separator:
            raise click.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--conf")
        settings[key] = value
    session = make_session(f"duemq {name}", master=master, memory=memory, settings=settings, for_jobs=for_jobs)
    try:
        yield session
    finally:
        session.stop()


def _check(store: str, out: str | None = None) -> None:
    """Tell what is wrong with the paths of a store and of results before Spark is started, which takes seconds."""
    from spark_jobs.store_files import StoreFiles

    if out is not None:
        local_path(out)
    StoreFiles.open(store)


@click.group(
    short_help="Audit, analyse and compact a store's files.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def main() -> None:
    """Offline jobs over the files of a store, duemq's or RocketMQ's (4.9, 5.x), with Spark.

    \b
    duemq spark analyse STORE --out DIR     audit, figures and a report, as every night
    duemq spark audit STORE                 was every scheduled message delivered once?
    duemq spark compact STORE NEW           a smaller store, without what nobody reads again
    duemq spark archive STORE DIR           to Parquet by day and topic; restore is the way back
    duemq spark sql STORE QUERY             any question, in SQL

    STORE is the directory that holds commitlog/, or its URI (hdfs://..., s3://...). A running broker's store can be
    read as well, not compacted.
    """


@main.command(short_help="Audit a store, make all figures and a report of them.")
@store_argument
@click.option("--out", metavar="DIR", required=True, help="Where report.html, analysis.json, parquet/ ... go.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages a second that the broker delivers.")
@click.option(
    "--sign-key", type=click.Path(exists=True, dir_okay=False), help="Private Ed25519 key (PEM) for the audit."
)
@levels_option
@spark_options
@one_line_errors
def analyse(
    store: str,
    out: str,
    rate: float | None,
    sign_key: str | None,
    delay_levels: str | None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Audit STORE, make all figures, and write them into DIR: report.html, analysis.json, parquet/, audit.json,
    offenders.parquet. Runs into the same DIR, night after night, add up to curves in the report."""
    _check(store, out)
    from spark_jobs import output
    from spark_jobs.analyse import analyse as run
    from spark_jobs.progress_bar import spark_tasks

    key = Path(sign_key).read_bytes() if sign_key else None
    with _session("analyse", master, memory, conf) as session, spark_tasks(session, f"analysing {shown(store)}"):
        analysis = run(session, store, delay_levels=delay_levels, rate=rate, out=out, key=key)
    paths = output.write(analysis, out)
    print_summary(analysis.audit)
    print_forecast(analysis.forecast)
    click.echo(f"report: {next(path for path in paths if path.endswith('.html'))}")
    sys.exit(0 if analysis.audit.is_good else LOST)


@main.command(short_help="Prove that every scheduled message was delivered once, or name those that were not.")
@store_argument
@click.option("--out", metavar="DIR", help="Where audit.json and offenders.parquet go.")
@click.option(
    "--sign-key", type=click.Path(exists=True, dir_okay=False), help="Private Ed25519 key (PEM) to sign with."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@levels_option
@spark_options
@one_line_errors
def audit(
    store: str,
    out: str | None,
    sign_key: str | None,
    as_json: bool,
    delay_levels: str | None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Tell of every scheduled message in STORE what became of it: delivered, cancelled, pending, lost or delivered
    twice. Exit code 1 when one was lost."""
    _check(store, out)
    import msgspec

    from spark_jobs.audit import audit as run
    from spark_jobs.progress_bar import spark_tasks

    key = Path(sign_key).read_bytes() if sign_key else None
    with _session("audit", master, memory, conf) as session, spark_tasks(session, f"auditing {shown(store)}"):
        summary = run(session, store, out, delay_levels=delay_levels, key=key)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    else:
        print_summary(summary)
    sys.exit(0 if summary.is_good else LOST)


@main.command(short_help="Check that an audit.json is as it was made, and by whom.")
@click.argument("summary", type=click.Path(exists=True, dir_okay=False))
@click.option("--public-key", type=click.Path(exists=True, dir_okay=False), help="Public Ed25519 key (PEM).")
@one_line_errors
def verify(summary: str, public_key: str | None) -> None:
    """Check the digest of SUMMARY, an audit.json, and its signature where a public key is given."""
    from spark_jobs.audit import verify as check

    found = check(Path(summary).read_bytes(), Path(public_key).read_bytes() if public_key else None)
    signed = "signed by that key" if public_key else "signature not checked" if found.signature else "not signed"
    click.echo(f"unchanged since {time_text(found.made_ms)}; {signed}")


@main.command(short_help="Which seconds ahead will be late, and by how much.")
@store_argument
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages a second; by default as measured.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@levels_option
@spark_options
@one_line_errors
def forecast(
    store: str,
    rate: float | None,
    as_json: bool,
    delay_levels: str | None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """From what waits in STORE, and from how fast its broker delivered when it was busy: which seconds ahead will be
    late."""
    _check(store)
    import msgspec

    from spark_jobs.analyse import forecast_of
    from spark_jobs.progress_bar import spark_tasks

    with _session("forecast", master, memory, conf) as session, spark_tasks(session, f"reading {shown(store)}"):
        found = forecast_of(session, store, delay_levels=delay_levels, rate=rate)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        print_forecast(found)


@main.command(short_help="Make a new, smaller store without what nobody can read again.")
@store_argument
@click.argument("new", metavar="NEW")
@click.option(
    "--reserved-hours", type=click.FloatRange(min=0), help="Leave out messages older than that, as retention."
)
@click.option(
    "--compact-topic", multiple=True, metavar="TOPIC", help="Keep the newest message of each key; repeatable."
)
@click.option("--holes", is_flag=True, help="Of such topics let messages go from the middle of queues too.")
@click.option("--no-index", is_flag=True, help="Make no index files (queries by key find nothing then).")
@click.option("--skip-damaged", is_flag=True, help="Leave out damaged stretches rather than refuse.")
@spark_options
@one_line_errors
def compact(
    store: str,
    new: str,
    reserved_hours: float | None,
    compact_topic: tuple[str, ...],
    holes: bool,
    no_index: bool,
    skip_damaged: bool,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Write STORE to NEW without delivered copies in the schedule topics, ended transactions and whatever the options
    name. STORE is only read; no broker may have it open. Brokers open NEW as they would STORE: queue offsets stay."""
    _check(store, new)
    from spark_jobs.compact import CompactOptions
    from spark_jobs.compact import compact as run
    from spark_jobs.progress_bar import bytes_done

    options = CompactOptions(
        reserved_hours=reserved_hours,
        keyed_topics=compact_topic,
        holes=holes,
        index=not no_index,
        skip_damaged=skip_damaged,
    )
    with _session("compact", master, memory, conf) as session, bytes_done(f"compacting {shown(store)}") as progress:
        result = run(store, new, spark=session, options=options, progress=progress)
    print_compacted(result)


@main.command(short_help="Write a store's records to Parquet, by day and topic.")
@store_argument
@click.argument("directory", metavar="DIR")
@spark_options
@one_line_errors
def archive(store: str, directory: str, master: str | None, memory: str | None, conf: tuple[str, ...]) -> None:
    """Write the records of STORE to DIR as Parquet (zstd), partitioned by day (UTC) and topic: readable by anything,
    and by `duemq spark restore`, which makes the store of it again, byte for byte."""
    _check(store, directory)
    from spark_jobs.archive import archive as run
    from spark_jobs.progress_bar import bytes_done

    with _session("archive", master, memory, conf) as session, bytes_done(f"archiving {shown(store)}") as progress:
        result = run(store, directory, spark=session, progress=progress)
    print_archived(result)


@main.command(short_help="Make a store from an archive.")
@click.argument("directory", metavar="DIR")
@click.argument("new", metavar="NEW")
@spark_options
@one_line_errors
def restore(directory: str, new: str, master: str | None, memory: str | None, conf: tuple[str, ...]) -> None:
    """Make the store NEW from the archive in DIR."""
    from spark_jobs.archive import read_manifest
    from spark_jobs.archive import restore as run
    from spark_jobs.progress_bar import bytes_done

    local_path(new)
    read_manifest(directory)
    with _session("restore", master, memory, conf) as session, bytes_done(f"restoring {new}") as progress:
        result = run(directory, new, spark=session, progress=progress)
    click.echo(f"{result.records:,} records, {size_text(result.size)}")


@main.command(short_help="Ask a store anything, in SQL.")
@store_argument
@click.argument("query", metavar="QUERY")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Rows that are printed.")
@levels_option
@spark_options
@one_line_errors
def sql(
    store: str,
    query: str,
    form: str,
    limit: int,
    delay_levels: str | None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Run QUERY over the tables of STORE: messages, schedules, pending, consume_queue, timers, offsets, damaged.

    \b
    duemq spark sql ./data "select topic, count(*), sum(size) from messages group by topic"
    duemq spark sql ./data "select real_topic, due_time from pending order by due_ms limit 20"
    """
    _check(store)
    from spark_jobs import tables
    from spark_jobs.progress_bar import spark_tasks

    with _session("sql", master, memory, conf, for_jobs=False) as session:
        for name in tables.COLUMNS:
            reader = session.read.format("rocketmq").option("table", name)
            if delay_levels is not None:
                reader = reader.option("delayLevels", delay_levels)
            # Only what a query names is made: what it does not name costs nothing to offer, bodies included.
            columns = tables.columns_named(name, query)
            reader.option("columns", ",".join(columns)).load(store).createOrReplaceTempView(name)
        with spark_tasks(session, "asking"):
            result = session.sql(query).limit(limit).toArrow()
    print_table(result, form)


@main.command(short_help="Zip what tasks on a cluster need, for spark-submit --py-files.")
@click.argument("path", metavar="ZIP")
@one_line_errors
def package(path: str) -> None:
    """Write the packages that Spark's tasks import to ZIP. The cluster's Python needs numpy, pandas, pyarrow, msgspec,
    structlog and zlib-ng.

    \b
    duemq spark package duemq-spark.zip
    unzip -p duemq-spark.zip __main__.py > duemq_spark.py
    spark-submit --py-files duemq-spark.zip duemq_spark.py analyse hdfs:///rocketmq/store --out report
    """
    root = Path(__file__).resolve().parent.parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive_file:
        for name in PACKAGES:
            for file in sorted((root / name).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive_file.write(file, file.relative_to(root))
        archive_file.writestr("__main__.py", (root / "spark_jobs" / "__main__.py").read_text())
    click.echo(path)
