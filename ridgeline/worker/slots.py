"""The device's side of the slot table: the state of every running request, indexed by slot.

The host writes it only through a plan's deltas. The step itself advances kv_len, last_token, stopped and the output
counts.

Legend:
    S  slots
    A  cache groups
    C  columns of a block table
    E  stop ids of a slot
    B  biased ids of a slot
    V  vocabulary
    W  words of 32 bits
    n  some of the slots, or some ids
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.request import MAX_STOP_IDS
from ridgeline.core.plan.step import Assign, Delta, Feature, SetBlocks, features_of
from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.step.op import SlotAdvance
from ridgeline.worker.upload import staging, upload
from ridgeline.worker.words import Record, Words

_NUM_INTS = 6
# Float parameter → the name of its table
_FLOATS = {
    "temperature": "temperature_S",
    "top_p": "top_p_S",
    "min_p": "min_p_S",
    "typical_p": "typical_p_S",
    "repetition_penalty": "repetition_S",
    "presence_penalty": "presence_S",
    "frequency_penalty": "frequency_S",
}
# A slot's form in words, and as `struct` packs it: integers, floats, the stopped flag, the adapter, the shift, stop ids
_FORM_WIDTHS = [2] * _NUM_INTS + [1] * len(_FLOATS) + [1, 1, 1, 2 * MAX_STOP_IDS]
_FORM = Struct(f"<{_NUM_INTS}q{len(_FLOATS)}f3i{MAX_STOP_IDS}q")
_FIRST_BLOCKS = len(_FORM_WIDTHS)  # the index of the first block table, behind the tables of the form


class Slots:
    """The tables of all slots.

    kv_len_S: how many tokens the cache holds.
    last_token_S: the input of the slot's next row that has no span.
    stopped_S: not 0 once the device has seen the end. Rows of the slot then write to the null block and emit -1 until
        the next Assign.
    max_len_S: the total length at which to stop.
    adapter_S: the place of the request's adapter, from 1; 0: it has none.
    shift_S: the difference between a token's position and its number, behind the prompt.
    """

    def __init__(self, num_slots: int, num_groups: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.dummy = num_slots  # a slot that is always stopped, for padding rows
        num_slots += 1
        self.generations = np.zeros(num_slots, np.int32)  # the generation of the request in each slot; 0: it is free
        self.forms: dict[int, Assign] = {}  # the full form that each slot was last assigned
        self._words = words = Words(num_slots, _FORM_WIDTHS + [max_blocks] * num_groups, device)
        self._form = Record(words, len(_FORM_WIDTHS))
        ints = [words.column(table, torch.int64) for table in range(_NUM_INTS)]
        self.kv_len_S, self.last_token_S, self.max_len_S, top_k_S, seed_S, min_len_S = ints
        tables = {"top_k_S": top_k_S, "seed_S": seed_S, "min_len_S": min_len_S}
        tables |= {name: words.column(table, torch.float32) for table, name in enumerate(_FLOATS.values(), _NUM_INTS)}
        tables["stop_ids_SE"] = words.rows(_FIRST_BLOCKS - 1, torch.int64)
        self.stopped_S = words.column(_FIRST_BLOCKS - 4, torch.int32).fill_(1)
        self.adapter_S = words.column(_FIRST_BLOCKS - 3, torch.int32).fill_(0)
        self.shift_S = words.column(_FIRST_BLOCKS - 2, torch.int32).fill_(0)
        self.block_tables_ASC = words.int32_tables(_FIRST_BLOCKS, num_groups).fill_(NULL_BLOCK)
        empty = SamplingTables.empty(num_slots, vocab_size, device)
        for name, table in tables.items():
            table.copy_(getattr(empty, name))
        self.sampling = replace(empty, **tables)
        self._biased: set[int] = set()  # slots whose row of the bias table is, or may be, not empty

    def reset(self) -> None:
        """Forget every slot. The plan that resets carries the full forms of the requests that live on."""
        self.forms.clear()
        self.generations.fill(0)
        self._biased.update(range(self.dummy))  # their contents are unknown
        self.stopped_S.fill_(1)

    def apply(self, deltas: Sequence[Delta]) -> None:
        """Bring the tables up to date. Within a plan a later delta overrides an earlier one."""
        blocks: dict[int, int] = {}  # place among the words → block id
        assigned: dict[int, Assign] = {}
        for delta in deltas:
            if isinstance(delta, SetBlocks):
                place = self._words.place(_FIRST_BLOCKS + delta.group, delta.slot, delta.start)
                blocks.update(enumerate(delta.block_ids, place))
            elif isinstance(delta, Assign):
                assigned[delta.slot] = delta
                for table, ids in enumerate(delta.blocks, _FIRST_BLOCKS):
                    blocks.update(enumerate(ids, self._words.place(table, delta.slot)))
            else:
                self.forms.pop(delta.slot, None)
                self.generations[delta.slot] = 0
                assigned.pop(delta.slot, None)
        if blocks or assigned:
            self._write(blocks, list(assigned.values()))

    def _write(self, blocks: Mapping[int, int], forms: Sequence[Assign]) -> None:
        form_words_nW = _form_words(forms)
        count = len(blocks)
        total = count + form_words_nW.size
        staged_3W = staging(3 * total, self.device)
        change = staged_3W.numpy()
        places_W, words_W = change[: 2 * total].view(np.int64), change[2 * total :]
        places_W[:count], words_W[:count] = list(blocks), list(blocks.values())
        if forms:
            places_W[count:] = self._form.places([form.slot for form in forms]).reshape(-1)
            words_W[count:] = form_words_nW.reshape(-1)
        self._words.write(staged_3W.to(self.device, non_blocking=True))
        for form in forms:
            self.forms[form.slot] = form
            self.generations[form.slot] = form.generation
            features = features_of(form.params, masked=False)
            if form.slot in self._biased or features & Feature.BIAS:
                self._assign_bias(form)
            if features & Feature.PENALTY:
                self._count_tokens(form)

    def _assign_bias(self, form: Assign) -> None:
        bias, tables = form.params.logit_bias or {}, self.sampling  # an empty one clears the last request's
        width = tables.bias_SB.shape[1]
        tables.bias_ids_SB[form.slot] = upload(np.array(_padded(list(bias), width), np.int64), self.device)
        tables.bias_SB[form.slot] = upload(np.array(_padded(list(bias.values()), width, 0), np.float32), self.device)
        (self._biased.add if bias else self._biased.discard)(form.slot)

    def _count_tokens(self, form: Assign) -> None:
        seen_V, count_V = self.sampling.prompt_seen_SV[form.slot], self.sampling.output_count_SV[form.slot]
        prompt = () if form.embedded else form.prompt
        seen_V.zero_().index_fill_(0, upload(np.array(prompt, np.int64), self.device), True)
        count_V.zero_()
        if form.output:
            ids_counts = np.stack(np.unique(np.array(form.output, np.int64), return_counts=True))
            ids_n, counts_n = upload(ids_counts, self.device)
            count_V.index_copy_(0, ids_n, counts_n.to(count_V.dtype))

    def advancing(
        self, slots_R: Tensor, kv_len_R: Tensor, active_R: Tensor, features: Feature = Feature.NONE
    ) -> SlotAdvance:
        """Return the rows of a step and the tables in which they advance. features: those of the rows."""
        counts_SV = self.sampling.output_count_SV if features & Feature.PENALTY else None
        tables = self.max_len_S, self.kv_len_S, self.last_token_S, self.stopped_S
        return SlotAdvance(slots_R, kv_len_R, active_R, self.sampling.stop_ids_SE, *tables, counts_SV)

    def lengthen(self, slots_R: Tensor, kv_len_R: Tensor, active_R: Tensor, ops: Ops) -> None:
        """Note how far the caches of a step's rows reach now, which draw no tokens here."""
        tokens, codes = (
            torch.empty(len(slots_R), dtype=each, device=self.device) for each in (torch.int32, torch.int8)
        )
        none_R = torch.zeros_like(active_R)
        ops.step_advance(slots_R, none_R, self.advancing(slots_R, kv_len_R, active_R), tokens, codes)

    def check(self, expected: Mapping[int, Assign]) -> None:
        """Raise ContractViolation, naming slot and field, where the tables differ from the engine's full forms. For
        debugging: it reads the device.

        A slot that the device has stopped keeps its own kv_len.
        """
        for slot, form in expected.items():
            have: dict[str, object] = {"generation": int(self.generations[slot]), "max_len": int(self.max_len_S[slot])}
            want: dict[str, object] = {"generation": form.generation, "max_len": form.max_total_tokens}
            have["adapter"], want["adapter"] = int(self.adapter_S[slot]), form.adapter
            have["shift"], want["shift"] = int(self.shift_S[slot]), form.shift
            if not self.stopped_S[slot]:
                have["kv_len"], want["kv_len"] = int(self.kv_len_S[slot]), form.kv_len
            for group, ids in enumerate(form.blocks):
                have[f"blocks of group {group}"] = tuple(self.block_tables_ASC[group, slot, : len(ids)].tolist())
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


_floats_of = attrgetter(*_FLOATS)


def _form_words(forms: Sequence[Assign]) -> np.ndarray:
    """Pack each form as `_FORM` says: int32 [n, W]."""
    packed = b"".join(
        _FORM.pack(
            *_ints_of(form),
            *_floats_of(form.params),
            0,
            form.adapter,
            form.shift,
            *_padded(sorted(form.stop_ids), MAX_STOP_IDS),
        )
        for form in forms
    )
    return np.frombuffer(packed, np.int32).reshape(len(forms), _FORM.size // 4)


def _ints_of(form: Assign) -> list[int]:
    last_token = max(0, form.last_token or 0)
    min_len = len(form.prompt) + form.params.min_tokens
    return [
        form.kv_len,
        last_token,
        form.max_total_tokens,
        max(0, form.params.top_k),
        _as_int64(form.seed),
        min_len,
    ]


def _padded(values: list, width: int, filler: float = -1) -> list:
    return values + [filler] * (width - len(values))


def _used(ids: Tensor) -> list[int]:
    return sorted(i for i in ids.tolist() if i >= 0)


def _as_int64(seed: int) -> int:
    """Return the 64 bits of a seed as a signed integer, as torch has it."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
