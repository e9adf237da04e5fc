"""The one decoder: it turns a `ModelSpec` into a network. The keys of a `WeightMap` are its parameters' names.

Legend:
    T  tokens of all sequences of a step in a row; in `logits`, the tokens to score
    M  model width
    V  vocabulary
    U  this rank's part of it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ridgeline.core.specs.coded import CodedTowerSpec
from ridgeline.core.specs.model import ModelSpec, lender_of
from ridgeline.core.specs.pooling import SECOND_TEXT
from ridgeline.core.specs.sam import SamTowerSpec
from ridgeline.core.specs.tiled import TiledTowerSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.attention import Attention
from ridgeline.layers.build import Build
from ridgeline.layers.embedding import Embedding, SinePositions
from ridgeline.layers.encoder.coded import CodedTower
from ridgeline.layers.encoder.listener import Listener
from ridgeline.layers.encoder.sam import SamTower
from ridgeline.layers.encoder.tiled import TiledTower
from ridgeline.layers.encoder.tower import Tower
from ridgeline.layers.expert_cache import ExpertCache
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.given import GivenVectors
from ridgeline.layers.head import Head
from ridgeline.layers.layer import Layer, divides_tokens, leaves_sums
from ridgeline.layers.layer_inputs import LayerInputs
from ridgeline.layers.lent_keys import Lent, state_of
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import Norm, summed_norm
from ridgeline.layers.recurrent import DecayRate
from ridgeline.layers.rotary import Rotary
from ridgeline.layers.stem import Stem
from ridgeline.layers.streamed import StreamedLayers
from ridgeline.layers.streams import Streams, StreamsLayer
from ridgeline.parallel.axis import ALONE, Axis, Deferred
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.token_parts import TokenParts
from ridgeline.quantization.scheme import SchemeOf, everywhere, scheme


class LayerStates(Protocol):
    """The states of all layers, by layer index. Each mixer gets its own, which offers the operation of its kind.

    live_T: bool, the tokens that belong to a request; None: all of them.
    """

    @property
    def live_T(self) -> Tensor | None: ...

    def __getitem__(self, layer: int) -> Any: ...


def positions_of(spec: ModelSpec, width: int, build: Build) -> Embedding | SinePositions | None:
    """Return the table of positions that is added to the tokens', if there is one."""
    if not spec.learned_positions:
        return None
    if spec.sines is None:
        return Embedding(spec.learned_positions, width, build)
    return SinePositions(spec.sines, spec.learned_positions, width, build)


class Hidden(NamedTuple):
    """The layers' output, from which tokens are scored. Its rows are the tokens that were run. Where ranks divide the
    model, x may still have to be added up.

    embedded_TM: the tokens as they were embedded, if the next stage gets them too.
    """

    x_TM: Tensor
    residual_TM: Tensor | None
    embedded_TM: Tensor | None = None

    def at(self, index: Tensor | slice) -> Hidden:
        """Return the rows of some tokens."""
        return Hidden(self.x_TM[index], None if self.residual_TM is None else self.residual_TM[index])


class Taps(NamedTuple):
    """Layers whose outputs are wanted, and these outputs, the residual included, in the order of the layers: [T, M]."""

    layers: Sequence[int]
    found: list[Tensor]


