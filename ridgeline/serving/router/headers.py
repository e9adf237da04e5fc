"""The headers that pass through, in both directions: all but those between two hops."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(  # RFC 9110, section 7.6.1, and older ones that have the same meaning
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# What the router says itself. A client could name an address that is not its own.
FROM_CLIENT = frozenset((b"host", b"content-length", b"expect", b"forwarded", b"x-real-ip", b"x-request-id"))
FROM_SERVER = frozenset((b"date", b"x-request-id"))


def to_server(headers: Iterable[tuple[bytes, bytes]], host: bytes, request_id: str, peer: str, length: int) -> Headers:
    """Return the headers for a server. length: bytes of the body, -1 without one."""
    kept = [
        (name, value.strip(b" \t"))  # blanks there are legal, and the client library refuses them
        for name, value in _end_to_end(headers)
        if name not in FROM_CLIENT and not name.startswith(b"x-forwarded-")
    ]
    own = [(b"host", host), (b"x-request-id", request_id.encode())]
    if peer:
        own.append((b"x-forwarded-for", peer.encode("ascii", "replace")))
    if length >= 0:
        own.append((b"content-length", b"%d" % length))
    return own + kept


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a server's answer for its client."""
    lowered = [(name.lower(), value) for name, value in headers]
    return [(name, value) for name, value in _end_to_end(lowered) if name not in FROM_SERVER]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers without those of the hop, and those that its Connection names."""
    headers = list(headers)
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")} - {
        b"authorization",
        b"x-api-key",
    }  # a key is never lost by a header that strips it
    return [(name, value) for name, value in headers if name not in HOP_BY_HOP and name not in named]
