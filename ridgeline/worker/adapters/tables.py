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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.gemm.lora.op import AdapterFactors, by_adapter, tiles
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.adapted import AdaptedWeight, AdapterVectors, LoneAdapter, StepAdapters
from ridgeline.quantization.adapted_experts import AdaptedExperts
from ridgeline.weights.adapters.places import ENCODERS, AdaptedMap, ModulePlace
from ridgeline.weights.adapters.reader import Factors, ReadAdapter
from ridgeline.weights.adapters.stacks import ThinPair
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

    step: the adapters of the step under way. seen: the one with which pictures or sounds are encoded.
    """

    def __init__(
        self, decoder: Decoder, maps: Iterable[AdaptedMap], places: int, most_rank: int, *, factors: bool = False
    ) -> None:
        device, self.dtype = next(decoder.parameters()).device, decoder.dtype
        listed = list(maps)
        self.places, self.step, self._factors = places, StepAdapters(), factors
        self.seen = LoneAdapter(places=places, device=device)
        self._ranks_LA = torch.zeros(len(listed), places, dtype=torch.int32, device=device)
        self._maps: dict[str, MapMatrices] = {}
        self._experts: dict[str, ExpertMatrices] = {}
        for index, each in enumerate(listed):
            linear = decoder.get_submodule(each.name)
            if isinstance(linear, ExpertStack):
                self._experts[each.name] = self._of_experts(linear, each, places, most_rank)
                continue
            assert isinstance(linear, Linear)
            down_APRI = torch.zeros(places, len(each.parts), most_rank, each.inputs, dtype=self.dtype, device=device)
            up_AOR = torch.zeros(places, sum(each.parts), most_rank, dtype=self.dtype, device=device)
            tile_J3 = torch.tensor(tiles(each.parts), dtype=torch.int32, device=device)
            matrices = AdapterFactors(down_APRI.flatten(1, 2), up_AOR, self._ranks_LA[index], tile_J3)
            vectors, step = None, self.seen if each.name.startswith(ENCODERS) else self.step
            if factors:
                input_AI, output_AO = (
                    torch.ones(places + 1, size, device=device) for size in (each.inputs, sum(each.parts))
                )
                added_AO = torch.zeros_like(output_AO)
                vectors = AdapterVectors(input_AI, output_AO, added_AO)
            linear.matrix = AdaptedWeight(decoder.ops, linear.matrix, matrices, step, vectors)
            self._maps[each.name] = MapMatrices(each, index, down_APRI, up_AOR, vectors)

    @property
    def nbytes(self) -> int:
        tensors = ((each.down_APRI, each.up_AOR, *(each.vectors or ())) for each in self._maps.values())
        found = sum(tensor.nbytes for own in tensors for tensor in own if tensor is not None)
        return found + sum(each.down_AEPRI.nbytes + each.up_AEOR.nbytes for each in self._experts.values())

    def _of_experts(self, stack: ExpertStack, own: AdaptedMap, places: int, most_rank: int) -> ExpertMatrices:
        """Return the matrices of a layer's experts, which its stack looks at from now on."""
        device, parts = self._ranks_LA.device, len(own.parts)
        if device.type != "cpu" and stack.weight is None:
            raise InvalidConfig("enable_lora_experts is not for quantized experts on a GPU yet; leave it out.")
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
        for pair in adapter.pairs:
            if pair.place.map.experts:
                continue
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
            self._fill_vectors(at, adapter.factors)
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
                vectors.added_AO[at, rows] += upload(added_O.numpy(), vectors.added_AO.device)
            if output_O1 is not None:
                vectors.output_AO[at, rows].copy_(output_O1[:, 0], non_blocking=True)

    def begin(self, inputs: DeviceInputs, adapter_S: Tensor) -> None:
        """Let the linear maps know which token of a step has which adapter."""
        tokens = by_adapter(inputs.slots_R, inputs.start_R1, adapter_S, inputs.num_tokens, self.places)
        self.step.tokens = tokens
        if self._factors or self._experts:
            place_T = torch.arange(len(tokens.order_T), dtype=torch.int32, device=tokens.order_T.device)
            line_T = torch.searchsorted(tokens.start_A1[1:], place_T, right=True)
            self.step.line_T = torch.empty_like(line_T).index_copy_(0, tokens.order_T.long(), line_T)

    @contextmanager
    def seeing(self, place: int) -> Iterator[None]:
        """Encode pictures and sounds in the body with the adapter of a place, from 1; 0: without."""
        self.seen.place = place
        try:
            yield
        finally:
            self.seen.place = 0

    def end(self) -> None:
        """Let the linear maps run without adapters."""
        self.step.tokens = self.step.line_T = None


def maps_of(places: Mapping[str, ModulePlace]) -> list[AdaptedMap]:
    """Return the linear maps of which modules are parts, each once."""
    return list({place.map.name: place.map for place in places.values()}.values())
