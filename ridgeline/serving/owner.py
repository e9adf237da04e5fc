"""The owner of a request, from its connection to the queues that clients share fairly; "" if it is not known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from hashlib import sha256

from ridgeline.core.plan.embeds import named_within
from ridgeline.core.plan.request import PEER, Request
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.keys import allowed

_current: ContextVar[str] = ContextVar("owner", default="")
_tenant: ContextVar[str] = ContextVar("tenant", default="")
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)

HEADER = "x-ridgeline-tenant"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MOST_PEER = 64  # characters of an address
WRONG_NAME = "X-Ridgeline-Tenant must be 1 to 64 letters, digits, dots, dashes and underscores."


def take(key: str | None, peer: str | None, *, trusted: Sequence[str] = (), name: str | None = None) -> None:
    """Set the owner for all that this task, and those it starts, will run. Raise BadRequest for a wrong name.

    `key` is the one that the client gave, if keys are asked for. It tells clients apart better than `peer`, the
    address, which clients may share or change. A key in `trusted` may name the tenant, which is then the owner; the
    `name` that comes with any other is not read. Addresses begin with PEER, as no name does.
    """
    tenant = sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16] if key else ""
    trusts = bool(trusted) and key is not None and allowed(key, trusted)
    if trusts and name is not None:
        if NAME.fullmatch(name) is None:
            raise BadRequest(WRONG_NAME)
        tenant = name
    _tenant.set(tenant)
    _current.set(tenant or (PEER + peer[:MOST_PEER] if peer else ""))
    _trusted.set(trusts)


def trusted() -> bool:
    """Return True if the owner's key is trusted."""
    return _trusted.get()


def current() -> str:
    """Return the owner, or "" if none was set."""
    return _current.get()


def tenant() -> str:
    """Return the owner as its key tells, or "" where no keys are asked for: all clients are then one tenant."""
    return _tenant.get()


def apart(request: Request) -> Request:
    """Return the request as one that shares no cached prefix with those of other owners.

    The owner leads the salt, so that a tier on a disk counts its blocks as the owner's. It is among the keys of the
    prefix as well, which no client writes: a salt that looks like an owner's finds nothing. So do names of vectors that
    a tower or a listener made.
    """
    mine = _current.get()
    salt = f"{mine}\n{request.cache_salt}" if request.cache_salt else mine
    keys = f"owner {mine}", *request.prefix_keys
    return replace(request, cache_salt=salt, prefix_keys=keys, inserted=named_within(request.inserted, mine))


def set_to(name: str) -> None:
    """Set the owner to one that `current` returned before, and that a key told ("" where no keys are asked for)."""
    _current.set(name)
    _tenant.set(name)
