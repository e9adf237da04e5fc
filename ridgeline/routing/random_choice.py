"""Any replica, each as likely as the others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ridgeline.routing import ServerLoad


class RandomChoice:
    """The draws are the same in every run with one seed."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def choose(
        self, prompt: Sequence[int] | bytes, salt: str, loads: Mapping[int, ServerLoad], *, session: str = ""
    ) -> int:
        """Return a replica drawn at random."""
        return self._draw.choice(sorted(loads))

    def forget(self, replica: int) -> None: ...
