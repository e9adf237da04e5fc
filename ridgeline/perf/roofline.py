"""The least time that a step can take: every op takes the time of memory or of arithmetic, whichever is longer.

This is the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009), op by op. Ops wait for one another, so
their limits add up. Op names are the decoder's: the module's for ops with parameters, else the op's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ABSENT, CrossAttentionSpec, LayerSpec, ModelSpec, Product, attention_of
from ridgeline.kernels.attention.paged.cost import visible
from ridgeline.kernels.base.cost import Cost, OpCost, StepShape
from ridgeline.kernels.gemm.plain.cost import linear_cost
from ridgeline.kernels.sampling.cost import sample_cost
from ridgeline.kernels.small.embedding.cost import embedding_cost
from ridgeline.kernels.small.norm.cost import norm_cost
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.parts import (
    FEED_FORWARDS,
    MIXERS,
    NormBefore,
    Priced,
    Reach,
    cached_itemsize,
    crossing,
    grouped,
    product_cost,
    stem,
)
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.towers import TOWER, tower_ops

Join = Callable[[Any, Any], Any]  # seconds of memory and of arithmetic → seconds of an op

KEPT_SUMS = 1 << 14  # steps come in few sizes
EXPERTS = ("grouped_gate_up", "grouped_down")
PRODUCTS = (
    "qkv",
    "q",
    "kv",
    "conv_in",
    "delta_in",
    "mamba_in",
    "select",
    "dt",
    "out",
    "gate_up",
    "up",
    "down",
    "latent_in",
    "latent_out",
    *(f"indexer.{name}" for name in ("query", "key", "weights")),
    "both_in",
    "attention.out",
    "mamba.out",
    *(f"block.{name}" for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")),
    *(f"{name}_adapter.{part}" for name in ("qkv", "mlp") for part in ("down", "up.0", "up.1", "up.2")),
    "link",
    "patch",
    *("projector.0", "projector.1", "projector.2"),
    "shared.gate_up",
    "shared.up",
    "shared.down",
    *EXPERTS,
)
VECTOR = ("selective_scan",)  # ops that are no matrix products, however they are cut
# Ops whose FLOPs depend on the length of each row
BY_ROW = (
    *("gated_delta", "packed_attention", "latent_attention", "expanded_attention", "cross_attention"),
    *("index_topk", "choice_bits", "sparse_attention"),
)
ENCODER = "encoder."  # begins the names of ops that run before a request's first row
SAMPLED = ("unembed", "sample")  # these ops run for sampled rows only, the others for every token


def step_ops(
    model: ModelSpec, shape: StepShape, *, dtype: str | Precision, kv_dtype: str | None = None, expert_devices: int = 1
) -> list[OpCost]:
    """Return every op of one step, in the order of first appearance. Equal ops are counted instead of repeated.

    dtype: a `Precision` or its name.
    kv_dtype: the cache's dtype (default: the layers' own).
    expert_devices: so many devices run such a step each, and every one of them has a part of the experts (`Reach`).
    """
    p = precision(dtype)
    if not model.layers:  # a tower or a listener alone, which runs no tokens
        return list(_encoding(model, shape, p, kv_dtype))
    tokens, width, reach = int(np.sum(shape.num_tokens_R)), model.hidden_size, Reach(shape.reach, expert_devices)
    found: Counter[Priced] = Counter(_embed(model, tokens, p))
    for layer, times in Counter(model.layers).items():
        for op in _layer(layer, width, shape, tokens, p, kv_dtype, reach):
            found[op] += times
    begin = model.layers[0]
    if begin.norms in ("before", "both") and begin.mixer is not ABSENT:
        first = ("mixer_norm", _norm(begin.norm.kind, tokens, width, p, residual=False))
        found[("mixer_norm", _norm(begin.norm.kind, tokens, width, p))] -= 1  # no residual to add yet
        embedded = len(list(_embed(model, tokens, p)))
        ordered = [(op, times) for op, times in found.items() if times]
        ordered.insert(embedded, (first, 1))
    else:
        ordered = list(found.items())
    ordered += [(op, 1) for op in _head(model, tokens, shape.num_sampled, p)]
    encoding = list(_encoding(model, shape, p, kv_dtype))
    return encoding + [OpCost(name, cost, times) for (name, cost), times in ordered]


def _encoding(model: ModelSpec, shape: StepShape, p: Precision, kv_dtype: str | None) -> Iterator[OpCost]:
    yield from seeing_ops(model, shape, p, kv_dtype)
    if model.encoder is None or not len(shape.encoded):
        return
    for op in step_ops(model.encoder, StepShape(shape.encoded, shape.encoded, 0), dtype=p):
        yield replace(op, name=f"{ENCODER}{op.name}")
    for name, cost, times in crossing(model, int(np.sum(shape.encoded)), p, kv_dtype):
        yield OpCost(f"{ENCODER}{name}", cost, times)


def seeing_ops(model: ModelSpec, shape: StepShape, p: Precision, kv_dtype: str | None) -> Iterator[OpCost]:
    """Yield the ops of the tower, and of the keys and values that layers of cross attention make of its output."""
    if model.tower is None or not len(shape.views):
        return
    yield from tower_ops(model.tower, shape.views, p)
    if model.crosses:
        vectors = sum(shape.views) + len(shape.views) * model.tower.class_token
        for name, cost, times in crossing(model, vectors, p, kv_dtype):
            yield OpCost(f"{TOWER}{name}", cost, times)


def _embed(model: ModelSpec, tokens: int, p: Precision) -> Iterator[Priced]:
    if model.stem is not None:
        yield from stem(model.stem, model.hidden_size, tokens, p)
        return
    width = model.embed_width or model.hidden_size
    yield "embed", embedding_cost(tokens, width, itemsize=p.item)
    if model.learned_positions:
        yield "position_embed", embedding_cost(tokens, width, itemsize=p.item)
    if model.token_types:
        yield "type_embed", embedding_cost(tokens, width, itemsize=p.item)
    if model.embed_norm is not None:
        yield "embed_norm", _norm(model.embed_norm.kind, tokens, width, p, residual=False)
    if (own := model.layer_inputs) is not None:
        columns = own.width * len(model.layers)
        yield "layer_inputs.table", embedding_cost(tokens, columns, itemsize=p.item)
        yield "project", product_cost("project", Product(model.hidden_size, columns), tokens, p)
        yield "layer_inputs.norm", norm_cost(tokens * len(model.layers), own.width, itemsize=p.item, kind="rms")
    if model.embed_width:
        yield "embed_project", product_cost("embed_project", Product(width, model.hidden_size, True), tokens, p)


def _layer(
    layer: LayerSpec, width: int, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None, reach: Reach
) -> Iterator[Priced]:
    before, after = layer.norms in ("before", "both"), layer.norms in ("after", "both", "around")
    post_norm = _norm(layer.norm.kind, tokens, width, p, residual=layer.norms == "around")
    if layer.mixer is not ABSENT:
        *first, last = (
            (name, product_cost(name, product, tokens, p))
            for name, product in layer.mixer.products(width).items()
            if product.used
        )
        if before:
            yield "mixer_norm", _norm(layer.norm.kind, tokens, width, p)
        yield from first
        yield from MIXERS[layer.mixer.kind](layer.mixer, shape, tokens, p, kv_dtype)
        yield last
        if after:
            yield "mixer_post_norm", post_norm
    if layer.feed_forward is ABSENT:
        return
    fed = before or layer.norms == "feed_forward"
    norm = NormBefore(layer.norm.kind, residual=not layer.parallel) if fed else None
    yield from FEED_FORWARDS[layer.feed_forward.kind](layer.feed_forward, width, norm, tokens, p, reach)
    if after:
        yield "feed_forward_post_norm", post_norm
    if layer.inputs is not None:
        for name, product in layer.products(width).items():
            if name.startswith(("input_", "laurel_")):
                yield name, product_cost(name, product, tokens, p)
        yield "input_norm", _norm(layer.norm.kind, tokens, width, p, residual=False)


def _head(model: ModelSpec, tokens: int, sampled: int, p: Precision) -> Iterator[Priced]:
    if model.ends_normed:
        yield "final_norm", _norm(model.final_norm.kind, tokens, model.hidden_size, p)
    width = model.hidden_size
    for number, each in enumerate(model.pooling.head if model.pooling is not None else ()):
        yield f"head.{number}", linear_cost(sampled, width, each.outputs, itemsize=p.item, weight_itemsize=p.item)
        width = each.outputs
    if not model.scores:
        return
    stored = p.weight_of("unembed", p.item)
    yield "unembed", linear_cost(sampled, model.hidden_size, model.vocab_size, itemsize=p.item, weight_itemsize=stored)
    yield "sample", sample_cost(sampled, model.vocab_size)


def _norm(kind: str, tokens: int, width: int, p: Precision, residual: bool = True) -> Cost:
    return norm_cost(tokens, width, itemsize=p.item, kind="rms" if kind == "rms" else "layer", residual=residual)


def _sampled(name: str) -> bool:
    """Return True if an op runs for sampled rows only: those of the head of a model that pools do."""
    return name in SAMPLED or name.startswith("head.")


def op_rate(name: str, hardware: Hardware, p: Precision) -> float:
    """Return the FLOP/s at which the op called `name` can run."""
    name = name.removeprefix(ENCODER).removeprefix(TOWER)
    if name in VECTOR and "float32" in hardware.matrix:
        return hardware.rate("float32")
    usual = p.product_rate if name in PRODUCTS else p.other_rate
    held = p.rate_of(name, usual)
    return hardware.rate(held if held in hardware.matrix else usual)  # where it has no such units, weights are widened


def seconds(cost: Cost, hardware: Hardware, rate: float) -> float:
    """Return max(bytes ÷ bandwidth, FLOPs ÷ rate)."""
    return max(cost.bytes / hardware.bandwidth, cost.flops / rate)


def bound(cost: Cost, hardware: Hardware, rate: float) -> str:
    """Return "memory" or "compute", whichever takes longer."""
    return "memory" if cost.bytes / hardware.bandwidth >= cost.flops / rate else "compute"


def step_limit(ops: list[OpCost], hardware: Hardware, dtype: str | Precision) -> float:
    """Return the seconds that all ops need, one after the other. This is the slow, plain form of
    `Roofline.step_limit`."""
    p = precision(dtype)
    return sum(op.count * seconds(op.cost, hardware, op_rate(op.name, hardware, p)) for op in ops)


class Roofline:
    """A `kernels.base.cost.CostModel` that is fast enough for every step: it takes microseconds, since most ops are
    linear in the numbers of tokens and of rows, or of sampled rows, and experts in one number more.

    expert_devices: as in `step_ops`. join: how long an op takes whose bytes and FLOPs take so many seconds each.

    Legend:
        R  rows
        K  ops whose cost is linear in the numbers of tokens (or of sampled rows) and of rows
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        dtype: str | Precision,
        kv_dtype: str | None = None,
        expert_devices: int = 1,
        join: Join = np.maximum,
    ) -> None:
        p, self._join = precision(dtype), join
        self._join_one: Join = max if join is np.maximum else join  # of single numbers
        self._model = model
        self._encoder = None
        if model.encoder is not None:
            self._encoder = Roofline(model.encoder, hardware, p, kv_dtype, join=join)
        others = ("attention", *EXPERTS, *BY_ROW)
        steps = (
            step_ops(model, StepShape(new, new, sum(new)), dtype=dtype, kv_dtype=kv_dtype) for new in ([1], [2], [1, 1])
        )
        probes = list(zip(*([op for op in ops if op.name not in others] for ops in steps), strict=True))
        self._per_token = _Lines([each for each in probes if not _sampled(each[0].name)], hardware, p, join)
        self._per_sample = _Lines([each for each in probes if _sampled(each[0].name)], hardware, p, join)
        feed_forwards = Counter(layer.feed_forward for layer in model.layers)
        self._expert_devices = expert_devices
        self._experts = [
            _Experts(spec, times, model.hidden_size, hardware, p, Reach(devices=expert_devices).used(spec))
            for spec, times in feed_forwards.items()
            if isinstance(spec, ExpertsSpec)
        ]
        self._hardware, self._precision, self._kv_dtype = hardware, p, kv_dtype
        probe = StepShape([1], [1], 1)
        self._rowwise = {
            mixer: times
            for mixer, times in Counter(layer.mixer for layer in model.layers if layer.mixer is not ABSENT).items()
            if any(name in BY_ROW for name, _ in MIXERS[mixer.kind](mixer, probe, 1, p, kv_dtype))
        }
        mixing = (layer.mixer for layer in model.layers if not isinstance(layer.mixer, CrossAttentionSpec))
        attention = [found for mixer in mixing if (found := attention_of(mixer)) is not None]
        mixers = Counter(
            (m.window or m.chunk, m.num_heads, m.num_kv_heads, m.head_dim, cached_itemsize(m, p, kv_dtype))
            for m in attention
            if not m.bidirectional
        )
        self._attention = [
            (
                window,
                times * 2 * heads * dim * p.item / hardware.bandwidth,
                times * 2 * kv_heads * dim * kv_item / hardware.bandwidth,
                times * 4 * heads * dim / hardware.rate(p.other_rate),
            )
            for (window, heads, kv_heads, dim, kv_item), times in mixers.items()
        ]
        windows = any(window is not None for window, *_ in self._attention)
        self._plain = not (self._rowwise or windows or model.encoder is not None)  # no op needs one row's own length

    def step_limit(self, shape: StepShape) -> float:
        """Return the least seconds that the step needs."""
        new_R = np.asarray(shape.num_tokens_R, np.float64)
        return self._total(shape, new_R, float(np.add.reduce(new_R)))

    @property
    def sums_suffice(self) -> bool:
        """Return True if `of_prompt` can be asked: no op's cost depends on the length of one row."""
        return self._plain

    def of_prompt(self, rows: int, keys: float, tokens: int, length: int) -> float:
        """Return `step_limit` of a step in which `rows` rows decode, with so many cached keys in all, and one more row
        runs so many tokens of a prompt, behind which it has `length`. tokens: 0 if there is no such row."""
        if not tokens:
            return self._of_sums(rows, rows, rows, (keys, keys))
        pairs = keys + tokens * length - (tokens * tokens - tokens) / 2
        return self._of_sums(rows + tokens, rows + 1, rows + 1, (pairs, keys + length))

    def _total(self, shape: StepShape, new_R: np.ndarray, ran: float, tokens: float = 0.0) -> float:
        """Return the sum over all ops. ran: the tokens of all rows. tokens: those that run, if padding is included."""
        length_R, tokens = np.asarray(shape.kv_len_R, np.float64), tokens or ran
        rows, seen = int(np.count_nonzero(new_R)), None
        if len(shape.views):
            return self._seeing(shape) + self._total(shape._replace(views=()), new_R, ran, tokens)
        if not shape.shared and rows == len(new_R):  # what `visible` returns without a window, in fewer operations
            pairs = keys = float(np.add.reduce(length_R))
            if ran != rows:
                pairs = float(new_R @ length_R - (new_R @ new_R - ran) / 2)
            seen = pairs, keys
        if seen is not None and self._plain:
            return self._of_sums(tokens, rows, shape.num_sampled, seen, shape.reach)
        total = sum(self._by_row(shape, int(tokens)))
        total += self._of_sums(tokens, rows, shape.num_sampled, seen or (0.0, 0.0), shape.reach)
        for window, per_token, per_key, per_pair in self._attention:
            if seen is None or window is not None:
                pairs, keys = visible(new_R, length_R, window, shape.shared)
                total += float(self._join_one(per_token * tokens + per_key * keys, per_pair * pairs))
        return total if self._encoder is None or not len(shape.encoded) else total + self._encoding(shape)

    def _of_sums(self, tokens: float, rows: int, sampled: int, seen: tuple[float, float], reach: float = 1.0) -> float:
        """Return the sum over the ops that need no row's own length, and attention without windows if it has `seen` so
        many pairs of query and key, and keys."""
        total, (pairs, keys) = self._per_token.seconds(tokens, rows) + self._per_sample.seconds(sampled), seen
        for window, per_token, per_key, per_pair in self._attention if keys else ():
            if window is None:
                total += float(self._join_one(per_token * tokens + per_key * keys, per_pair * pairs))
        if self._experts:
            used = Reach(reach, self._expert_devices)
            total += sum(experts.seconds(tokens, used, self._join) for experts in self._experts)
        return total

    def _encoding(self, shape: StepShape) -> float:
        """Return the seconds of the encoder, and of what the decoder's layers make of its output."""
        assert self._encoder is not None
        hardware, p = self._hardware, self._precision
        total = self._encoder.step_limit(StepShape(shape.encoded, shape.encoded, 0))
        for name, cost, times in crossing(self._model, int(np.sum(shape.encoded)), p, self._kv_dtype):
            rate = op_rate(name, hardware, p)
            total += times * float(self._join(cost.bytes / hardware.bandwidth, cost.flops / rate))
        return total

    def _seeing(self, shape: StepShape) -> float:
        """Return the seconds of the tower, of which each op is looked at: few steps have pictures."""
        hardware, p = self._hardware, self._precision
        ops = seeing_ops(self._model, shape, p, self._kv_dtype)
        rated = ((op.cost, op.count, op_rate(op.name, hardware, p)) for op in ops)
        return sum(n * float(self._join(c.bytes / hardware.bandwidth, c.flops / rate)) for c, n, rate in rated)

    def _by_row(self, shape: StepShape, tokens: int) -> Iterator[float]:
        """Yield the limits of the ops that are not linear."""
        hardware, p = self._hardware, self._precision
        for mixer, times in self._rowwise.items():
            for name, cost in MIXERS[mixer.kind](mixer, shape, tokens, p, self._kv_dtype):
                if name in BY_ROW:
                    yield times * seconds(cost, hardware, op_rate(name, hardware, p))


