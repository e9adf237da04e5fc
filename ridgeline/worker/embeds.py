"""Vectors that stand in the place of tokens' embeddings, on their way to the network.

Legend:
    t  tokens of the step whose embeddings are given
    L  positions that are stored under a name
    M  model width
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import EncoderFigures, ShownPictures
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.encoder.tower import Tower
from ridgeline.layers.given import GivenPlaces, GivenRows
from ridgeline.parallel.axis import Axis
from ridgeline.worker.adapters.tables import AdapterTables
from ridgeline.worker.listening import HeardSounds
from ridgeline.worker.pictures import Pictures
from ridgeline.worker.step import PlannedStep, StepPart
from ridgeline.worker.upload import upload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InsertedVectors(StepPart):
    """The vectors that plans may insert.

    stored: [L, M] by name, on the device, as an encoder leaves them. Of pictures that are tokens: these, int64 [L, 1].
    adapters: those that may change the tower or listener.
    missed: the tower ran op by op what may be captured now.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self.stored: dict[str, Tensor] = {}
        self.adapters: AdapterTables | None = None
        self.missed = False
        self._decoder, self._device, self._width = decoder, device, decoder.spec.hidden_size
        self._pictures = None if decoder.tower is None else Pictures(decoder.tower, device)
        self._sounds = None if decoder.listener is None else HeardSounds(decoder.listener, device)
        # Towers that make codes agree about these among ranks
        shared = decoder.mesh.shares_pictures and isinstance(decoder.tower, Tower)
        self._shares = shared and decoder.tp.size > 1

    @property
    def pictures(self) -> Pictures | None:
        """The part that makes vectors of pictures, if the model sees some."""
        return self._pictures

    def figures(self) -> EncoderFigures | None:
        """Return the tower's work so far; None without one."""
        return None if self._pictures is None else self._pictures.figures()

    def prepare(self, step: PlannedStep) -> None:
        """Find the vectors that the plan's spans bring or name, and the places of their tokens in the step."""
        for name in step.plan.forgets:
            self.stored.pop(name, None)
        if placed := [(span.row, span.positions_3T) for span in step.plan.spans if span.positions_3T is not None]:
            self._place(step, placed)
        if any(span.both_ways for span in step.plan.spans):
            step.ahead_T = self._ahead(step)
        given = [(span.row, each) for span in step.plan.spans for each in span.inserted]
        if not given or not self._decoder.spec.embeds:
            return
        self._encode([each for _, each in given if each.made_of is not None])
        if self._decoder.spec.senses_only:
            step.pictured = {row: self.stored[each.name] for row, each in given}
            return
        if self._pictures is not None and self._pictures.embeds:
            step.pictured = {row: self._vectors(each)[0] for row, each in given}
            return
        rows = step.plan.rows
        start_R = np.cumsum(rows.num_tokens_R) - rows.num_tokens_R
        places = [start_R[row] + np.arange(each.start, each.end) for row, each in given]
        x_tM, *deep = _joined([self._vectors(each) for _, each in given]).split(self._width, dim=1)
        step.given = GivenRows(upload(np.concatenate(places).astype(np.int64), self._device), x_tM, deep)

    def _encode(self, parts: list[Inserted]) -> None:
        """Store the vectors of pictures and sounds. Those of one adapter run together."""
        for place in sorted({each.adapter for each in parts}):
            own = [each for each in parts if each.adapter == place]
            with nullcontext() if self.adapters is None else self.adapters.seeing(place):
                if self._pictures is not None:
                    shown = {each.name: each.shown for each in own if each.shown}
                    adapted = self.adapters is not None and self.adapters.seen.adapts
                    if self._shares and len(shown) > 1:
                        mine = own_share(shown, self._decoder.tp)
                        self._pictures.encode(mine, self.stored, adapted=adapted)
                        self._exchange(shown, mine)
                    else:
                        self._pictures.encode(shown, self.stored, adapted=adapted)
                    graphs = self._pictures.graphs
                    self.missed = graphs is not None and graphs.missed is not None
                if self._sounds is not None:
                    self._sounds.encode({each.name: each.heard for each in own if each.heard}, self.stored)

    def _exchange(self, shown: Mapping[str, ShownPictures], mine: Mapping[str, ShownPictures]) -> None:
        """Store the vectors of other ranks' pictures, which add theirs to this one's zeros."""
        tp, tower = self._decoder.tp, self._decoder.tower
        assert isinstance(tower, Tower)
        counts = [len(self.stored[name]) if name in mine else 0 for name in shown]
        found = tp.all_reduce(torch.tensor(counts, dtype=torch.float32, device=self._device)).int().tolist()
        all_LM = torch.zeros(sum(found), tower.spec.outputs, dtype=tower.dtype, device=self._device)
        parts = all_LM.split(found)
        for name, part_LM in zip(shown, parts, strict=True):
            if name in mine:
                part_LM.copy_(self.stored[name])
        for name, part_LM in zip(shown, tp.all_reduce(all_LM).split(found), strict=True):
            self.stored[name] = part_LM.clone()

    def _place(self, step: PlannedStep, given: list[tuple[int, np.ndarray]]) -> None:
        """Bring the positions of spans whose tokens have three to the device, by their rows."""
        rows = step.plan.rows
        start_R = np.cumsum(rows.num_tokens_R) - rows.num_tokens_R
        token_t = np.concatenate([start_R[row] + np.arange(places.shape[1]) for row, places in given])
        both = np.concatenate([token_t[None], np.concatenate([places for _, places in given], axis=1)])
        token_t, *axes = upload(both.astype(np.int64), self._device)
        step.places = GivenPlaces(token_t, torch.stack(axes))

    def _ahead(self, step: PlannedStep) -> Tensor:
        """Return the number of tokens behind its own that each of the step's tokens sees too."""
        rows = step.plan.rows
        start_R = np.cumsum(rows.num_tokens_R) - rows.num_tokens_R
        ahead_T = np.zeros(step.plan.num_tokens, np.int32)
        for span in step.plan.spans:
            for first, end in span.both_ways:
                ahead_T[start_R[span.row] + first : start_R[span.row] + end] = np.arange(end - first)[::-1]
        return upload(ahead_T, self._device)

    def _vectors(self, inserted: Inserted) -> Tensor:
        if inserted.across:  # what layers of cross attention see keeps the embedding of its token
            row_T = torch.full((inserted.count,), self._decoder.spec.picture_row, device=self._device)
            return self._decoder.table_rows(row_T)
        if inserted.embeds is None:
            found_LM = self.stored[inserted.name][inserted.first : inserted.first + inserted.count]
            return found_LM if found_LM.is_floating_point() else self._decoder.table_rows(found_LM[:, 0])
        flat = torch.frombuffer(bytearray(inserted.embeds.data), dtype=DTYPES[inserted.embeds.dtype])
        return flat.view(-1, inserted.embeds.width).to(self._device)


def _joined(vectors: list[Tensor]) -> Tensor:
    """Return vectors below each other. Those of a prompt's own are as wide as the model, and those of pictures may have
    parts behind that, which are added later: of the others these are zeros."""
    width = max(each.shape[1] for each in vectors)
    return torch.cat([each if each.shape[1] == width else pad(each, (0, width - each.shape[1])) for each in vectors])


def own_share(shown: Mapping[str, ShownPictures], ranks: Axis) -> dict[str, ShownPictures]:
    """Return the pictures that this rank sees: the largest first, each goes to the rank with the fewest patches so
    far."""
    taken, owner = [0] * ranks.size, dict[str, int]()
    for name, each in sorted(shown.items(), key=lambda item: -item[1].patches):
        owner[name] = min(range(ranks.size), key=taken.__getitem__)
        taken[owner[name]] += each.patches
    return {name: each for name, each in shown.items() if owner[name] == ranks.rank}
