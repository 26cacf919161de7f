"""The exit codes of a broker process."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from duemq.broker import logs, main
from duemq.broker.settings.config import BrokerConfig, Origin


@pytest.mark.parametrize(
    ("failure", "code"),
    [(None, 0), ("stopped, but not cleanly; the next start recovers: Too many open files", main.EXIT_STORE)],
)
def test_the_exit_code_says_whether_the_stop_was_clean(
    tmp_path: Path, failure: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run(config: BrokerConfig, origin: Origin, log_format: str) -> str | None:
        return failure

    monkeypatch.setattr(main, "_run", run)
    monkeypatch.setattr(logs, "logging_to", lambda descriptor, log_format: nullcontext())  # logged by other tests, too
    assert main.serve(store=str(tmp_path)) == code
    assert capfd.readouterr().err.endswith(f"duemq: {failure}\n" if failure else "")


def test_a_callback_without_memory_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    """A callback without memory ends the process: otherwise it would be lost, or called again at once, for ever; in a
    callback of a connection only that connection ends."""
    loop, codes, told = asyncio.new_event_loop(), list[int](), list[str]()
    loop.default_exception_handler = lambda context: told.append(context["message"])  # type: ignore[method-assign]
    main.on_loop_error(loop, {"message": "a callback", "exception": MemoryError()}, codes.append)
    assert (codes, told) == ([main.EXIT_STORE], [])
    assert "memory ran out" in capfd.readouterr().err
    main.on_loop_error(loop, {"message": "a connection", "exception": MemoryError(), "protocol": 1}, codes.append)
    main.on_loop_error(loop, {"message": "an error", "exception": ValueError()}, codes.append)
    assert (codes, told) == ([main.EXIT_STORE], ["a connection", "an error"])
    loop.close()
