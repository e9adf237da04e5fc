"""Cases of the ops around a step, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A case for tests.

    counts: the tokens of each row; None is a row of one token whose slot is stopped.
    """

    counts: tuple[int | None, ...]
    padded_rows: int = 0
    padded_tokens: int = 0
    groups: int = 1
    block_size: int = 16
    vocab_size: int = 1000
    stop_ids: int = 8

    def tables(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Return the slots by field, without block tables. There is a slot for each row, two unused slots, and the
        dummy at the end."""
        generator = torch.Generator().manual_seed(seed)
        slots = len(self.counts) + 3
        numbers = torch.stack(
            [
                torch.randint(0, 100, (slots,), generator=generator),
                torch.randint(0, self.vocab_size, (slots,), generator=generator),
                torch.randint(60, 160, (slots,), generator=generator),
            ]
        ).to(device)
        kv_len_S, last_token_S, max_len_S = numbers
        stop_ids_SE = torch.randint(-1, self.vocab_size, (slots, self.stop_ids), generator=generator).clamp(min=-1)
        stop_ids_SE[:, -2:] = -1
        return {
            "kv_len_S": kv_len_S,
            "last_token_S": last_token_S,
            "max_len_S": max_len_S,
            "stop_ids_SE": stop_ids_SE.to(device),
            "stopped_S": torch.ones(slots, dtype=torch.int32, device=device),
            "output_count_SV": torch.zeros(slots, self.vocab_size, dtype=torch.int32, device=device),
        }

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[dict[str, Tensor], list]:
        """Return (tables, arguments of `step_inputs`). Half of the rows' first tokens, and all of their other tokens,
        are overridden."""
        generator = torch.Generator().manual_seed(seed)
        tables = self.tables(device, seed)
        counts = [1 if count is None else count for count in self.counts] + [0] * self.padded_rows
        tokens, dummy = sum(counts) + self.padded_tokens, len(self.counts) + 2
        slots_R = [*torch.randperm(dummy, generator=generator)[: len(self.counts)].tolist()]
        for slot, count in zip(slots_R, self.counts, strict=True):
            tables["stopped_S"][slot] = count is None
        starts = torch.tensor([0, *counts]).cumsum(0)
        override_T = torch.randint(0, self.vocab_size, (tokens,), generator=generator, dtype=torch.int32)
        single = starts[:-1][torch.tensor(counts) > 0]
        override_T[single[torch.rand(len(single), generator=generator) < 0.5]] = -1
        columns = -(-(100 + max(counts)) // self.block_size)
        tables_ASC = torch.randint(1, 9999, (self.groups, dummy + 2, columns + 3), generator=generator).int().to(device)
        tables_ASC = tables_ASC[:, :-1, :columns]  # neither tables nor their rows need be contiguous
        slots = torch.tensor(slots_R + [dummy] * self.padded_rows, dtype=torch.int32, device=device)
        names = ("kv_len_S", "last_token_S", "stopped_S")
        return tables, [
            slots, starts.int().to(device), override_T.to(device), *(tables[n] for n in names), tables_ASC,
            self.block_size,
        ]  # fmt: skip


CASES = (
    StepCase(counts=(1,)),
    StepCase(counts=(1, 1, None, 1), padded_rows=4, padded_tokens=4),
    StepCase(counts=(7, 0, 40, 1, None, 300), groups=2, block_size=4),
    StepCase(counts=(33, 1, 1), padded_rows=13, padded_tokens=29, groups=4),
    StepCase(counts=(4, None, 1, 60), padded_rows=2, padded_tokens=9, groups=7, block_size=8),
    StepCase(counts=(None, None), padded_tokens=1),
)


@dataclass(frozen=True, kw_only=True)
class KeepCase:
    """A case for tests.

    kept: the tokens that each row keeps of its 1 + `drafts`; None is a row whose slot is stopped, and 0 one that
        verified nothing.
    lengths: the tokens before each row.
    shared: all entries of a row's table name one block.
    """

    kept: tuple[int | None, ...]
    lengths: tuple[int, ...]
    drafts: int = 3
    block_size: int = 16
    layers: int = 2
    words: int = 5
    shared: bool = False

    def inputs(self, device: torch.device) -> tuple[tuple, Tensor, Tensor]:
        """Return (arguments of `step_keep` up to the scratch, the scratch, all units)."""
        rows, columns = len(self.kept), 64 // self.block_size + 4
        places = torch.arange(rows * columns).view(rows, columns) // (columns if self.shared else 1)
        table_SC = torch.full((rows + 2, columns + 3), 10**9, dtype=torch.int32)[:, :columns]
        table_SC[1:-1] = 1 + places.int()
        scratch_DR = 1 + rows * columns + torch.arange(rows * self.drafts).view(self.drafts, rows)
        verify_R = torch.tensor([1 if kept == 0 else 1 + self.drafts for kept in self.kept], dtype=torch.int32)
        kept_R = torch.tensor([1 if kept in (0, None) else kept for kept in self.kept])
        active_R = torch.tensor([kept is not None for kept in self.kept])
        length_R = torch.tensor(self.lengths)
        kv_len_S = torch.zeros(rows + 2, dtype=torch.int64)
        kv_len_S[1:-1] = length_R + kept_R
        ids = 1 + rows * columns + rows * self.drafts
        units_NW = torch.arange(self.layers * ids * self.words).view(-1, self.words)
        slots_R, kv_len_R = 1 + torch.arange(rows).int(), torch.where(active_R, length_R + verify_R, 1)
        given = slots_R, kv_len_R, active_R, verify_R, kv_len_S
        table_SC = table_SC.to(device)
        return (*(part.to(device) for part in given), table_SC, self.block_size), scratch_DR.to(device), units_NW


KEEP_CASES = (
    KeepCase(kept=(4, 1, 2, None, 3, 0), lengths=(5, 16, 15, 20, 30, 9)),
    KeepCase(kept=(4, 4, 3, 2), lengths=(1, 2, 3, 4), block_size=2),
    KeepCase(kept=(4, 3, None, 2), lengths=(6, 7, 8, 9), block_size=1, layers=1, words=1500),
    KeepCase(kept=(6, 5), lengths=(13, 14), drafts=5, shared=True),
)