class Decoder(nn.Module):
    """The network. Its parameters are uninitialised.

    max_positions: the longest context of this run, by which some rotations are scaled (default: the model's own
        maximum).
    rotary_rows: rows of the table of angles, if memory holds fewer tokens than that.
    scheme_of: the scheme of a linear map's weight, by the map's name (default: plain).
    mesh: the ranks between which the model is divided (default: this one has all of it).
    expert_cache: of how many experts of a layer the device holds the matrices (default: of all).
    embed: the table of another decoder whose tokens have its rows; it has that parameter too.
    below: layers whose matrices wait in the host's memory (default: none). waiting: the modules there that wait (None:
        all). buffers: such layers that the device holds at a time.
    senses: the device of tower and listener, and ops for it (default: those of the rest).

    `whole` is the model's spec, and `spec` that of this rank's part, but with the whole vocabulary, all of which the
    ranks together score. `dtype` is that of activations, which some parameters have not. A stage of a pipeline lacks
    the modules that other stages have: the embedding, or the final norm and the output layer. `encoder` is the decoder
    of the spec's encoder, if it has one, `tower` what turns pictures into vectors, and `listener` sounds.

    To change the dtype, build with another `dtype`. `.to(dtype)` would round the float32 rotary table.
    """

    streamed: StreamedLayers | None = None
    unwritten_t: Tensor | None
    _below: Sequence[int] = ()

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
        rotary_rows: int | None = None,
        scheme_of: SchemeOf = everywhere(scheme(None)),
        mesh: Mesh | None = None,
        expert_cache: int = 0,
        embed: Embedding | None = None,
        below: Sequence[int] = (),
        waiting: Collection[str] | None = None,
        buffers: int = 2,
        senses: tuple[torch.device, Ops] | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or Mesh()
        part = mesh.part_of(spec)
        positions = max_positions or spec.max_position_embeddings
        build = Build(ops, dtype, device, scheme_of, positions, rotary_rows, mesh=mesh, expert_cache=expert_cache)
        width = spec.hidden_size
        self.whole, self.dtype = spec, dtype
        self.spec = spec = replace(part, vocab_size=spec.vocab_size)
        self.ops, self.mesh, self.tp = ops, mesh, mesh.tp
        self.layer_inputs: LayerInputs | None = None
        self.streams = None if spec.streams is None else Streams(spec.streams, width, build.within("streams"))
        # The first layer's norm can make the table's sum
        waits = spec.embeds and not (
            spec.embed_norm
            or spec.embed_width
            or spec.layer_inputs
            or spec.learned_positions
            or any(each.embedded for each in self.whole.layers)
        )
        # Rounded to the dtype, as in training
        self._embedding_multiplier = torch.tensor(spec.embedding_multiplier).to(dtype).item()
        self._embed_adds_up = waits
        if spec.embeds and not spec.senses_only:
            own = spec.embed_width or width
            rows = -(-(self.whole.vocab_size + spec.extra_rows) // mesh.tp.size)
            self.embed = embed or Embedding(rows, own, build, Deferred(mesh.tp) if waits else mesh.tp)
            self.embed_norm = Norm(spec.embed_norm, own, build) if spec.embed_norm else None
            self.position_embed = positions_of(spec, own, build)
            self.type_embed = Embedding(spec.token_types, own, build) if spec.token_types else None
            widens = build.within("embed_project")
            if spec.layer_inputs is not None:
                self.layer_inputs = LayerInputs(part, spec.layer_inputs, build.within("layer_inputs"))
            self.embed_project = Linear(own, (width,), True, widens) if spec.embed_width else None
        self.stem = None if spec.stem is None else Stem(spec.stem, width, build.within("stem"))
        divides = mesh.tp.size > 1 and waits and spec.scores and all(map(divides_tokens, spec.layers))
        self._parts = TokenParts(mesh.tp) if divides else None
        sums: Axis = self._parts or mesh.tp
        # Over which ranks what comes to each layer is still to be added up, and the output of the last one; and over
        # which each layer wants it to be
        self._pending = [sums if waits else ALONE, *(sums if leaves_sums(each) else ALONE for each in spec.layers)]
        wanted = (ALONE if layer.embedded else left for layer, left in zip(spec.layers, self._pending, strict=False))
        self._wanted = [*wanted, self._pending[-1]]
        self._borrows = [lender_of(layer.mixer) for layer in spec.layers]
        self._lends = any(each is not None for each in self._borrows)
        self._below, self._held, self._device = below, buffers, device
        self.layers = nn.ModuleList()
        for index, (layer, pending) in enumerate(zip(spec.layers, self._wanted, strict=False)):
            inside = replace(
                build.within(f"layers.{index}"), pending=pending, sums=sums, waiting=waiting if index in below else ()
            )
            kind = Layer if layer.streams is None else StreamsLayer
            self.layers.append(kind(layer, width, inside) if layer.same_as is None else self.layers[layer.same_as])
        mixtures: list[tuple[nn.Module, Norm | None]]
        mixtures = [(each.feed_forward, each.feed_forward_norm) for each in self.layers]  # type: ignore[misc]
        cached = [(part, norm) for part, norm in mixtures if isinstance(part, Experts) and part.slots]
        for (mixture, _), following in pairwise(cached):
            mixture.following = (following,)
        self.tower: Tower | TiledTower | CodedTower | SamTower | None = None
        sensing, self._senses_apart = build, senses is not None and senses[0] != device
        if senses is not None:
            sensing = replace(build, device=senses[0], ops=senses[1])
        if spec.tower is not None and spec.embeds:
            inside = replace(sensing.within("tower"), positions=1, rotary_rows=None)
            if isinstance(spec.tower, TiledTowerSpec):
                self.tower = TiledTower(spec.tower, inside)
            elif isinstance(spec.tower, CodedTowerSpec):
                self.tower = CodedTower(spec.tower, inside)
            elif isinstance(spec.tower, SamTowerSpec):
                self.tower = SamTower(spec.tower, inside)
            else:
                self.tower = Tower(spec.tower, inside)
        self.listener: Listener | None = None
        if spec.listener is not None and spec.embeds:
            inside = replace(sensing.within("listener"), positions=1, rotary_rows=None)
            self.listener = Listener(spec.listener, inside)
        self.encoder: Decoder | None = None
        if spec.encoder is not None:
            longest = min(positions, spec.encoder.max_position_embeddings)
            self.encoder = Decoder(
                spec.encoder, ops, dtype=dtype, device=device, max_positions=longest,
                scheme_of=lambda name: scheme_of(f"encoder.{name}"), embed=self.embed,
            )  # fmt: skip
        pools = spec.pooling is not None
        if not (spec.scores or pools):
            return
        ends_normed = spec.ends_normed and not spec.senses_only
        self.final_norm = Norm(spec.final_norm, width, build) if ends_normed else None
        if spec.pooling is not None:
            table = self.embed.weight if spec.embeds and not spec.senses_only else None
            self.head = Head(spec.pooling, width, build.within("head"), table)
        if not spec.scores:
            return
        self._scales = spec.logits_multiplier != 1 or spec.logits_softcap is not None or bool(spec.unwritten)
        numbers = (token - mesh.tp.rank * part.vocab_size for token in spec.unwritten)
        unwritten = [number for number in numbers if 0 <= number < part.vocab_size]
        unwritten_t = torch.tensor(unwritten, dtype=torch.int64, device=device) if spec.unwritten else None
        self.register_buffer("unwritten_t", unwritten_t, persistent=False)
        tied = self.embed.weight if spec.tie_word_embeddings else None
        head = build.within("unembed")
        self.unembed = Linear(width, (part.vocab_size,), spec.unembed_bias, head, tied=tied, pending=self._pending[-1])

    def prepare(self) -> None:
        """Give every linear map's weight the form of its scheme. Call it after loading, on a decoder that is not to be
        trained."""
        self.requires_grad_(False)
        waiting = {n: self.layers[n] for n in self._below}
        apart = {id(module) for layer in waiting.values() for module in layer.modules()}
        _prepare(module for module in self.modules() if id(module) not in apart)
        if waiting:
            self.streamed = StreamedLayers(waiting, self._held, self._device, _prepare)

    @property
    def keeps_weights(self) -> bool:
        """True if this is a network of attention and gated feed-forwards in plain numbers, of whose weights `prepare`
        changes and keeps nothing: it may be prepared, and run, before these are there."""
        kinds = {Decoder, Layer, Attention, GatedMLP, Linear, Norm, Embedding, Rotary, nn.ModuleList}
        parts = (part for part in self.modules() if isinstance(part, (Linear, Norm)))
        numbers = (name.rpartition(".")[2] for name, _ in self.named_parameters())
        return (
            {type(part) for part in self.modules()} <= kinds
            and {"weight", "bias"}.issuperset(numbers)
            and all(part.keeps_weight for part in parts)
            and not self._below
        )

    @property
    def expert_caches(self) -> list[ExpertCache]:
        """The caches of layers whose experts lie in the host's memory."""
        parts = (layer.feed_forward for layer in self.layers)
        return [part.cache for part in parts if isinstance(part, Experts) and part.cache is not None]

    def bytes_per_second(self) -> float:
        """Return the rate at which weights come from the host's memory, by a copy; 0 where all are on the device. No
        step may have run."""
        if self.streamed is not None:
            return self.streamed.bytes_per_second()
        return self.expert_caches[0].bytes_per_second() if self.expert_caches else 0.0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, including those in another form. A tower or listener on a device of its own does not
        count."""
        senses = [each for each in (self.tower, self.listener) if each is not None and self._senses_apart]
        elsewhere = {id(part) for each in senses for part in (*each.modules(), *each.parameters())}
        own = (each for each in self.modules() if id(each) not in elsewhere)
        modules = [each for each in own if isinstance(each, (Linear, ExpertStack)) and not each.below]
        held = sum(module.prepared_bytes for module in modules) + sum(cache.nbytes for cache in self.expert_caches)
        held += 0 if self.streamed is None else self.streamed.buffer_bytes
        # Experts' matrices may lie in the host's memory, and layers may have no parameters left: OLMo's norms have none
        devices = [p.device for p in (*self.layers.parameters(), *self.parameters())]
        here = (p for p in self.parameters() if p.device == devices[0] and id(p) not in elsewhere)
        return sum(p.nbytes for p in here) + held

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        states: LayerStates,
        before_TM: Tensor | None = None,
        given: GivenVectors | None = None,
        taps: Taps | None = None,
        only: Sequence[int] | None = None,
    ) -> Hidden:
        """Return the last layer's output, not yet added to its residual: [T, M] each.

        before_TM: what the stage before has handed on (`ModelSpec.handed_width` numbers a token).
        given: vectors of tokens that came as such.
        taps: gets the outputs of the layers that it names.
        only: the layers that run; None: all.
        """
        x_TM = self.embedded(token_ids_T, positions_T, given) if before_TM is None else before_TM
        stage, embedded_TM, residual_TM, pending = self.spec.stage, x_TM, None, self._pending[0]
        if stage is not None and stage.embedded and before_TM is not None:
            x_TM, embedded_TM = (part_TM.contiguous() for part_TM in before_TM.chunk(2, dim=1))
        inputs_TLP = None
        if self.layer_inputs is not None:
            inputs_TLP = self.layer_inputs(token_ids_T, x_TM, given)
        x_TM = x_TM if self.streams is None else self.streams.spread_out(x_TM)
        lent: Lent = {}
        awaited = False  # the next layer makes the sum that is wanted of this one
        for index in range(len(self.layers)) if only is None else only:
            layer, x_TM = self.layers[index], _added_up_over(self._wanted[index], x_TM, pending)
            state = states[index]
            if self._lends:
                state = state_of(states, index, self._borrows[index], index in self._borrows, lent)
            input_TP = None if inputs_TLP is None else inputs_TLP[:, index]
            sums = {"sums": taps.found} if taps is not None and awaited else {}
            args = x_TM, residual_TM, positions_T, state, states.live_T, embedded_TM, input_TP
            if self.streamed is not None:
                self.streamed.before(index)
            x_TM, residual_TM = layer(*args, **sums)
            if self.streamed is not None:
                self.streamed.after(index)
            if self.spec.layers[index].late_addend:
                before = self.layers[index - 1].feed_forward
                assert isinstance(before, Experts)
                late_TM = before.take()
                x_TM = x_TM if late_TM is None else x_TM + late_TM
            pending = self._pending[index + 1]
            if given is not None and index < len(given.deep) and pending.rank == 0:
                x_TM = given.added(x_TM, index)
            if taps is not None:
                awaited = index in taps.layers and only is None and self._is_summed_behind(index)
                if index in taps.layers and not awaited:
                    taps.found.append(self._whole(x_TM, residual_TM, pending))
        x_TM = x_TM if self.streams is None else self.streams.merged(x_TM)
        if self._parts is not None and residual_TM is not None:
            residual_TM = self._parts.whole(residual_TM, len(x_TM))
        goes_on = stage is not None and stage.embedded and not stage.last
        return Hidden(_added_up_over(self._pending[-1], x_TM, pending), residual_TM, embedded_TM if goes_on else None)

    def _is_summed_behind(self, index: int) -> bool:
        """Return True if the layer behind this one adds up this one's output first, all of it, so that it costs
        nothing to keep the sum."""
        if index + 1 == len(self.layers) or self._pending[index + 1].size > 1 or self._parts is not None:
            return False
        behind = self.layers[index + 1]
        return isinstance(behind, Layer) and behind.sums_first

    def _whole(self, x_TM: Tensor, residual_TM: Tensor | None, pending: Axis) -> Tensor:
        """Return x + residual, added up over ranks, and leave x as it is, since others add it up too."""
        if pending.size > 1:
            x_TM = pending.all_reduce(x_TM.clone())
        if residual_TM is None:
            return x_TM
        return x_TM + (residual_TM if self._parts is None else self._parts.whole(residual_TM, len(x_TM)))

    def handed_on(self, hidden: Hidden) -> Tensor:
        """Return the input of the next stage: the sum over ranks with its residual, and the tokens as they were
        embedded, if layers need them."""
        x_TM = self._pending[-1].all_reduce(hidden.x_TM)
        x_TM = x_TM if hidden.residual_TM is None else x_TM + hidden.residual_TM
        return x_TM if hidden.embedded_TM is None else torch.cat((x_TM, hidden.embedded_TM), dim=1)

    def lend_experts(self) -> None:
        """Take part in a step of ranks that have tokens of their own, as one that has none."""
        for layer in self.layers:
            if isinstance(layer.feed_forward, Experts):
                layer.feed_forward.lend()

    def table_rows(self, token_ids_T: Tensor) -> Tensor:
        """Return the rows of the embedding table as they are, the same on every rank: [T, M]."""
        x_TM = self.embed(token_ids_T)
        return self.tp.all_reduce(x_TM) if self._embed_adds_up else x_TM

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor, given: GivenVectors | None = None) -> Tensor:
        """Return the input of the first layer: [T, M]."""
        if self.spec.senses_only:
            return torch.zeros(len(token_ids_T), self.spec.hidden_size, dtype=self.dtype, device=self._device)
        second_T: Tensor | None = None
        if self.type_embed is not None:
            second_T = token_ids_T >= SECOND_TEXT
            token_ids_T = token_ids_T - SECOND_TEXT * second_T
        x_TM = self.embed(token_ids_T)
        if self._embedding_multiplier != 1:
            x_TM = x_TM * self._embedding_multiplier
        if given is not None:
            # Where ranks add their parts up later, the first one's part is all
            x_TM = given.placed(x_TM, blank=self._embed_adds_up and self.tp.rank > 0)
        if self.type_embed is not None and second_T is not None:
            x_TM = x_TM + self.type_embed(second_T.to(token_ids_T.dtype))
        if self.position_embed is not None:
            offset = self.spec.position_offset
            x_TM = x_TM + self.position_embed(positions_T + offset if offset else positions_T)
        if self.embed_norm is not None:
            x_TM, _ = self.embed_norm(x_TM)
        return x_TM if self.embed_project is None else self.embed_project(x_TM)

    def normed(self, hidden: Hidden) -> Tensor:
        """Return the hidden states behind the final norm, the same on every rank: [T, M]."""
        x_TM, residual_TM, _ = hidden
        if (pending := self._pending[-1]).size > 1:  # x stays as it is, since the scores add it up too
            return summed_norm(pending, self.ops, self.final_norm, x_TM.clone(), residual_TM)[0]
        if self.final_norm is not None:
            return self.final_norm(x_TM, residual_TM)[0]
        return x_TM if residual_TM is None else x_TM + residual_TM

    def logits(self, hidden: Hidden) -> Tensor:
        """Return the scores of every vocabulary entry, after the final norm: [T, V] in the model's dtype."""
        own_TU = self.own_logits(hidden)
        return own_TU if self.tp.size == 1 else self.tp.all_gather(own_TU)[:, : self.spec.vocab_size]

    def own_logits(self, hidden: Hidden) -> Tensor:
        """Return the scores of this rank's part of the vocabulary: [T, U]. Of a last part that is short the rest means
        nothing."""
        logits_TU, _ = self.unembed.normed(self.final_norm, hidden.x_TM, hidden.residual_TM)
        return self._scaled(logits_TU) if self._scales else logits_TU

    def scored(self, x_TM: Tensor) -> Tensor:
        """Return the scores of vectors that are behind a norm, as `own_logits` does: [T, U]."""
        logits_TU = self.unembed(x_TM)
        return self._scaled(logits_TU) if self._scales else logits_TU

    @property
    def scoring_matrix(self) -> nn.Parameter | None:
        """The parameter W, [U, M], if `scored` returns x · Wᵀ and does nothing else."""
        return None if self._scales else self.unembed.only_matrix

    def _scaled(self, logits_TU: Tensor) -> Tensor:
        if self.spec.logits_multiplier != 1:
            logits_TU = logits_TU * self.spec.logits_multiplier
        if self.unwritten_t is not None:
            logits_TU = logits_TU.index_fill(1, self.unwritten_t, -torch.inf)
        cap = self.spec.logits_softcap
        return logits_TU if cap is None else cap * torch.tanh(logits_TU / cap)


def _prepare(modules: Iterable[nn.Module]) -> None:
    """Give the weights of these modules the forms that multiply."""
    for module in modules:
        if isinstance(module, (Linear, ExpertStack, Experts, DecayRate, Norm)):
            module.prepare()


def _added_up_over(wanted: Axis, x_TM: Tensor, pending: Axis) -> Tensor:
    """Return an x that is still to be added up over `pending` as one that is to be over `wanted`. They differ where
    layers were left out between two that do not fit each other."""
    if pending.size == wanted.size:
        return x_TM
    if wanted.size == 1:
        return pending.all_reduce(x_TM)
    return x_TM if wanted.rank == 0 else torch.zeros_like(x_TM)
