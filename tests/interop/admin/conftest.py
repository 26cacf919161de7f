"""Runs the tests of administration that need no state of the whole broker some at a time."""

from pathlib import Path

from tests.interop.at_once import at_once_with_shared_broker

_at_once = at_once_with_shared_broker(Path(__file__).parent, "test_admin_api", "test_nameserver")
