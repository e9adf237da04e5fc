"""The engine's side of the slot table: the sequence of each slot, and optimistic counts as columns.

Columns (numpy, indexed by slot) let one step advance every decoding request with a handful of vector operations;
Python runs only for the requests to which something happens.
"""

from __future__ import annotations

import numpy as np

from ridgeline.engine.sequence import NO_SLOT, Sequence


class SlotTable:
    """kv_len: tokens in the cache once every submitted plan has run, if its rows emit all they may. capacity: kv_len
    from which on its blocks have no room for a decoding row. last_kv_len: kv_len after which the request has sampled
    its last token. used: a sequence has the slot. known, prompt, shared: its tokens when it got it, those of its
    prompt, and those in blocks that others had as well. limits: the sum of the most tokens that each one in a slot can
    come to. kinds: the features and numbers of logprobs that they have, and how many have each. generation, features,
    num_logprobs: the sequence's own."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self.limits = 0
        self.kinds: dict[tuple[int, int], int] = {}
        self.generation = np.zeros(num_slots, np.int32)
        self.features = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.zeros(num_slots, np.int32)
        self.kv_len = np.zeros(num_slots, np.int32)
        self.capacity = np.zeros(num_slots, np.int32)
        self.last_kv_len = np.zeros(num_slots, np.int32)
        self.used = np.zeros(num_slots, np.bool_)
        self.known = np.zeros(num_slots, np.int32)
        self.prompt = np.zeros(num_slots, np.int32)
        self.shared = np.zeros(num_slots, np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.used) - len(self._free)

    def acquire(self, seq: Sequence, kv_len: int) -> None:
        """Give `seq` a free slot under a new generation."""
        slot = self._free.pop()
        self.generation[slot] += 1
        seq.slot, seq.generation = slot, self.generation.item(slot)
        self.features[slot], self.num_logprobs[slot] = seq.features, seq.num_logprobs
        kind = seq.features, seq.num_logprobs
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.kv_len[slot] = self.capacity[slot] = kv_len
        last = self.last_kv_len[slot] = seq.request.max_total_tokens - 1
        known = self.known[slot] = len(seq.tokens)
        self.limits += max(last, known)
        self.used[slot] = True
        self.prompt[slot], self.shared[slot] = seq.num_prompt, seq.shared_tokens

    def release(self, seq: Sequence) -> None:
        self._free.append(seq.slot)
        self.limits -= max(self.last_kv_len.item(seq.slot), self.known.item(seq.slot))
        kind = int(self.features[seq.slot]), int(self.num_logprobs[seq.slot])
        self.kinds[kind] -= 1
        if not self.kinds[kind]:
            del self.kinds[kind]
        self.used[seq.slot] = False
        seq.slot = NO_SLOT
