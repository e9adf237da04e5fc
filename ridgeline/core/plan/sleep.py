"""The kinds of memory that an engine gives back while it sleeps."""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["weights", "kv_cache"]
KINDS: tuple[Kind, ...] = get_args(Kind)
