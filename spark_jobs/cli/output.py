"""Printing the results of `duemq spark`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from duemq.protocol.printable import printable
from duemq.spark_jobs.store.local_files import size_text

if TYPE_CHECKING:
    from duemq.spark_jobs.analyse.comparison import Comparison
    from duemq.spark_jobs.analyse.forecast import Forecast
    from duemq.spark_jobs.archive.append import AppendResult
    from duemq.spark_jobs.archive.archive import ArchiveResult
    from duemq.spark_jobs.audit.audit import Summary
    from duemq.spark_jobs.compact.compact import CompactResult


def time_text(ms: int) -> str:
    """Return a time, given in ms since the epoch, as text."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def print_summary(summary: Summary) -> None:
    """Print the result of an audit."""
    from duemq.spark_jobs.report.verdict import coming_again

    for name in ("scheduled", "delivered", "cancelled", "pending", "lost", "twice"):
        note = f"  ({summary.overdue:,} overdue)" if name == "pending" and summary.overdue else ""
        click.echo(f"{name:<10}{getattr(summary, name):>14,}{note}")
    if summary.destroyed:
        click.echo(f"destroyed {summary.destroyed:>14,}  (the queues list them, and the commitlog has no record there)")
    again = coming_again(summary.starts)
    for start in summary.starts:
        if not start.wrote_it and start not in again:
            continue
        if start in again and not start.reasons:
            had = f", which had {start.store or 'the store'} last," if start.wrote_it else ""
            click.echo(f"{start.broker}{had} will deliver {start.again:,} delivered messages again when it starts")
        elif start.reasons:
            found = f"{start.finds:,} of those pending" if start.misses else "all that are pending, but"
            had = f", which had {start.store or 'the store'} last," if start.wrote_it else ""
            click.echo(f"{start.broker}{had} finds {found} when it starts:")
            for reason in start.reasons:
                click.echo(f"  {reason}")
        if start.misses or start.again:
            click.echo(f"  to rebuild the files: duemq store repair {start.store or summary.store}")
    late = summary.lateness
    if late.count:
        shown = "  ".join(f"{name} {value:,}" for name, value in late.percentiles_ms.items())
        click.echo(f"late, ms: {shown}; early: {late.early:,}")
    if summary.unclaimed:
        click.echo(f"{summary.unclaimed:,} deliveries of messages that are not in the log")
    if summary.damaged:
        click.echo(f"{summary.damaged:,} damaged stretches; see the table damaged")
    if summary.corrupt:
        click.echo(f"corrupt   {summary.corrupt:>14,}  (records with wrong bytes)")
        for offset, size, why in summary.corruptions[:10]:
            click.echo(f"corrupt: {size:,} bytes at {offset}: {printable(why)}")
    for offender in summary.offenders[:10]:
        at = f"{offender.physical_offset}{f' of {offender.store}' if offender.store else ''}"
        topic, key = printable(offender.topic or "?"), printable(offender.unique_key or "")
        click.echo(
            f"{offender.what}: {topic} {key} at {at}, due {time_text(offender.due_ms) if offender.due_ms else '?'}"
        )


def print_comparison(found: Comparison) -> None:
    """Print what is new and what grew worse since the run before."""
    parts = [f"{number:,} new {status}" for status, number in found.new.items()] or ["nothing new is wrong"]
    parts += [
        f"{sum(counts.values()):,} {word}" for word, counts in (("known", found.known), ("gone", found.gone)) if counts
    ]
    click.echo(f"since {time_text(found.made_ms)}: {', '.join(parts)}")
    for worse in found.worse[:10]:
        unit = " ms" if worse.unit == "ms" else ""
        click.echo(f"  {worse.name}: {worse.before:,}{unit} -> {worse.now:,}{unit}")


