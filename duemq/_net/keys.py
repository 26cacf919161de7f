"""The keys of an account, with which a client signs its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from duemq.errors import ArgumentError

if TYPE_CHECKING:
    from duemq.protocol.requests.signature import Signer


def signer_of(access_key: str | None, secret_key: str | None) -> Signer | None:
    """Return the signer for these keys, or None without keys. Raises ArgumentError if only one key is given, or if one
    is not a str. No error contains a key: the secret one may be in the wrong place."""
    for name, key in (("access_key", access_key), ("secret_key", secret_key)):
        if key is not None and not isinstance(key, str):
            raise ArgumentError(f"{name}= is of type {type(key).__name__}: give a str, or None")
    if not access_key and not secret_key:
        return None
    if not access_key or not secret_key:
        missing = "secret_key" if access_key else "access_key"
        raise ArgumentError(f"{missing} is missing: an account has two keys, access_key and secret_key")
    from duemq.protocol.requests.signature import Signer

    return Signer(access_key, secret_key)
