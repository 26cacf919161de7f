"""The commands under `duemq store`, for stores that no broker has open. Exit code 0: done, or nothing to do; 1: a dry
run found something to repair; 2: it could not be done, for the reason in one line on stderr."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

if TYPE_CHECKING:
    from duemq.broker.repair.repair import Report

WRONG: Final = 1
FAILED: Final = 2
_SHOWN: Final = 20
_STEP: Final = 0.02


@click.group(name="store", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Maintain a store that no broker has open."""


@main.command(name="repair", short_help="Rebuild the files derived from the commitlog.")
@click.argument("store", metavar="STORE", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the repaired store to DIR, as a complete copy, and leave STORE as it is.",
)
@click.option("--dry-run", is_flag=True, help="Say what is wrong and what would be rebuilt; write nothing in STORE.")
@click.option("--index", is_flag=True, help="Also rebuild index/, with which Apache's brokers find messages by key.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The broker's configuration file, duemq's or Apache's: its file sizes and messageDelayLevel.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="One such setting, which overrides the file. May be repeated.",
)
def repair_command(
    store: Path, to: Path | None, dry_run: bool, index: bool, config: Path | None, settings: tuple[str, ...]
) -> None:
    """Rebuild what a store has beside its commitlog: consume queues, delayOffset.json, timer log, timer wheel,
    timercheck, checkpoint, and topics that topics.json lacks. For stores of duemq and of Apache RocketMQ 4.9 and 5.x;
    afterwards any of the three can open the store.

    The commitlog says what was delivered: a delivered message is not delivered again, and a waiting message still is.
    No byte of the commitlog is changed. If the command is interrupted, run it again.

    \b
    duemq store repair ./store --dry-run
    duemq store repair ./store --config broker.conf
    duemq store repair ./store --to ./repaired
    """
    with _one_line_errors(), _Progress() as progress:
        from duemq.broker import logs
        from duemq.broker.repair.repair import repair, settings_of
        from duemq.storage.clock import SystemClock, look

        logs.silence()  # the report is printed instead
        report = repair(
            str(store),
            now=look(SystemClock()),
            settings=settings_of(str(config) if config else None, list(settings)),
            to=str(to) if to else None,
            dry_run=dry_run,
            with_index=index,
            on_read=progress.show,
        )
        _print(report, dry_run=dry_run)
    if dry_run and not report.is_sound:
        sys.exit(WRONG)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        from duemq.broker.errors import BrokerBaseError
        from duemq.storage.errors import StoreError

        try:
            yield
        except (BrokerBaseError, StoreError) as error:
            _fail(str(error))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except BrokenPipeError:
            sys.exit(FAILED)  # the reader of the output is gone; duemq.cli.streams drops the rest
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        _fail(f"store needs the package {error.name}: pip install 'duemq[broker]'")


def _fail(text: str) -> NoReturn:
    click.echo(f"duemq: {text}", err=True)
    sys.exit(FAILED)


class _Progress:
    """Shows how much of the commitlog has been read, in one line of a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._next = _STEP

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown and self._next > _STEP:
            click.echo("\r\x1b[K", nl=False, err=True)

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are read."""
        if self._is_shown and total and done / total >= self._next:
            self._next = done / total + _STEP
            click.echo(f"\rreading the commitlog: {done / total:.0%}", nl=False, err=True)


def _print(report: Report, *, dry_run: bool) -> None:
    click.echo(
        f"a store of {report.written_by}: {report.records:,} records, physical offsets {report.commitlog_begin} to "
        f"{report.commitlog_end}"
    )
    for damage in report.damages[:_SHOWN]:
        click.echo(
            f"  damaged: the commitlog from {damage.start} to {damage.end}: {damage.why}; this cannot be repaired"
        )
    if len(report.damages) > _SHOWN:
        click.echo(f"  and {len(report.damages) - _SHOWN:,} more damaged stretches")
    if report.behind:
        click.echo(
            f"  damaged: the commitlog at {report.commitlog_end}: {report.torn}; a broker's start cuts off the "
            f"{report.behind:,} whole records behind that. Copy the file first, to keep them"
        )
    elif report.torn:
        click.echo(f"  torn end at {report.commitlog_end}: {report.torn}; a broker's start cuts it off")
    for difference in report.differences[:_SHOWN]:
        click.echo(f"  {difference.path} {difference.why}")
    if len(report.differences) > _SHOWN:
        click.echo(f"  and {len(report.differences) - _SHOWN:,} more files")
    if report.topics_left_out:
        names = ", ".join(report.topics_left_out[:_SHOWN])
        click.echo(f"  without queues, since they were deleted: {len(report.topics_left_out):,} topics ({names})")
    waits = sum(report.levels.values())
    by_level = ", ".join(f"level {level} {count:,}" for level, count in report.levels.items())
    click.echo(
        f"{waits:,} messages wait in delay levels{f' ({by_level})' if by_level else ''}, "
        f"{report.timers:,} in the timer wheel; {report.queues:,} consume queues"
    )
    for level in report.delays_assumed:
        click.echo(
            f"  the delay of level {level} is unknown: a repair needs the broker's table, by --config or "
            "--set messageDelayLevel='1s 5s ...'"
        )
    if report.lacks_index and not report.index_files:
        click.echo("  index/ is missing: Apache's brokers cannot find these messages by key; --index rebuilds it")
    if report.repaired:
        click.echo(f"repaired: {report.target}")
    elif report.is_sound:
        click.echo("nothing to repair")
    else:
        click.echo("needs repair: run this without --dry-run" if dry_run else "not repaired")
