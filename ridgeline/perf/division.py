"""A model divided over devices: who holds what, what a device computes in a step, and what devices send each other.

tp: matrices and heads are divided (`core.plan.sharding.part_of`). A sum behind every mixer and feed-forward, one behind
    the embedding, those that a mixer needs inside of it, and the candidates of the scores.
ep: experts are divided, whole. Groups of tp devices bring tokens of their own; in each layer a row goes to every
    device that has an expert of it, and one comes back.
pp: layers are divided, in stages. A row for each token goes from stage to stage, and stages wait (the bubble).
cp: the cache is divided, and of a prompt the tokens too. Keys and values go around a ring; in a decode step partial
    results are merged in each layer.

Nothing hides what is sent. Stages get micro-batches as equal as they can be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import check_experts, part_of, with_experts_of_a_rank
from ridgeline.core.plan.stages import deal, stage_of
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ABSENT, LayerSpec, ModelSpec, attention_of
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.context import told_bytes
from ridgeline.perf.experts import devices_of_token
from ridgeline.perf.footprint import check_shape, kv_bytes, kv_bytes_per_token, parameters, state_bytes, weight_bytes
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.links import Links
from ridgeline.perf.precision import Precision
from ridgeline.perf.roofline import Roofline

CANDIDATE_BYTES = 8 * 64  # of a row's likeliest tokens on a rank: their scores and ids


@dataclass(frozen=True, kw_only=True)
class Division:
    """The number of devices along each axis. ep counts those that divide the experts: a multiple of tp, whose groups
    bring tokens of their own; or tp itself, and then no further devices."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        check_shape(tp=self.tp, pp=self.pp, ep=self.ep, cp=self.cp)
        if self.ep > 1 and self.ep % self.tp:
            raise InvalidConfig(
                f"ep {self.ep} is no multiple of tp {self.tp}; experts are divided over whole groups of tp devices."
            )
        if self.groups > 1 and self.cp > 1:
            raise InvalidConfig(
                f"cp {self.cp} and ep {self.ep} beyond tp {self.tp} cannot be planned together; leave one of them out."
            )

    @property
    def groups(self) -> int:
        """The groups of devices that bring tokens of their own, between which rows go to experts and back."""
        return max(1, self.ep // self.tp)

    @property
    def devices(self) -> int:
        return self.tp * self.groups * self.pp * self.cp

    def __str__(self) -> str:
        named = [f"{name} {size}" for name, size in vars(self).items() if size > 1]
        return " · ".join(named) or "one device"

    def part_of(self, model: ModelSpec) -> ModelSpec:
        """Return a device's part of each layer. Raise InvalidConfig if it does not divide."""
        check_experts(model, self.ep, "ep")
        if self.pp > len(model.layers):
            raise InvalidConfig(f"pp {self.pp} is more than the model's {len(model.layers)} layers; choose less.")
        own = with_experts_of_a_rank(model, self.ep, named="ep") if self.ep > 1 else model
        return part_of(own, self.tp, named="tp")


@dataclass(frozen=True, kw_only=True)
class Times:
    """The seconds of a step, or of a prompt, one after the other. bubble: of pp, in which a stage waits."""

    compute: float
    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0
    pp: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.ep + self.cp + self.pp + self.bubble

    def __add__(self, other: Times) -> Times:
        return Times(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Collective(NamedTuple):
    """An act of all ranks together, so many `times` in a step: an op of `perf.links`, with its bytes and seconds."""

    op: str
    times: int
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some consecutive layers of a device's part. first, last: it embeds tokens, it scores them."""

    model: ModelSpec
    first: bool
    last: bool


def stages(model: ModelSpec, part: ModelSpec, pp: int, wanted: str | None = None) -> list[Stage]:
    """Return the stages of a device's part, with as many layers of the model as the engine deals out to each. wanted:
    see `deal`."""
    counts = deal(model, pp, wanted)
    return [
        Stage(model=replace(part, layers=stage_of(part, stage, counts).layers), first=stage == 0, last=stage == pp - 1)
        for stage in range(pp)
    ]


def stage_weights(stage: Stage, precision: Precision) -> float:
    """Return the bytes of a stage's weights: tables only where they are used. So a tied one is there twice, unless the
    last stage has another form of it to score with."""
    model, count = stage.model, parameters(stage.model)
    table = model.vocab_size * model.hidden_size
    lacks, beside = 0.0, any(name == "unembed" for name, _, _ in precision.held)
    if not stage.first and not (stage.last and model.tie_word_embeddings and not beside):
        lacks += count.embed * precision.item
    if not stage.last:
        lacks += table * precision.weight_of("unembed", precision.item if count.unembed else 0.0)
    return weight_bytes(model, precision) - lacks


class Divided:
    """A model on several devices, as its busiest one sees it. Raise InvalidConfig if it does not divide so."""

    def __init__(
        self, model: ModelSpec, division: Division, hardware: Hardware, links: Links, p: Precision, kv_dtype: str
    ) -> None:
        self.division, self._links, self._precision, self._kv_dtype = division, links, p, kv_dtype
        self.part = division.part_of(model)
        self.stages = stages(model, self.part, division.pp)
        costs = {
            layers: Roofline(replace(self.part, layers=layers), hardware, p, kv_dtype, division.groups)
            for layers in {stage.model.layers for stage in self.stages}
        }
        self._cost = [costs[stage.model.layers] for stage in self.stages]

    # ---- memory -----------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> list[float]:
        """The bytes of weights on a device of each stage."""
        return [stage_weights(stage, self._precision) for stage in self.stages]

    def kv_per_token(self, stage: int) -> float:
        return kv_bytes_per_token(self.stages[stage].model, self._kv_dtype) / self.division.cp

    def state_per_request(self, stage: int) -> float:
        """Return the bytes of a request's states of constant size on a device of this stage."""
        return state_bytes(self.stages[stage].model)

    def kv_per_request(
        self, stage: int, tokens: int, *, block_size: int, max_chunk: int, encoded: int | None = None
    ) -> float:
        """Return the most bytes that a request ever holds on a device of this stage. encoded: as in `kv_bytes`."""
        model, cp = self.stages[stage].model, self.division.cp
        tokens, chunk = -(-tokens // cp), -(-max_chunk // cp)
        return kv_bytes(model, tokens, self._kv_dtype, block_size=block_size, max_chunk=chunk, encoded=encoded)

    # ---- time -------------------------------------------------------------------------------------------------

    def step(self, shape: StepShape) -> Times:
        """Return the time of a step whose rows go through all stages as one micro-batch."""
        return self._sum([self._stage(number, shape) for number in range(len(self.stages))], shape)

    def decode(self, batch: int, context: int, encoded: int = 0) -> Times:
        """Return the time from token to token of `batch` requests: with stages, of as many micro-batches as there are
        stages, if there are requests for them. encoded: the tokens of each one's encoder input."""
        pp = self.division.pp
        waves = min(batch, pp)
        shape = _decode(-(-batch // waves), context, self.division.cp)
        if encoded:
            shape = shape._replace(crossed_R=np.full(batch, encoded))
        each = [self._stage(number, shape) for number in range(pp)]
        through = self._sum(each, shape)
        slowest = max(times.total for times in each) + self._hop(shape)  # from the last stage tokens go to the first
        return replace(through, bubble=max(0.0, waves * slowest - through.total)) if pp > 1 else through

    def idle(self, batch: int, context: int) -> float:
        """Return the share of time in which stages wait for work in decode steps, on average over the stages."""
        pp = self.division.pp
        if pp == 1:
            return 0.0
        waves = min(batch, pp)
        shape = _decode(-(-batch // waves), context, self.division.cp)
        work = sum(self._stage(number, shape).total for number in range(pp)) / pp
        return 1 - waves * work / self.decode(batch, context).total

    def prompt(self, tokens: int, chunk: int) -> Times:
        """Return the time of a prompt that runs alone, in chunks that follow each other through the stages."""
        pp, total = self.division.pp, Times(compute=0.0)
        pieces = max(1, round(tokens / chunk)) if pp > 1 else 1
        for piece in range(pieces):
            start, end = tokens * piece // pieces, tokens * (piece + 1) // pieces
            shape = self._prompt(end - start, end)
            each = [self._stage(number, shape) for number in range(pp)]
            if piece == pieces - 1:
                total += self._sum(each, shape)  # the last piece goes through all stages
            else:  # those before it leave the slowest stage one after the other
                total += replace(max(each, key=lambda times: times.total), pp=self._hop(shape))
        return total

    def busy(self, tokens: int) -> float:
        """Return the seconds that a prompt keeps the slowest stage busy."""
        shape = self._prompt(tokens, tokens)
        return max(self._stage(number, shape).total for number in range(self.division.pp))

    def _prompt(self, tokens: int, length: int) -> StepShape:
        """Return a device's part of a chunk that ends at `length`. An encoder's input runs beside the decoder's first
        token."""
        if self.part.encoder is not None:
            return StepShape([1], [1], 1, encoded=[tokens], crossed_R=[tokens])
        return _prompt(tokens, length, self.division.cp)

    def _sum(self, each: list[Times], shape: StepShape) -> Times:
        total = sum(each[1:], each[0])
        return replace(total, pp=(self.division.pp - 1) * self._hop(shape))

    def _hop(self, shape: StepShape) -> float:
        """Return the time of the rows between two stages. With tp each device sends its part."""
        if self.division.pp == 1:
            return 0.0
        beside = any(layer.embedded for layer in self.part.layers)  # the tokens as embedded go along
        return self._links.seconds("send", 2, self._rows(shape) * (1 + beside) / self.division.tp)

    def _rows(self, shape: StepShape) -> float:
        """Return the bytes of a row for each token."""
        return float(np.sum(shape.num_tokens_R)) * self.part.hidden_size * self._precision.item

    def _stage(self, number: int, shape: StepShape) -> Times:
        stage = self.stages[number]
        own = shape if stage.last else shape._replace(num_sampled=0)
        return Times(
            compute=self._cost[number].step_limit(own),
            tp=self._sums(stage, own),
            ep=self._exchange(stage.model, own),
            cp=self._ring(stage.model, own),
        )

    def _sums(self, stage: Stage, shape: StepShape) -> float:
        return sum(each.times * each.seconds for each in self.sums(stage, shape))

    def sums(self, stage: Stage, shape: StepShape) -> list[Collective]:
        """Return the collectives of tp ranks in a step of a stage: sums, and candidates of the rows that draw."""
        tp, rows = self.division.tp, self._rows(shape)
        if tp == 1:
            return []
        layers = stage.model.layers
        parts = sum((layer.mixer is not ABSENT) + (layer.feed_forward is not ABSENT) for layer in layers)
        found = [Collective("all_reduce", parts + stage.first, rows, self._links.seconds("all_reduce", tp, rows))]
        for numbers, times in sorted(Counter(each for layer in layers for each in layer.mixer.summed).items()):
            nbytes = rows * numbers / stage.model.hidden_size
            found.append(Collective("all_reduce", times, nbytes, self._links.seconds("all_reduce", tp, nbytes)))
        if shape.num_sampled:
            nbytes = float(tp * CANDIDATE_BYTES * shape.num_sampled)
            found.append(Collective("all_gather", 1, nbytes, self._links.seconds("all_gather", tp, nbytes)))
        return found

    def _exchange(self, model: ModelSpec, shape: StepShape) -> float:
        return sum(each.times * each.seconds for each in self.exchanges(model, shape))

    def exchanges(self, model: ModelSpec, shape: StepShape) -> list[Collective]:
        """Return dispatch and combine: a row goes once to every other device that has an expert of it, and one back."""
        ep, found = self.division.ep, []
        if self.division.groups == 1:
            return []
        mixtures = Counter(layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsSpec))
        for spec, layers in mixtures.items():
            to = devices_of_token(spec.routing.experts, spec.routing.top_k, ep)  # itself among them as often as others
            nbytes = self._rows(shape) / self.division.tp * to  # with what stays, as bytes of an all-to-all are counted
            found.append(Collective("all_to_all", 2 * layers, nbytes, self._links.seconds("all_to_all", ep, nbytes)))
        return found

    def _ring(self, model: ModelSpec, shape: StepShape) -> float:
        cp = self.division.cp
        if cp == 1:
            return 0.0
        new = float(np.sum(shape.num_tokens_R))
        decodes = new <= len(shape.num_tokens_R)
        return sum(
            times * (self._merge(layer, new) if decodes else self._hops(layer, model, new))
            for layer, times in Counter(model.layers).items()
        )

    def _merge(self, layer: LayerSpec, rows: float) -> float:
        """Return the time of gathering partial results, with the logarithm of their sums, in float32."""
        mixer = attention_of(layer.mixer)
        if mixer is None:
            return 0.0
        size = mixer.num_heads * (mixer.head_dim + 1) * 4
        return self._links.seconds("all_gather", self.division.cp, self.division.cp * rows * size)

    def _hops(self, layer: LayerSpec, model: ModelSpec, tokens: float) -> float:
        """Return the time in which keys and values of a device's tokens go around, or what they do to a state."""
        own = tokens * kv_bytes_per_token(replace(model, layers=(layer,)), self._kv_dtype)
        return (self.division.cp - 1) * self._links.seconds("send", 2, own + told_bytes(layer))


def _decode(rows: int, context: int, cp: int) -> StepShape:
    return StepShape(np.ones(rows), np.full(rows, -(-context // cp)), rows)


def _prompt(tokens: int, length: int, cp: int) -> StepShape:
    """Return a device's part of a chunk that ends at `length`. Zig-zag gives each as many pairs of queries and keys: as
    if its queries stood in the middle."""
    own = -(-tokens // cp)
    return StepShape([own], [length - tokens + (tokens + own) // 2], 1)
