"""The matrices of the adapters that the device holds.

Every linear map that adapters can change has memory for `max_loras` adapters of `max_lora_rank`, which graphs may hold
addresses of. An adapter is copied to its place there in the order of the steps, so steps that are under way still find
what they need.

Legend:
    A  places of adapters
    E  experts
    P  parts of a linear map
    R  the most that an adapter's rank may be
    I  inputs of a linear map
    O  outputs of a linear map
    S  slots
    T  tokens of the step
    N  rows that are scored, or pooled
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.kernels.gemm.lora.op import AdapterFactors, sorted_tokens, tiles
from ridgeline.layers.cross_attention import CrossAttention
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.embedding import Embedding
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.adapted import AdaptedRows, AdaptedWeight, AdapterVectors, LoneAdapter, StepAdapters
from ridgeline.quantization.adapted_experts import AdaptedExperts
from ridgeline.quantization.weight import Weight, weight_of
from ridgeline.weights.adapters.places import ENCODERS, UNEMBED, AdaptedMap, ModulePlace, linear_of
from ridgeline.weights.adapters.reader import Factors, ReadAdapter
from ridgeline.weights.adapters.stacks import ThinPair
from ridgeline.worker.adapters.magnitudes import of_ranks
from ridgeline.worker.inputs import DeviceInputs
from ridgeline.worker.upload import upload


class MapMatrices(NamedTuple):
    """The matrices of one linear map, and its vectors if adapters may have such. row: its row of the ranks."""

    map: AdaptedMap
    row: int
    down_APRI: Tensor
    up_AOR: Tensor
    vectors: AdapterVectors | None


class ExpertMatrices(NamedTuple):
    """The matrices of a layer's experts, and their ranks."""

    down_AEPRI: Tensor
    up_AEOR: Tensor
    rank_AE: Tensor


