"""LoRA that is trained (Hu et al., arXiv 2106.09685), on the engine's own decoder, and written as PEFT writes it.

The places of modules are those of adapters that are served (`weights.adapters.places`): what is trained here is what
`ridgeline serve --enable-lora` loads.

Legend:
    T  tokens
    I  inputs
    O  outputs
    R  the adapter's rank
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.adapters import CONFIG, MOST_RANK, TENSORS
from ridgeline.kernels.base.rooms import ROOM, with_room
from ridgeline.kernels.gemm.experts.torch_ops import down, gate_up
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.gemm.plain.torch_ops import weight_gradient
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.embedding import Embedding
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.experts import StackedWeights
from ridgeline.quantization.frozen import FrozenWeight, add_input_gradient, add_product, adds, numbers_of
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.quantization.multiplied import MultipliedWeight
from ridgeline.quantization.weight import FormedWeight, Weight, WrappedWeight
from ridgeline.weights.adapters.config import ALL_LINEAR, AdapterConfig, read_adapter_config
from ridgeline.weights.adapters.matching import meant_modules
from ridgeline.weights.adapters.places import (
    EMBED,
    UNEMBED,
    ModulePlace,
    adaptable,
    expert_places,
    vocabulary_places,
    with_head,
)
from ridgeline.weights.adapters.reader import read_adapter
from ridgeline.weights.loader import empty_decoder


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The sizes of an adapter.

    targets: the ends of modules' names, or "all-linear": the linear layers, without the output layer.
    rooted: the scale is alpha / sqrt(rank) (rsLoRA).
    start: a folder of PEFT's with an adapter of these sizes, whose numbers training goes on from; "": it begins anew.
    dora: each output's row of the adapted weight has a magnitude in place of its norm, which learns too (Liu et al.,
        arXiv 2402.09353).
    dropout: the share of inputs that each thin product leaves out in training, the others being multiplied by its
        complement's inverse.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | str = ALL_LINEAR
    rooted: bool = False
    start: str = ""
    dora: bool = False
    dropout: float = 0.0

    @classmethod
    def of_folder(cls, folder: Path) -> LoraConfig:
        """Return the settings of an adapter in a folder, to go on from it. Raise ModelLoadError for a bad folder."""
        found = read_adapter_config(folder, MOST_RANK, factors=True)
        mixed = bool(found.parameters) and isinstance(found.targets, str)
        if found.ia3 or found.biased or found.tokens or mixed:
            raise InvalidConfig(
                f"the adapter in {folder} is one of IA3, or has biases, rows of tokens, or experts beside all-linear; "
                "only LoRA and DoRA are trained further here, and experts beside modules that are listed."
            )
        targets = found.targets if isinstance(found.targets, str) else (*found.targets, *found.parameters)
        if found.ranks or found.alphas or found.excluded or found.layers is not None:
            raise InvalidConfig(
                f"the adapter in {folder} is not alike in all modules (rank_pattern, alpha_pattern, exclude_modules or "
                "layers_to_transform), and only one that is can be trained further here."
            )
        return cls(
            rank=found.rank, alpha=found.alpha, targets=targets, rooted=found.rooted, start=str(folder),
            dora=found.dora,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise InvalidConfig(f"the rank of an adapter is 1 to {MOST_RANK}, got {self.rank}.")
        if not 0 < self.alpha < math.inf:
            raise InvalidConfig(f"alpha must be a number above 0, got {self.alpha:g}.")
        if not 0 <= self.dropout < 1:
            raise InvalidConfig(f"dropout is a share from 0 to below 1, got {self.dropout:g}.")
        if self.dora and self.dropout:
            raise InvalidConfig("dropout beside magnitudes (dora) is not here; leave one of them out.")


class Dropout:
    """The inputs that thin products leave out while a step of training runs. Numbers follow from the seed and the step
    alone, so a run that goes on draws those of an uninterrupted one.

    share: of the inputs. device: where numbers are drawn.
    """

    def __init__(self, share: float, seed: int, device: torch.device) -> None:
        self.share, self._seed, self.runs = share, seed, False
        self._draw = torch.Generator(device)

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """Leave inputs out in the body."""
        self._draw.manual_seed((self._seed << 32) + step)
        self.runs = self.share > 0
        try:
            yield
        finally:
            self.runs = False

    def __call__(self, x_TI: Tensor) -> Tensor:
        kept_TI = torch.rand(x_TI.shape, generator=self._draw, device=x_TI.device) >= self.share
        return x_TI * kept_TI / (1 - self.share)


class ThinMap(nn.Module):
    """The two matrices of one module. up_OR has rows in the order of our map; it begins as zeros. magnitude_O: those of
    the rows of the adapted weight; None: they are what they are."""

    magnitude_O: nn.Parameter | None

    def __init__(self, place: ModulePlace, rank: int, device: torch.device, generator: torch.Generator) -> None:
        super().__init__()
        self.place = place
        self.magnitude_O = None
        if place.map.name == EMBED:  # whose second matrix begins with numbers, in PEFT
            self.down_RI = nn.Parameter(torch.zeros(rank, place.map.inputs, device=device))
            self.up_OR = nn.Parameter(torch.randn(place.outputs, rank, generator=generator).to(device))
            return
        bound = 1 / math.sqrt(place.map.inputs)  # PEFT's initial numbers: Kaiming's, uniform, with a = sqrt(5)
        drawn_RI = (2 * torch.rand(rank, place.map.inputs, generator=generator) - 1) * bound
        self.down_RI = nn.Parameter(drawn_RI.to(device))
        self.up_OR = nn.Parameter(torch.zeros(place.outputs, rank, device=device))


class ThinPart(NamedTuple):
    """Some of an adapter's matrices as products take them.

    outputs, ranks: those that it has of the map's outputs, and of all ranks of the map.
    up_OR: [outputs, ranks], block by block where it stands for several matrices. blocks: the rows and columns of each.
    """

    outputs: slice
    ranks: slice
    up_OR: Tensor
    blocks: tuple[tuple[slice, slice], ...]


class ThinParts(NamedTuple):
    """An adapter's matrices of one map in the dtype of products. down_RI: of all parts, times the scale. whole: the
    memory in which they lie beside the frozen weight (`beside_weight`), or None."""

    key: tuple[Any, ...]
    down_RI: Tensor
    parts: tuple[ThinPart, ...]
    whole: Tensor | None = None


def beside_weight(linear: Linear) -> Tensor | None:
    """Move the plain weight of a map into memory that has `ROOM` rows and columns more, which are 0, and return this:
    [O + ROOM, I + ROOM]. An adapter's numbers there are multiplied in the weight's own product. None for weights in
    other forms, and where ops leave no room behind their rows."""
    if linear.weight is None or linear.weight.dim() != 2 or linear.ops.chosen["rms_norm"] != "triton_training":
        return None
    outputs, inputs = linear.weight.shape
    whole = linear.weight.new_zeros(outputs + ROOM, inputs + ROOM)
    whole[:outputs, :inputs] = linear.weight
    linear.weight.data = whole[:outputs, :inputs]
    return whole


@dataclass(frozen=True)
class LearntRows:
    """The matrices of a table of embeddings that are trained: the first is looked up."""

    thin: ThinMap
    scale: float

    def add(self, x_TM: Tensor, row_T: Tensor) -> None:
        """See `layers.embedding.AddsToRows`."""
        thin_TR = F.embedding(row_T.long(), self.thin.down_RI.T)
        x_TM += (F.linear(thin_TR, self.thin.up_OR) * self.scale).to(x_TM.dtype)


class ThinExperts(nn.Module):
    """The two matrices of every expert of a layer, for one of its stacks. up_EOR has rows in the order of our map."""

    def __init__(self, place: ModulePlace, rank: int, device: torch.device, generator: torch.Generator) -> None:
        super().__init__()
        self.place, whole = place, place.map
        bound = 1 / math.sqrt(whole.inputs)
        drawn_ERI = (2 * torch.rand(whole.experts, rank, whole.inputs, generator=generator) - 1) * bound
        self.down_ERI = nn.Parameter(drawn_ERI.to(device))
        self.up_EOR = nn.Parameter(torch.zeros(whole.experts, sum(whole.parts), rank, device=device))

    def in_their_form(self) -> tuple[Tensor, Tensor]:
        """Return PEFT's two tensors: A has the ranks of an expert below each other, B's columns are all experts' of the
        first rank, then those of the second. Of fused pairs whose outputs alternate in files, rows alternate."""
        up_EOR, parts = self.up_EOR.detach().cpu(), self.place.map.parts
        if self.place.source.alternating:
            up_EOR = torch.stack(up_EOR.split(list(parts), 1), 2).flatten(1, 2)
        return self.down_ERI.detach().cpu().flatten(0, 1), up_EOR.permute(1, 2, 0).flatten(1)


@dataclass(frozen=True)
class LearntExperts:
    """The frozen matrices of a layer's experts, and those of an adapter that is trained."""

    inner: StackedWeights
    thin: ThinExperts
    scale: float

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        return gate_up(self._linear, x_TM, bias_EO, routes, gate)

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        return down(self._linear, sum(self.thin.place.map.parts), h_PF, bias_EM, routes, add_TM)

    def _linear(self, expert: int, rows_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        assert isinstance(self.inner.weight, Tensor)
        y_NO = F.linear(rows_NI, self.inner.weight[expert], bias_O)
        thin_NR = F.linear(rows_NI, self.thin.down_ERI[expert].to(rows_NI.dtype))
        return y_NO + F.linear(thin_NR, (self.thin.up_EOR[expert] * self.scale).to(rows_NI.dtype))


JOINED_RANK = 128  # ranks together up to which the parts of a map are one product, most of whose numbers are zeros


@dataclass(frozen=True)
class LearntWeight(WrappedWeight):
    """A frozen weight, and the matrices of an adapter that is trained.

    thin: by the first of the outputs that they change.
    squares_O: of the norms of the frozen weight's rows, where these have magnitudes.
    whole: of `beside_weight`.
    """

    thin: Mapping[int, ThinMap]
    scale: float
    dropout: Dropout
    squares_O: Tensor | None = None
    whole: Tensor | None = None
    _kept: list[ThinParts] = field(default_factory=list, repr=False, compare=False)

    @property
    def adapts(self) -> bool:
        return True

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # there is no buffer
        kind = x_TI.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TI.dtype
        if self.dropout.runs:
            return self._without_some(x_TI.to(dtype), bias_O)
        matrices = [matrix for _, each in sorted(self.thin.items()) for matrix in (each.down_RI, each.up_OR)]
        own_O = bias_O if self.squares_O is None else None
        found: Tensor = _Adapted.apply(x_TI, own_O, self.inner, self.parts(dtype), self.scale, *matrices)
        if self.squares_O is None:
            return found
        found = (found * self.factor()).to(found.dtype)
        return found if bias_O is None else found + bias_O.to(found.dtype)

    def _without_some(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return the product of which each thin one has lost some inputs, its own ones."""
        y_TO = FrozenWeight(self.ops, self.inner).linear(x_TI, bias_O)
        parts, done = list[Tensor](), 0
        for first, each in sorted(self.thin.items()):
            thin_TR = F.linear(self.dropout(x_TI), each.down_RI.to(x_TI.dtype))
            thin_TO = F.linear(thin_TR, (each.up_OR * self.scale).to(x_TI.dtype))
            parts += [y_TO[:, done:first], y_TO[:, first : first + each.place.outputs] + thin_TO.to(y_TO.dtype)]
            done = first + each.place.outputs
        return torch.cat([*parts, y_TO[:, done:]], dim=1)

    def factor(self) -> Tensor:
        """Return the factor of each output: its magnitude over its row's norm, through which no gradient goes."""
        assert self.squares_O is not None
        parts, done = list[Tensor](), 0
        for first, each in sorted(self.thin.items()):
            assert each.magnitude_O is not None
            parts += [self.squares_O.new_ones(first - done), each.magnitude_O / self._norms(first, each)]
            done = first + each.place.outputs
        return torch.cat([*parts, self.squares_O.new_ones(len(self.squares_O) - done)])

    @torch.no_grad()
    def _norms(self, first: int, thin: ThinMap) -> Tensor:
        """Return the norms of the rows of W + s B A, from |W|, W A and A A."""
        assert self.squares_O is not None
        stored = self.inner.stored.dtype if self.inner.stored.is_floating_point() else thin.down_RI.dtype
        rows = slice(first, first + thin.place.outputs)
        with torch.autocast(thin.down_RI.device.type, enabled=False):
            across_RO = self.inner.linear(thin.down_RI.to(stored), None)[:, rows].to(thin.up_OR.dtype)
            up_OR = self.scale * thin.up_OR
            inside_RR = thin.down_RI @ thin.down_RI.T
            squares_O = self.squares_O[rows] + (2 * (up_OR * across_RO.T) + (up_OR @ inside_RR) * up_OR).sum(1)
        return squares_O.clamp(min=torch.finfo(squares_O.dtype).tiny).sqrt()

    @torch.no_grad()
    def parts(self, dtype: torch.dtype) -> ThinParts:
        """Return the matrices as products take them, made anew where they have changed: once a step."""
        thin = sorted(self.thin.items())
        key = (dtype, *((m._version, m.data_ptr()) for _, each in thin for m in (each.down_RI, each.up_OR)))
        if self._kept and self._kept[0].key == key:
            return self._kept[0]
        ranks = sum(len(each.down_RI) for _, each in thin)
        if self.whole is not None and self.whole.dtype == dtype and ranks <= ROOM:
            self._kept[:] = [self._beside(key, self.whole, thin, ranks)]
            return self._kept[0]
        down_RI = torch.cat([each.down_RI for _, each in thin]).mul_(self.scale).to(dtype)
        parts, low = list[ThinPart](), 0
        for first, each in thin:
            count, rank = each.up_OR.shape
            whole = ((slice(0, count), slice(0, rank)),)
            parts.append(ThinPart(slice(first, first + count), slice(low, low + rank), each.up_OR.to(dtype), whole))
            low += rank
        if len(parts) > 1 and low <= JOINED_RANK:
            parts = [_joined(parts, down_RI)]
        self._kept[:] = [ThinParts(key, down_RI, tuple(parts))]
        return self._kept[0]

    def _beside(
        self, key: tuple[Any, ...], whole: Tensor, thin: Sequence[tuple[int, ThinMap]], ranks: int
    ) -> ThinParts:
        """Write the matrices beside the weight: [[weight, ups], [downs, 0]]."""
        outputs, inputs = whole.shape[0] - ROOM, whole.shape[1] - ROOM
        low, blocks = 0, list[tuple[slice, slice]]()
        begin, end = thin[0][0], thin[-1][0] + len(thin[-1][1].up_OR)
        for first, each in thin:
            count, rank = each.up_OR.shape
            torch.mul(each.down_RI, self.scale, out=whole[outputs + low : outputs + low + rank, :inputs])
            whole[first : first + count, inputs + low : inputs + low + rank] = each.up_OR
            blocks.append((slice(first - begin, first - begin + count), slice(low, low + rank)))
            low += rank
        up_OR, down_RI = whole[begin:end, inputs : inputs + ranks], whole[outputs : outputs + ranks, :inputs]
        part = ThinPart(slice(begin, end), slice(0, ranks), up_OR, tuple(blocks))
        return ThinParts(key, down_RI, (part,), whole)


def squares_of(weight: Weight) -> Tensor:
    """Return the squares of the norms of a frozen matrix's rows: [O] in float32, or the matrix's wider dtype."""
    if isinstance(weight, JoinedWeight):
        return torch.cat([squares_of(each) for each in weight.weights])
    assert isinstance(weight, FormedWeight)
    wide = torch.float64 if weight.stored.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        return numbers_of(weight, wide).square().sum(1)


def _joined(parts: Sequence[ThinPart], down_RI: Tensor) -> ThinPart:
    first, end = parts[0].outputs.start, parts[-1].outputs.stop
    up_OR, blocks = down_RI.new_zeros(end - first, len(down_RI)), list[tuple[slice, slice]]()
    for part in parts:
        blocks.append((slice(part.outputs.start - first, part.outputs.stop - first), part.ranks))
        up_OR[blocks[-1]] = part.up_OR
    return ThinPart(slice(first, end), slice(0, len(down_RI)), up_OR, tuple(blocks))


def _together(x_TI: Tensor, thin_TR: Tensor) -> Tensor | None:
    """Return x and, behind each row, the thin product, filled up with zeros to a multiple of 8 columns: [T, I + 8 n].
    None where there is no room behind the rows."""
    width, ranks = x_TI.shape[1], thin_TR.shape[1]
    both_TJ = with_room(x_TI, -(-ranks // 8) * 8)
    if both_TJ is not None:
        both_TJ[:, width : width + ranks] = thin_TR
        both_TJ[:, width + ranks :].zero_()
    return both_TJ


class _Adapted(torch.autograd.Function):
    """The product of a frozen weight and of thin ones. Where rows have room for the thin product, the two are one
    product of a few more columns. Else the wide product is added to the thin ones where it can be, since a kernel that
    is bound by arithmetic reads them in passing; or they are added to it."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, bias_O: Tensor | None, inner: Weight, thin: ThinParts, scale: float, *matrices: Tensor
    ) -> Tensor:
        ctx.dtype, dtype = x_TI.dtype, thin.down_RI.dtype
        x_TI = x_TI.to(dtype)
        with torch.autocast(x_TI.device.type, enabled=False):
            thin_TR = x_TI @ thin.down_RI.T  # the parts of a map have one input, which is read once for all of them
            both_TJ = None if thin.whole is None else _together(x_TI, thin_TR)
            if both_TJ is not None and thin.whole is not None:
                wide_OJ = thin.whole[: inner.stored.shape[0], : both_TJ.shape[1]]
                y_TO = F.linear(both_TJ, wide_OJ, None if bias_O is None else bias_O.to(dtype))
            elif bias_O is None and adds(inner, x_TI):
                y_TO, done = x_TI.new_empty(len(x_TI), inner.stored.shape[0]), 0
                for part in thin.parts:
                    y_TO[:, done : part.outputs.start].zero_()
                    torch.mm(thin_TR[:, part.ranks], part.up_OR.T, out=y_TO[:, part.outputs])
                    done = part.outputs.stop
                y_TO[:, done:].zero_()
                add_product(inner, x_TI, y_TO)
            else:
                y_TO = inner.linear(x_TI, None if bias_O is None else bias_O.to(dtype))
                for part in thin.parts:
                    y_TO[:, part.outputs].addmm_(thin_TR[:, part.ranks], part.up_OR.T)
        ctx.inner, ctx.thin, ctx.scale = inner, thin, scale
        ctx.ranks, ctx.wide = [len(each) for each in matrices[::2]], matrices[0].dtype
        ctx.save_for_backward(x_TI, thin_TR)
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Any, ...]:
        x_TI, thin_TR = ctx.saved_tensors
        thin, (wants_x, wants_bias) = ctx.thin, ctx.needs_input_grad[:2]
        grad_TO = grad_TO.to(x_TI.dtype)
        grad_TR, of_ups, grad_TI = torch.empty_like(thin_TR), list[Tensor](), None
        for part in thin.parts:
            part_TO = grad_TO[:, part.outputs]
            torch.mm(part_TO, part.up_OR, out=grad_TR[:, part.ranks])
            of_up_OR = weight_gradient(part_TO, thin_TR[:, part.ranks], ctx.wide)
            of_ups += [of_up_OR[block] for block in part.blocks]
        if wants_x:
            both_TJ = None if thin.whole is None else _together(grad_TO, grad_TR)
            if both_TJ is not None and thin.whole is not None:
                grad_TI = both_TJ @ thin.whole[: both_TJ.shape[1], : x_TI.shape[1]]
            else:
                grad_TI = grad_TR @ thin.down_RI
                add_input_gradient(ctx.inner, grad_TO, grad_TI)
        of_downs = weight_gradient(grad_TR, x_TI, ctx.wide).mul_(ctx.scale).split(ctx.ranks)
        found = [each for both in zip(of_downs, of_ups, strict=True) for each in both]
        bias_grad_O = grad_TO.sum(0) if wants_bias else None
        return None if grad_TI is None else grad_TI.to(ctx.dtype), bias_grad_O, None, None, None, *found


class Lora(nn.Module):
    """The matrices of an adapter, by the names of the checkpoint's modules with "/" for "."; they are in the decoder's
    linear maps from now on. All else of the decoder is frozen. Raise InvalidConfig for targets that no module has."""

    def __init__(self, decoder: Decoder, model: ModelConfig, config: LoraConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.places = adaptable(model.spec, model.weights)
        if config.targets != ALL_LINEAR:
            found = vocabulary_places(empty_decoder(model.spec), with_head(model.weights))
            self.places |= {name: each for name, each in found.items() if each.source.name == f"{name}.weight"}
        experts, others = split_targets(config.targets)
        modules = meant(others, self.places) if others else ()
        self._check({self.places[module].map.name for module in modules}, experts)
        device, generator = next(decoder.parameters()).device, torch.Generator().manual_seed(seed)
        decoder.requires_grad_(False)
        self.maps = nn.ModuleDict()
        by_map: dict[str, dict[int, ThinMap]] = {}
        for module in modules:
            place = self.places[module]
            thin = ThinMap(place, config.rank, device, generator)
            self.maps[module.replace(".", "/")] = thin
            by_map.setdefault(place.map.name, {})[place.first] = thin
        scale = _peft(config).scale(config.rank, config.alpha)
        self.dropout = Dropout(config.dropout, seed, device)
        for name, parts in by_map.items():
            linear = decoder.get_submodule(name)
            if isinstance(linear, Embedding):
                linear.adapted = LearntRows(parts[0], scale)
                continue
            assert isinstance(linear, Linear)
            inner = linear.matrix.inner if isinstance(linear.matrix, MultipliedWeight) else linear.matrix
            inner = inner.inner if isinstance(inner, FrozenWeight) else inner
            squares_O = squares_of(inner) if config.dora else None
            if squares_O is not None:
                for first, thin in parts.items():
                    thin.magnitude_O = nn.Parameter(squares_O[first : first + thin.place.outputs].sqrt())
            own = linear.weight is not None and inner.stored is linear.weight and name != UNEMBED  # that may be tied
            whole = beside_weight(linear) if own and not config.dropout else None
            linear.multiply_with(LearntWeight(linear.ops, inner, parts, scale, self.dropout, squares_O, whole))
        self.stacks = nn.ModuleDict()
        if experts:
            self._adapt_experts(decoder, model, experts, scale, generator)
        if config.start:
            self._begin(Path(config.start), scale)

    def _adapt_experts(
        self, decoder: Decoder, model: ModelConfig, wanted: Sequence[str], scale: float, generator: torch.Generator
    ) -> None:
        """Adapt the stacks of experts whose names end so. Raise InvalidConfig if there are none, or other ones."""
        found = {
            name: place
            for name, place in expert_places(empty_decoder(model.spec), model.weights).items()
            if place.is_stacked and any(f".{name}".endswith(f".{each}") for each in wanted)
        }
        if lost := [each for each in wanted if not any(f".{name}".endswith(f".{each}") for name in found)]:
            raise InvalidConfig(f"no layer of this model has {lost[0]}; leave it out of the targets.")
        for name, place in found.items():
            stack = decoder.get_submodule(place.map.name)
            assert isinstance(stack, ExpertStack)
            weights = stack.matrices
            if not isinstance(weights, StackedWeights) or not isinstance(weights.weight, Tensor):
                raise InvalidConfig("experts that are quantized have no adapters in training; take --method lora.")
            thin = ThinExperts(place, self.config.rank, next(decoder.parameters()).device, generator)
            self.stacks[name.replace(".", "/")] = thin
            self.places[name] = place
            stack.matrices = LearntExperts(weights, thin, scale)

    def _check(self, names: set[str], experts: Sequence[str]) -> None:
        """Raise InvalidConfig for what maps of the vocabulary, and of experts, have not."""
        if experts and (self.config.dora or self.config.dropout):
            raise InvalidConfig("magnitudes (dora) and dropout are not for experts; leave these out of the targets.")
        if self.config.dora and EMBED in names:
            raise InvalidConfig("magnitudes (dora) are not for the table of the tokens; leave it out of the targets.")
        if self.config.dropout and names & {EMBED, UNEMBED}:
            raise InvalidConfig(
                "dropout is not for embeddings and output layers, which are computed in parts; leave one of them out."
            )

    @torch.no_grad()
    def _begin(self, folder: Path, scale: float) -> None:
        """Take the numbers of an adapter."""
        found = read_adapter(folder, self.places, most_rank=self.config.rank, dtype=torch.float32, factors=True)
        pairs = {id(pair.place): pair for pair in found.pairs if not pair.place.map.experts}
        for name, stack in self.stacks.items():
            assert isinstance(stack, ThinExperts)
            parts = [pair for pair in found.pairs if pair.place.map.name == stack.place.map.name]
            if len(parts) != len(stack.place.map.parts) or parts[0].rank != self.config.rank:
                raise InvalidConfig(f"the adapter in {folder} has no matrices of {name.replace('/', '.')}.")
            stack.down_ERI.copy_(parts[0].down_RI)
            ordered = sorted(parts, key=lambda pair: pair.place.part)
            stack.up_EOR.copy_(torch.cat([pair.up_OR for pair in ordered], 1) / scale)
        for name, thin in self.maps.items():
            assert isinstance(thin, ThinMap)
            if (pair := pairs.pop(id(thin.place), None)) is None or len(pair.down_RI) != self.config.rank:
                raise InvalidConfig(
                    f"the adapter in {folder} has no matrices of rank {self.config.rank} for {name.replace('/', '.')}."
                )
            up_OR = pair.up_OR / scale
            thin.up_OR.copy_(up_OR if thin.place.factor_O is None else up_OR / thin.place.factor_O[:, None])
            thin.down_RI.copy_(pair.down_RI)
            if thin.magnitude_O is not None:
                assert pair.magnitude_O is not None  # the config says so
                factor_O = thin.place.factor_O
                thin.magnitude_O.copy_(pair.magnitude_O if factor_O is None else pair.magnitude_O / factor_O.abs())

    @torch.no_grad()
    def add_to(self, plain: Decoder) -> None:
        """Add the products of the matrices to the weights of a decoder that has plain ones."""
        scale = _peft(self.config).scale(self.config.rank, self.config.alpha)
        for stack in self.stacks.values():
            assert isinstance(stack, ThinExperts)
            added_EOI = scale * (stack.up_EOR.float() @ stack.down_ERI.float())
            whole = plain.get_parameter(f"{stack.place.map.name}.weight")
            whole.add_(added_EOI.to(whole.device, whole.dtype))
        for thin in self.maps.values():
            assert isinstance(thin, ThinMap)
            weight, first = plain.get_parameter(f"{thin.place.map.name}.weight"), thin.place.first
            delta_OI = scale * (thin.up_OR.float() @ thin.down_RI.float())
            if thin.place.map.name == EMBED:
                weight.add_(delta_OI.T.to(weight.device, weight.dtype))
                continue
            rows = slice(first, first + thin.place.outputs)
            if thin.magnitude_O is None:
                weight[rows] += delta_OI.to(weight.device, weight.dtype)
                continue
            added_OI = weight[rows].float() + delta_OI.to(weight.device)
            factor_O = thin.magnitude_O.float().to(weight.device) / added_OI.norm(dim=1)
            weight[rows] = (added_OI * factor_O[:, None]).to(weight.dtype)

    def export(self, folder: Path, base: str) -> None:
        """Write PEFT's two files, in float32, and read them as a server does. base: the model's name or folder."""
        tensors, modules = {}, []
        for name, thin in self.maps.items():
            assert isinstance(thin, ThinMap)
            module = name.replace("/", ".")
            up_OR = replace(thin.place, factor_O=None).in_their_order(thin.up_OR.detach().cpu())
            before = f"base_model.model.{module}"
            of_rows = thin.place.map.name == EMBED
            ends = ("lora_embedding_A", "lora_embedding_B") if of_rows else ("lora_A.weight", "lora_B.weight")
            for end, matrix in zip(ends, (thin.down_RI.detach().cpu(), up_OR), strict=True):
                tensors[f"{before}.{end}"] = matrix.contiguous()
            if thin.magnitude_O is not None:
                own_O1 = thin.magnitude_O.detach().cpu()[:, None]
                theirs_O1 = replace(thin.place, factor_O=None).in_their_order(own_O1)
                tensors[f"{before}.lora_magnitude_vector"] = theirs_O1[:, 0].contiguous()
            modules.append(module)
        experts, others = split_targets(self.config.targets)
        targets = set(others) if not isinstance(others, str) else {module.rpartition(".")[2] for module in modules}
        for name, stack in self.stacks.items():
            assert isinstance(stack, ThinExperts)
            owner, _, kind = name.replace("/", ".").rpartition(".")
            both = {f"{owner.replace('.', '/')}/{each}" for each in ("gate_up_proj", "down_proj")} <= set(self.stacks)
            before = f"base_model.model.{owner}{'.base_layer' if both and kind != 'down_proj' else ''}"
            for half, matrix in zip("AB", stack.in_their_form(), strict=True):
                tensors[f"{before}.lora_{half}.weight"] = matrix.contiguous()
        entries = {
            "peft_type": "LORA",
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "use_rslora": self.config.rooted,
            "target_modules": sorted(targets),
            "target_parameters": list(experts) or None,
            "use_dora": self.config.dora,
            "lora_dropout": self.config.dropout,
            "bias": "none",
        }
        write_adapter(folder, tensors, entries, base, [self.places[module] for module in modules])
        read_adapter(folder, self.places, most_rank=self.config.rank, dtype=torch.float32, factors=True)


def split_targets(targets: tuple[str, ...] | str) -> tuple[tuple[str, ...], tuple[str, ...] | str]:
    """Return the names of parameters that hold all experts' matrices, and the other targets."""
    if isinstance(targets, str):
        return (), targets
    experts = tuple(each for each in targets if re.search(r"(^|\.)experts\.(gate_up|up|down)_proj$", each))
    return experts, tuple(each for each in targets if each not in experts)


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], entries: Mapping[str, Any], base: str, places: Sequence[ModulePlace]
) -> None:
    """Write PEFT's two files. entries: those of the kind of adapter. places: those of its modules."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / TENSORS, metadata={"format": "pt"})
    (folder / TENSORS).chmod(0o644)  # safetensors makes the file private
    whole = {
        **entries,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "fan_in_fan_out": any(place.source.transpose for place in places),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(whole, indent=2) + "\n")


def _peft(config: LoraConfig) -> AdapterConfig:
    return AdapterConfig(
        rank=config.rank, alpha=config.alpha, targets=config.targets, ranks={}, alphas={}, rooted=config.rooted
    )


def meant(targets: tuple[str, ...] | str, places: Mapping[str, ModulePlace]) -> Sequence[str]:
    """Return the modules that are to be adapted, in the order of the model. Raise InvalidConfig if there are none."""
    config = AdapterConfig(rank=1, alpha=1.0, targets=targets, ranks={}, alphas={})
    modules = list(meant_modules(config, list(places), Path()))
    wanted = (targets,) if isinstance(targets, str) else targets
    lost = [
        each
        for each in wanted
        if each != ALL_LINEAR and not any(f".{module}".endswith(f".{each}") for module in modules)
    ]
    if lost or not modules:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in places}))
        raise InvalidConfig(f"no linear layer of this model is called {lost[0] if lost else targets}; it has {known}.")
    return modules
