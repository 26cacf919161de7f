"""Errors that stop the daemon, and errors that a handler reports to a client.

BrokerError
├── ChangeRefused      accounts are not changed: there is no such account or file
├── RepairError        a store cannot be repaired as asked: one line, exit code 2
├── ConfigError        a property, flag, port or directory is wrong: one line, exit code 2
│   ├── AclFileError   a file of accounts is wrong: the same at a start; later the old accounts stay
│   └── AuthStoreError users and policies cannot be read or written: the same
├── TlsRefused         a connection begins with TLS, or without, and may not
├── Refused            a request ends with this response code and remark
│   ├── AccessRefused  because its sender may not do what it asks for
│   └── LimitReached   because of a limit on what clients can make the broker keep or do
└── NotNow             a request cannot begin now: its connection hands it over again
"""

from __future__ import annotations


class BrokerError(Exception):
    """Base of everything this package raises."""


class ConfigError(BrokerError):
    """The broker cannot start with its configuration."""


class AclFileError(ConfigError):
    """A file of accounts is wrong. The text names the file and the line, and never has a secret in it."""


class AuthStoreError(ConfigError):
    """Users and policies of ACL 2.0 cannot be read or written. The text never has a secret in it."""


class TlsRefused(BrokerError):
    """A connection does not begin as the TLS mode wants."""


class RepairError(BrokerError):
    """A store cannot be repaired as requested."""


class ChangeRefused(BrokerError):
    """Accounts are not changed as requested."""


class Refused(BrokerError):
    """A request that is answered with an error. Attributes: `code`, a response code; `remark`."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


class LimitReached(Refused):
    """A request beyond a limit. `limit`: the property that is the limit. `reason`: what the log says of it; None: it
    is only counted."""

    def __init__(self, limit: str, code: int, remark: str, reason: str | None = None) -> None:
        super().__init__(code, remark)
        self.limit = limit
        self.reason = reason


class AccessRefused(Refused):
    """A request whose sender is not known or may not do what it asks for. `reason`: the same for the log, without
    what a peer that is not known has sent. `kind`: what it is counted as."""

    def __init__(self, code: int, remark: str, kind: str, reason: str) -> None:
        super().__init__(code, remark)
        self.kind = kind
        self.reason = reason


class NotNow(BrokerError):
    """A request cannot begin now because too much is under way. Its connection is held back, and hands it over
    again."""