class AdapterTables:
    """The matrices of `places` adapters for all maps of a model. Its linear maps look at them from now on.

    most_rank: the largest rank of a product, and that of a map by its name if it may be another.
    step: the adapters of the step under way. scored: those of its rows that are scored, which are not its tokens.
    seen: the one with which pictures or sounds are encoded. inputs: those of the tokens that an encoder reads.
    """

    def __init__(
        self,
        decoder: Decoder,
        maps: Iterable[AdaptedMap],
        places: int,
        most_rank: int | Callable[[str], int],
        *,
        factors: bool = False,
    ) -> None:
        device, self.dtype, self._decoder = next(decoder.parameters()).device, decoder.dtype, decoder
        listed = list(maps)
        self.places, self.step, self._factors = places, StepAdapters(), factors
        ranks = (most_rank if isinstance(most_rank, int) else most_rank(each.name) for each in listed)
        # These alone read panels, and keep to an op of adapters that was asked for
        beside = decoder.ops.chosen["norm_linear"] == decoder.ops.chosen["lora"] == "triton"
        self._most = min(ranks, default=0) if beside else 0  # of most maps: those of tables may have more
        self.scored, self._scores, self._rows = StepAdapters(), False, False
        self.inputs = StepAdapters()
        self._adapter_T: Tensor | None = None  # of the step's tokens, from 1; 0: none
        self.seen = LoneAdapter(places=places, device=device)
        self._ranks_LA = torch.zeros(len(listed), places, dtype=torch.int32, device=device)
        self._maps: dict[str, MapMatrices] = {}
        self._experts: dict[str, ExpertMatrices] = {}
        self._units = 0  # bytes of unit matrices
        foreign: dict[str, Weight] = {}
        for index, each in enumerate(listed):
            linear, most = (
                linear_of(decoder, each.name),
                most_rank if isinstance(most_rank, int) else most_rank(each.name),
            )
            if isinstance(linear, ExpertStack):
                self._experts[each.name] = self._of_experts(linear, each, places, most)
                continue
            if isinstance(linear, Embedding):
                self._maps[each.name] = self._of_rows(linear, each, index, most)
                continue
            assert isinstance(linear, Linear | nn.Linear)
            down_APRI = torch.zeros(places, len(each.parts), most, each.inputs, dtype=self.dtype, device=device)
            # All adapters' columns of an output are neighbours, so that they are further inputs of the linear map
            up_AOR = torch.zeros(sum(each.parts), places, most, dtype=self.dtype, device=device).transpose(0, 1)
            tile_J3 = torch.tensor(tiles(each.parts), dtype=torch.int32, device=device)
            matrices = AdapterFactors(down_APRI.flatten(1, 2), up_AOR, self._ranks_LA[index], tile_J3, each.parts)
            vectors, step = None, self.seen if each.name.startswith(ENCODERS) else self.step
            if reads_inputs(decoder, each.name):
                step = self.inputs
            if each.name == UNEMBED:
                step, self._scores = self.scored, True
            if factors:
                input_AI, output_AO = (
                    torch.ones(places + 1, size, device=device) for size in (each.inputs, sum(each.parts))
                )
                added_AO = torch.zeros_like(output_AO)
                vectors = AdapterVectors(input_AI, output_AO, added_AO)
            inner = linear.matrix if isinstance(linear, Linear) else weight_of(decoder.ops, linear.weight)
            adapted = AdaptedWeight(decoder.ops, inner, matrices, step, vectors)
            if isinstance(linear, Linear):
                linear.matrix = adapted
            else:
                foreign[each.name] = adapted
            self._maps[each.name] = MapMatrices(each, index, down_APRI, up_AOR, vectors)

        if isinstance(decoder, ForeignDecoder):
            decoder.multiply_with(foreign)

    @property
    def nbytes(self) -> int:
        tensors = ((each.down_APRI, each.up_AOR, *(each.vectors or ())) for each in self._maps.values())
        found = self._units + sum(tensor.nbytes for own in tensors for tensor in own if tensor is not None)
        return found + sum(each.down_AEPRI.nbytes + each.up_AEOR.nbytes for each in self._experts.values())

    def _of_rows(self, table: Embedding, own: AdaptedMap, index: int, most_rank: int) -> MapMatrices:
        """Return the matrices of a table of embeddings, which looks at them from now on."""
        device, places = self._ranks_LA.device, self.places
        thin_AIR = torch.zeros(places, own.inputs, most_rank, dtype=self.dtype, device=device)
        up_AOR = torch.zeros(places, sum(own.parts), most_rank, dtype=self.dtype, device=device)
        unit_ARR = torch.eye(most_rank, dtype=self.dtype, device=device).repeat(places, 1, 1)
        tile_J3 = torch.tensor(tiles(own.parts), dtype=torch.int32, device=device)
        factors = AdapterFactors(unit_ARR, up_AOR, self._ranks_LA[index], tile_J3)
        table.adapted, self._rows = AdaptedRows(table.ops, thin_AIR, factors, self.step), True
        self._units += unit_ARR.nbytes
        return MapMatrices(own, index, thin_AIR.transpose(1, 2)[:, None], up_AOR, None)

    def _of_experts(self, stack: ExpertStack, own: AdaptedMap, places: int, most_rank: int) -> ExpertMatrices:
        """Return the matrices of a layer's experts, which its stack looks at from now on."""
        device, parts = self._ranks_LA.device, len(own.parts)
        shape, outputs = (places, own.experts), sum(own.parts)
        down_AEPRI = torch.zeros(*shape, parts, most_rank, own.inputs, dtype=self.dtype, device=device)
        up_AEOR = torch.zeros(*shape, outputs, most_rank, dtype=self.dtype, device=device)
        rank_AE = torch.zeros(*shape, dtype=torch.int32, device=device)
        tile_J3 = torch.tensor(tiles(own.parts), dtype=torch.int32, device=device)
        flat = down_AEPRI.flatten(0, 1).flatten(1, 2), up_AEOR.flatten(0, 1), rank_AE.flatten()
        factors = AdapterFactors(*flat, tile_J3)
        stack.matrices = AdaptedExperts(stack.ops, stack.matrices, factors, self.step, own.experts)
        return ExpertMatrices(down_AEPRI, up_AEOR, rank_AE)

    def _fill_experts(self, at: int, pairs: Iterable[ThinPair]) -> None:
        by_map: dict[str, list[ThinPair]] = {}
        for pair in pairs:
            by_map.setdefault(pair.place.map.name, []).append(pair)
        for name, matrices in self._experts.items():
            own = by_map.get(name, [])
            rank = max((pair.rank for pair in own), default=0)
            matrices.rank_AE[at].fill_(rank)
            matrices.down_AEPRI[at, :, :, :rank].zero_()
            matrices.up_AEOR[at, :, :, :rank].zero_()
            for where, down_ERI, up_EOR, _ in own:
                thin, rows = down_ERI.shape[1], slice(where.first, where.first + where.outputs)
                matrices.down_AEPRI[at, :, where.part, :thin].copy_(down_ERI, non_blocking=True)
                matrices.up_AEOR[at, :, rows, :thin].copy_(up_EOR, non_blocking=True)

    def fill(self, place: int, adapter: ReadAdapter) -> None:
        """Copy an adapter to a place, from 1."""
        at, ranks = place - 1, torch.zeros(len(self._ranks_LA), dtype=torch.int32)
        pairs: dict[str, list] = {}
        factors = list(adapter.factors)
        for pair in adapter.pairs:
            if pair.place.map.experts:
                continue
            if pair.magnitude_O is not None:
                pair, factor = of_ranks(pair, self._decoder)
                factors.append(factor)
            pairs.setdefault(pair.place.map.name, []).append(pair)
        for name, own in pairs.items():
            matrices = self._maps[name]
            rank = max(len(pair.down_RI) for pair in own)
            ranks[matrices.row] = rank
            if len(own) < len(matrices.map.parts) or any(len(pair.down_RI) < rank for pair in own):
                matrices.down_APRI[at, :, :rank].zero_()
                matrices.up_AOR[at, :, :rank].zero_()
            for where, down_RI, up_OR, _ in own:
                thin = len(down_RI)
                matrices.down_APRI[at, where.part, :thin].copy_(down_RI, non_blocking=True)
                rows = slice(where.first, where.first + where.outputs)
                matrices.up_AOR[at, rows, :thin].copy_(up_OR, non_blocking=True)
        self._ranks_LA[:, at].copy_(upload(ranks.numpy(), self._ranks_LA.device))
        if self._factors:
            self._fill_vectors(at, factors)
        self._fill_experts(at, (pair for pair in adapter.pairs if pair.place.map.experts))

    def _fill_vectors(self, at: int, factors: Iterable[Factors]) -> None:
        for matrices in self._maps.values():
            for vector_AN, neutral in zip(matrices.vectors or (), (1, 1, 0), strict=False):
                if vector_AN is not None:
                    vector_AN[at].fill_(neutral)
        for where, input_1I, output_O1, added_O in factors:
            vectors = self._maps[where.map.name].vectors
            assert vectors is not None
            if input_1I is not None:
                vectors.input_AI[at].copy_(input_1I[0], non_blocking=True)
            rows = slice(where.first, where.first + where.outputs)
            if added_O is not None:
                on_host = added_O.device.type == "cpu"
                vectors.added_AO[at, rows] += upload(added_O.numpy(), self._ranks_LA.device) if on_host else added_O
            if output_O1 is not None:
                vectors.output_AO[at, rows].copy_(output_O1[:, 0], non_blocking=True)

    def begin(self, inputs: DeviceInputs, adapter_S: Tensor) -> None:
        """Let the linear maps know which token of a step has which adapter."""
        rows = inputs.slots_R, inputs.start_R1, adapter_S, inputs.num_tokens
        self.step.tokens = found = self._decoder.ops.by_adapter(*rows, self.places, self._most)
        self._adapter_T = found.adapter_T
        self._lines(self.step, found.adapter_T)

    def _sort(self, step: StepAdapters, adapter_T: Tensor) -> None:
        step.tokens = sorted_tokens(adapter_T, self.places)
        self._lines(step, adapter_T)

    def _lines(self, step: StepAdapters, adapter_T: Tensor) -> None:
        if self._factors or self._experts or self._rows:
            step.line_T = torch.where(adapter_T > 0, adapter_T - 1, self.places).long()

    @contextmanager
    def some(self, token_t: Tensor) -> Iterator[None]:
        """Let the linear maps run on some of the step's tokens in the body."""
        step, adapter_T = self.step, self._adapter_T
        kept = step.tokens, step.line_T
        if adapter_T is not None:
            self._sort(step, adapter_T[token_t.long()])
        yield
        step.tokens, step.line_T = kept

    def score(self, index_N: Tensor | None) -> None:
        """Let the output layer know which of the step's tokens it scores. None: all."""
        if not self._scores or self._adapter_T is None:
            return
        if index_N is None:
            self.scored.tokens, self.scored.line_T = self.step.tokens, self.step.line_T
        else:
            self._sort(self.scored, self._adapter_T[index_N.long().clamp(min=0)])

    @contextmanager
    def encoding(self, places: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """Run an encoder in the body over inputs of these adapters, of so many tokens each. places: from 1; 0: none."""
        if any(places):
            self._sort(self.inputs, upload(np.repeat(np.array(places, np.int32), lengths), self._ranks_LA.device))
        try:
            yield
        finally:
            self.inputs.tokens = self.inputs.line_T = None

    @contextmanager
    def scoring(self, places: Sequence[int]) -> Iterator[None]:
        """Score rows of these adapters in the body, outside of the segments. places: from 1; 0: none."""
        if self._scores and any(places):
            self._sort(self.scored, upload(np.array(places, np.int32), self._ranks_LA.device))
        try:
            yield
        finally:
            self.scored.tokens = self.scored.line_T = None

    @contextmanager
    def seeing(self, place: int) -> Iterator[None]:
        """Encode pictures and sounds in the body with the adapter of a place, from 1; 0: without."""
        self.seen.place = place
        try:
            yield
        finally:
            self.seen.place = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the linear maps run without adapters in the body, on any tokens, and go on with those of the step."""
        step, adapter_T = self.step, self._adapter_T
        kept = step.tokens, step.line_T
        self.end()
        yield
        (step.tokens, step.line_T), self._adapter_T = kept, adapter_T

    def end(self) -> None:
        """Let the linear maps run without adapters."""
        for step in self.step, self.scored:
            step.tokens = step.line_T = None
        self._adapter_T = None


def reads_inputs(decoder: Decoder, name: str) -> bool:
    """Return True for a linear map that an encoder's inputs come to, not the step's tokens: those of the encoder, and
    of keys and values that the decoder makes of its output."""
    if isinstance(decoder, ForeignDecoder):
        return False
    owner = decoder.get_submodule(name.rpartition(".")[0])
    crosses = isinstance(owner, CrossAttention) and name.endswith(".kv") and not name.startswith("tower.")
    return name.startswith("encoder.") or crosses


def maps_of(places: Mapping[str, ModulePlace]) -> list[AdaptedMap]:
    """Return the linear maps of which modules are parts, each once."""
    return list({place.map.name: place.map for place in places.values()}.values())
