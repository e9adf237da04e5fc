"""The owner of a request, as far as it is known, on the way from the connection to where clients share fairly."""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import sha256

_current: ContextVar[str] = ContextVar("owner", default="")


def take(key: str | None, peer: str | None) -> None:
    """Set the owner for all that this task, and those it starts, will run.

    `key` is the one that the client gave, if keys are asked for. It tells clients apart better than `peer`, the
    address, which clients may share or change.
    """
    _current.set(sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16] if key else peer or "")


def current() -> str:
    """Return the owner, or "" if none was set."""
    return _current.get()


def set_to(name: str) -> None:
    """Set the owner to one that `current` returned before."""
    _current.set(name)
