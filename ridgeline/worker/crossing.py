"""Pictures that layers of cross attention see: a tower runs over them before a request's first row, and these layers
keep keys and values of its output.

Legend:
    T  vectors of the pictures of a step, packed behind one another
    M  model width
    S  slots
    U  pictures of a slot
    C  columns of a block table
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.crossed import MOST_PICTURES, MOST_RUNS, PictureKeys
from ridgeline.core.plan.pictures import ShownPictures
from ridgeline.layers.cross_attention import crossing
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.pictures import Pictures
from ridgeline.worker.slots import Slots
from ridgeline.worker.state.cross import BEHIND, SeenKeys, SeenKV
from ridgeline.worker.state.states import States
from ridgeline.worker.step import PlannedStep, StepPart
from ridgeline.worker.upload import upload


class PicturesSeen(StepPart):
    """The part that runs a tower over the pictures that a plan's spans bring, and tells the layers where their keys
    are. It sizes its work on the host, so it is never in a graph."""

    def __init__(self, decoder: Decoder, slots: Slots, states: States, pictures: Pictures, block_size: int) -> None:
        self._slots, self._states, self._block_size = slots, states, block_size
        self.pictures = pictures
        self._layers = crossing(decoder.layers)
        self._groups = [(g, group) for g, group in enumerate(states.groups) if isinstance(group, SeenKV)]
        columns = -(-decoder.spec.most_crossed // block_size)
        self._seen = SeenKeys(len(slots.kv_len_S), columns, len(self._groups), slots.device)
        for number, (_, group) in enumerate(self._groups):
            group.seen, group.number = self._seen, number

    def prepare(self, step: PlannedStep) -> None:
        """Note where the pictures' keys are, encode those that are new, and store their keys and values."""
        slots_R, given = step.plan.rows.slots_R, list[tuple[int, PictureKeys, ShownPictures]]()
        for span in step.plan.spans:
            if span.crossed is None:
                continue
            slot, keys, shown = int(slots_R[span.row]), span.crossed.keys, span.crossed.shown
            self._note(slot, keys)
            given += [(slot, *each) for each in zip(keys[len(keys) - len(shown) :], shown, strict=True)]
        if given:
            self._encode(given)

    def _note(self, slot: int, keys: tuple[PictureKeys, ...]) -> None:
        noted_3U = np.tile(np.array([[BEHIND], [1], [0]], np.int64), (1, MOST_PICTURES))
        for index, each in enumerate(keys):
            noted_3U[:, index] = each.token, each.end - each.first, each.run
        token_U, length_U, run_U = upload(noted_3U, self._slots.device).int()
        seen = self._seen
        seen.token_SU[slot], seen.length_SU[slot], seen.run_SU[slot] = token_U, length_U, run_U
        for (g, _), table_RC in zip(self._groups, seen.tables, strict=True):
            blocks_C = self._slots.block_tables_ASC[g][slot]
            for each in keys:
                if each.first == each.start:
                    own_C = blocks_C[each.first // self._block_size :][: table_RC.shape[1]]
                    table_RC[slot * MOST_RUNS + each.run, : len(own_C)] = own_C

    def _encode(self, given: list[tuple[int, PictureKeys, ShownPictures]]) -> None:
        made: dict[str, Tensor] = {}
        self.pictures.encode({str(index): shown for index, (_, _, shown) in enumerate(given)}, made)
        encoded_TM = torch.cat([made[str(index)] for index in range(len(given))])
        slots = np.concatenate([np.full(keys.end - keys.start, slot) for slot, keys, _ in given])
        places = np.concatenate([np.arange(keys.start, keys.end) for _, keys, _ in given])
        slot_T, place_T = upload(np.stack((slots, places)).astype(np.int64), self._slots.device)
        for g, group in self._groups:
            group.place(slot_T, place_T, self._slots.block_tables_ASC[g])
        for index, mixer in self._layers:
            mixer.encode(encoded_TM, self._states[index])
