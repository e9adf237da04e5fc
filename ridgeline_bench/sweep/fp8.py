"""Products with 8-bit weights on a Hopper GPU: check every cut of the kernels against float32, then time them.

    ridgeline bench sweep fp8 --json results.jsonl [--tokens 1 64] [--form token block int8 bf16]

"op" is all that an op launches: rounding the activations (with norm and residual for qkv and gate_up) and the product.
"product" is the product alone, "round" the rounding alone, "library" torch's own product of the same numbers. Weights
of the form "group" are those of "token"; o and down get activations that the op before has rounded, with a scale for
each 128 (so the op is the product alone), and gate_up rounds its results in the same way. A limit
is the larger of bytes / 4.42 TB/s and FLOPs / 1,979 TFLOP/s (half of them for bf16). Errors are in standard deviations
of the result. runs.py says how it is done.

Legend: see kernels/gemm/fp8/op.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.gemm.fp8 import choose, library
from ridgeline.kernels.gemm.fp8.choose import Tiles
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.fp8.products import rounded_linear
from ridgeline.kernels.gemm.fp8.rounding import round_into, round_rows
from ridgeline.kernels.gemm.plain import triton as gemm
from ridgeline.kernels.gemm.plain.choose import RING, Stream
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded, room
from ridgeline.kernels.small.activation.op import gated_activation
from ridgeline.kernels.small.activation.triton import gated_activation as gated
from ridgeline_bench.sweep.sweep import Job, Limit, Sweep

PROCESSORS, EPS = 132, 1e-5
FORMS = ("token", "block", "int8")  # token, block: scales of E4M3
Plan = Stream | Tiles


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight of `outputs` rows (of each half if gated). normed: its op has a norm and a residual."""

    outputs: int
    inputs: int
    gate: str | None = None
    normed: bool = False

    @property
    def rows(self) -> int:
        return self.outputs * (2 if self.gate else 1)


MATRICES = {
    "qkv": Fp8Matrix(6144, 4096, normed=True),
    "o": Fp8Matrix(4096, 4096),
    "gate_up": Fp8Matrix(14_336, 4096, "silu", normed=True),
    "down": Fp8Matrix(4096, 14_336),
    "large": Fp8Matrix(7168, 16_384),
}


def forms_of(name: str, tokens: int) -> Iterator[str]:
    yield "token"
    if tokens <= 256 and name != "qkv":
        yield "group"
    yield "block"
    if tokens in (1, 64, 8192):
        yield "int8"


