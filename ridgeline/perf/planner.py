"""A forecast of a deployment before it is bought: memory, latencies, throughput and cost, from a config alone.

Every step is taken to need its roofline limit; `explain` and the benchmarks tell how near an engine comes. The load is
a closed loop: B requests always run, each with `input` + `output` tokens, and a new one begins whenever one ends. A
cycle, in which every request produces all its tokens, takes B prefills and `output` - 1 decode steps, in turns. An
engine that runs chunks of prompts inside decode steps can save, against this, at most one reading of the weights per
decode step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.reserve import StepSizes, reserved
from ridgeline.core.settings.cache import MOST_GIB, WeightsWanted
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.activations import Activations
from ridgeline.perf.bus import TierRoom, bus_rate
from ridgeline.perf.division import Divided, Division, Times
from ridgeline.perf.experts import exchanged_bytes
from ridgeline.perf.footprint import check_shape, expert_parameters
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.links import Links, assumed
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.roofline import PRODUCTS, Roofline, op_rate, seeing_ops, step_limit, step_ops
from ridgeline.perf.speculation import Verifying, verifying
from ridgeline.perf.streamed import WeightsBelow, cheaper, experts_below, layers_below

ROWS = 256  # requests of the step that is planned for
SHARED_STEP = 8192  # tokens of prompts that one copy of layers in the host's memory serves
LARGEST_STEP = 1 << 16  # tokens; a device whose products stay memory-bound beyond that is reported as such


class NoRoom(InvalidConfig):
    """No request fits beside the weights. fact: the sentence without what to do."""

    def __init__(self, fact: str, remedy: str) -> None:
        super().__init__(f"{fact}; {remedy}.")
        self.fact = fact


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The deployment to plan.

    input, output: tokens of a request's prompt and output.
    tp, pp, ep, cp: how many devices lie along each axis (`perf.division`).
    links: how long collectives take (default: what is assumed of the hardware's).
    kv_kept: the share of a request's tokens that stays in the cache, if keys and values are evicted (as H2O does).
    kv_offloading_size: GiB of the host's memory for blocks of the cache, for all devices together.
    cpu_offload_gb: GiB of each device's weights that wait in the host's memory and come to it in every step.
    utilization: the share of the memory to use.
    slo_ttft, slo_itl: bounds on the time to the first token and between tokens, in seconds.
    views: the patches of each view of a picture in a request, that a tower sees once; its vectors are among `input`.
    """

    model: ModelSpec
    hardware: Hardware
    input: int
    output: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    links: Links | None = None
    dtype: str | Precision = "bfloat16"
    kv_dtype: str | None = None
    block_size: int = 16
    kv_kept: float = 1.0
    kv_offloading_size: float = 0.0
    cpu_offload_gb: float = 0.0
    utilization: float = 0.9
    slo_ttft: float | None = None
    slo_itl: float | None = None
    price_per_hour: float | None = None
    views: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.views and self.model.tower is None:
            raise InvalidConfig("patches are what a tower sees of pictures, and this model has none; leave them out.")
        check_shape(input=self.input, output=self.output, block_size=self.block_size)
        self.division.part_of(self.model)
        for name in ("utilization", "kv_kept"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidConfig(f"{name} must be above 0 and at most 1, got {getattr(self, name)!r}.")
        if not 0 <= self.kv_offloading_size <= MOST_GIB:
            raise InvalidConfig(
                f"kv_offloading_size must be from 0 to {MOST_GIB:g} GiB, got {self.kv_offloading_size!r}."
            )
        if not 0 <= self.cpu_offload_gb <= MOST_GIB:
            raise InvalidConfig(f"cpu_offload_gb must be from 0 to {MOST_GIB:g} GiB, got {self.cpu_offload_gb!r}.")
        if self.cpu_offload_gb and (self.pp > 1 or self.ep > 1):
            raise InvalidConfig("plan knows cpu_offload_gb for one device and for tp and cp; leave pp and ep out.")
        for name in ("slo_ttft", "slo_itl", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidConfig(f"{name} must be above 0, got {value!r}.")

    @property
    def context(self) -> int:
        """The tokens of a request before its last one, without an encoder's input."""
        return self.prompted + self.output

    @property
    def encoded(self) -> int:
        """The tokens of a request's encoder input; 0: the model has no encoder."""
        return self.input if self.model.encoder is not None else 0

    @property
    def prompted(self) -> int:
        """The tokens that an answer follows. Behind an encoder that is the decoder's start."""
        return 1 if self.encoded else self.input

    @property
    def decoding_context(self) -> int:
        """The cached tokens that a decode step reads of each request, on average over its answer."""
        return self.cached(self.prompted + self.output // 2)

    def cached(self, tokens: int) -> int:
        """Return the number of a request's tokens that the cache keeps."""
        return math.ceil(self.kv_kept * tokens)

    @property
    def division(self) -> Division:
        return Division(tp=self.tp, pp=self.pp, ep=self.ep, cp=self.cp)

    @property
    def devices(self) -> int:
        return self.division.devices


@dataclass(frozen=True, kw_only=True)
class Point:
    """The figures at `batch` requests (with ep, of each group of devices that brings tokens of its own).

    ttft: seconds to the first token.
    step: seconds from token to token while nothing but decode steps run, and `decode` their parts.
    itl: average seconds between tokens, with the other requests' prefills between them.
    tokens_per_second: output tokens of all requests per second.
    cost_per_million: the price of a million output tokens (None: no price was given).
    """

    batch: int
    ttft: float
    step: float
    decode: Times
    itl: float
    tokens_per_second: float
    cost_per_million: float | None


class Chunked(NamedTuple):
    """A prompt that runs in chunks of `chunk` tokens beside decoding requests.

    steps: how many chunks. ttft: seconds of all of them. longest: of the slowest step, for which every decoding request
    waits. alone: of a decode step without a chunk.
    """

    chunk: int
    steps: int
    ttft: float
    longest: float
    alone: float


class Plan:
    """The answers about one deployment. Bytes are per device. Raises InvalidConfig if the model does not fit."""

    def __init__(self, deployment: Deployment) -> None:
        d = self.deployment = deployment
        self.precision = precision(d.dtype)
        self.kv_dtype = d.kv_dtype or self.precision.other_rate
        self.links = d.links or assumed(d.hardware)
        self.divided = Divided(d.model, d.division, d.hardware, self.links, self.precision, self.kv_dtype)
        self.part = self.divided.part
        self.below = self._below() if d.cpu_offload_gb else None
        self.activations = self._activations()
        self.stage = min(range(d.pp), key=self._room)  # the one with room for the fewest requests
        self.weights = self._weights(self.stage)
        self.kv_per_token = self.divided.kv_per_token(self.stage)
        self.state_per_request = self.divided.state_per_request(self.stage)
        self.kv_per_request = self._kv_per_request(self.stage)
        self.kv_budget = self._kv_budget(self.stage)
        self.max_requests = self._room(self.stage)
        if not self.max_requests:
            more = "--tp, --pp or --ep" if expert_parameters(d.model) else "--tp or --pp"
            raise NoRoom(
                f"on {d.devices} x {d.hardware.name} {max(0.0, self.kv_budget) / 1e9:.1f} GB per device remain for the "
                f"KV cache after {self.weights / 1e9:.1f} GB of weights, and one request of {d.context} tokens needs "
                f"{self.kv_per_request / 1e9:.2f} GB",
                f"raise {more}, or use a smaller --dtype or --kv-dtype",
            )

    def _below(self) -> WeightsBelow:
        """Return the weights of a device that wait in the host's memory, as an engine chooses them."""
        d, whole = (
            self.deployment,
            layers_below(self.part, WeightsWanted(self.deployment.cpu_offload_gb), self.precision),
        )
        if d.devices > 1 or self.precision.product_rate != self.precision.other_rate or self.precision.held:
            return whole
        computing = self.divided.decode(ROWS, d.decoding_context, d.encoded).total
        experts = experts_below(self.part, d.cpu_offload_gb, self.precision)
        return cheaper(whole, experts, ROWS, bus_rate(d.hardware), computing)

    def _with_copies(self, computing: float, tokens: int) -> float:
        """Return the seconds of a step of so many tokens, whose computing takes so long."""
        if self.below is None:
            return computing
        return self.below.seconds(computing, tokens, bus_rate(self.deployment.hardware))

    def _room(self, stage: int) -> int:
        return int(max(0.0, self._kv_budget(stage)) // self._kv_per_request(stage))

    def _kv_budget(self, stage: int) -> float:
        d = self.deployment
        return d.hardware.memory * d.utilization - self._weights(stage) - self.activations

    def _weights(self, stage: int) -> float:
        """Return the bytes of weights on the device."""
        return self.divided.weights[stage] - (0 if self.below is None else self.below.saved)

    @property
    def copying(self) -> float:
        """The seconds in which all that waits in the host's memory comes to the device. Layers do in every step, and
        experts in a step whose tokens choose all of them."""
        return 0.0 if self.below is None else self.below.num_bytes / bus_rate(self.deployment.hardware)

    def _kv_per_request(self, stage: int) -> float:
        d, chunk = self.deployment, self.crossover or self.deployment.input
        return self.divided.kv_per_request(
            stage, d.cached(d.context), block_size=d.block_size, max_chunk=chunk, encoded=d.encoded
        )

    @property
    def exchanged(self) -> float:
        """The bytes that a token makes its device send to experts on other devices in one forward pass (dispatch). As
        many come back (combine)."""
        devices = self.deployment.ep if self.deployment.division.groups > 1 else 1
        return exchanged_bytes(self.deployment.model, devices, self.precision.item)

    @property
    def blocks(self) -> int:
        """The number of blocks (of `block_size` tokens in all layers) that fit, or, if no layer keeps tokens, of
        requests' states."""
        if not self.kv_per_token:
            return self.max_requests
        return int(self.kv_budget // (self.deployment.block_size * self.kv_per_token))

    def empty_share(self, block_size: int | None = None) -> float:
        """Return the share of the room in a running request's blocks that holds no token: in the mean half of its last
        block, while it holds its prompt and half of its answer."""
        half = (block_size or self.deployment.block_size) / 2 * bool(self.kv_per_token)
        return half / (self.deployment.input + self.deployment.output / 2 + half)

    @property
    def tier(self) -> TierRoom | None:
        """The tier in the host's memory beside one device; None: there is none, or no layer keeps tokens."""
        d = self.deployment
        if not d.kv_offloading_size or not self.kv_per_token:
            return None
        block = d.block_size * self.kv_per_token
        blocks, tokens = int(d.kv_offloading_size * (1 << 30) / d.devices // block), d.input - d.input % d.block_size
        run = self.divided.prompt(tokens, self.chunk).total if tokens else 0.0
        return TierRoom(blocks, tokens, tokens * self.kv_per_token / bus_rate(d.hardware), run)

    @cached_property
    def crossover(self) -> int | None:
        """The least tokens in a step for which the layers' products take longer to compute than to read;
        None: never."""
        return smallest(LARGEST_STEP, self._products_compute_bound)

    @cached_property
    def chunk(self) -> int:
        """The tokens that a prefill chunk should have at least: the next power of two at which weights cost nothing
        extra."""
        return 1 << max(4, ((self.crossover or LARGEST_STEP) - 1).bit_length())

    @cached_property
    def largest_chunk(self) -> int | None:
        """The largest chunk beside the best batch whose step stays within slo_itl. None: there is no such bound, or no
        such chunk."""
        d, best = self.deployment, self.best
        if d.slo_itl is None or best is None:
            return None
        limit = d.slo_itl

        def too_slow(tokens: int) -> bool:
            return self._mixed(best.batch, tokens) > limit

        first = smallest(LARGEST_STEP, too_slow)
        return LARGEST_STEP if first is None else (first - 1 or None)

    @cached_property
    def best(self) -> Point | None:
        """The largest batch that fits and meets the SLOs; None: not even one request does."""
        first_bad = smallest(self.max_requests, lambda batch: not self.meets(self.point(batch)))
        batch = self.max_requests if first_bad is None else first_bad - 1
        return self.point(batch) if batch else None

    @cached_property
    def prompt(self) -> Times:
        """The time of a prompt that runs alone."""
        return self.divided.prompt(self.deployment.input, self.chunk)

    @cached_property
    def seeing(self) -> float:
        """The seconds of the tower for a request's pictures, of which every device has the whole."""
        d = self.deployment
        shape = StepShape([], [], 0, views=d.views)
        return step_limit([*seeing_ops(d.model, shape, self.precision, self.kv_dtype)], d.hardware, self.precision)

    @cached_property
    def shares(self) -> tuple[float, float, float]:
        """The shares of a request's device time that are the tower's, its prompt's, and its part of decode steps beside
        as many requests as in `best`, or as fit."""
        d, batch = self.deployment, self.best.batch if self.best else self.max_requests
        steps = (d.output - 1) * self.point(batch).step / batch
        times = self.seeing, self.divided.busy(d.input), steps
        return times[0] / sum(times), times[1] / sum(times), times[2] / sum(times)

    def meets(self, point: Point) -> bool:
        d = self.deployment
        return (d.slo_ttft is None or point.ttft <= d.slo_ttft) and (d.slo_itl is None or point.itl <= d.slo_itl)

    def points(self) -> list[Point]:
        """Return the points at powers of two up to the largest batch that fits, at that batch, and at the best one."""
        batches = {1 << i for i in range(self.max_requests.bit_length())} | {self.max_requests}
        return [self.point(b) for b in sorted(batches | ({self.best.batch} if self.best else set()))]

    def verifying(self, drafts: int) -> list[Verifying]:
        """Return cost and gain of verifying so many drafts a row, or fewer, on one device, at the batches of the
        points."""
        d, batches = self.deployment, [point.batch for point in self.points()]
        model = Roofline(d.model, d.hardware, self.precision, self.kv_dtype)
        return verifying(model, d.decoding_context, sorted({1, -(-drafts // 2), drafts}), batches)

    def point(self, batch: int) -> Point:
        """Return the figures of one batch. A request arrives during a decode step, waits for it, and then its prompt
        runs alone."""
        d, divided = self.deployment, self.divided
        decode = divided.decode(batch, d.decoding_context, d.encoded)
        step, shared = self._with_copies(decode.total, batch), self.copying * d.input / SHARED_STEP
        prefill = self.seeing + self._with_copies(self.prompt.total, d.input)
        busy = self.seeing + max(divided.busy(d.input), shared)
        cycle = batch * busy + (d.output - 1) * step
        rate = d.division.groups * batch * d.output / cycle
        cost = None if d.price_per_hour is None else d.price_per_hour * d.devices / 3600 / rate * 1e6
        others = (batch - 1) * busy
        return Point(
            batch=batch,
            ttft=prefill + (step if batch > 1 else 0.0),
            step=step,
            decode=decode,
            itl=step + others / max(1, d.output - 1),
            tokens_per_second=rate,
            cost_per_million=cost,
        )

    def chunked(self, chunk: int, batch: int) -> Chunked:
        """Return the times of a prompt in chunks of so many tokens, beside `batch` decoding requests."""
        check_shape(chunk=chunk)
        d = self.deployment
        chunk = max(chunk, d.encoded)  # none is cut
        ends = [min(start + chunk, d.input) for start in range(0, d.input, chunk)]
        times = [self._mixed(batch, end - start, end) for start, end in pairwise([0, *ends])]
        alone = self._with_copies(self.divided.decode(batch, d.decoding_context, d.encoded).total, batch)
        return Chunked(chunk, len(times), sum(times), max(times), alone)

    def _mixed(self, batch: int, chunk: int, end: int | None = None) -> float:
        d = self.deployment
        context = [d.decoding_context] * batch
        if d.encoded:
            crossed = [*[d.encoded] * batch, chunk]
            shape = StepShape([1] * (batch + 1), [*context, 1], batch, encoded=[chunk], crossed_R=crossed)
            return self.divided.step(shape).total
        shape = StepShape([1] * batch + [chunk], [*context, end or max(chunk, d.input)], batch)
        return self._with_copies(self.divided.step(shape).total, batch + chunk)

    def _products_compute_bound(self, tokens: int) -> bool:
        d = self.deployment
        shape = StepShape([tokens], [tokens], 1)
        groups = d.division.groups
        ops = step_ops(self.part, shape, dtype=d.dtype, kv_dtype=self.kv_dtype, expert_devices=groups)
        products = [op for op in ops if op.name in PRODUCTS]
        reading = sum(op.count * op.cost.bytes for op in products) / d.hardware.bandwidth
        return reading < sum(op.count * op.cost.flops / op_rate(op.name, d.hardware, self.precision) for op in products)

    def _activations(self) -> float:
        """Return the bytes of one step of `chunk` tokens and 256 rows, as an engine plans for it."""
        d = self.deployment
        sizes = StepSizes(
            device_type="cuda",
            itemsize=int(self.precision.item),
            max_tokens=self.chunk,
            max_seqs=ROWS,
            longest=d.context,
            ranks=d.cp,
        )
        return reserved([Activations(self.part)], sizes)


def smallest(largest: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest n in 1..largest for which `holds` is true, or None. `holds` must stay true from some n on."""
    if largest < 1 or not holds(largest):
        return None
    low, high = 1, largest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
