"""Products for queries, keys and values, attention, and the output's product of short sequences in one kernel.

Idea      A sequence of at most 128 tokens is one tile. A program has a head of a sequence: it multiplies the inputs
          with the head's rows of the weight, and queries, keys, values and scores never leave the chip. Then all
          programs meet once, and each multiplies all heads of a sequence with 64 rows of the output's weight.
FLOPs     As three launches: 2 T M (H + 2 G) D + 4 T² H D + 2 T H D M a sequence; with groups of heads more, as each
          head computes the keys of its group.
Bytes     Inputs and weights once for each head from L2. Of what lies between the products only the heads' outputs go
          through L2: 2 T H D bytes each way, an eighth of what three launches write and read there.
Limit     Tensor cores if there are a head for each multiprocessor or many more. With few sequences most multiprocessors
          have nothing to do, and three launches divide the first product into smaller tiles.
Waiting   Programs wait for each other, so the launch is cooperative, and has no more programs than multiprocessors. No
          atomic sum is in the result: it is the same to the bit in every run.

Triton's interpreter runs one program after the other, and none can wait: there the phases are two launches.

Legend:
    B  sequences      M  model width
    T  tokens         X  rows of the weight for queries, keys and values: (H + 2 G) D
    H  query heads    G  heads of keys
    D  head width: 64
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from ridgeline.kernels.attention.triton_sdpa import EXACT, LOG2E, NOTHING
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.cuda.predict import Chip

MOST_TOKENS, WIDTH = 128, 64
STEP = 64  # inputs of a step of a product, and rows of the output's weight of a tile
MEETING = 1e-6  # assumed seconds: all programs of a cooperative launch meet once
BETWEEN = 1.5e-6  # assumed seconds from the end of a kernel to the next one's first product, in a graph


@triton.jit
def _rows(pointer, rows, columns, stride, count):
    """Load a tile of rows; 0 behind the last one."""
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=rows[:, None] < count, other=0.0)


@triton.jit
def _attend(x_ptr, w_ptr, heads_ptr, item, T, scale, H: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
            D: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Write the attention of one head of one sequence to its place in [B, T, H D]."""
    sequence, head = item // H, item % H
    group = head // (H // G)
    tokens, inputs, channels = tl.arange(0, TOKENS), tl.arange(0, STEP), tl.arange(0, D)
    x_ptr += tl.cast(sequence, tl.int64) * T * M
    q = tl.zeros([TOKENS, D], tl.float32)
    k, v = q, q
    at = channels[:, None] * M + inputs[None, :]
    for start in range(0, M, STEP):
        x = _rows(x_ptr + start, tokens, inputs, M, T)
        q = tl.dot(x, tl.trans(tl.load(w_ptr + head * D * M + start + at)), q, input_precision=EXACT)
        k = tl.dot(x, tl.trans(tl.load(w_ptr + (H + group) * D * M + start + at)), k, input_precision=EXACT)
        v = tl.dot(x, tl.trans(tl.load(w_ptr + (H + G + group) * D * M + start + at)), v, input_precision=EXACT)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    scores = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision=EXACT) * scale
    seen = tokens[None, :] < T
    if CAUSAL:
        seen = seen & (tokens[None, :] <= tokens[:, None])
    scores = tl.where(seen, scores, NOTHING)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    out = tl.dot(weights.to(dtype), v.to(dtype), input_precision=EXACT) / total[:, None]
    at = heads_ptr + (tl.cast(sequence, tl.int64) * T + tokens[:, None]) * (H * D) + head * D + channels[None, :]
    tl.store(at, out.to(dtype), mask=tokens[:, None] < T)


