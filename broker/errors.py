"""Errors that stop the daemon, and errors that a handler reports to a client.

BrokerBaseError
├── ChangeRefused      accounts are not changed: there is no such account or file
├── RepairError        a store cannot be repaired as requested: one line, exit code 2
├── ConfigError        a property, flag, port or directory is wrong: one line, exit code 2
│   ├── AclFileError   a file of accounts is wrong: the same at a start; later the old accounts stay
│   └── AuthStoreError users and policies cannot be read or written: the same
├── TlsRefused         a connection begins with or without TLS, which the mode does not allow
├── Refused            a request ends with this response code and remark
│   ├── AccessRefused  because its sender may not do what it asks for
│   └── LimitReached   because of a limit on what clients can make the broker keep or do
└── NotNow             a request cannot begin now: its connection hands it over again
"""

from __future__ import annotations


class BrokerBaseError(Exception):
    """Base of everything this package raises."""


class ConfigError(BrokerBaseError):
    """The broker cannot start with its configuration."""


class AclFileError(ConfigError):
    """A file of accounts is wrong. The text names the file and the line, and never has a secret in it."""


class AuthStoreError(ConfigError):
    """Users and policies of ACL 2.0 cannot be read or written. The text never has a secret in it."""


class TlsRefused(BrokerBaseError):
    """A connection does not begin as the TLS mode requires."""


class RepairError(BrokerBaseError):
    """A store cannot be repaired as requested."""


class ChangeRefused(BrokerBaseError):
    """Accounts are not changed as requested."""


class Refused(BrokerBaseError):
    """A request that is answered with an error. Attributes: `code`, a response code; `remark`.

    Any handler of requests may raise it, or a class made of it, and so may what a handler calls. Docstrings in `broker`
    need not say so.
    """

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


class LimitReached(Refused):
    """A request beyond a limit. `limit`: the property that sets the limit. `reason`: the text for the log; if None, the
    request is only counted."""

    def __init__(self, limit: str, code: int, remark: str, reason: str | None = None) -> None:
        super().__init__(code, remark)
        self.limit = limit
        self.reason = reason


class AccessRefused(Refused):
    """A request whose sender is not known or may not do what it asks for. `reason`: the text for the log, without what
    an unknown peer has sent. `kind`: the name under which it is counted."""

    def __init__(self, code: int, remark: str, kind: str, reason: str) -> None:
        super().__init__(code, remark)
        self.kind = kind
        self.reason = reason


class NotNow(BrokerBaseError):
    """A request cannot begin now because too much is under way. Its connection is held back, and hands it over
    again."""
