"""Cases of drafts by lookup, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.kernels.step.lookup.recent import NOTHING, note


@dataclass(frozen=True, kw_only=True)
class LookupCase:
    """A case for tests. lengths: the known tokens of each row before it emits; 0: the row emits nothing. vocab_size:
    the fewer tokens there are, the more often they repeat."""

    lengths: tuple[int, ...]
    columns: int = 4
    drafts: int = 3
    vocab_size: int = 3
    shortest: int = 2
    longest: int = 4
    room: int = 100

    def inputs(self, device: torch.device, seed: int = 0) -> list:
        """Return the arguments of `lookup_drafts`. The last row's slot has stopped, and the last slot is free."""
        generator = torch.Generator().manual_seed(seed)
        rows, most = len(self.lengths), max(self.lengths) + self.columns + 2
        texts = torch.randint(0, self.vocab_size, (rows + 1, most), generator=generator, dtype=torch.int32)
        emitted = torch.randint(0, self.vocab_size, (rows, self.columns), generator=generator, dtype=torch.int32)
        counts = torch.randint(1, self.columns + 1, (rows,), generator=generator)
        counts[torch.tensor(self.lengths) == 0] = 0
        emitted[torch.arange(self.columns) >= counts[:, None]] = -1
        slots_R = torch.randperm(rows, generator=generator)
        kv_len_S = torch.zeros(rows + 1, dtype=torch.int64)
        kv_len_S[slots_R] = (torch.tensor(self.lengths) + counts - 1).clamp(min=0)
        max_len_S = kv_len_S + torch.randint(1, self.room, (rows + 1,), generator=generator)
        stopped_S = torch.zeros(rows + 1, dtype=torch.int32)
        stopped_S[slots_R[-1]] = int(rows > 1)
        drafts = torch.randint(0, 9, (rows + 1, self.drafts), generator=generator, dtype=torch.int32)
        shared_S = torch.full((rows + 1,), 9, dtype=torch.int32)
        tensors = (emitted, slots_R.int(), kv_len_S, max_len_S, stopped_S, texts, drafts, shared_S)
        return [*(x.to(device) for x in tensors), self.shortest, self.longest]


CASES = (
    LookupCase(lengths=(1,), shortest=1, longest=1),
    LookupCase(lengths=(5, 0, 40, 1, 300)),
    LookupCase(lengths=(2000, 37, 3000, 12), vocab_size=6, shortest=3, longest=5, drafts=16, columns=17),
    LookupCase(lengths=(64, 129, 31), vocab_size=2, shortest=1, longest=9, drafts=5, columns=1, room=4),
    LookupCase(lengths=(1500, 1025), vocab_size=1, shortest=2, longest=2, drafts=7),
)


@dataclass(frozen=True, kw_only=True)
class RecentCase(LookupCase):
    """A case for tests: one of `lookup_drafts`, whose texts hold the emitted tokens already. places: of the table, some
    of which hold entries."""

    places: int = 4096
    length: int = 3

    def inputs(self, device: torch.device, seed: int = 0) -> list:
        """Return the arguments of `recent_drafts`. Every third slot has a salt of its own."""
        emitted_RK, slots_R, *lengths, text_SN, drafts_SD, _ = super().inputs(torch.device("cpu"), seed)[:8]
        generator = torch.Generator().manual_seed(seed)
        for row, slot in enumerate(slots_R.tolist()):
            count, known = int((emitted_RK[row] >= 0).sum()), int(lengths[0][slot]) + 1
            if count:
                text_SN[slot, known - count : known] = emitted_RK[row, :count]
        shared_S = torch.randint(0, self.length + 1, (len(text_SN),), generator=generator, dtype=torch.int32)
        salt_S = torch.arange(len(text_SN)) % 3 // 2 * -0x123456789ABCDEF
        next_H = torch.full((self.places,), NOTHING)
        for slot, text in enumerate(text_SN.numpy()):  # what the texts hold was noted before
            if len(text) > self.length:
                grams = np.lib.stride_tricks.sliding_window_view(text[:-1], self.length)
                note(next_H.numpy(), grams, np.full(len(grams), int(salt_S[slot]), np.int64), text[self.length :])
        tensors = (emitted_RK, slots_R, *lengths, text_SN, shared_S, salt_S, next_H, drafts_SD)
        return [*(x.to(device) for x in tensors), self.length]


RECENT_CASES = (
    RecentCase(lengths=(5,), length=1),
    RecentCase(lengths=(5, 0, 40, 1, 300), length=2),
    RecentCase(lengths=(90, 37, 200, 12), vocab_size=30, drafts=16, columns=17, length=5),
    RecentCase(lengths=(64, 29, 31, 40, 40, 40), vocab_size=2, places=8, drafts=5, columns=2, room=4, length=2),
    RecentCase(lengths=(150, 70), vocab_size=2, length=64, drafts=7, columns=6),
)
