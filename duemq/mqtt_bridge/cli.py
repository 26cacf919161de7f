"""`duemq mqtt-bridge`: runs the bridge, and tries its rules against sample topics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from duemq._values.times import now_ms
from duemq.cli.shared import fail
from duemq.errors import DueMQError
from duemq.mqtt_bridge.carried import Carried
from duemq.mqtt_bridge.rules.model import Rules, RulesError

RELOAD_EVERY: Final = 1.0
"""Seconds between two checks whether the file has changed."""

_CONSOLE: Final = "%(asctime)s %(levelname)s %(message)s"

log = logging.getLogger("duemq.mqtt_bridge")

_config = click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=Path("bridge.toml"),
    show_default=True,
    help="The file of rules.",
)


@click.group(invoke_without_command=True, short_help="Connect an MQTT broker.")
@_config
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    help="Format of the log, on standard error.",
)
@click.option(
    "--until-input-ends",
    is_flag=True,
    help="Also end at the end of standard input: so a broker with mqttBridge=FILE runs its bridge.",
)
@click.pass_context
def main(context: click.Context, config: Path, log_format: str, *, until_input_ends: bool) -> None:
    """Carry messages between an MQTT broker and RocketMQ's topics, and delay messages that ask for it, until SIGTERM or
    Ctrl-C. The file of rules is read again when it changes, and at SIGHUP. If the new rules are wrong, the old ones
    stay in use.

    \b
    duemq mqtt-bridge --config bridge.toml
    duemq mqtt-bridge check --config bridge.toml sensors/kitchen/temp delayed/10/lamp
    """
    context.obj = config
    if context.invoked_subcommand is not None:
        return
    rules = _read(config)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_format == "json" else logging.Formatter(_CONSOLE))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("duemq.consumer").setLevel(logging.WARNING)
    # Not on uvloop, although it is faster: when paho closes a socket, the next one may get the same descriptor
    # immediately, and uvloop may then never watch this descriptor again.
    asyncio.run(_serve(config, rules, until_input_ends=until_input_ends))


@main.command(short_help="Try the rules against sample topics.")
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--config", type=click.Path(path_type=Path), help="The file of rules; bridge.toml by default.")
@click.pass_context
def check(context: click.Context, config: Path | None, topics: tuple[str, ...]) -> None:
    """Read the file of rules, and show where a message to each MQTT TOPIC would go. The exit code is 1 if the file is
    wrong, or if the bridge would not accept one of these messages."""
    from duemq.mqtt_bridge.rules import check as checking

    rules = _read(config or context.obj)
    for line in checking.describe(rules):
        click.echo(line)
    all_taken = True
    for topic in topics:
        lines, is_taken = checking.sample(rules, topic, now_ms())
        all_taken = all_taken and is_taken
        for line in lines:
            click.echo(line)
    if not all_taken:
        sys.exit(1)


def _read(path: Path) -> Rules:
    from duemq.mqtt_bridge.rules.file import read

    try:
        return read(path)
    except RulesError as error:
        fail(str(error))


class _JsonLines(logging.Formatter):
    """Log records as lines of JSON, with the field names of the broker's log."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"event": record.getMessage(), "level": record.levelname.lower(), "timestamp": at}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def stop_when_input_ends(input_: int | None, stopped: asyncio.Event) -> None:
    """Set `stopped` when a file is at its end, in the background. `input_`: the file's descriptor; None if the file is
    closed. A thread reads the file, since an event loop cannot watch plain files and /dev/null."""
    loop = asyncio.get_running_loop()

    def read_all() -> None:
        if input_ is not None:
            with suppress(OSError):  # a terminal that no longer exists is at its end, too
                while _has_more(input_):
                    pass
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=read_all, name="duemq input", daemon=True).start()


def _has_more(input_: int) -> bool:
    try:
        return bool(os.read(input_, 4096))
    except BlockingIOError:
        # Another process that has the same pipe may have made it non-blocking.
        select.select([input_], [], [])
        return True


async def _serve(path: Path, rules: Rules, *, until_input_ends: bool) -> None:
    """Run one bridge after another, each with the newest rules, until a signal ends the last one."""
    loop = asyncio.get_running_loop()
    stopped, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    if until_input_ends:
        stop_when_input_ends(0 if sys.stdin is not None else None, stopped)
    watch = _Watch(path, rules)
    carried = Carried()
    session = _session_of(rules)
    found: Rules | None = rules
    while found is not None:
        if _session_of(found) != session:
            session = _session_of(found)
            carried.receipts.clear()
        found = await _run_until_changed(found, carried, stopped, watch, reload)


def _session_of(rules: Rules) -> tuple[str, int, str]:
    """Return the values that identify the session at an MQTT broker."""
    connection = rules.connection
    return connection.host, connection.port, connection.client_id


async def _run_until_changed(
    rules: Rules, carried: Carried, stopped: asyncio.Event, watch: _Watch, reload: asyncio.Event
) -> Rules | None:
    """Run a bridge until a signal or new rules end it; return the new rules, or None after a signal."""
    from duemq.mqtt_bridge.bridge import Bridge

    bridge = Bridge(rules, carried=carried)
    running = asyncio.create_task(bridge.run(), name="duemq bridge")
    found: Rules | None = None
    stopping = asyncio.create_task(stopped.wait())
    while found is None and not running.done() and not stopped.is_set():
        await asyncio.wait((running, stopping), timeout=RELOAD_EVERY, return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not stopped.is_set():
            found = await asyncio.to_thread(watch.changed, reload)
        if found is not None and not running.done():
            try:
                await bridge.check_change(found)
            except RulesError as error:
                log.error("%s; the old rules stay in use", error)
                found = None
    if found is not None:
        watch.use(found)
    bridge.stop()
    stopping.cancel()
    try:
        await running
    except DueMQError as error:
        fail(str(error))
    if found is not None:
        log.info("the rules have changed; the new rules are now in use")
    return None if stopped.is_set() else found


class _Watch:
    """Notices changes of a file of rules. `rules`: those that the bridge uses now."""

    def __init__(self, path: Path, rules: Rules) -> None:
        self._path = path
        self._directory = os.path.realpath(rules.connection.state_directory)
        """The directory of the journal that the bridge has open."""
        self._seen = self._state()

    def changed(self, reload: asyncio.Event) -> Rules | None:
        """Return the new rules if the file has changed, or None. Wrong rules are logged once, and so are rules whose
        `state` cannot be used. If `reload` is set, the file is read even if it has not changed."""
        from duemq.mqtt_bridge.rules.file import read

        state = self._state()
        if state == self._seen and not reload.is_set():
            return None
        reload.clear()
        self._seen = state
        try:
            found = read(self._path)
            if os.path.realpath(found.connection.state_directory) != self._directory:
                _try_state(self._path, found)
        except RulesError as error:
            log.error("%s; the old rules stay in use", error)
            return None
        return found

    def use(self, rules: Rules) -> None:
        """Note that the bridge now uses new rules."""
        self._directory = os.path.realpath(rules.connection.state_directory)

    def _state(self) -> tuple[int, int, int] | None:
        with suppress(OSError):
            found = self._path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino
        return None


def _try_state(path: Path, rules: Rules) -> None:
    """Check that the journal of new rules can be opened. Raises RulesError."""
    from duemq.mqtt_bridge.session.journal import JournalError, try_journal

    try:
        try_journal(rules.connection.state_directory)
    except JournalError as error:
        raise RulesError(f"{path}:{rules.connection.state_line}: {error}") from None
