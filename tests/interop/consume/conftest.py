"""Runs the tests of consumers some at a time."""

from pathlib import Path

from tests.interop.at_once import at_once_with_shared_broker

_at_once = at_once_with_shared_broker(Path(__file__).parent)
