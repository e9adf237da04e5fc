"""KV caches of 16 and of 8 bits on a GPU: check attention in every format, then time decode and prefill in one run.

    python benchmarks/sweep_kv.py [--cuts] [--json results.json]

Shapes are those of Llama-3.1-8B (32 heads, 8 key heads of 128, blocks of 64). Times are of CUDA graphs in which
several layers' caches take turns, so that none is found in the second-level cache; decode includes the norm-free heads,
the rotation and the write of the newest token. The limit is the cache's bytes, scales included, over 4.42 TB/s for
decode, and FLOPs over 750 TFLOP/s for prefill. `--cuts` also times other stages and columns for levels, and decode in
one launch and in two. `--rows` and `--length` pick decode cases. `--smoke` runs tiny shapes once, on a CPU too (with
TRITON_INTERPRET=1).

Legend: see kernels/attention/op.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels import kv_cache
from ridgeline.kernels.attention import triton as attention
from ridgeline.kernels.attention.op import PAGED_ATTENTION, Case, RaggedBatch, make_case, options_of
from ridgeline.kernels.attention.schedule import make_schedule
from ridgeline.kernels.decode_attention import triton as decoding
from ridgeline.kernels.decode_attention.op import DECODE_ATTENTION, DecodeCase
from ridgeline.kernels.kv_cache import KVScales
from ridgeline.kernels.op import Platform

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
RATE, FLOPS = 4.42e12, 750e12
UNCACHED = 200 << 20  # bytes of the caches that take turns
FORMATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
CUT_CASES = ((1, 1088), (8, 8192), (64, 1088), (64, 8192), (256, 1088))
CUTS = [(s, 8, w, f) for f in (0, 256) for s, w in ((2, 4), (3, 4), (4, 4), (5, 4), (4, 2), (4, 8))]  # for levels
CUTS += [(4, 16, 4, 0), (4, 16, 4, 256)]
WIDE_BYTES = 1 << 28  # as in worker/state/paged.py


@dataclass(frozen=True)
class Result:
    """Microseconds of one layer. ratio: of bf16's time to this."""

    work: str
    format: str
    microseconds: float
    limit: float
    ratio: float = 1.0
    cut: str = ""


@dataclass(frozen=True)
class Cache:
    """The pool of blocks of all layers that take turns."""

    k_NGPD: Tensor
    v_NGPD: Tensor
    scales: KVScales | None

    @property
    def token_bytes(self) -> int:
        return 2 * KV_HEADS * (DIM * self.k_NGPD.element_size() + (2 if self.scales else 0))


def make_cache(blocks: int, dtype: torch.dtype, device: torch.device) -> Cache:
    """Return random numbers of order one in any format."""
    shape = (blocks, 2, KV_HEADS, BLOCK, DIM)
    if dtype == torch.bfloat16:
        units = torch.empty(shape, dtype=dtype, device=device)
        for part in units.split(4096):
            part.normal_()
        return Cache(units[:, 0], units[:, 1], None)
    units = torch.empty(shape, dtype=torch.uint8, device=device)
    for part in units.split(4096):
        part.random_(0, 255)
        if dtype != torch.int8:
            part.bitwise_and_(0xB7 if dtype == torch.float8_e4m3fn else 0xBB)  # no infinities, no NaN
    pairs = torch.full((blocks, KV_HEADS, BLOCK, 2), 1 / 64, dtype=torch.bfloat16, device=device)
    units = units.view(dtype)
    return Cache(units[:, 0], units[:, 1], KVScales(pairs_NGP2=pairs))


def check(device: torch.device) -> None:
    """Compare decode and prefill in every format with the reference. Nothing is timed on a red check."""
    for name, dtype in FORMATS.items():
        if dtype == torch.bfloat16:
            continue
        case = DecodeCase(
            lengths=(700, 90, 1), num_heads=8, num_kv_heads=2, head_dim=DIM, rotary_dim=DIM, block_size=BLOCK
        )
        outs = []
        for which in ("triton", "reference"):
            arguments = list(case.inputs(activations(device), device))
            (k, ks), (v, vs) = (_quantized(x, dtype) for x in arguments[6:8])
            arguments[6:8] = k, v
            scales = KVScales(pairs_NGP2=torch.stack((ks, vs), -1))
            attend = DECODE_ATTENTION.choose(Platform.of(device), which)
            outs.append(attend(*arguments, **case.options(activations(device), device), scales=scales).double())
        error = excess(outs[0], outs[1], 2.0**-11, device)
        long = Case(rows=((300, 700), (1, 90), (60, 60)), num_heads=8, num_kv_heads=2, head_dim=DIM, block_size=BLOCK)
        q_THD, k, v, batch = make_case(long, activations(device), device)
        (k, ks), (v, vs) = (_quantized(x, dtype) for x in (k, v))
        scales, options = KVScales(pairs_NGP2=torch.stack((ks, vs), -1)), options_of(long, activations(device), device)
        expected = PAGED_ATTENTION.reference(q_THD, k, v, batch, **options, scales=scales).double()
        for wide in (None, wide_memory(2, device)):
            out = prefill(q_THD, k, v, scales, batch, wide, options, kv_heads=2)
            rounding = 2.0**-11 if wide is None else max(2.0**-11, torch.finfo(activations(device)).eps / 2)
            error = max(error, excess(out.double(), expected, rounding, device))
        print(f"{name}: largest error {error:.2f} of what roundings allow", flush=True)
        if not error <= 1:
            raise SystemExit(f"{name} is wrong by {error} times what roundings allow.")


