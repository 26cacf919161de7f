"""The commands under `duemq spark`. Exit code 0: done; 1: an audit found messages lost, destroyed or unreachable, or
corrupt records; 2: the job could not be done, with one line on stderr; 3: an audit is over a given limit."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec

import click

import duemq
from duemq.spark_jobs.analyse.limits import FAILED, AnalysisLimits, LatenessLimit, exit_code, parse_late, tell, worst
from duemq.spark_jobs.cli.output import (
    print_appended,
    print_archived,
    print_compacted,
    print_comparison,
    print_forecast,
    print_summary,
    print_table,
    time_text,
)
from duemq.spark_jobs.errors import JobError, cannot_read
from duemq.spark_jobs.spark_errors import TRACEBACK
from duemq.spark_jobs.spark_errors import summary as summary_of
from duemq.spark_jobs.store.local_files import (
    distinct_names,
    each_once,
    expand,
    is_local,
    is_same,
    local_path,
    refuse_within,
    shown,
    size_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

    from duemq.spark_jobs.analyse.analyse import Analysed
    from duemq.spark_jobs.analyse.comparison import Comparison
    from duemq.spark_jobs.analyse.nights import RunOutput
    from duemq.spark_jobs.archive.table import Table
    from duemq.spark_jobs.audit.audit import Summary

P = ParamSpec("P")
_GONE: Final = "the last run had this store, which no longer exists: if it was taken away for good, give --retired PATH"
_LIBRARIES: Final = ("pyspark", "pyarrow", "numpy", "pandas", "rich", "cryptography", "jinja2")
_UNDECODABLE: Final = re.compile("[\udc80-\udcff]")
"""Characters by which Python represents the bytes of a file name that cannot be decoded."""
KEPT: Final = ".kept"
"""Name of the directory, in a folder of nights, with the results that its runs keep for the next one."""


def _fail(text: str) -> NoReturn:
    click.echo(f"duemq: {text}", err=True)
    sys.exit(FAILED)


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: errors that a user can act on end it with one line on stderr."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in _LIBRARIES:
                _fail(f"the Spark jobs need the package {error.name}: pip install 'duemq[spark]'")
            raise
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                # The reader of the output is gone. Python would try to write the rest at its end, and print an error.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(FAILED)
            found = _line_of(error)
            if found is None:
                raise
            _fail(found)

    return wrapper


def _line_of(error: Exception) -> str | None:
    """Return the line for an error that a user can act on; None for any other."""
    if isinstance(error, JobError):
        return str(error)
    if isinstance(error, UnicodeEncodeError) and _UNDECODABLE.search(error.object):
        return (
            f"{error.object!a}: a name on this disk is not text in {error.encoding}: rename it, or set LC_ALL to a "
            "locale in which it is text, such as C.UTF-8"
        )
    found = summary_of(error)
    if found is None and isinstance(error, OSError) and not os.environ.get(TRACEBACK):
        return str(cannot_read(str(error.filename), error) if error.filename else error)
    return found


def spark_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options of commands that start Spark."""
    master = click.option("--master", metavar="URL", help="Where Spark runs; default: local[*], or spark-submit's.")
    memory = click.option("--memory", metavar="SIZE", help="Memory of Spark's driver, such as 2g; default: 1536m.")
    conf = click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark's; repeatable.")
    return master(memory(conf(command)))


def state_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options of commands that continue from their last run."""
    state = click.option("--state", metavar="DIR", help="Keep the results in DIR, and read only what is new since.")
    full = click.option("--full", is_flag=True, help="Read everything, and replace the kept results.")
    return state(full(command))


levels_option = click.option(
    "--delay-levels", metavar="TABLE", help="The broker's messageDelayLevel, if the store does not have it."
)
store_argument = click.argument("store", metavar="STORE")


class _Time(click.ParamType[int]):
    """A time by this machine's clock unless it names another zone, converted to ms since the epoch."""

    name = "TIME"

    def convert(self, value: str, _: click.Parameter | None, __: click.Context | None) -> int:
        try:
            return int(datetime.fromisoformat(value).astimezone().timestamp() * 1000)
        except (ValueError, OverflowError):
            raise click.BadParameter(f"{value!r} is not a time; write it as 2030-01-31T08:30+02:00") from None


