"""The folder where this user keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return ridgeline's folder, which may not exist yet. XDG_CACHE_HOME counts only if it is an absolute path, as the
    XDG specification asks. Raises RuntimeError if the user has no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".cache") / "ridgeline"
