from __future__ import annotations

import logging

import pytest

from duemq._net.complaints import Complaints


def test_what_hinders_many_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(logging.getLogger("test"))
    for who in ("reading a", "reading b", "reading a"):
        complaints.raise_(who, "broker gone")
    complaints.raise_("reading b", "disk full")
    complaints.raise_("reading c", "broker gone")
    complaints.forget("reading c")
    complaints.resolve("reading d")
    complaints.resolve("reading a")
    complaints.resolve("reading b")
    complaints.resolve("reading b")
    assert caplog.messages == ["reading a: broker gone", "reading b: disk full", "reading b: resolved"]