def plans_of(matrix: Fp8Matrix, tokens: int, form: str) -> Iterator[Plan]:
    """Yield the chosen plan, then others that might be faster."""
    outputs, inputs, gated = matrix.outputs, matrix.inputs, matrix.gate is not None
    blocked = form == "block"
    yield choose.choose_hopper(
        tokens, inputs, outputs, gated=gated, processors=PROCESSORS, blocked=blocked, between=form == "group"
    )
    if form == "group" and not gated and tokens <= 64:
        # A tile of 128 rows has all outputs of a scale, so its end could round for the op behind
        yield Stream(128, max(16, tokens), 256, 5 if tokens <= 32 else 4, 4)
    if tokens in (1, 8) and form in ("token", "group") and not gated:
        # Boxes with fewer rows beyond the last token; half as many barriers
        split = 2 if inputs > 8192 else 1
        for columns, block in ((8, 256), (8, 512), (16, 512)):
            yield Stream(64, columns, block, RING // ((64 + columns) * block), split)
    if tokens in (1, 8) and form in ("token", "group") and gated:
        yield Stream(128, 8, 128, 6)
    if tokens <= 64:
        for rows in (64, 128):
            for columns in {max(16, tokens), max(16, tokens // 2)}:
                tiles = -(-outputs // rows) * -(-tokens // columns)
                for long in (False, True):
                    plan = choose.stream(
                        rows, columns, inputs, tiles, gated=gated, processors=PROCESSORS, long=long and not gated
                    )
                    yield plan
                    if form == "token" and tokens == 64:
                        yield replace(plan, promote=True)
    elif tokens <= 512:
        if form != "group":
            yield Tiles(6, promote=True) if blocked else Tiles()
        for rows, columns in ((64, 64), (64, 128), (128, 128)) if gated else ((64, 128), (128, 128), (64, 256)):
            if columns > tokens or (form != "token" and columns == 256) or (blocked and gated and columns == 128):
                continue
            tiles = -(-outputs // rows) * -(-tokens // columns)
            yield choose.stream(rows, columns, inputs, tiles, gated=gated, processors=PROCESSORS, long=not gated)
    if (tokens >= 256 and form == "block") or (tokens >= 1024 and form == "token"):
        yield from (Tiles(4, promote=True, tokens=256), Tiles(6, promote=True))


class Fp8Given(NamedTuple):
    """The arguments of a call. rounded: activations for a product alone. room: for a result that is rounded."""

    x_TI: Tensor
    residual_TI: Tensor | None
    norm_I: Tensor | None
    weight: Eight
    rounded: Rounded | None = None
    room: Rounded | None = None


class Fp8Sweep(Sweep):
    workload = "products with 8-bit weights"
    tolerance, peak = 0.1, 1979e12
    start, silence = 45.0, 15.0

    def jobs(self) -> list[Job]:
        found = []
        for tokens in (1, 8, 64, 256, 1024, 8192, 16, 32, 128, 512):
            for case in ("qkv", "o", "gate_up", "down"):
                for form in forms_of(case, tokens):
                    found += self._cuts(case, "op", tokens, form)
                found += [Job(case, "round", tokens, "token")]
                found += [Job(case, "op", tokens, "token", "library")] if tokens > 1 else []
                found += [Job(case, "op", tokens, "bf16")]
        for form in FORMS:
            found += self._cuts("large", "product", 4096, form)
            found += [Job("large", "product", 4096, form, "library")] if form != "block" else []
        return [*found, Job("large", "product", 4096, "bf16")]

    @staticmethod
    def _cuts(case: str, op: str, tokens: int, form: str) -> list[Job]:
        plans = dict.fromkeys(plans_of(MATRICES[case], tokens, form))
        return [Job(case, op, tokens, form, plan, chosen=i == 0) for i, plan in enumerate(plans)]

    def shape(self, job: Job) -> tuple[Fp8Matrix, int]:
        matrix = MATRICES[job.case]
        small = replace(matrix, outputs=self.small(matrix.outputs, 128), inputs=self.small(matrix.inputs, 256))
        return small, self.small(job.tokens, 3)

    def arguments(self, job: Job) -> list[Fp8Given]:
        matrix, tokens = self.shape(job)
        nbytes = matrix.rows * matrix.inputs * (2 if job.form == "bf16" else 1)
        make = lambda: [self._weight(matrix, job.form) for _ in range(self.turns(nbytes))]  # noqa: E731
        return [
            self._given(job, matrix, tokens, weight)
            for weight in self.kept("weights", (job.case, job.form.replace("group", "token")), make)
        ]

    def _weight(self, matrix: Fp8Matrix, form: str) -> Eight:
        normal_OI = self.normal(matrix.rows, matrix.inputs)
        if form == "bf16":
            plain_OI = normal_OI * matrix.inputs**-0.5
            return Eight(plain_OI, plain_OI)
        blocked = form == "block"
        shape = (-(-matrix.rows // 128), -(-matrix.inputs // 128)) if blocked else (matrix.rows, 1)
        scale = (0.5 + torch.rand(shape, device=self.device)) * matrix.inputs**-0.5
        if form == "int8":
            return Eight((normal_OI * 40).clamp(-127, 127).to(torch.int8), scale / 40)
        number_OI = (normal_OI * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Eight(number_OI, scale / 100, blocked, "block" if blocked else "token")

    def _given(self, job: Job, matrix: Fp8Matrix, tokens: int, weight: Eight) -> Fp8Given:
        x_TI = self.normal(tokens, matrix.inputs)
        residual_TI = self.normal(tokens, matrix.inputs) if matrix.normed else None
        norm_I = torch.ones(matrix.inputs, dtype=self.dtype, device=self.device) if matrix.normed else None
        given = Fp8Given(x_TI, residual_TI, norm_I, weight)
        if job.form == "group":
            return self._fed(given, matrix, tokens)
        alone = job.op == "product" and job.form != "bf16"
        return given._replace(rounded=self._rounded(given)) if alone else given

    def _fed(self, g: Fp8Given, matrix: Fp8Matrix, tokens: int) -> Fp8Given:
        """Return the arguments with activations that the op before has rounded, or room for what this one rounds."""
        if matrix.gate:
            return g._replace(room=room(tokens, matrix.outputs, self.dtype, self.device))
        rounded = room(tokens, matrix.inputs, self.dtype, self.device)
        round_into(g.x_TI, rounded)
        return g._replace(rounded=rounded)

    @staticmethod
    def _rounded(g: Fp8Given) -> Rounded:
        kind, how = g.weight.number_OI.dtype, g.weight.activations or "token"
        return round_rows(Operand(g.x_TI, g.residual_TI, g.norm_I, EPS), kind, how)[0]

    def launch(self, job: Job, arguments: Any) -> Tensor:
        matrix, g = self.shape(job)[0], arguments
        if job.form == "bf16":
            if g.norm_I is None:
                return gemm.linear(g.x_TI, g.weight.number_OI, None)
            return gemm.norm_linear(
                Operand(g.x_TI, g.residual_TI, g.norm_I, EPS), g.weight.number_OI, Epilogue(gate=matrix.gate)
            )[0]
        x = self._rounded(g) if g.rounded is None else g.rounded
        if job.op == "round":
            return x.q_TI
        if job.cut == "library":
            y_TO = library.product(x, g.weight, None)
            return gated(y_TO, matrix.gate) if matrix.gate else y_TO
        y_TO = rounded_linear(x, g.weight, None, matrix.gate, job.cut, g.room)
        return y_TO if g.room is None else g.room

    def reference(self, job: Job, arguments: Any) -> Tensor | None:
        """Return the product of the first and the last tokens, of the numbers that our rounding makes."""
        matrix, g = self.shape(job)[0], arguments
        if job.op == "round":
            return None
        if job.form == "bf16":
            n_TI = self._ends(g.x_TI if g.residual_TI is None else g.x_TI + g.residual_TI).float()
            if g.norm_I is not None:
                n_TI = n_TI * torch.rsqrt((n_TI**2).mean(1, keepdim=True) + EPS)
            weight_OI = g.weight.number_OI.float()
        else:
            n_TI = self._ends((self._rounded(g) if g.rounded is None else g.rounded).wide())
            scale = g.weight.scale
            if g.weight.blocked:
                scale = scale.repeat_interleave(128, 0)[: matrix.rows].repeat_interleave(128, 1)[:, : matrix.inputs]
            weight_OI = g.weight.number_OI.float() * scale
        want = n_TI @ weight_OI.T
        return gated_activation(want, matrix.gate) if matrix.gate else want

    def defined(self, job: Job, arguments: Any, result: Any) -> Tensor:
        result = result.wide() if isinstance(result, Rounded) else result
        return result if job.op == "round" else self._ends(result)

    @staticmethod
    def _ends(x: Tensor) -> Tensor:
        return x if len(x) <= 48 else torch.cat((x[:24], x[-24:]))

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        matrix, tokens = self.shape(job)
        if job.op == "round":
            return self.least(tokens * matrix.inputs * (7 if matrix.normed else 3), 0.0)
        wide = 2 if job.form == "bf16" else 1
        moved = tokens * (2 * matrix.inputs * (3 if matrix.normed else 1) + 2 * matrix.outputs)
        flops = 2.0 * tokens * matrix.rows * matrix.inputs
        return self.least(matrix.rows * matrix.inputs * wide + moved, flops, self.peak / wide)

    def alike(self, a: Job, b: Job) -> bool:
        return super().alike(a, b) and MATRICES[a.case].gate == MATRICES[b.case].gate
