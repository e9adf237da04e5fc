"""The growth of a model's steps and memory with the context, and from which context on another model needs less.

Attention reads the keys and values of every token before it, so its steps take longer and its requests hold more, the
longer the context is. A state of constant size costs the same at every context, which is more than a few tokens' keys
and values. Where the two meet is a question of arithmetic: the times here are the hardware's limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.footprint import kv_bytes, weight_bytes
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.planner import smallest
from ridgeline.perf.precision import Precision
from ridgeline.perf.roofline import Roofline, step_ops

CONTEXTS = tuple(1 << n for n in range(10, 21))  # 1k to 1M tokens
LONGEST = 1 << 24  # tokens; models that have not met by then are said never to meet


@dataclass(frozen=True, kw_only=True)
class Point:
    """The figures at one context, in tokens.

    step: seconds of a step in which every request decodes a token.
    step_bytes: bytes that the step reads and writes.
    chunk: seconds of a step that runs the prompt's last tokens up to the context (`Curve.chunk` of them).
    held: bytes that a request holds.
    requests: how many requests fit beside the weights into the device's memory.
    """

    context: int
    step: float
    step_bytes: float
    chunk: float
    held: float
    requests: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One model's figures over the context.

    batch: requests that decode together.
    chunk: tokens of a prompt that run in one step.
    kv_dtype: the cache's dtype.
    utilization: the share of the device's memory to use.
    """

    name: str
    model: ModelSpec
    hardware: Hardware
    precision: Precision
    kv_dtype: str
    batch: int = 1
    chunk: int = 8192
    utilization: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("chunk", self.chunk)):
            if value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}.")

    def decoding(self, context: int) -> StepShape:
        """Return the step in which every request decodes a token and then has `context` tokens cached."""
        return StepShape([1] * self.batch, [context] * self.batch, self.batch)

    def prompt(self, context: int) -> StepShape:
        """Return the step that runs the last chunk of a prompt of `context` tokens."""
        return StepShape([min(self.chunk, context)], [context], 1)

    def at(self, context: int) -> Point:
        ops = step_ops(self.model, self.decoding(context), dtype=self.precision, kv_dtype=self.kv_dtype)
        held = self.held(context)
        room = self.hardware.memory * self.utilization - weight_bytes(self.model, self.precision)
        return Point(
            context=context,
            step=self.step(context),
            step_bytes=sum(op.count * op.cost.bytes for op in ops),
            chunk=self._limit.step_limit(self.prompt(context)),
            held=held,
            requests=max(0, int(room // held)),
        )

    def step(self, context: int) -> float:
        """Return the least seconds of a step of decoding."""
        return self._limit.step_limit(self.decoding(context))

    def held(self, context: int) -> float:
        """Return the bytes that a request of `context` tokens holds."""
        return kv_bytes(self.model, context, self.kv_dtype)

    @cached_property
    def _limit(self) -> Roofline:
        return Roofline(self.model, self.hardware, self.precision, self.kv_dtype)


def crossing(one: Callable[[int], float], other: Callable[[int], float], longest: int = LONGEST) -> int | None:
    """Return the shortest context from which on `other` is below `one`; None if it is not, up to `longest` tokens.

    Both must grow with the context, and `one` faster than `other` if they cross.
    """
    return smallest(longest, lambda context: other(context) < one(context))


def crossings(curves: Sequence[Curve]) -> list[tuple[Curve, Curve, str, int]]:
    """Return (model, the one that is better from there on, in what, from how many tokens on) for every pair that
    crosses. What is better everywhere crosses nowhere."""
    found = []
    for one in curves:
        for other in curves:
            for what in ("step", "held"):
                at = crossing(getattr(one, what), getattr(other, what)) if one is not other else None
                if at is not None and at > 1:
                    found.append((one, other, what, at))
    return found
