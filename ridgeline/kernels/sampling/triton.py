"""Sampling on a GPU without a sort, in two launches without filters and four with them. The legend is that of op.py.

Greedy: for every tile `draw` finds the largest logit, and for every row one program of `finish` finds the best tile.
With noise `draw` only bounds what a tile holds, which costs half as much, and `finish` looks again at the few tiles
that can win.

With filters `stats` and `bracket` first find roughly where a row will be cut. If many tokens stay, `draw` bounds those
that may, and `finish` checks that the token it drew stays. If few stay, `draw` lists them, and `finish` finds the exact
threshold and draws from the list. Typical-p is rare. If a row asks for it, `typical` applies all filters exactly, in
place of `bracket`.

Nothing waits for the host, and sizes depend on shapes.

Legend, beside that of op.py:
    J  tiles of a row
    C  candidates kept of a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ridgeline.kernels.base.launch import compute_capability, launch_options
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.bracket import bracket_kernel, stats_kernel
from ridgeline.kernels.sampling.draw import APART, WIDTH, draw_kernel
from ridgeline.kernels.sampling.finish import finish_kernel
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.typical import typical_kernel

ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits that are 0 in a float32 of that dtype


@dataclass(frozen=True)
class Config:
    """The sizes of the kernels.

    tile: logits per program of a pass over the row.
    warps: warps of such a program.
    row_warps, bracket_warps: warps of a row's program in `finish` and in `bracket`, with filters.
    capacity: how many candidates a row can list, a power of two up to 2048.
    sample: how many tokens the cut is estimated from.
    reserve: how many sampled tokens must lie above the low end of the bracket.
    many: tokens that are looked at together if a row must be searched in full.
    """

    tile: int
    warps: int
    row_warps: int = 16
    bracket_warps: int = 8
    capacity: int = 2048
    sample: int = 4096
    reserve: int = 16
    many: int = 8192


def choose_config(rows: int, vocab_size: int, random: bool) -> Config:
    """Return small tiles if these are needed to occupy the GPU; larger tiles take fewer reductions. Noise takes
    registers, so with it tiles stay smaller."""
    if rows * vocab_size < 2**19:
        return Config(1024, 4)
    return Config(2048, 4) if random else Config(4096, 4)


def sample(
    logits_RV: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    position_R: Tensor,
    features: Feature,
    config: Config | None = None,
    part: int | None = None,
) -> Tensor:
    """Compute `op.sample_reference`, but only the steps that `features` names. Rows of logits and tables must be
    contiguous.

    part: compute `parts.draw_part` of the tokens from there on, a multiple of 4.
    """
    rows, vocab = logits_RV.shape
    random = bool(features & Feature.RANDOM)
    config = config or choose_config(rows, vocab, random)
    device = logits_RV.device
    tiles = triton.cdiv(vocab, config.tile)
    typical = random and bool(features & Feature.TYPICAL)
    filtered = random and bool(features & Feature.FILTER) and not typical
    first = part or 0
    flags = flags_of(tables, features)
    adjusts = any(flags.values())
    options = launch_options(device)
    approximate = compute_capability(device) != (0, 0)  # NVIDIA's GPUs have the instruction
    strides = strides_of(tables)
    nothing = slots_R  # in place of pointers that are not read
    columns = columns_of(tables)
    best_RJ, sure_RJ, reach_RJ, max_RJ, sum_RJ = torch.empty(5, rows, tiles, dtype=torch.float32, device=device)
    best_id_RJ = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    source_RV = read_RV = logits_RV  # the adjusted logits, and the logits that `draw` reads
    if adjusts and random:
        source_RV = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    bracket_R8 = count_R = candidates_RC = nothing
    if filtered or typical:
        stats_kernel[(tiles, rows)](
            logits_RV, slots_R, position_R, tables.temperature_S, *columns, source_RV,
            max_RJ, sum_RJ, vocab, first, logits_RV.stride(0), source_RV.stride(0), *strides,
            TILE=config.tile, **flags, num_warps=config.warps, **options,
        )  # fmt: skip
        flags, read_RV = dict.fromkeys(flags, 0), source_RV
    if typical:
        read_RV = torch.empty(rows, vocab, dtype=torch.float32, device=device)
        typical_kernel[(rows,)](
            source_RV, slots_R, tables.temperature_S, tables.top_p_S, tables.min_p_S, tables.top_k_S,
            tables.typical_p_S, max_RJ, read_RV, vocab, tiles, source_RV.stride(0), read_RV.stride(0), *strides[-2:],
            TILES=triton.next_power_of_2(tiles), SHIFT=ZERO_BITS[source_RV.dtype], MANY=config.many,
            num_warps=config.row_warps, **options,
        )  # fmt: skip
        source_RV = read_RV
    if filtered:
        bracket_R8 = torch.empty(rows, WIDTH.value, dtype=torch.float32, device=device)
        count_R = torch.empty(rows, APART.value, dtype=torch.int32, device=device)
        candidates_RC = torch.empty(rows, config.capacity, dtype=torch.int64, device=device)
        bracket_kernel[(rows,)](
            source_RV, slots_R, tables.temperature_S, tables.top_p_S, tables.min_p_S, tables.top_k_S, max_RJ,
            sum_RJ, bracket_R8, count_R, vocab, tiles, source_RV.stride(0), *strides[-2:],
            TILES=triton.next_power_of_2(tiles), SAMPLE=_sample_size(vocab, config), RESERVE=config.reserve,
            CAPACITY=config.capacity, num_warps=config.bracket_warps, **options,
        )  # fmt: skip
    draw_kernel[(rows, tiles)](
        read_RV, slots_R, position_R, tables.temperature_S, tables.seed_S, *columns, source_RV,
        bracket_R8, count_R, candidates_RC, best_RJ, best_id_RJ, sure_RJ, reach_RJ,
        vocab, first, read_RV.stride(0), source_RV.stride(0), *strides,
        TILE=config.tile, CAPACITY=config.capacity, **flags, RANDOM=random, FILTER=filtered, APPROX=approximate,
        num_warps=config.warps, **options,
    )  # fmt: skip
    if part is None:
        token_R = torch.empty(rows, dtype=torch.int64, device=device)
    else:
        token_R = torch.empty(rows, 2, dtype=torch.int32, device=device)
    finish_kernel[(rows,)](
        best_RJ, best_id_RJ, sure_RJ, reach_RJ, bracket_R8, count_R, candidates_RC, source_RV,
        slots_R, position_R, tables.temperature_S, tables.top_p_S, tables.min_p_S, tables.top_k_S, tables.seed_S,
        token_R, vocab, tiles, first, source_RV.stride(0), *strides[-2:],
        TILES=triton.next_power_of_2(tiles), CAPACITY=config.capacity, SHIFT=ZERO_BITS[source_RV.dtype],
        TILE=config.tile, MANY=config.many, RANDOM=random, FILTER=filtered, PART=part is not None, APPROX=approximate,
        num_warps=_row_warps(config, random, filtered), **options,
    )  # fmt: skip
    return token_R


def sample_batch_invariant(
    logits_RV: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
) -> Tensor:
    """Compute `sample` so that a row's sums are made in one way, whatever lies beside it: from float32, by tiles of one
    size, and with the one filter that serves every row."""
    if features & Feature.FILTER:
        features |= Feature.TYPICAL
    return sample(logits_RV.float(), tables, slots_R, position_R, features, Config(2048, 4))


def _row_warps(config: Config, random: bool, filtered: bool) -> int:
    """Return the warps of a program of `finish`: it searches a list, or looks at a tile again, or only compares the
    tiles' winners."""
    return config.row_warps if filtered else config.tile // 256 if random and config.tile > 256 else 1


