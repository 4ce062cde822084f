"""Who may call: API keys, deny by default.

Owns: the public routes and the comparison of keys. Must not know: what the routes do. Called by: app, for each request,
before a byte of the body is read.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from ropeway.errors import RequestError

PUBLIC_PATHS = frozenset({"/live", "/ready", "/health", "/metrics"})


class Keys:
    """A set of API keys. With none, everybody may call everything."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys if key]

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Name of the caller's key (``key-0``, ``key-1`` ...; empty where no key is needed). Raises RequestError(401).

        headers: as in an ASGI scope. ``Authorization: Bearer KEY`` and ``x-api-key: KEY`` are understood.
        """
        if not self._keys or path in PUBLIC_PATHS:
            return ""
        given = _presented_key(headers)
        # Every key is compared, each in constant time, so the time taken tells nothing about any of them.
        matches = [hmac.compare_digest(key, given) for key in self._keys]
        if any(matches):
            return f"key-{matches.index(True)}"
        raise RequestError(
            "Incorrect API key provided."
            if given
            else "You did not provide an API key: send Authorization: Bearer KEY.",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            return value.strip()
    return b""
