"""TLS for a client's connections."""

from __future__ import annotations

import ssl

from duemq.errors import ArgumentError

Tls = bool | ssl.SSLContext
"""True: TLS with the certificates that the machine trusts; an SSLContext: TLS with that context; False: no TLS."""


def context_of(tls: Tls) -> ssl.SSLContext | None:
    """Return the context for connections, or None for no TLS. Raises ArgumentError for any other value."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    if not isinstance(tls, bool):
        raise ArgumentError(
            f"tls={tls!r}: give True, or an ssl.SSLContext such as ssl.create_default_context(cafile='ca.pem')"
        )
    if not tls:
        return None
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def reason_of(error: ssl.SSLError) -> str:
    """Return the reason why a handshake or a TLS record failed, as text for a message."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    return "TLS failed: " + (error.reason or str(error)).lower().replace("_", " ")
