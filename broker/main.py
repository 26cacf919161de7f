"""The process: settings, logs, signals, exit codes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog
import uvloop

from duemq.broker import logs
from duemq.broker.bridge_process import BridgeProcess, command_of
from duemq.broker.daemon import Broker
from duemq.broker.errors import ConfigError
from duemq.broker.log_output import keep_standard_descriptors, write_last
from duemq.broker.settings.config import SECRET, BrokerConfig, Origin, check_exposure, load
from duemq.broker.systemd import notify
from duemq.storage.errors import StoreError

EXIT_CONFIG = 2
EXIT_STORE = 3

_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that end a broker."""
_NO_MEMORY: Final = b"duemq: memory ran out; the next start recovers the store. Give the broker more memory\n"
"""Encoded in advance: once memory has run out, building it may fail."""


def serve(
    config_file: str | None = None,
    *,
    store: str | None = None,
    host: str | None = None,
    port: int | None = None,
    nameserver_port: int | None = None,
    settings: Sequence[str] = (),
    log_format: str = "console",
) -> int:
    """Run a broker until SIGTERM, SIGINT or SIGHUP (its terminal was closed), and return the exit code.

    The code is 0 after a clean stop, 2 if the broker cannot start, and 3 if the store stopped accepting messages, could
    not be stopped cleanly, or memory ran out. After a 3, the next start recovers the store from what is on the disk. If
    the code is not 0, one line on standard error gives the reason."""
    keep_standard_descriptors()
    flags = {"storePathRootDir": store, "bindAddress": host, "listenPort": port, "nameserverPort": nameserver_port}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        with logs.logging_to(logs.STANDARD_ERROR, log_format):
            code, why = _serve(config_file, settings, given, log_format)
    except RuntimeError as error:
        code, why = EXIT_CONFIG, str(error)
    if why is not None:
        write_last(f"duemq: {why}\n".encode("utf-8", "backslashreplace"))
    return code


def _serve(
    config_file: str | None, settings: Sequence[str], flags: Mapping[str, object], log_format: str
) -> tuple[int, str | None]:
    """Return the exit code and the reason, None after a clean stop. `flags`: by property, the values of flags that have
    a name of their own; they win over `settings`."""
    try:
        _check_no_secrets(settings)
        config, ignored, origin = load(config_file, [*settings, *(f"{name}={flags[name]}" for name in flags)])
        check_exposure(config)
    except ConfigError as error:
        return EXIT_CONFIG, str(error)
    _warn(config, ignored)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            failure = runner.run(_run(config, origin, log_format))
    except (ConfigError, StoreError) as error:
        return EXIT_CONFIG, str(error)
    except OSError as error:
        return EXIT_CONFIG, f"{error.filename or config.store_root}: {error.strerror or error}"
    return (0, None) if failure is None else (EXIT_STORE, failure)


def _check_no_secrets(settings: Sequence[str]) -> None:
    """Raise ConfigError if one of the settings of the command line is a secret."""
    for setting in settings:
        name = setting.partition("=")[0].strip()
        if name in SECRET:
            raise ConfigError(f"--set {name}=...: every user of this machine sees it; put it into the file of --config")


def _warn(config: BrokerConfig, ignored: Sequence[str]) -> None:
    """Warn of settings that leave the broker open to anyone, or that have no effect (`ignored`)."""
    log = structlog.get_logger("broker")
    if ignored:
        log.warning("properties_ignored", properties=ignored)
    if not config.listens_on_loopback and not config.has_access_control:
        log.warning(
            "insecure",
            address=config.host,
            help="anyone who can reach the ports may read, change and delete everything; set aclEnable=true",
        )
    if config.host.startswith("127.") and not config.advertised_host.startswith("127."):
        log.warning("listening_on_loopback_only", advertised=config.advertised_host, help="listen with --host 0.0.0.0")


def on_loop_error(
    loop: asyncio.AbstractEventLoop, context: dict[str, Any], end: Callable[[int], object] = os._exit
) -> None:
    """The event loop's handler for errors of callbacks.

    After a MemoryError the event loop either drops the callback or retries it forever (uvloop allocates 64 KiB to read
    a signal), so the broker would continue with parts missing. The process therefore ends as if by kill -9, for a
    supervisor to restart it, and the next start recovers. An error of a single connection ends only that connection."""
    if isinstance(context.get("exception"), MemoryError) and "protocol" not in context:
        write_last(_NO_MEMORY)
        end(EXIT_STORE)
    else:
        loop.default_exception_handler(context)


async def _run(config: BrokerConfig, origin: Origin, log_format: str) -> str | None:
    """Run a broker; return why its store failed, or None after a requested, clean stop."""
    broker = Broker(config, origin=origin)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_loop_error)
    ending = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in ending:
        loop.add_signal_handler(number, stopped.set)
    await broker.start()
    # All objects that exist now stay, so the collector need not look at them again. Later it rarely finds anything.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    gc.enable()  # the command `duemq serve` turned it off for the start
    bridge = BridgeProcess(command_of(config.mqtt_bridge, log_format)) if config.mqtt_bridge else None
    if bridge is not None:
        bridge.start()
    notify("READY=1")
    asked: asyncio.Future[Any] = asyncio.ensure_future(stopped.wait())
    either: list[asyncio.Future[Any]] = [asked, broker.failed]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    failure = broker.failed.result() if broker.failed.done() else None
    notify("STOPPING=1" if failure is None else f"STATUS=the store accepts nothing more: {failure}\nSTOPPING=1")
    if bridge is not None:
        await bridge.stop()
    unclean = await broker.stop()
    _ignore(loop, ending)
    if broker.failed.done():
        return f"stopped, because the store accepts nothing more: {broker.failed.result()}"
    return f"stopped, but not cleanly; the next start recovers: {unclean}" if unclean is not None else None


def _ignore(loop: asyncio.AbstractEventLoop, signals: Sequence[signal.Signals]) -> None:
    """Ignore signals that a loop has handled. The broker has stopped: a second SIGTERM would only change the exit code,
    which tells how the stop went."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # without its handler, one that comes here would end the process
    for number in signals:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
