"""The owner of a request, from its connection to the queues that clients share fairly; "" if it is not known."""

from __future__ import annotations

import re
from contextvars import ContextVar
from hashlib import sha256

_current: ContextVar[str] = ContextVar("owner", default="")
_tenant: ContextVar[str] = ContextVar("tenant", default="")
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)

HEADER = "x-ridgeline-tenant"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
WRONG_NAME = "X-Ridgeline-Tenant must be 1 to 64 letters, digits, dots, dashes and underscores."


def take(key: str | None, peer: str | None) -> None:
    """Set the owner for all that this task, and those it starts, will run.

    `key` is the one that the client gave, if keys are asked for. It tells clients apart better than `peer`, the
    address, which clients may share or change.
    """
    tenant = sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16] if key else ""
    _tenant.set(tenant)
    _current.set(tenant or peer or "")
    _trusted.set(False)


def is_name(name: str) -> bool:
    """Return True if a tenant may have this name."""
    return NAME.fullmatch(name) is not None


def trust(name: str | None) -> None:
    """Note that the key is trusted. The owner is the tenant that it names, if it names one."""
    _trusted.set(True)
    if name is not None:
        _current.set(name)
        _tenant.set(name)


def trusted() -> bool:
    """Return True if the owner's key is trusted."""
    return _trusted.get()


def current() -> str:
    """Return the owner, or "" if none was set."""
    return _current.get()


def tenant() -> str:
    """Return the owner as its key tells, or "" where no keys are asked for: all clients are then one tenant."""
    return _tenant.get()


def set_to(name: str) -> None:
    """Set the owner to one that `current` returned before, and that a key told ("" where no keys are asked for)."""
    _current.set(name)
    _tenant.set(name)
