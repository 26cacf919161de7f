"""The signature of a request: it shows that its sender has the secret key of an account.

    content   = the values of all extension fields but Signature, in the order of their names, and then the body
    signature = Base64(HMAC-SHA1(secret key, content))

The sender adds the fields AccessKey and Signature. Code, opaque, flag and remark of the request are not signed.

Source: apache/rocketmq acl/common/{AclUtils,AclSigner,AclClientRPCHook,SessionCredentials}.java at 4.9.7, and client at
5.3.3.
"""

from __future__ import annotations

import hashlib
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from hmac import compare_digest
from operator import itemgetter
from typing import Final

from duemq.protocol.frames.command import Body

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
_UNSIGNED_BY_SOME: Final = "_UNIQUE_KEY_QUERY"
"""A field of QUERY_MESSAGE. Clients up to 4.9.3 do not sign it, later ones do; Apache's brokers go by one of both."""
_BLOCK_BYTES: Final = 64
"""SHA-1 works on blocks of this size."""
_INNER: Final = bytes(number ^ 0x36 for number in range(256))
_OUTER: Final = bytes(number ^ 0x5C for number in range(256))
_MAX_ORDERS: Final = 512
"""Known sets of field names. A client has a few dozen; a hostile one may make up any number, of any length."""
_MAX_NAMES_LENGTH: Final = 1024
"""The order of names that are longer together is not kept."""

_orders: dict[tuple[str, ...], Callable[[Mapping[str, str]], tuple[str, ...]]] = {}
"""By the names of a request's fields as they came: what takes their values in the order of the names. It depends on
nothing else, so it never gets wrong."""


def signed_text(ext: Mapping[str, str]) -> bytes:
    """Return the first part of the content of a request, its fields."""
    names = tuple(ext)
    values = _orders.get(names) or _new_order(names)
    text = "".join(values(ext))
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which Java encodes as a question mark
        return text.encode(errors="replace")


def _new_order(names: tuple[str, ...]) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    taker = _taker(sorted((name for name in names if name != SIGNATURE), key=_java_order))
    if sum(map(len, names)) <= _MAX_NAMES_LENGTH:
        if len(_orders) >= _MAX_ORDERS:
            _orders.clear()
        _orders[names] = taker
    return taker


def _java_order(name: str) -> bytes:
    """Java compares texts by their UTF-16 units."""
    return name.encode("utf-16-be", "surrogatepass")


def _taker(names: list[str]) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    if len(names) >= 2:
        return itemgetter(*names)
    return lambda ext: tuple(ext[name] for name in names)


class SecretKey:
    """A secret key, prepared for signing. Its text is shown by nothing: neither `repr` nor `str` has it."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: str) -> None:
        key = secret.encode(errors="replace")
        if len(key) > _BLOCK_BYTES:
            key = hashlib.sha1(key).digest()
        key = key.ljust(_BLOCK_BYTES, b"\0")
        # HMAC begins with a block that depends on the key alone, twice. Both are hashed here and not for each request,
        # which takes half as long as hmac.digest.
        self._inner = hashlib.sha1(key.translate(_INNER))
        self._outer = hashlib.sha1(key.translate(_OUTER))

    def sign(self, ext: Mapping[str, str], body: Body) -> bytes:
        """Return the signature of a request, in Base64."""
        inner = self._inner.copy()
        inner.update(signed_text(ext))
        inner.update(body)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return b2a_base64(outer.digest(), newline=False)

    def has_signed(self, ext: Mapping[str, str], body: Body) -> bool:
        """Whether a request has the signature of this key. The time that the comparison takes tells nothing of it."""
        given = ext.get(SIGNATURE)
        if given is None:
            return False
        signature = given.encode(errors="replace")
        if compare_digest(self.sign(ext, body), signature):
            return True
        if _UNSIGNED_BY_SOME not in ext:
            return False
        less = {name: value for name, value in ext.items() if name != _UNSIGNED_BY_SOME}
        return compare_digest(self.sign(less, body), signature)


class Signer:
    """Signs the requests of a client with the keys of an account."""

    def __init__(self, access_key: str, secret_key: str) -> None:
        self.access_key = access_key
        self._key = SecretKey(secret_key)

    def sign(self, ext: dict[str, str], body: Body) -> None:
        """Add the access key and the signature to the extension fields of a request. They must not change any more."""
        ext[ACCESS_KEY] = self.access_key
        ext[SIGNATURE] = self._key.sign(ext, body).decode()
