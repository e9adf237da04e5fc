"""The clock that an engine reads: the machine's own, or one that a simulation sets."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Return seconds since some fixed moment; no later call returns less."""

MONOTONIC: Clock = time.monotonic