class _Lines:
    """Ops whose bytes are a + b·n + c·rows, and whose FLOPs are d·n. They are made from the ops' costs for one token,
    for two in a row, and for two in a row each."""

    def __init__(
        self, probes: list[tuple[OpCost, OpCost, OpCost]], hardware: Hardware, p: Precision, join: Join
    ) -> None:
        self._join, self._sums = join, dict[tuple[float, float], float]()
        rates = [op_rate(one.name, hardware, p) for one, _, _ in probes]
        bytes_K3 = np.array([[one.count * each.cost.bytes for each in (one, two, apart)] for one, two, apart in probes])
        one_K, two_K, apart_K = bytes_K3.reshape(-1, 3).T / hardware.bandwidth
        flops_K = [one.count * one.cost.flops / rate for (one, _, _), rate in zip(probes, rates, strict=True)]
        self._slope_K, self._row_K, self._flops_K = two_K - one_K, apart_K - two_K, np.array(flops_K)
        self._fixed_K = one_K - self._slope_K - self._row_K

    def seconds(self, n: float, rows: float = 0) -> float:
        """Return the sum of the ops' limits. For n = 0 nothing runs, and no weight is read."""
        if (found := self._sums.get((n, rows))) is None:
            bytes_K = self._fixed_K + self._slope_K * n + self._row_K * rows
            found = float(self._join(bytes_K, self._flops_K * n).sum()) if n else 0.0
            if len(self._sums) >= KEPT_SUMS:
                self._sums.clear()
            self._sums[n, rows] = found
        return found


class _Experts:
    """The two products of equal mixtures: a · (experts reached) + b · tokens bytes and c · tokens FLOPs each."""

    def __init__(
        self, spec: ExpertsSpec, times: int, width: int, hardware: Hardware, p: Precision, used: float
    ) -> None:
        self._spec = spec
        self._ops = [
            (
                times * (one.bytes - none.bytes) / hardware.bandwidth,
                times * none.bytes / hardware.bandwidth,
                times * none.flops / op_rate(name, hardware, p),
            )
            for (name, none), (_, one) in zip(
                *(grouped(spec, width, 1, p, reached, used) for reached in (0, 1)), strict=True
            )
        ]

    def seconds(self, tokens: float, reach: Reach, join: Join) -> float:
        """Return the sum of both ops' limits."""
        reached = reach.experts(tokens, self._spec)
        return sum(float(join(a * reached + b * tokens, c * tokens)) for a, b, c in self._ops)