def columns_of(tables: SamplingTables) -> tuple[Tensor, ...]:
    """Return the tensors that a kernel reads to adjust logits."""
    ids = tables.bias_ids_SB, tables.bias_SB, tables.stop_ids_SE
    seen = tables.output_count_SV, tables.prompt_seen_SV
    return *ids, *seen, tables.min_len_S, tables.repetition_S, tables.presence_S, tables.frequency_S


def flags_of(tables: SamplingTables, features: Feature) -> dict[str, int]:
    """Return the kernels' compile-time choices; all are 0 if logits need no adjustment."""
    return {
        "BIAS_WIDTH": triton.next_power_of_2(tables.bias_ids_SB.shape[1]) if features & Feature.BIAS else 0,
        "STOP_WIDTH": triton.next_power_of_2(tables.stop_ids_SE.shape[1]) if features & Feature.MIN_TOKENS else 0,
        "PENALTY": int(bool(features & Feature.PENALTY)),
    }


def strides_of(tables: SamplingTables) -> tuple[int, ...]:
    """Return the strides of the wide tables' rows, then those of the integer and the float columns (columns of one type
    are parts of one array)."""
    t = tables
    integers = {c.stride(0) for c in (t.top_k_S, t.seed_S, t.min_len_S)}
    filters = (t.temperature_S, t.top_p_S, t.min_p_S, t.typical_p_S)
    floats = {c.stride(0) for c in (*filters, t.repetition_S, t.presence_S, t.frequency_S)}
    if len(integers) > 1 or len(floats) > 1:
        raise ValueError(f"columns of one type must share a stride, got {integers} and {floats}")
    wide = (t.bias_ids_SB, t.bias_SB, t.stop_ids_SE, t.output_count_SV, t.prompt_seen_SV)
    return (*(table.stride(0) for table in wide), integers.pop(), floats.pop())


def _sample_size(vocab_size: int, config: Config) -> int:
    """Return 0 if every token fits among the candidates, else a power of two of at most the vocabulary."""
    if vocab_size <= config.capacity:
        return 0
    return min(config.sample, triton.next_power_of_2(vocab_size + 1) // 2)