@triton.jit
def _meet(arrived_ptr, programs):
    """Wait until all programs are here. The counter never goes back: a launch adds `programs` to it."""
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    goal = (before // programs + 1) * programs
    found = before + 1
    while found < goal:
        found = tl.atomic_add(arrived_ptr, 0, sem="acq_rel")
    tl.debug_barrier()


@triton.jit
def _project(heads_ptr, w_ptr, out_ptr, item, T, H: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
             TOKENS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Write STEP channels of the output of one sequence, [B, T, M]."""
    sequence, tile = item // (M // STEP), item % (M // STEP)
    tokens, inputs, outputs = tl.arange(0, TOKENS), tl.arange(0, STEP), tile * STEP + tl.arange(0, STEP)
    heads_ptr += tl.cast(sequence, tl.int64) * T * (H * D)
    out = tl.zeros([TOKENS, STEP], tl.float32)
    for start in range(0, H * D, STEP):
        x = _rows(heads_ptr + start, tokens, inputs, H * D, T)
        w = tl.load(w_ptr + start + outputs[:, None] * (H * D) + inputs[None, :])
        out = tl.dot(x, tl.trans(w), out, input_precision=EXACT)
    at = out_ptr + (tl.cast(sequence, tl.int64) * T + tokens[:, None]) * M + outputs[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=tokens[:, None] < T)


@triton.jit
def _layer_kernel(
    x_ptr, qkv_ptr, o_ptr, heads_ptr, out_ptr, arrived_ptr, sequences, T, scale,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
    CAUSAL: tl.constexpr, ATTEND: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    """Both phases, or one of them. A program takes every so many heads, and then tiles of outputs."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if ATTEND:
        for item in range(program, sequences * H, programs):
            _attend(x_ptr, qkv_ptr, heads_ptr, item, T, scale, H, G, M, D, TOKENS, STEP, CAUSAL)
    if ATTEND and PROJECT:
        _meet(arrived_ptr, programs)
    if PROJECT:
        for item in range(program, sequences * (M // STEP), programs):
            _project(heads_ptr, o_ptr, out_ptr, item, T, H, M, D, TOKENS, STEP)


class ShortLayer:
    """The layer with given weights, for inputs of one shape: [B, T, M] → [B, T, M]. Not for two streams at once.

    qkv_XM, o_MX: weights of queries, keys and values, one behind the other, and of the output. Contiguous.
    heads: query heads; each has 64 channels. causal: a token sees those before it alone.

    Raises ValueError for more than 128 tokens, for shapes that do not fit, and for a width that 64 does not divide.
    """

    def __init__(self, qkv_XM: Tensor, o_MX: Tensor, heads: int, shape: tuple[int, int], causal: bool = True) -> None:
        (self.batch, self.tokens), (rows, model) = shape, qkv_XM.shape
        self.heads, self.groups, self.model, self.causal = heads, (rows // WIDTH - heads) // 2, model, causal
        fits = rows == (heads + 2 * self.groups) * WIDTH and o_MX.shape == (model, heads * WIDTH) and model % STEP == 0
        if not fits or self.groups < 1 or heads % self.groups:
            shapes = f"{tuple(qkv_XM.shape)} and {tuple(o_MX.shape)}"
            raise ValueError(f"weights are [(H + 2 G) 64, M] and [M, H 64] with M a multiple of {STEP}; got {shapes}.")
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise ValueError(f"a sequence has 1 to {MOST_TOKENS} tokens, got {self.tokens}.")
        device = qkv_XM.device
        self.weights = qkv_XM, o_MX
        like: dict[str, Any] = {"dtype": qkv_XM.dtype, "device": device}
        self.heads_BTX = torch.full((self.batch, self.tokens, heads * WIDTH), torch.nan, **like)
        self.out_BTM = torch.full((self.batch, self.tokens, model), torch.nan, **like)
        self.arrived = torch.zeros(1, dtype=torch.int64, device=device)
        items = self.batch * max(heads, model // STEP)
        together = device.type == "cuda"
        places = torch.cuda.get_device_properties(device).multi_processor_count if together else items
        self.programs = min(items, places)
        self.phases = [(True, True)] if together else [(True, False), (False, True)]

    def __call__(self, x_BTM: Tensor) -> Tensor:
        """Return the layer's outputs; the next call writes to the same memory."""
        for attend, project in self.phases:
            extra: dict[str, Any] = {"launch_cooperative_grid": True} if attend and project else {}
            _layer_kernel[(self.programs,)](
                x_BTM, *self.weights, self.heads_BTX, self.out_BTM, self.arrived, self.batch, self.tokens,
                WIDTH**-0.5 * LOG2E.value, H=self.heads, G=self.groups, M=self.model, D=WIDTH,
                TOKENS=max(16, triton.next_power_of_2(self.tokens)), STEP=STEP, CAUSAL=self.causal, ATTEND=attend,
                PROJECT=project, num_warps=warps_of(self.tokens), num_stages=3, **extra,
            )  # fmt: skip
        return self.out_BTM


def warps_of(tokens: int) -> int:
    """Return the warps of a program: with 128 tokens the sums of three products fill the registers of four."""
    return 8 if tokens > 64 else 4


def three_launches(
    x_BTM: Tensor, qkv_XM: Tensor, o_MX: Tensor, heads: int, causal: bool = True, attend: Any = None
) -> Tensor:
    """Return the layer by its definition, in the inputs' dtype. attend: as torch's scaled_dot_product_attention."""
    groups = (len(qkv_XM) // WIDTH - heads) // 2
    parts = linear(x_BTM, qkv_XM).unflatten(-1, (-1, WIDTH)).transpose(1, 2).split([heads, groups, groups], 1)
    attend = attend or scaled_dot_product_attention
    out_BHTD: Tensor = attend(*parts, is_causal=causal, enable_gqa=heads != groups)
    return linear(out_BHTD.transpose(1, 2).flatten(2), o_MX)


# ---- predictions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShortShape:
    """Sequences of so many tokens, and a model with heads of 64 channels that fill its width."""

    sequences: int
    tokens: int = 128
    heads: int = 12

    @property
    def model(self) -> int:
        return self.heads * WIDTH

    @property
    def flops(self) -> float:
        """FLOPs of the layer, all pairs of tokens counted: a tile has them all."""
        return self.sequences * self.heads * (8 * self.tokens * self.model * WIDTH + 4 * self.tokens**2 * WIDTH)


def predicted(shape: ShortShape, chip: Chip) -> tuple[float, float]:
    """Return the seconds of one kernel and of three: FLOPs of the busiest multiprocessor, and what is between phases.

    Tiles are 128 by 64. Three launches have as many for the first product as it has columns of 64, one kernel a head.
    """
    rate, place = chip.matrix / chip.multiprocessors, chip.multiprocessors
    product = 2 * shape.tokens * shape.model * WIDTH / rate
    attention = 4 * shape.tokens**2 * WIDTH / rate
    heads = shape.sequences * shape.heads
    waves, wide = -(-heads // place), -(-3 * heads // place)
    one = waves * (3 * product + attention) + MEETING + waves * product
    return one, wide * product + waves * (attention + product) + 2 * BETWEEN


def table(chip: Chip, sequences: tuple[int, ...] = (1, 4, 11, 44, 176)) -> list[str]:
    """Return the lines of the page's table: 128 tokens, 12 heads."""
    lines = ["| sequences | one kernel, µs | three, µs | times faster |", "|--:|--:|--:|--:|"]
    for count in sequences:
        one, three = predicted(ShortShape(count), chip)
        lines.append(f"| {count} | {1e6 * one:.1f} | {1e6 * three:.1f} | {three / one:.2f} |")
    return lines


# ---- ahead of time --------------------------------------------------------------------------------------------------


def ahead_of_time(tokens: int, heads: int, groups: int, **options: Any) -> AotKernel:
    """Return the kernel with both phases, to compile for bfloat16."""
    types = dict.fromkeys(("x_ptr", "qkv_ptr", "o_ptr", "heads_ptr", "out_ptr"), "*bf16")
    types |= {"arrived_ptr": "*i64", "sequences": "i32", "T": "i32", "scale": "fp32"}
    constants = {"H": heads, "G": groups, "M": heads * WIDTH, "D": WIDTH, "TOKENS": tokens, "STEP": STEP}
    constants |= {"CAUSAL": True, "ATTEND": True, "PROJECT": True}
    options |= {"hot": True, "num_warps": warps_of(tokens), "num_stages": 3, "waits": "together"}
    return AotKernel(_layer_kernel, types, constants, **options)


AOT = (ahead_of_time(128, 12, 12, tensor_cores="HGMMA", archs=("sm_90",)),)
