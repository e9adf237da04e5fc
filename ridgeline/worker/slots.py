"""The device's side of the slot table: everything a running request is, indexed by slot.

The host writes it only through a plan's deltas; the step itself advances kv_len, last_token, stopped and the output
counts. Legend: S slots, C columns of a block table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.cache_spec import NULL_BLOCK
from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan import Assign, Delta, Feature, SetBlocks, features_of
from ridgeline.kernels.sampling.op import SamplingTables

# float parameter → its table
_FLOATS = {
    "temperature": "temperature_S",
    "top_p": "top_p_S",
    "min_p": "min_p_S",
    "repetition_penalty": "repetition_S",
    "presence_penalty": "presence_S",
    "frequency_penalty": "frequency_S",
}


class Slots:
    """kv_len_S: tokens in the cache. last_token_S: input of the next row without a span. stopped_S: the device saw the
    end; rows of the slot write to the null block and emit -1 until the next Assign. max_len_S: total length to stop at.
    """

    def __init__(self, num_slots: int, num_groups: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.generations = np.zeros(num_slots, np.int32)  # of the request in the slot, 0 when it is free
        self.forms: dict[int, Assign] = {}  # host copy of the full form each slot was last assigned
        self.kv_len_S, self.last_token_S, self.max_len_S = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        self.stopped_S = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.block_tables_SC = [
            torch.full((num_slots, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self.sampling = SamplingTables.empty(num_slots, vocab_size, device)

    def reset(self) -> None:
        """Forget every slot; the plan that asked for it carries the full forms of those that live on."""
        self.forms.clear()
        self.generations.fill(0)
        self.stopped_S.fill_(True)

    def apply(self, deltas: Sequence[Delta]) -> None:
        """Bring the tables up to date. Within a plan later deltas win."""
        blocks: dict[tuple[int, int, int], int] = {}  # (group, slot, column) → block id
        assigned: dict[int, Assign] = {}
        for delta in deltas:
            if isinstance(delta, SetBlocks):
                for column, block in enumerate(delta.block_ids, start=delta.start):
                    blocks[delta.group, delta.slot, column] = block
            elif isinstance(delta, Assign):
                assigned[delta.slot] = delta
                for group, ids in enumerate(delta.blocks):
                    blocks.update({(group, delta.slot, column): block for column, block in enumerate(ids)})
            else:
                self.forms.pop(delta.slot, None)
                self.generations[delta.slot] = 0
                assigned.pop(delta.slot, None)
        if blocks:
            self._set_blocks(blocks)
        if assigned:
            self._assign(list(assigned.values()))

    def _set_blocks(self, blocks: Mapping[tuple[int, int, int], int]) -> None:
        for group, table_SC in enumerate(self.block_tables_SC):
            entries = [(slot, column, block) for (g, slot, column), block in blocks.items() if g == group]
            if entries:
                slot, column, block = torch.from_numpy(np.array(entries, np.int32).T.copy()).to(self.device)
                table_SC[slot, column] = block

    def _assign(self, forms: list[Assign]) -> None:
        for form in forms:
            self.forms[form.slot] = form
            self.generations[form.slot] = form.generation
        slots = self._ints([form.slot for form in forms])
        last = [max(0, form.last_token or 0) for form in forms]
        self.kv_len_S[slots] = self._ints([form.kv_len for form in forms])
        self.last_token_S[slots] = self._ints(last)
        self.max_len_S[slots] = self._ints([form.max_total_tokens for form in forms])
        self.stopped_S[slots] = False
        self._assign_sampling(forms, slots)

    def _assign_sampling(self, forms: list[Assign], slots: Tensor) -> None:
        tables = self.sampling
        numbers = [[getattr(form.params, name) for name in _FLOATS] for form in forms]
        columns = torch.tensor(numbers, dtype=torch.float32).to(self.device).unbind(1)
        for table, column in zip(_FLOATS.values(), columns, strict=True):
            getattr(tables, table)[slots] = column
        tables.top_k_S[slots] = self._ints([max(0, form.params.top_k) for form in forms])
        tables.seed_S[slots] = self._ints([_as_int64(form.seed) for form in forms])
        tables.min_len_S[slots] = self._ints([len(form.prompt) + form.params.min_tokens for form in forms])
        width = tables.stop_ids_SE.shape[1]
        tables.stop_ids_SE[slots] = self._ints([_padded(sorted(form.stop_ids), width) for form in forms])
        tables.bias_ids_SB[slots] = -1  # what the slot's last request left would count beside a biased row
        tables.bias_SB[slots] = 0
        for form in forms:
            features = features_of(form.params, masked=False)
            if features & Feature.BIAS:
                self._assign_bias(form)
            if features & Feature.PENALTY:
                self._count_tokens(form)

    def _assign_bias(self, form: Assign) -> None:
        bias, tables = form.params.logit_bias or {}, self.sampling
        width = tables.bias_SB.shape[1]
        tables.bias_ids_SB[form.slot] = self._ints(_padded(list(bias), width))
        tables.bias_SB[form.slot] = torch.tensor(_padded([float(b) for b in bias.values()], width, 0.0)).to(self.device)

    def _count_tokens(self, form: Assign) -> None:
        seen_V, count_V = self.sampling.prompt_seen_SV[form.slot], self.sampling.output_count_SV[form.slot]
        seen_V.zero_()[self._ints(list(form.prompt))] = True
        count_V.zero_()
        if form.output:
            count_V += torch.bincount(self._ints(list(form.output)), minlength=len(count_V)).to(count_V.dtype)

    def check(self, expected: Mapping[int, Assign]) -> None:
        """Debug mode: what the deltas folded to must equal the engine's full forms. Reads the device.

        Raises ContractViolation naming slot and field. A slot the device has stopped keeps its own kv_len.
        """
        for slot, form in expected.items():
            have: dict[str, object] = {"generation": int(self.generations[slot]), "max_len": int(self.max_len_S[slot])}
            want: dict[str, object] = {"generation": form.generation, "max_len": form.max_total_tokens}
            if not self.stopped_S[slot]:
                have["kv_len"], want["kv_len"] = int(self.kv_len_S[slot]), form.kv_len
            for group, ids in enumerate(form.blocks):
                have[f"blocks of group {group}"] = tuple(self.block_tables_SC[group][slot, : len(ids)].tolist())
                want[f"blocks of group {group}"] = ids
            self._note_sampling(slot, form, have, want)
            for field, value in want.items():
                if have[field] != value:
                    raise ContractViolation(f"slot {slot}: {field} is {have[field]}, the engine expects {value}.")

    def _note_sampling(self, slot: int, form: Assign, have: dict[str, object], want: dict[str, object]) -> None:
        tables, params = self.sampling, form.params
        have |= {name: float(getattr(tables, table)[slot]) for name, table in _FLOATS.items()}
        want |= {name: float(np.float32(getattr(params, name))) for name in _FLOATS}
        have |= {"seed": int(tables.seed_S[slot]), "top_k": int(tables.top_k_S[slot])}
        want |= {"seed": _as_int64(form.seed), "top_k": max(0, params.top_k)}
        have |= {"min_len": int(tables.min_len_S[slot]), "stop ids": _used(tables.stop_ids_SE[slot])}
        want |= {"min_len": len(form.prompt) + params.min_tokens, "stop ids": sorted(form.stop_ids)}
        have["biased ids"], want["biased ids"] = _used(tables.bias_ids_SB[slot]), sorted(params.logit_bias or ())

    def _ints(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


def _padded(values: list, width: int, filler: float = -1) -> list:
    return values + [filler] * (width - len(values))


def _used(ids: Tensor) -> list[int]:
    return sorted(i for i in ids.tolist() if i >= 0)


def _as_int64(seed: int) -> int:
    """The 64 bits of a seed as torch's signed integer."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
