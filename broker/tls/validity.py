"""Reads from certificates' files until when they are valid.

Only the dates are read; OpenSSL has already checked that the files are certificates. Python's `ssl` does not return the
dates of one's own certificate, and the package cryptography, which does, would take 10 MB in a running broker.

    Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version OPTIONAL, INTEGER serialNumber,
        SEQUENCE signature, SEQUENCE issuer, SEQUENCE validity { Time notBefore, Time notAfter }, ... }, ... }
    Time ::= UTCTime (0x17) "YYMMDDhhmmssZ" | GeneralizedTime (0x18) "YYYYMMDDhhmmssZ"

Source: RFC 5280, sections 4.1 and 4.1.2.5.
"""

from __future__ import annotations

import datetime
import re
import ssl
from typing import Final

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_FIRST_YEAR: Final = 1950
"""The years of UTCTime are from 1950 to 2049."""


def valid_until_ms(pem: str) -> int | None:
    """Return the time, in ms since the epoch, at which the first of some certificates in PEM expires: a chain is
    invalid after that. None without a certificate. Raises ValueError for one that cannot be read."""
    ends = [_not_after(ssl.PEM_cert_to_DER_cert(text)) for text in _PEM.findall(pem)]
    return min(ends, default=None)


def _not_after(der: bytes) -> int:
    try:
        ((_, certificate),) = _contents(der)
        parts = _contents(_contents(certificate)[0][1])
        _, (kind, text) = _contents(parts[4 if parts[0][0] == _VERSION else 3][1])
    except IndexError:
        raise ValueError("the certificate has no validity") from None
    digits = text.decode("ascii").removesuffix("Z")
    if kind == _UTC_TIME:
        year = int(digits[:2]) + 1900
        digits = f"{year if year >= _FIRST_YEAR else year + 100}{digits[2:]}"
    end = datetime.datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=datetime.UTC)
    return int(end.timestamp() * 1000)


def _contents(der: bytes) -> list[tuple[int, bytes]]:
    """Return the tag and the contents of each DER element. Raises ValueError."""
    elements, position = [], 0
    while position < len(der):
        head = der[position : position + 2]
        if len(head) < 2:
            raise ValueError("the certificate is cut off")
        tag, length = head
        position += 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(der[position : position + count], "big")
            position += count
        contents = der[position : position + length]
        if len(contents) < length:
            raise ValueError("the certificate is cut off")
        elements.append((tag, contents))
        position += length
    return elements
