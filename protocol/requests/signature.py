"""The signature of a request, which shows that its sender has the secret key of an account.

    content   = the values of all extension fields but Signature, in the order of their names, and then the body
    signature = Base64(HMAC-SHA1(secret key, content))

The sender adds the fields AccessKey and Signature. Code, opaque, flag and remark of the request are not signed.

Source: apache/rocketmq acl/common/{AclUtils,AclSigner,AclClientRPCHook,SessionCredentials}.java at 4.9.7, and client at
5.3.3.
"""

from __future__ import annotations

import hashlib
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Mapping
from hmac import compare_digest
from operator import itemgetter
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from duemq.protocol.frames.command import Body

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
_UNSIGNED_BY_SOME: Final = "_UNIQUE_KEY_QUERY"
"""A field of QUERY_MESSAGE. Clients up to 4.9.3 do not sign it, later ones do. Apache's brokers accept only one of the
two."""
_BLOCK_BYTES: Final = 64
"""SHA-1 works on blocks of this size."""
_INNER: Final = bytes(number ^ 0x36 for number in range(256))
_OUTER: Final = bytes(number ^ 0x5C for number in range(256))
_MAX_ORDERS: Final = 512
"""Most entries of `_orders`. A client uses a few dozen sets of field names; a hostile client may make up any number, of
any length."""
_MAX_NAMES_LENGTH: Final = 1024
"""If a set of names is longer than this in all, its order is not kept."""

_ADDED_BY_CLIENTS: Final = ("SecurityToken", "OnsChannel", "ReqT", "bname", "lo", "n", "ns", "nsd", "oway")
"""Fields that clients add to requests of any code: those about the kind of account, and 5.x's fields for names and
streams."""

_orders: dict[tuple[str, ...], Callable[[Mapping[str, str]], tuple[str, ...]]] = {}
"""For the names of a request's fields, in the order in which they came: a function that returns the fields' values in
the order of signing. It depends on nothing but the names, so an entry never becomes outdated."""


def signed_text(ext: Mapping[str, str]) -> str:
    """Return the part of the signed content that comes from a request's extension fields."""
    names = tuple(ext)
    return "".join((_orders.get(names) or _new_order(names))(ext))


class Fields:
    """The extension fields of a request, of any names, as far as its signature needs them."""

    __slots__ = ("_ext",)

    def __init__(self, ext: Mapping[str, str]) -> None:
        self._ext = ext

    @property
    def access_key(self) -> str:
        """The access key, empty if there is none."""
        return self._ext.get(ACCESS_KEY, "")

    def are_signed(self, key: SecretKey, body: Body) -> bool:
        """Whether the signature of the fields and a body was made with a key."""
        ext = self._ext
        signature = ext.get(SIGNATURE, "")
        if key.has_signed(signature, signed_text(ext), body):
            return True
        if _UNSIGNED_BY_SOME not in ext:
            return False
        less = {name: value for name, value in ext.items() if name != _UNSIGNED_BY_SOME}
        return key.has_signed(signature, signed_text(less), body)


class _Texts(msgspec.Struct):
    """The fields of a request of one kind, as texts, in the order in which they are signed; the signature is last. A
    missing field is an empty text, which makes no difference to the signed content."""

    def are_signed(self, key: SecretKey, body: Body) -> bool:
        """Whether the signature of the fields and a body was made with a key."""
        values = astuple(self)
        return key.has_signed(values[-1], "".join(values[:-1]), body)


def fields_decoder(names: Iterable[str]) -> Callable[[bytes], Any]:
    """Return a function that decodes the fields in a JSON header. It knows the fields with these names, and those that
    clients add to any request. Checking a signature then takes half the time that it takes with `Fields`. The result of
    the function has the same attributes as `Fields`. The function raises msgspec.MsgspecError if there are other
    fields, or if values are not texts."""
    all_names = sorted({*names, ACCESS_KEY, *_ADDED_BY_CLIENTS} - {SIGNATURE}, key=_java_order)
    attributes = [(f"field_{at}" if name != ACCESS_KEY else "access_key", name) for at, name in enumerate(all_names)]
    texts = msgspec.defstruct(
        "Texts",
        [
            (attribute, str, msgspec.field(default="", name=name))
            for attribute, name in [*attributes, ("signature", SIGNATURE)]
        ],
        bases=(_Texts,),
        forbid_unknown_fields=True,
        gc=False,
    )
    head = msgspec.defstruct("Head", [("fields", texts, msgspec.field(name="extFields"))], gc=False)
    decode = msgspec.json.Decoder(head).decode
    return lambda header: decode(header).fields  # type: ignore[attr-defined]


def _new_order(names: tuple[str, ...]) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    taker = _taker(sorted((name for name in names if name != SIGNATURE), key=_java_order))
    if sum(map(len, names)) <= _MAX_NAMES_LENGTH:
        if len(_orders) >= _MAX_ORDERS:
            _orders.clear()
        _orders[names] = taker
    return taker


def _java_order(name: str) -> bytes:
    """Return the sort key of a name: Java compares texts by their UTF-16 units."""
    return name.encode("utf-16-be", "surrogatepass")


def _taker(names: list[str]) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    if len(names) >= 2:
        return itemgetter(*names)
    return lambda ext: tuple(ext[name] for name in names)


class SecretKey:
    """A secret key, prepared for signing. Its text cannot be read back: neither `repr` nor `str` shows it."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: str) -> None:
        key = secret.encode(errors="replace")
        if len(key) > _BLOCK_BYTES:
            key = hashlib.sha1(key).digest()
        key = key.ljust(_BLOCK_BYTES, b"\0")
        # Both hashes of HMAC begin with a block that depends on the key alone. These two blocks are hashed here, and
        # not for each request: signing then takes half as long as with hmac.digest.
        self._inner = hashlib.sha1(key.translate(_INNER))
        self._outer = hashlib.sha1(key.translate(_OUTER))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretKey) and compare_digest(self._inner.digest(), other._inner.digest())

    def __hash__(self) -> int:
        return hash(self._inner.digest())

    def sign(self, text: str, body: Body) -> bytes:
        """Return the signature of a request in Base64. `text`: the result of `signed_text` for its fields."""
        inner = self._inner.copy()
        # Half of a surrogate pair is encoded as a question mark, as Java does.
        inner.update(text.encode("utf-8", "replace"))
        inner.update(body)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return b2a_base64(outer.digest(), newline=False)

    def has_signed(self, signature: str, text: str, body: Body) -> bool:
        """Whether a signature was made with this key. The time that the comparison takes tells nothing about the right
        signature."""
        return compare_digest(self.sign(text, body), signature.encode("utf-8", "replace"))


class Signer:
    """Signs the requests of a client with the keys of an account."""

    def __init__(self, access_key: str, secret_key: str) -> None:
        self.access_key = access_key
        self._key = SecretKey(secret_key)

    def sign(self, ext: dict[str, str], body: Body) -> None:
        """Add the access key and the signature to the extension fields of a request. The fields and the body must not
        be changed after that."""
        ext[ACCESS_KEY] = self.access_key
        ext[SIGNATURE] = self._key.sign(signed_text(ext), body).decode()