TIME = _Time()


class _LatenessLimit(click.ParamType[LatenessLimit]):
    """A limit of lateness."""

    name = "LIMIT"

    def convert(self, value: str, _: click.Parameter | None, __: click.Context | None) -> LatenessLimit:
        try:
            return parse_late(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for an audit's limits, passed to the command as one parameter `limits`, and for `hook`."""

    @functools.wraps(command)
    def wrapper(
        fail_late: tuple[LatenessLimit, ...],
        fail_twice: int | None,
        fail_damaged: int | None,
        fail_unclaimed: int | None,
        **others: Any,
    ) -> None:
        command(limits=AnalysisLimits(fail_late, fail_twice, fail_damaged, fail_unclaimed), **others)

    number = click.IntRange(min=0)
    decorated: Callable[..., None] = wrapper
    for option in (
        click.option(
            "--hook", metavar="COMMAND", help="A shell command that gets the result as JSON on standard input."
        ),
        click.option(
            "--fail-unclaimed", metavar="N", type=number, help="Exit code 3 if there are more than N stray deliveries."
        ),
        click.option(
            "--fail-damaged", metavar="N", type=number, help="Exit code 3 if there are more than N damaged stretches."
        ),
        click.option(
            "--fail-twice", metavar="N", type=number, help="Exit code 3 if more than N messages were delivered twice."
        ),
        click.option(
            "--fail-late",
            metavar="LIMIT",
            type=_LatenessLimit(),
            multiple=True,
            help="Exit code 3 if the latest delivery is later (1s), or a percentile is (p99=200ms). Repeatable.",
        ),
    ):
        decorated = option(decorated)
    return decorated


@contextmanager
def _told_to(hook: str | None, job: str, store: str) -> Iterator[None]:
    """Run the hook, if there is one, when the job in the block fails or is interrupted; the error is raised on."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if hook is not None:
            if isinstance(error, Exception):
                why = _line_of(error) or f"{type(error).__name__}: {error}"
            else:
                why = "was interrupted"
            try:
                tell(hook, job, shown(store), f"duemq {job}: {why}", FAILED)
            except JobError as failed:
                click.echo(f"duemq: {failed}", err=True)
        raise


def _each(stores: list[str], work: Callable[[str], int]) -> list[int]:
    """Do a job with each of some stores; return the exit codes. If it fails for one of several, continue with the
    others."""
    codes = []
    for store in stores:
        try:
            codes.append(work(store))
        except Exception as error:
            why = _line_of(error)
            if len(stores) == 1 or why is None:
                raise
            _say(why)
            codes.append(FAILED)
    return codes


def _headline(summary: Summary) -> str:
    from duemq.spark_jobs.report.verdict import verdict_of

    return verdict_of(summary).headline


def _ending(
    job: str,
    summary: Summary,
    limits: AnalysisLimits,
    hook: str | None,
    *,
    report: str | None = None,
    comparison: Comparison | None = None,
    stores: Sequence[Mapping[str, str | None]] = (),
) -> int:
    """Print which figures are over a limit, and run the hook; return the exit code. `stores`: for a cluster, its stores
    as the hook gets them."""
    exceeded = limits.exceeded(summary, comparison)
    for line in exceeded:
        click.echo(f"over the limit: {line}", err=True)
    code = exit_code(summary, exceeded)
    if summary.missing:
        code = worst([code, FAILED])
    if hook is not None:
        missing = [f"{one.store}: {one.why}" for one in summary.missing]
        told = "; ".join([f"duemq {job} of {summary.store}: {_headline(summary)}", *missing, *exceeded])
        try:
            tell(hook, job, summary.store, told, code, summary=summary, report=report, stores=stores)
        except JobError as error:
            click.echo(f"duemq: {error}", err=True)
            code = code or FAILED
    return code


def _settings(conf: tuple[str, ...]) -> dict[str, str]:
    """Return Spark's settings in --conf. Raises BadParameter for one without an equals sign."""
    settings = {}
    for item in conf:
        key, separator, value = item.partition("=")
        if not separator:
            raise click.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--conf")
        settings[key] = value
    return settings


def _check_state(state: str | None, *, full: bool) -> None:
    if full and state is None:
        raise click.UsageError("--full is for runs that keep what they read: give --state DIR or --nights DIR")
    if state is not None:
        local_path(state)


def _say(text: str) -> None:
    click.echo(f"duemq: {text}", err=True)


@contextmanager
def _session(
    name: str, master: str | None, memory: str | None, conf: tuple[str, ...], *, for_jobs: bool = True
) -> Iterator[SparkSession]:
    from duemq.spark_jobs.quiet import let_java_end
    from duemq.spark_jobs.session import make_session

    settings = _settings(conf)
    session = make_session(f"duemq {name}", master=master, memory=memory, settings=settings, for_jobs=for_jobs)
    if not os.environ.get(TRACEBACK):
        let_java_end()
    try:
        yield session
    except BaseException:
        with suppress(Exception):  # the earlier error is the one to raise
            session.stop()
        raise
    session.stop()


def _check(store: str, *outputs: str | None) -> None:
    """Check the paths of a store and of a job's outputs. To be called before Spark is started, which takes seconds.
    Raises JobError."""
    from duemq.spark_jobs.store.store_files import StoreFiles

    found = StoreFiles.open(store)
    refuse_within(store, *outputs)
    found.check_files()


def _shown_there(path: str, written: str | None, out: str | None) -> str:
    """Return the path of a result to show to the user. `written`: the directory it was written to; `out`: the one the
    user asked for, which may be a URI."""
    if out is None or written is None or is_local(out):
        return path
    return f"{shown(out).rstrip('/')}/{os.path.relpath(path, written)}"


@click.group(
    short_help="Audit, analyse and compact a store's files.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def main() -> None:
    """Offline jobs over the files of a store, duemq's or RocketMQ's (4.9, 5.x), with Spark.

    \b
    duemq spark analyse STORE --nights DIR  audit, figures and a report, as every night
    duemq spark audit STORE                 was every scheduled message delivered once?
    duemq spark compact STORE NEW           a smaller store, without what no broker or consumer needs
    duemq spark archive STORE DIR           to Parquet by day and topic; restore is the way back
    duemq spark sql STORE QUERY             any question, in SQL

    STORE is the directory that holds commitlog/, or its URI (hdfs://..., s3://...). A running broker's store can be
    read, but not compacted.
    """


@main.command(short_help="Audit a store, make all figures and a report of them.")
@store_argument
@click.option("--out", metavar="DIR", help="Where report.html, analysis.json, parquet/ ... go.")
@click.option("--nights", metavar="DIR", help="Instead of --out: a folder of nights, with a page that lists them.")
@click.option("--keep-nights", metavar="N", type=click.IntRange(min=1), help="Remove nights older than the last N.")
@click.option("--previous", metavar="DIR", help="Compare with the run in DIR; default: the last one of this store.")
@click.option("--retired", metavar="PATH", multiple=True, help="A store of the last run that was taken away for good.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages per second that a broker delivers.")
@click.option(
    "--sign-key", type=click.Path(exists=True, dir_okay=False), help="Private Ed25519 key (PEM) to sign the audit with."
)
@click.option("--fail-worse", is_flag=True, help="Exit code 3 if more is wrong than in the run before.")
@click.option("--check-bodies", is_flag=True, help="Look for wrong bytes in all records as well.")
@limit_options
@state_options
@levels_option
@spark_options
@one_line_errors
def analyse(
    store: str,
    out: str | None,
    nights: str | None,
    keep_nights: int | None,
    previous: str | None,
    retired: tuple[str, ...],
    rate: float | None,
    sign_key: str | None,
    fail_worse: bool,
    check_bodies: bool,
    limits: AnalysisLimits,
    hook: str | None,
    state: str | None,
    full: bool,
    delay_levels: str | None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Audit STORE, make all figures, and write them into DIR: report.html, analysis.json, parquet/, audit.json,
    offenders.parquet. Each run into the same DIR is compared with the one before, and the report has curves over the
    runs. With --nights each run has a directory of its own in DIR, and DIR/index.html lists them.

    STORE may have wildcards (in quotes, for the shell): each store that matches is analysed, one after the other, and
    all of them together, as a cluster. The report is then of the cluster, with links to that of each store; limits
    apply to the whole. A store that cannot be read is named, and the analysis continues with the others.

    \b
    duemq spark analyse ./data --nights reports --keep-nights 90
    duemq spark analyse '/data/*/store' --nights reports --fail-late p99=1s
    """
    if (out is None) == (nights is None):
        raise click.UsageError("give --out DIR or --nights DIR")
    if nights is not None and not is_local(nights):
        raise JobError(
            f"{shown(nights)}: nights need a directory of this machine, to lock and to rename in; --out can be a URI"
        )
    if nights is not None and state is None:
        state = os.path.join(local_path(nights), KEPT)
    _check_state(state, full=full)
    _settings(conf)
    if keep_nights is not None and nights is None:
        raise click.UsageError("--keep-nights is for --nights")
    limits = dataclasses.replace(limits, is_worse_too_much=fail_worse)
    with _told_to(hook, "analyse", store):
        stores = each_once(expand(store), _say)
    from duemq.spark_jobs.analyse.nights import last_stores

    before = last_stores(shown(store), out=out, folder=nights)
    there = [*map(shown, stores), *map(shown, retired)]
    gone = [one for one in before if not any(is_same(one, other) for other in there)]
    # A cluster stays one, even if only one store is left.
    is_cluster = len(stores) > 1 or len(before) > 0
    if is_cluster and previous is not None:
        raise click.UsageError("--previous is for one store; several are compared with their last runs there")
    key = Path(sign_key).read_bytes() if sign_key else None
    sessions: list[SparkSession] = []

    def run(path: str, output: RunOutput) -> Analysed:
        from duemq.spark_jobs.analyse.analyse import analyse_for_cluster
        from duemq.spark_jobs.cli.progress_bar import spark_tasks

        with ExitStack() as shows:

            @functools.cache
            def session() -> SparkSession:
                if not sessions:
                    sessions.append(stack.enter_context(_session("analyse", master, memory, conf)))
                shows.enter_context(spark_tasks(sessions[0], f"analysing {shown(path)}"))
                return sessions[0]

            return analyse_for_cluster(
                session,
                path,
                delay_levels=delay_levels,
                rate=rate,
                out=output.out,
                key=key,
                check_bodies=check_bodies,
                state=state,
                anew=full,
                tell=_say,
            )

    def one(path: str) -> int:
        _check(path, out, nights, state)
        from duemq.spark_jobs.analyse.nights import RunOutput
        from duemq.spark_jobs.store.published import published

        with (
            published(out) as written,
            RunOutput(shown(path), out=written, folder=nights, previous=previous) as output,
        ):
            analysis = run(path, output).analysis
            report, comparison, left = output.finish(analysis, keep=keep_nights)
            report = _shown_there(report, written, out)
        print_summary(analysis.audit)
        if comparison is not None:
            print_comparison(comparison)
        print_forecast(analysis.forecast)
        for line in left:
            _say(line)
        click.echo(f"report: {report}")
        return _ending("analyse", analysis.audit, limits, hook, report=report, comparison=comparison)

    with ExitStack() as stack:
        if is_cluster:
            with _told_to(hook, "analyse", store):
                code = _analyse_cluster(
                    store,
                    stores,
                    gone,
                    run,
                    out=out,
                    nights=nights,
                    state=state,
                    keep_nights=keep_nights,
                    key=key,
                    limits=limits,
                    hook=hook,
                )
        else:
            with _told_to(hook, "analyse", stores[0]):
                code = one(stores[0])
    sys.exit(code)


def _analyse_cluster(
    pattern: str,
    stores: list[str],
    gone: list[str],
    run: Callable[[str, RunOutput], Analysed],
    *,
    out: str | None,
    nights: str | None,
    state: str | None,
    keep_nights: int | None,
    key: bytes | None,
    limits: AnalysisLimits,
    hook: str | None,
) -> int:
    """Analyse the stores that a pattern names, one after the other, and then all of them together; return the exit
    code. If one cannot be analysed, continue with the others. `gone`: stores of the last run that the pattern no longer
    matches; they count as stores that cannot be read."""
    from duemq.spark_jobs.analyse.cluster import StoreRun, finish, join, missing_of, none_of
    from duemq.spark_jobs.analyse.comparison import Compared
    from duemq.spark_jobs.analyse.history import run_of
    from duemq.spark_jobs.analyse.nights import RunOutput
    from duemq.spark_jobs.audit.audit import Missing
    from duemq.spark_jobs.store.published import published

    for path in stores:
        refuse_within(path, out, nights, state)
    names, runs, missing, left = list[str](), list[StoreRun](), list[Missing](), dict[str, None]()
    with published(out) as written:

        def one(path: str, folder: str) -> StoreRun:
            _check(path)
            into = os.path.join(local_path(written), "stores", folder) if written is not None else None
            with RunOutput(shown(path), out=into, folder=nights) as output:
                analysed = run(path, output)
                report, comparison, lines = output.finish(analysed.analysis, keep=keep_nights)
                compared = None
                if comparison is not None and output.earlier is not None:
                    found = run_of(analysed.analysis)
                    compared = Compared(analysed.analysis.audit, found.lags, output.earlier, comparison)
                left.update(dict.fromkeys(lines))
                return StoreRun(analysed, output.out, report, compared)

        for path, folder in zip(stores, distinct_names(pattern, stores), strict=True):
            try:
                found = one(path, folder)
            except Exception as error:
                why = _line_of(error)
                if why is None:
                    raise
                _say(why)
                missing.append(missing_of(path, why))
                names.append(missing[-1].store)
            else:
                names.append(found.store)
                runs.append(found)
                click.echo(f"{shown(path)}: {_headline(found.analysed.analysis.audit)}")
                click.echo(f"  report: {_shown_there(found.report, written, out)}")
        for path in gone:
            missing.append(Missing(path, _GONE))
            names.append(path)
            _say(f"{path}: {_GONE}")
        if not runs:
            raise none_of(pattern, missing)
        with RunOutput(shown(pattern), out=written, folder=nights) as output:
            analysis = join(shown(pattern), [each.analysed for each in runs], stores=names, missing=missing)
            finish(analysis, runs, output.out, key)
            compared = [each.compared for each in runs if each.compared is not None]
            report, comparison, lines = output.finish(analysis, keep=keep_nights, compared=compared)
            left.update(dict.fromkeys(lines))
        report = _shown_there(report, written, out)
        reports = {each.store: _shown_there(each.report, written, out) for each in runs}
    click.echo(f"{shown(pattern)}: {len(runs)} of {len(names)} stores")
    print_summary(analysis.audit)
    if comparison is not None:
        print_comparison(comparison)
    print_forecast(analysis.forecast, of_several=True)
    for line in left:
        _say(line)
    click.echo(f"report: {report}")
    whys = {each.store: each.why for each in missing}
    told = [{"store": name, "report": reports.get(name), "error": whys.get(name)} for name in names]
    return _ending("analyse", analysis.audit, limits, hook, report=report, comparison=comparison, stores=told)


@main.command(short_help="Prove that every scheduled message was delivered once, or name those that were not.")
@store_argument
@click.option("--out", metavar="DIR", help="Where audit.json and offenders.parquet go.")
@click.option(
    "--sign-key", type=click.Path(exists=True, dir_okay=False), help="Private Ed25519 key (PEM) to sign with."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--check-bodies", is_flag=True, help="Look for wrong bytes in all records as well.")
@limit_options
@state_options
@levels_option
@spark_options
@one_line_errors
def audit(
    store: str,
    out: str | None,
    sign_key: str | None,
    as_json: bool,
    check_bodies: bool,
    limits: AnalysisLimits,
    hook: str | None,
    state: str | None,
    full: bool,
    delay_levels: str | None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Report what became of every scheduled message in STORE: delivered, cancelled, pending, lost or delivered twice.
    Exit code 1 if one was lost or destroyed, or will not be found by the broker, or if records have wrong bytes."""
    _check_state(state, full=full)
    _settings(conf)
    with _told_to(hook, "audit", store):
        _check(store, out, state)
        import msgspec

        from duemq.spark_jobs.audit.audit import audit as run
        from duemq.spark_jobs.cli.progress_bar import spark_tasks
        from duemq.spark_jobs.store.published import published

        key = Path(sign_key).read_bytes() if sign_key else None
        with published(out) as written, ExitStack() as stack:

            @functools.cache
            def session() -> SparkSession:
                found = stack.enter_context(_session("audit", master, memory, conf))
                stack.enter_context(spark_tasks(found, f"auditing {shown(store)}"))
                return found

            summary = run(
                session,
                store,
                written,
                delay_levels=delay_levels,
                key=key,
                check_bodies=check_bodies,
                state=state,
                anew=full,
                tell=_say,
            )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    else:
        print_summary(summary)
    sys.exit(_ending("audit", summary, limits, hook))


@main.command(short_help="Check that an audit.json is unchanged, and who signed it.")
@click.argument("summary", type=click.Path(exists=True, dir_okay=False))
@click.option("--public-key", type=click.Path(exists=True, dir_okay=False), help="Public Ed25519 key (PEM).")
@one_line_errors
def verify(summary: str, public_key: str | None) -> None:
    """Check the digest of SUMMARY, an audit.json, and its signature if a public key is given."""
    from duemq.spark_jobs.audit.audit import verify as check

    found = check(Path(summary).read_bytes(), Path(public_key).read_bytes() if public_key else None)
    signed = "signed by that key" if public_key else "signature not checked" if found.signature else "not signed"
    click.echo(f"unchanged since {time_text(found.made_ms)}; {signed}")
    for one in found.missing:
        click.echo(f"without {one.store}, which could not be read: {one.why}")


@main.command(short_help="Say which seconds ahead will be late, and by how much.")
@store_argument
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages per second; default: as measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the forecast as JSON.")
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
    """Say which seconds ahead will be late, from the messages that wait in STORE and the rate at which its broker
    delivered when it was busy."""
    _check(store)
    import msgspec

    from duemq.spark_jobs.analyse.analyse import forecast_of
    from duemq.spark_jobs.cli.progress_bar import spark_tasks

    with (
        _session("forecast", master, memory, conf) as session,
        spark_tasks(session, f"reading {shown(store)}"),
    ):
        found = forecast_of(session, store, delay_levels=delay_levels, rate=rate)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        print_forecast(found)


@main.command(short_help="Make a new, smaller store, without what no one can read again.")
@store_argument
@click.argument("new", metavar="NEW")
@click.option(
    "--reserved-hours", type=click.FloatRange(min=0), help="Leave out messages older than this, as retention would."
)
@click.option(
    "--compact-topic", multiple=True, metavar="TOPIC", help="Keep the newest message of each key; repeatable."
)
@click.option("--holes", is_flag=True, help="In these topics, drop messages from the middle of queues too.")
@click.option("--no-index", is_flag=True, help="Make no index files (queries by key then find nothing).")
@click.option("--skip-damaged", is_flag=True, help="Leave out damaged stretches instead of refusing.")
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
    """Write STORE to NEW without delivered copies in the schedule topics, ended transactions and what the options name.
    STORE is only read; no broker may have it open. Brokers open NEW as they would STORE: queue offsets stay the
    same."""
    local_path(new)
    _check(store, new)
    from duemq.spark_jobs.cli.progress_bar import bytes_done
    from duemq.spark_jobs.compact.compact import CompactOptions
    from duemq.spark_jobs.compact.compact import compact as run

    options = CompactOptions(
        reserved_hours=reserved_hours,
        keyed_topics=compact_topic,
        holes=holes,
        index=not no_index,
        skip_damaged=skip_damaged,
    )
    with (
        _session("compact", master, memory, conf) as session,
        bytes_done(f"compacting {shown(store)}") as progress,
    ):
        result = run(store, new, spark=session, options=options, progress=progress)
    print_compacted(result)


@main.command(short_help="Write a store's records to Parquet, by day and topic, or append them to a table.")
@store_argument
@click.argument("directory", metavar="DIR")
@click.option("--append", is_flag=True, help="Append the records since the last time to the table in DIR.")
@click.option(
    "--table-format", type=click.Choice(["parquet", "iceberg", "delta"]), help="Format of the table; default: parquet."
)
@click.option("--store-name", metavar="NAME", help="The value of the table's column store; default: STORE.")
@click.option("--catalog", metavar="NAME", help="A catalog of pyiceberg's; DIR is the name of a table in it.")
@click.option("--allow-gap", is_flag=True, help="Continue if messages expired before they were appended.")
@click.option("--adopt", is_flag=True, help="Append nothing: STORE was compacted, and the table has its records.")
@spark_options
@one_line_errors
def archive(
    store: str,
    directory: str,
    append: bool,
    table_format: str | None,
    store_name: str | None,
    catalog: str | None,
    allow_gap: bool,
    adopt: bool,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Write the records of STORE to DIR as Parquet (zstd), partitioned by day (UTC) and topic: readable by any tool,
    and by `duemq spark restore`, which rebuilds the store from it, byte for byte.

    With --append, DIR is a table of several stores, in Parquet, Iceberg or Delta. The records since the last time are
    appended to it, each record once. STORE may then have wildcards (in quotes, for the shell).
    """
    if append:
        _append(
            store,
            None if catalog else directory,
            lambda: _open_table(directory, table_format, catalog),
            {"name": store_name, "allow_gap": allow_gap, "adopt": adopt},
            lambda: _session("archive", master, memory, conf),
        )
    if table_format or store_name or catalog or allow_gap or adopt:
        raise click.UsageError("--table-format, --store-name, --catalog, --allow-gap and --adopt are for --append")
    _check(store, directory)
    from duemq.spark_jobs.archive.archive import archive as run
    from duemq.spark_jobs.cli.progress_bar import bytes_done

    with (
        _session("archive", master, memory, conf) as session,
        bytes_done(f"archiving {shown(store)}") as progress,
    ):
        result = run(store, directory, spark=session, progress=progress)
    print_archived(result)


def _open_table(target: str, table_format: str | None, catalog: str | None) -> Table:
    from duemq.spark_jobs.archive.append import open_table

    return open_table(target, table_format or "parquet", catalog=catalog)


def _append(
    store: str,
    directory: str | None,
    open_table: Callable[[], Table],
    options: dict[str, Any],
    session: Callable[[], AbstractContextManager[SparkSession]],
) -> NoReturn:
    """Append the new records of some stores to a table. `directory`: the table's, if it has one. Raises UsageError if
    an option for one store is given with several."""
    stores = each_once(expand(store), _say)
    for path in stores:
        refuse_within(path, directory)
    if len(stores) > 1 and (options["name"] or options["adopt"]):
        raise click.UsageError("--store-name and --adopt are for one store")
    from duemq.spark_jobs.archive.append import append
    from duemq.spark_jobs.cli.progress_bar import bytes_done

    table = open_table()
    sessions: list[SparkSession] = []

    def one(path: str) -> int:
        _check(path)
        if not sessions:
            sessions.append(stack.enter_context(session()))
        with bytes_done(f"appending {shown(path)}") as progress:
            result = append(path, table, spark=sessions[0], progress=progress, **options)
        print_appended(result)
        return 0

    with ExitStack() as stack:
        codes = _each(stores, one)
    sys.exit(worst(codes))


@main.command(short_help="Make a store from an archive.")
@click.argument("directory", metavar="DIR")
@click.argument("new", metavar="NEW")
@spark_options
@one_line_errors
def restore(directory: str, new: str, master: str | None, memory: str | None, conf: tuple[str, ...]) -> None:
    """Make the store NEW from the archive in DIR."""
    from duemq.spark_jobs.archive.archive import read_manifest
    from duemq.spark_jobs.archive.archive import restore as run
    from duemq.spark_jobs.cli.progress_bar import bytes_done

    local_path(new)
    read_manifest(directory)
    with _session("restore", master, memory, conf) as session, bytes_done(f"restoring {new}") as progress:
        result = run(directory, new, spark=session, progress=progress)
    click.echo(f"{result.records:,} records, {size_text(result.size)}")


def _unknown_column(error: Exception, query: str) -> JobError | None:
    """Return the error for a query that names an unknown column; None for other errors."""
    from duemq.spark_jobs.source import tables

    column = re.match(r"\[UNRESOLVED_COLUMN[.\w]*\].*?with name `(.+?)` cannot", str(error))
    if column is None:
        return None
    words = set(re.findall(r"\w+", query.lower()))
    there = [f"{name} has {', '.join(columns)}" for name, columns in tables.COLUMNS.items() if name in words]
    return JobError("; ".join([f"there is no column {column[1].replace('`', '')}", *there]))


@main.command(short_help="Query a store in SQL.")
@store_argument
@click.argument("query", metavar="QUERY")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Most rows to print.")
@click.option("--topic", "topics", multiple=True, help="Read only records of this topic; repeatable.")
@click.option("--since", type=TIME, help="Read only records stored then or later (2030-01-31T08:30+02:00).")
@click.option("--until", type=TIME, help="Read only records stored before then.")
@levels_option
@spark_options
@one_line_errors
def sql(
    store: str,
    query: str,
    form: str,
    limit: int,
    topics: tuple[str, ...],
    since: int | None,
    until: int | None,
    delay_levels: str | None,
    master: str | None,
    memory: str | None,
    conf: tuple[str, ...],
) -> None:
    """Run QUERY over the tables of STORE: messages, schedules, pending, consume_queue, timers, offsets, damaged. STORE
    may have wildcards (in quotes, for the shell): all stores that match are queried as one, and the column `store`
    of each table tells them apart.

    \b
    duemq spark sql ./data "select topic, count(*), sum(size) from messages group by topic"
    duemq spark sql ./data "select real_topic, due_time from pending order by due_ms limit 20"
    duemq spark sql ./data "select count(*) from messages" --topic orders --since 2030-01-31T08:00
    duemq spark sql '/data/*/store' "select store, count(*) from pending group by store"

    Records that --topic, --since and --until leave out are not read. The tables consume_queue (except for --topic),
    timers, offsets and damaged stay whole.
    """
    for path in each_once(expand(store), _say):
        _check(path)
    from duemq.spark_jobs.cli.progress_bar import spark_tasks
    from duemq.spark_jobs.source import tables
    from duemq.spark_jobs.source.source import TABLES_OF_OPTION

    chosen = {
        "topics": ",".join(topics) or None,
        "startingTimestamp": since,
        "endingTimestamp": until,
    }
    with _session("sql", master, memory, conf, for_jobs=False) as session:
        for name in tables.COLUMNS:
            reader = session.read.format("rocketmq").option("table", name)
            if delay_levels is not None:
                reader = reader.option("delayLevels", delay_levels)
            for option, value in chosen.items():
                if value is not None and name in TABLES_OF_OPTION[option]:
                    reader = reader.option(option, value)
            # Each view has only the columns that the query names, so that others, such as bodies, cost nothing.
            columns = tables.columns_named(name, query)
            reader.option("columns", ",".join(columns)).load(store).createOrReplaceTempView(name)
        with spark_tasks(session, "asking"):
            try:
                result = session.sql(query).limit(limit).toArrow()
            except Exception as error:
                raise _unknown_column(error, query) or error from None
    print_table(result, form)


@main.command(short_help="Zip what tasks on a cluster need, for spark-submit --py-files.")
@click.argument("path", metavar="ZIP")
@one_line_errors
def package(path: str) -> None:
    """Write duemq to ZIP, for Spark's tasks. The cluster's Python needs numpy, pandas, pyarrow, msgspec, structlog and
    zlib-ng.

    \b
    duemq spark package duemq-spark.zip
    unzip -p duemq-spark.zip __main__.py > duemq_spark.py
    spark-submit --py-files duemq-spark.zip duemq_spark.py analyse hdfs:///rocketmq/store --out report
    """
    root = Path(duemq.__file__).parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive_file:
        # The whole package: the archive hides an installed duemq, even from a program that only sends messages. In the
        # source tree some folders are links.
        for folder, folders, files in os.walk(root, followlinks=True):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                file = Path(folder, name)
                archive_file.write(file, Path("duemq") / file.relative_to(root))
        archive_file.writestr("__main__.py", (root / "spark_jobs" / "__main__.py").read_text())
    click.echo(path)