def print_forecast(found: Forecast, *, of_several: bool = False) -> None:
    """Print which messages will be late. `of_several`: the forecast is for several brokers."""
    if not found.messages:
        click.echo("nothing waits")
        return
    if found.source == "fastest":
        done = "they have done: some were" if of_several else "it has done: it was"
        rate = f"{found.rate:,.0f} a second, the most {done} never behind, and may do more (--rate)"
    else:
        rate = f"{found.rate:,.0f} a second, {found.source}"
        rate += (
            f" in {found.measured_seconds:,} s in which {'one' if of_several else 'it'} was behind"
            if found.measured_seconds
            else ""
        )
    click.echo(f"{found.messages:,} wait; {'the brokers deliver' if of_several else 'the broker delivers'} {rate}")
    if not found.episodes:
        click.echo("at this rate none of them will be late")
    for episode in sorted(found.episodes, key=lambda episode: -episode.worst_ms)[:10]:
        click.echo(
            f"late from {time_text(episode.start_ms)} to {time_text(episode.end_ms)}: {episode.messages:,} messages, "
            f"up to {episode.worst_ms / 1000:,.1f} s"
        )


def print_compacted(result: CompactResult) -> None:
    """Print what a compaction removed."""
    click.echo(
        f"{size_text(result.log_before)} of messages became {size_text(result.log_after)}: {result.saved:.1%} less, "
        f"{result.kept:,} records kept"
    )
    for reason, count in sorted(result.removed.items(), key=lambda item: -item[1]):
        click.echo(f"  {count:>12,} {reason}")
    if result.lost:
        click.echo(f"  {result.lost:>12,} lost messages stay: after `duemq store repair` of the new store they arrive")
    for name in result.left_out:
        click.echo(f"{printable(name)} is a FIFO, a socket, a device or a link to nothing, and is not in the new store")


def print_archived(result: ArchiveResult) -> None:
    """Print the size of an archive, and whether it can be restored."""
    before = f"{size_text(result.size)} of messages"
    if result.disk_before is not None:
        before = f"{size_text(result.disk_before)} on disk"
    click.echo(f"{result.records:,} records, {before}, became {size_text(result.disk_after)} in {result.files:,} files")
    if result.damaged:
        click.echo(f"{result.damaged:,} damaged stretches are kept as they are")
    if result.missing:
        click.echo(f"{result.missing:,} stretches of the commitlog no longer have a file, and are not in the archive")
    for name in result.left_out:
        click.echo(f"{printable(name)} is a FIFO, a socket or a device, and is not in the archive")
    if result.why_not_restorable is not None:
        click.echo(f"{result.why_not_restorable}: the archive can be read, but not restored")


def print_appended(result: AppendResult) -> None:
    """Print what was appended to a table."""
    click.echo(
        f"{result.name}: {result.records:,} records, {size_text(result.size)}, in {result.files:,} files: physical "
        f"offsets {result.begin} to {result.end}"
    )
    if result.expired:
        click.echo(
            f"  {size_text(result.expired)} below those offsets are missing: they expired before a run appended them"
        )
    if result.damages:
        click.echo(f"  {result.damages:,} damaged stretches among them are not in the table")


def print_table(table: Any, form: str) -> None:
    """Print the rows of an Arrow table, as "table", "csv" or "json"."""
    if form == "csv":
        from pyarrow import csv

        csv.write_csv(_plain(table), sys.stdout.buffer)
    elif form == "json":
        import msgspec

        for row in _plain(table).to_pylist():
            click.echo(msgspec.json.encode(row).decode())
    else:
        from rich.console import Console
        from rich.table import Table

        shown = Table(*table.column_names)
        for row in _plain(table).to_pylist():
            shown.add_row(*("" if value is None else printable(str(value)) for value in row.values()))
        Console(markup=False, emoji=False).print(shown)


def _plain(table: Any) -> Any:
    """Return a table that CSV and JSON can represent: maps and bytes as text, unique names, and null for times that
    have no date."""
    import pyarrow as pa

    from duemq.spark_jobs.columns import instants

    names, columns = [], []
    for i, name in enumerate(table.column_names):
        column = table.column(i)
        if pa.types.is_map(column.type):
            column = pa.array([str(dict(value)) if value is not None else None for value in column.to_pylist()])
        elif pa.types.is_binary(column.type):
            texts = [
                value.decode("utf-8", "backslashreplace") if value is not None else None for value in column.to_pylist()
            ]
            column = pa.array(texts, pa.string())
        elif pa.types.is_timestamp(column.type):
            column = instants.with_python_dates(column)
        names.append(name if name not in names else f"{name}_{i}")
        columns.append(column)
    return pa.table(columns, names)
