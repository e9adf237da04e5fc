"""The same replica for all requests of a session, whatever it has to do; without a session, the least loaded one.

Rendezvous hashing (Thaler and Ravishankar, 1998): each replica has a number drawn from the session's name and its own,
and the highest one wins. Nothing is remembered. A replica that leaves loses its sessions alone, and gets them back when
it returns. Routers that list the same replicas agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from ridgeline.routing import ServerLoad
from ridgeline.routing.least_outstanding import LeastOutstanding


class Session:
    def __init__(self) -> None:
        self._others = LeastOutstanding()

    def choose(
        self, prompt: Sequence[int] | bytes, salt: str, loads: Mapping[int, ServerLoad], *, session: str = ""
    ) -> int:
        """Return the replica that a session belongs to, of those that are there."""
        if not session:
            return self._others.choose(prompt, salt, loads)
        name = f"{salt}\0{session}".encode("utf-8", "surrogatepass")
        return max(loads, key=lambda replica: blake2b(name, key=b"%d" % replica, digest_size=8).digest())

    def forget(self, replica: int) -> None: ...
