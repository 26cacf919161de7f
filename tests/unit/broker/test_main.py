"""What a process says with its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker import logs, main
from broker.config import BrokerConfig, Origin


@pytest.mark.parametrize(
    ("failure", "code"),
    [(None, 0), ("stopped, but not cleanly; the next start recovers: Too many open files", main.EXIT_STORE)],
)
def test_the_exit_code_says_whether_the_stop_was_clean(
    tmp_path: Path, failure: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run(config: BrokerConfig, origin: Origin) -> str | None:
        return failure

    monkeypatch.setattr(main, "_run", run)
    monkeypatch.setattr(logs, "configure", lambda log_format: None)  # of other tests, too
    assert main.serve(store=str(tmp_path)) == code
    assert capfd.readouterr().err.endswith(f"duemq: {failure}\n" if failure else "")
