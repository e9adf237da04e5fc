"""The keys of clients."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from hashlib import sha256

from ridgeline.core.settings.serving import ServeConfig

logger = logging.getLogger(__name__)


def allowed(given: str | None, keys: Sequence[str]) -> bool:
    """Return True if `given` is one of the keys, or if there are none.

    The time it takes reveals nothing about the keys: all are compared to the end, as digests of equal length.
    """
    if not keys:
        return True
    if given is None:
        return False
    digest, found = _digest(given), False
    for key in keys:
        found |= hmac.compare_digest(digest, _digest(key))
    return found


def bearer(authorization: str | None) -> str | None:
    """Return the key in "Bearer <key>", or None for anything else."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def tell_of_orders(config: ServeConfig) -> None:
    """Say at the start who may pause, sleep, reload or reset the engine, unless an admin key decides it."""
    if config.admin_key:
        return
    if config.open_admin_routes:
        logger.warning("every client may pause, sleep, reload or reset the engine (--open-admin-routes)")
    else:
        text = "no admin key is set, so routes that pause, sleep, reload or reset the engine are closed (--admin-key)"
        logger.log(logging.WARNING if config.api_key else logging.INFO, text)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
