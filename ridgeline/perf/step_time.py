"""The time that a step is expected to take, where the roofline gives the least.

Five things make a step longer than its limit, and each has one number that was fitted to steps of one kind: decode
steps alone (W2 and W3) and prompts alone (W4), of Llama-3.1-8B on an H200. Nothing was fitted to mixed load, to other
models or to other devices.

* Neither memory nor the matrix units are used to their attained rates all the time.
* An op that takes about as long for its bytes as for its FLOPs takes longer than either, since its tiles wait for both.
* The arithmetic of attention runs at a lower rate than that of products.
* Rows of unlike lengths keep the device waiting for the longest one.
* Each op has a start and an end in which the device is not full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ridgeline.core.plan.buckets import MIXED_TOKENS, at_least, row_buckets
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.roofline import Roofline, step_ops


@dataclass(frozen=True, kw_only=True)
class Attained:
    """Shares of a device's rates, and what ops lose.

    memory, products, attention: the shares of the attained bandwidth and matrix rate. sharpness: the exponent p of the
    norm (bytesᵖ + FLOPsᵖ)^(1/p) of an op's two times; inf would be the roofline's maximum. op: seconds of each op, as
    multiples of the device's shortest kernel. wave: how many decoding rows the device attends to at once. mixed: the
    further time of a decoding row's keys beside chunks of prompts, as a multiple, for `beside` rows at most.
    of_datasheet: the bandwidth and matrix rate that a device attains whose rates are its maker's, as shares of those:
    an H200's.
    """

    memory: float = 0.97
    products: float = 0.97
    attention: float = 0.8
    sharpness: float = 2.0
    op: float = 1.2
    wave: float = 18.0
    mixed: float = 2.5
    beside: float = 40.0
    of_datasheet: tuple[float, float] = (0.92, 0.76)


class StepTimes(Roofline):
    """A `kernels.base.cost.CostModel` of expected times. Steps are padded to graphs' sizes, as on a GPU.

    max_rows, max_tokens: the most of a step.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        dtype: str | Precision,
        kv_dtype: str | None = None,
        *,
        max_rows: int,
        max_tokens: int,
        attained: Attained | None = None,
    ) -> None:
        a = self._attained = attained or Attained()
        memory, products = a.memory, a.products
        if hardware.measured is None:
            memory, products = memory * a.of_datasheet[0], products * a.of_datasheet[1]
        rates = {name: rate * products for name, rate in hardware.matrix.items()}
        used = replace(hardware, bandwidth=hardware.bandwidth * memory, matrix=rates)

        def join(memory: np.ndarray, arithmetic: np.ndarray) -> np.ndarray:
            return (memory**a.sharpness + arithmetic**a.sharpness) ** (1 / a.sharpness)

        super().__init__(model, used, dtype, kv_dtype, join=join)
        self._attention = [
            (window, tokens, keys, pairs * a.products / a.attention) for window, tokens, keys, pairs in self._attention
        ]
        self._keys = sum(keys for _, _, keys, _ in self._attention)
        ops = step_ops(model, StepShape([1], [1], 1), dtype=precision(dtype), kv_dtype=kv_dtype)
        self._starts = sum(op.count for op in ops) * a.op * hardware.floors.latency
        self._rows = row_buckets(max_rows)
        self._tokens = [tokens for tokens in MIXED_TOKENS if tokens <= max_tokens]

    @property
    def sums_suffice(self) -> bool:
        """Return False: sums do not show how much time rows of unlike lengths lose."""
        return False

    def step_limit(self, shape: StepShape) -> float:
        """Return the seconds that the step is expected to take."""
        return self.seconds(shape)

    def seconds(self, shape: StepShape, shared_keys: int = 0) -> float:
        """Return the seconds that the step is expected to take. shared_keys: how many keys rows see that others of the
        step see as well, where the op reads them once."""
        new_R = np.asarray(shape.num_tokens_R, np.float64)
        ran, rows = float(np.add.reduce(new_R)), len(new_R)
        padded = at_least(self._rows if ran == rows else self._tokens, int(ran))
        keys = self._lost(new_R, np.asarray(shape.kv_len_R, np.float64), mixed=ran > rows) - shared_keys
        return self._starts + self._total(shape, new_R, ran, max(ran, float(padded))) + self._keys * keys

    def of_decoding(self, rows: int, keys: int, longest: int, shared_keys: int = 0) -> float | None:
        """Return `seconds` of a step in which each of `rows` runs one token and emits one. None if the lengths of all
        rows must be known. keys: the cached tokens of all rows. longest: those of the longest one."""
        if not self._plain:
            return None
        padded = float(max(rows, at_least(self._rows, rows)))
        lost = min(self._attained.wave, rows) * (longest - keys / rows) - shared_keys
        return self._starts + self._of_sums(padded, rows, rows, (float(keys), float(keys))) + self._keys * lost

    def _lost(self, new_R: np.ndarray, length_R: np.ndarray, *, mixed: bool) -> float:
        """Return the number of keys that could be read in the time that decoding rows lose: while the device waits for
        the longest of them, and beside prompts. mixed: some rows are chunks of prompts."""
        a = self._attained
        if mixed:
            length_R = length_R[new_R == 1]
        if not (rows := len(length_R)):
            return 0.0
        keys = float(np.add.reduce(length_R))
        late = min(a.wave, rows) * (float(np.maximum.reduce(length_R)) - keys / rows)
        return late + a.mixed * keys * min(1.0, a.beside / rows) if mixed else late
