"""Signatures, against their definition: HMAC-SHA1 over the values in the order of the names, and the body."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.requests import signature
from duemq.protocol.requests.headers import PullMessage, SendMessageV2
from duemq.protocol.requests.signature import Fields, SecretKey, Signer, fields_decoder, signed_text
from tests.support.canary import CANARY

SECRET = f"{CANARY}-1"
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
EXT = st.dictionaries(TEXT.filter(lambda name: name != "Signature"), TEXT, max_size=20)


def expected(ext: dict[str, str], body: bytes, secret: str = SECRET) -> str:
    """The signature by its definition: SHA-1 twice, with the key in a block before each."""
    names = sorted((name for name in ext if name != "Signature"), key=lambda name: name.encode("utf-16-be"))
    content = "".join(ext[name] for name in names).encode() + body
    key = secret.encode()
    key = hashlib.sha1(key).digest() if len(key) > 64 else key
    key = key.ljust(64, b"\0")
    inner = hashlib.sha1(bytes(each ^ 0x36 for each in key) + content).digest()
    return base64.b64encode(hashlib.sha1(bytes(each ^ 0x5C for each in key) + inner).digest()).decode()


def test_the_definition_is_that_of_the_standard_library() -> None:
    mac = hmac.new(SECRET.encode(), b"AKvaluebody", "sha1").digest()
    assert expected({"b": "value", "AccessKey": "AK"}, b"body") == base64.b64encode(mac).decode()


@given(EXT, st.binary(max_size=3000), st.text(st.characters(codec="utf-8"), min_size=1, max_size=100))
def test_a_request_has_the_signature_of_the_definition(ext: dict[str, str], body: bytes, secret: str) -> None:
    signed = dict(ext)
    Signer("account", secret).sign(signed, body)
    assert signed["Signature"] == expected({**ext, "AccessKey": "account"}, body, secret)
    assert {**ext, "AccessKey": "account"} == {name: value for name, value in signed.items() if name != "Signature"}
    assert Fields(signed).are_signed(SecretKey(secret), memoryview(body))


@given(EXT, st.binary(max_size=100), st.data())
def test_a_changed_request_is_not_signed(ext: dict[str, str], body: bytes, data: st.DataObject) -> None:
    signed = dict(ext)
    Signer("account", SECRET).sign(signed, body)
    what = data.draw(st.sampled_from(["body", "field", "signature", "key"]))
    key = SecretKey(SECRET)
    if what == "body":
        body += b"x"
    elif what == "field":
        signed["AccessKey"] += "x"
    elif what == "signature":
        signed["Signature"] = data.draw(TEXT.filter(lambda text: text != signed["Signature"]))
    else:
        key = SecretKey(SECRET + "x")
    assert not Fields(signed).are_signed(key, body)


def test_java_signs_names_in_the_order_of_utf_16() -> None:
    ext = {"\uffff": "second", "\U00010000": "first"}  # by code points it would be the other way round
    assert signed_text(ext) == "firstsecond"


def test_half_a_surrogate_pair_is_signed_as_a_question_mark() -> None:
    key = SecretKey(SECRET)
    assert key.sign("a\ud800", b"") == key.sign("a?", b"")
    assert not key.has_signed("\ud800", "a", b"")


def test_the_flag_of_a_query_by_unique_key_may_be_signed_or_not() -> None:
    key = SecretKey(SECRET)
    ext = {"topic": "T", "AccessKey": "account", "_UNIQUE_KEY_QUERY": "true"}
    without = {name: value for name, value in ext.items() if name != "_UNIQUE_KEY_QUERY"}
    assert Fields({**ext, "Signature": expected(ext, b"")}).are_signed(key, b"")
    assert Fields({**ext, "Signature": expected(without, b"")}).are_signed(key, b"")
    assert not Fields({**ext, "Signature": expected({"AccessKey": "account"}, b"")}).are_signed(key, b"")


@pytest.mark.parametrize("header_type", [SendMessageV2, PullMessage])
@given(data=st.data(), body=st.binary(max_size=50))
def test_the_quick_way_signs_the_same(header_type: type[Any], data: st.DataObject, body: bytes) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(header_type)]
    known = st.sampled_from([*names, "AccessKey", "SecurityToken", "OnsChannel", "n", "bname", "ns", "oway"])
    ext = data.draw(st.dictionaries(known, TEXT))
    ext["Signature"] = expected(ext, body)
    header = msgspec.json.encode({"code": 310, "extFields": ext, "flag": 0})
    fields = fields_decoder(names)(header)
    assert fields.access_key == ext.get("AccessKey", "")
    assert fields.are_signed(SecretKey(SECRET), body)
    assert not fields.are_signed(SecretKey(SECRET), body + b"x")


@pytest.mark.parametrize("ext", [{"a": "x", "unknown": "y"}, {"a": 1}, {"a": None}, {"_UNIQUE_KEY_QUERY": "true"}])
def test_the_quick_way_leaves_other_fields_to_the_slow_way(ext: dict[str, Any]) -> None:
    with pytest.raises(msgspec.MsgspecError):
        fields_decoder("abc")(msgspec.json.encode({"extFields": ext}))


@pytest.mark.parametrize("ext", [b'{"a":"1","a":"2"}', b'{"a":"1"},"extFields":{"a":"2"}'])
def test_of_two_fields_of_one_name_the_last_is_signed_as_it_is_used(ext: bytes) -> None:
    header = b'{"code":1,"extFields":' + ext + b"}"
    assert msgspec.json.decode(header)["extFields"] == {"a": "2"}
    decode = fields_decoder("a")
    assert decode(header) == decode(b'{"extFields":{"a":"2"}}') != decode(b'{"extFields":{"a":"1"}}')


def test_what_is_kept_of_made_up_names_is_bounded() -> None:
    for number in range(2000):
        signed_text({f"name{number}": "x", "other": "y"})
    assert len(signature._orders) <= signature._MAX_ORDERS
    long = {"n" * 2000: "x", "other": "y"}
    signed_text(long)
    assert tuple(long) not in signature._orders
    assert signed_text(long) == "xy"
    assert signed_text({}) == ""
    assert signed_text({"one": "x"}) == "x"


def test_no_text_of_a_key_has_the_secret() -> None:
    key, signer = SecretKey(SECRET), Signer("account", SECRET)
    for shown in (repr(key), str(key), repr(signer), str(signer), str(vars(signer))):
        assert "canary" not in shown


class Hidden(bytes):
    """A signature that only `compare_digest` compares: an ordinary comparison ends at the first byte that differs, so
    its time tells how far a guess is right."""

    def _refuse(self, other: object) -> bool:
        raise AssertionError("a signature is compared with ==, find or the like")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse
    __hash__ = bytes.__hash__
    startswith = endswith = find = index = count = decode = _refuse  # type: ignore[assignment]


def test_signatures_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the path that the code takes, not by the clock."""
    key, compared = SecretKey(SECRET), []
    ext = {"AccessKey": "a", "topic": "T"}
    right = key.sign(signed_text(ext), b"body").decode()
    sign = SecretKey.sign

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(bytes(other))
        return hmac.compare_digest(bytes(memoryview(one)), other)

    monkeypatch.setattr(SecretKey, "sign", lambda *arguments: Hidden(sign(*arguments)))
    monkeypatch.setattr(signature, "compare_digest", compare)
    quick = fields_decoder(["topic"])
    for guess in (right, right[:-1], right[:1], "", "x" * len(right), right + "x", "\ud800"):
        compared.clear()
        signed = ext | {"Signature": guess}
        assert Fields(signed).are_signed(key, b"body") is (guess == right)
        if guess.isascii():
            header = msgspec.json.encode({"extFields": signed})
            assert quick(header).are_signed(key, b"body") is (guess == right)
        assert compared == [guess.encode("utf-8", "replace")] * (2 if guess.isascii() else 1), (
            "each, whatever its length"
        )