def excess(out: Tensor, expected: Tensor, rounding: float, device: torch.device) -> float:
    """Return the largest error over its bound.

    rounding: of probabilities, or of values, beside which that of the products' other operand is nothing.

    Both results are rounded to the activations' type, so they may be one step apart: eps times the number. (1.6e-2 of
    bfloat16 numbers from 2 to 4 is one such step.) Probabilities times scales are rounded to float16, which moves an
    average of values of up to 5 by 5 / 2**11 at most; where widened, to bfloat16, by 5 / 2**8.
    """
    eps = torch.finfo(activations(device)).eps
    return ((out - expected).abs() / (eps * expected.abs() + 5 * rounding)).max().item()


def activations(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = kv_cache.row_scales(x, dtype)
    return kv_cache.levels(x, scale, dtype), scale


def wide_memory(kv_heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    blocks = (WIDE_BYTES if device.type == "cuda" else 1 << 24) // (4 * kv_heads * BLOCK * DIM)
    units = torch.empty(blocks, 2, kv_heads, BLOCK, DIM, dtype=activations(device), device=device)
    return units[:, 0], units[:, 1]


def prefill(
    q_THD: Tensor, k: Tensor, v: Tensor, scales: KVScales | None, batch: RaggedBatch,
    wide: tuple[Tensor, Tensor] | None, options: dict[str, Any], kv_heads: int = KV_HEADS,
) -> Tensor:  # fmt: skip
    """Attend once, schedule included."""
    schedule = make_schedule(
        batch.start_R1, batch.kv_len_R, batch.slots_R, num_tokens=len(q_THD), tokens_each=0,
        num_heads=q_THD.shape[1], num_kv_heads=kv_heads, cache_NGPD=k if scales is None else wide[0] if wide else None,
        head_bytes=DIM * 2, widened=wide is not None,
    )  # fmt: skip
    batch = replace(batch, schedule=schedule, wide=wide if schedule.hopper and scales else None, derived={})
    return attention.paged_attention(q_THD, k, v, batch, **options, scales=scales)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of some replays of a captured graph."""
    run()
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 3e3)
    return float(np.median(times))


def time_decode(cache: Cache, rows: int, length: int, device: torch.device) -> float:
    """Return the seconds of one layer's decode."""
    columns = -(-length // BLOCK)
    layers = max(1, min(16, UNCACHED // (rows * length * cache.token_bytes)))
    layers = min(layers, len(cache.k_NGPD) // (rows * columns))
    order = torch.randperm(len(cache.k_NGPD), device=device)[: layers * rows * columns].int()
    kv_len_R = torch.full((rows,), length, dtype=torch.int32, device=device)
    slots_R, start_R1 = (torch.arange(n, dtype=torch.int32, device=device) for n in (rows, rows + 1))
    qkv_TX = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device=device).to(activations(device))
    angles = torch.rand(length, DIM // 2, device=device) * 6.3
    table_ZY = torch.cat((angles.cos(), angles.sin()), -1)
    positions_T = (kv_len_R - 1).long()
    tables = order.view(layers, rows, columns)
    places = [(table_SC[:, -1] * BLOCK + (length - 1) % BLOCK).long() for table_SC in tables]
    attend = DECODE_ATTENTION.choose(Platform.of(device), "triton")

    def step() -> None:
        schedule = None
        for table_SC, place_T in zip(tables, places, strict=True):
            batch = RaggedBatch(
                slots_R=slots_R, block_table_SC=table_SC, start_R1=start_R1, kv_len_R=kv_len_R, tokens_each=1
            )
            schedule = schedule or make_schedule(
                start_R1, kv_len_R, slots_R, num_tokens=rows, tokens_each=1, num_heads=HEADS, num_kv_heads=KV_HEADS
            )
            attend(
                qkv_TX, None, None, 1e-6, table_ZY, positions_T, cache.k_NGPD, cache.v_NGPD, place_T, HEADS, KV_HEADS,
                replace(batch, schedule=schedule), scale=DIM**-0.5, scales=cache.scales,
            )  # fmt: skip

    return seconds(step, device) / layers


def time_prefill(cache: Cache, new: int, length: int, device: torch.device, *, known: bool) -> float:
    """Return the seconds of one layer's prefill. known: the host knows the lengths (larger steps are not captured)."""
    wide = wide_memory(KV_HEADS, device) if cache.scales else None
    columns = -(-length // BLOCK)
    batch = RaggedBatch(
        slots_R=torch.zeros(1, dtype=torch.int32, device=device),
        block_table_SC=torch.randperm(len(cache.k_NGPD), device=device)[None, :columns].int(),
        start_R1=torch.tensor([0, new], dtype=torch.int32, device=device),
        kv_len_R=torch.tensor([length], dtype=torch.int32, device=device),
        tokens_each=0,
        num_tokens_R=np.array([new], np.int32) if known else None,
        kv_bound_R=np.array([length], np.int32) if known else None,
    )
    q_THD = torch.randn(new, HEADS, DIM, device=device).to(activations(device))
    options = {"scale": DIM**-0.5}
    return seconds(lambda: prefill(q_THD, cache.k_NGPD, cache.v_NGPD, cache.scales, batch, wide, options), device)


@contextmanager
def cut(stages: int, queries: int, warps: int, fused_rows: int) -> Iterator[None]:
    """Decode levels with other options inside, and steps of up to `fused_rows` rows in one launch."""
    plain, fused = attention.decode_config, decoding.config

    def changed(config: Any, itemsize: int) -> Any:
        return replace(config, num_stages=stages, queries=queries, num_warps=warps) if itemsize == 1 else config

    with (
        patch.object(attention, "decode_config", lambda dim, item: changed(plain(dim, item), item)),
        patch.object(decoding, "MANY_ROWS", fused_rows),
        patch.object(decoding, "config", lambda r, g, d, item, b: changed(fused(r, g, d, item, b), item)),
    ):
        yield


def sweep(device: torch.device, arguments: argparse.Namespace) -> Iterator[Result]:
    decodes = [(rows, length) for length in (1088, 8192, 32_768) for rows in (1, 8, 64, 256)]
    decodes = [(r, n) for r, n in decodes if r in (arguments.rows or [r]) and n in (arguments.length or [n])]
    prefills = [(8192, 8192, True), (2048, 32_768, False), (256, 32_768, False)]
    if arguments.smoke:
        decodes, prefills = [(2, 130)], [(70, 130, True)]
    prefills = [] if arguments.no_prefill else prefills
    most = max(rows * -(-length // BLOCK) for rows, length in decodes)
    base: dict[str, float] = {}
    for name, dtype in FORMATS.items():
        token_bytes = 2 * KV_HEADS * DIM * dtype.itemsize
        blocks = max(most, 0 if arguments.smoke else 2 * UNCACHED // (BLOCK * token_bytes))
        cache = make_cache(blocks, dtype, device)
        for rows, length in decodes:
            work, limit = f"decode {rows} x {length}", 1e6 * rows * length * cache.token_bytes / RATE
            took = 1e6 * time_decode(cache, rows, length, device)
            yield Result(work, name, took, limit, base.setdefault(work, took) / took)
            if arguments.cuts and name in ("bf16", "fp8", "int8") and (rows, length) in CUT_CASES:
                levels = name != "bf16"
                for stages, queries, warps, fused_rows in CUTS if levels else ((3, 16, 4, 0), (3, 16, 4, 256)):
                    with cut(stages, queries, warps, fused_rows):
                        took = 1e6 * time_decode(cache, rows, length, device)
                    label = f"{stages} stages, {queries} columns, {warps} warps, {1 if fused_rows else 2} launches"
                    yield Result(work, name, took, limit, base[work] / took, label)
        for new, length, known in prefills:
            work = f"prefill {new} of {length}"
            pairs = new * length - (new * new - new) / 2
            took = 1e6 * time_prefill(cache, new, length, device, known=known)
            yield Result(work, name, took, 1e6 * 4 * DIM * HEADS * pairs / FLOPS, base.setdefault(work, took) / took)
        del cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--rows", type=int, action="append", help="default: all")
    parser.add_argument("--length", type=int, action="append", help="default: all")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch.inference_mode():
        check(device)
        results = []
        print(f"{'work':24s} {'format':6s} {'µs':>9s} {'limit':>9s} {'of it':>6s} {'bf16 ÷':>7s}")
        for result in sweep(device, arguments):
            results.append(result)
            share = result.limit / result.microseconds
            print(
                f"{result.work:24s} {result.format:6s} {result.microseconds:9.1f} {result.limit:9.1f} {share:6.0%} "
                f"{result.ratio:7.2f} {result.cut}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
