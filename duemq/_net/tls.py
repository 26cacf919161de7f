"""TLS of a client's connections."""

from __future__ import annotations

import ssl

from duemq.errors import ArgumentError

Tls = bool | ssl.SSLContext
"""True: with certificates that the machine trusts; a context of Python's: as that says; False: without TLS."""


def context_of(tls: Tls) -> ssl.SSLContext | None:
    """Return the context for connections, None without TLS. Raises ArgumentError for any other value."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    if not isinstance(tls, bool):
        raise ArgumentError(
            f"tls={tls!r}; give True, or an ssl.SSLContext: ssl.create_default_context(cafile='ca.pem')"
        )
    if not tls:
        return None
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def reason_of(error: ssl.SSLError) -> str:
    """Return why a handshake or a record was refused, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    return "TLS failed: " + (error.reason or str(error)).lower().replace("_", " ")
