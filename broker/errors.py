"""Errors that stop the daemon, and errors that a handler reports to a client.

BrokerError
├── RepairError        a store cannot be repaired as asked: one line, exit code 2
├── ConfigError        a property, flag, port or directory is wrong: one line, exit code 2
├── Refused            a request ends with this response code and remark
└── NotNow             a request cannot begin now: its connection hands it over again
"""

from __future__ import annotations


class BrokerError(Exception):
    """Base of everything this package raises."""


class ConfigError(BrokerError):
    """The broker cannot start with its configuration."""


class RepairError(BrokerError):
    """A store cannot be repaired as requested."""


class Refused(BrokerError):
    """A request that is answered with an error. Attributes: `code`, a response code; `remark`."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


class NotNow(BrokerError):
    """A request cannot begin now because too much is under way. Its connection is held back, and hands it over
    again."""
