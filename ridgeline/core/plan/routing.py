"""The choice of a replica for a request: the one that has most of its prompt cached, unless it has too much to do.

A `Router` decides by what it sent where. It asks no engine, so its picture is a guess: engines drop blocks that it
still counts, and other API servers send prompts that it never sees. A wrong guess costs one prompt's computation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 32  # tokens that are compared at once
BYTES = 4  # of text that a token has, about
MOST_BLOCKS = 4096  # of one prompt: its first 131,072 tokens tell conversations apart
KEPT = 1 << 16  # blocks known of one replica, about 13 MB

# A cached beginning draws a request to a replica whose load is up to FACTOR times the least, and WORTH tokens above for
# each token of that beginning. Half as much again is what the rows of a step can differ by before its time does much: a
# step of 24 decode rows takes hardly longer than one of 16. WORTH weighs what must be computed again, once, against
# tokens that are mostly there already: a long conversation stays where it is beside a few others, and a short system
# prompt, which is soon in every cache, piles nothing up.
FACTOR = 1.5
WORTH = 4.0


class Router:
    """The rule by which requests find their replica.

    Loads are in tokens. The replica chosen has the longest known beginning of the prompt of all replicas whose load is
    at most FACTOR × the least load + WORTH × the tokens of that beginning. Equal beginnings go to the lower load, and
    equal loads to the replica that was chosen longest ago. Without a known beginning that is the least loaded one.
    """

    def __init__(self, replicas: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]  # newest last
        self._room = [KEPT] * replicas
        self._turns = [0] * replicas  # when each was last chosen
        self._turn = 0

    def forget(self, replica: int, room: int = KEPT) -> None:
        """Forget what a replica has cached. From now on its cache holds `room` tokens."""
        self._known[replica].clear()
        self._room[replica] = min(KEPT, room // BLOCK)

    def bound(self, replica: int, room: int | None) -> None:
        """A replica's cache holds `room` tokens (None: not known). What was noted longest ago beyond them is gone."""
        self._room[replica] = KEPT if room is None else min(KEPT, room // BLOCK)
        self._shorten(replica)

    def choose(self, prompt: Sequence[int] | bytes, salt: str, loads: Mapping[int, float]) -> int:
        """Return the replica for a prompt, of those with a load, and note that it will have the prompt cached. The
        prompt is token ids, or a text's bytes where they are not known."""
        keys = _keys(prompt, salt) if any(self._room[replica] for replica in loads) else []
        least = min(loads.values())
        hits = {replica: BLOCK * self._hit(replica, keys) for replica in loads}
        fit = [replica for replica, load in loads.items() if load <= FACTOR * least + WORTH * hits[replica]]
        chosen = min(fit, key=lambda replica: (-hits[replica], loads[replica], self._turns[replica]))
        self._turn += 1
        self._turns[chosen] = self._turn
        self._note(chosen, keys)
        return chosen

    def cached(self, replica: int, prompt: Sequence[int] | bytes, salt: str) -> int:
        """Return the number of tokens of the prompt's beginning that a replica is thought to have."""
        return BLOCK * self._hit(replica, _keys(prompt, salt))

    def _hit(self, replica: int, keys: list[int]) -> int:
        known = self._known[replica]
        return next((count for count, key in enumerate(keys) if key not in known), len(keys))

    def _note(self, replica: int, keys: list[int]) -> None:
        """Note blocks as the newest, the first of the prompt last: without it, those behind it are of no use."""
        known = self._known[replica]
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        self._shorten(replica)

    def _shorten(self, replica: int) -> None:
        known = self._known[replica]
        while len(known) > self._room[replica]:
            known.popitem(last=False)


def _keys(prompt: Sequence[int] | bytes, salt: str) -> list[int]:
    """Return a key for each whole block, which stands for all that the prompt has up to its end. Two that are equal by
    chance send a request to the wrong replica and do no other harm, so Python's own hash is good enough."""
    size = BLOCK * BYTES if isinstance(prompt, bytes) else BLOCK
    prompt = prompt if isinstance(prompt, bytes) else tuple(prompt[: size * MOST_BLOCKS])
    keys, key = list[int](), hash(salt)
    for start in range(0, min(len(prompt), size * MOST_BLOCKS) - size + 1, size):
        key = hash((key, prompt[start : start + size]))
        keys.append(key)
    return keys
