"""KV caches of 16 and of 8 bits on a GPU: check attention in every format, then time decode and prefill in one run.

    ridgeline bench sweep kv --json results.jsonl [--chosen]

Shapes are those of Llama-3.1-8B (32 heads, 8 key heads of 128, blocks of 64). Several layers' caches take turns. Decode
includes the rotation and the write of the newest token; its schedule was made before, as a step makes it once for all
layers. Prefill includes its schedule and, if the cache is of 8 bits, widening. The limit is the cache's bytes, scales
included, over 4.42 TB/s, or FLOPs over 750 TFLOP/s if that is longer. Decode with other stages and columns for levels
is timed too, in one launch and in two. Every format and cut is first checked on short rows; errors are in units of what
roundings allow. runs.py says how it is done.

Legend: see kernels/attention/paged/op.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.attention.decode import op as decode_op
from ridgeline.kernels.attention.decode import triton as decoding
from ridgeline.kernels.attention.decode.cases import DecodeCase
from ridgeline.kernels.attention.paged import triton as attention
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch, paged_attention_reference
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.base import kv_cache
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline_bench.sweep.sweep import Job, Limit, Sweep, moved

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
FORMATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
WIDE_BYTES = 1 << 28  # as in worker/state/paged.py
DECODES = [(rows, length) for length in (1088, 8192, 32_768) for rows in (1, 8, 64, 256)]
PREFILLS = {8192: (8192, True), 2048: (32_768, False), 256: (32_768, False)}  # new tokens: of so many, known lengths
CHECKED = "700, 90, 1"  # the lengths of the rows that decode is checked on


@dataclass(frozen=True)
class Cut:
    """Other options of the decode kernel for levels.

    queries: columns of a product.
    fused_rows: steps of up to so many rows run in one launch, others in two.
    """

    stages: int
    queries: int
    warps: int
    fused_rows: int


PLAIN_CUTS = tuple(Cut(3, 16, 4, fused) for fused in (0, 256))
CUTS = tuple(Cut(s, 8, w, f) for f in (0, 256) for s, w in ((2, 4), (3, 4), (4, 4), (5, 4), (4, 2), (4, 8)))
CUTS += (Cut(4, 16, 4, 0), Cut(4, 16, 4, 256))
CUT_AT = ((1, 1088), (8, 8192), (64, 1088), (64, 8192), (256, 1088))


@dataclass(frozen=True)
class CachePool:
    """The pool of blocks of all layers that take turns."""

    k_NGPD: Tensor
    v_NGPD: Tensor
    scales: KVScales | None

    @property
    def token_bytes(self) -> int:
        return 2 * KV_HEADS * (DIM * self.k_NGPD.element_size() + (2 if self.scales else 0))


@contextmanager
def cut_to(cut: Cut) -> Iterator[None]:
    """Decode with other options inside."""
    plain, fused = attention.decode_config, decoding.config

    def changed(config: Any, itemsize: int) -> Any:
        if itemsize != 1:
            return config
        return replace(config, num_stages=cut.stages, queries=cut.queries, num_warps=cut.warps)

    with (
        patch.object(attention, "decode_config", lambda dim, item: changed(plain(dim, item), item)),
        patch.object(decoding, "MANY_ROWS", cut.fused_rows),
        patch.object(decoding, "config", lambda r, g, d, item, b: changed(fused(r, g, d, item, b), item)),
    ):
        yield


class KVSweep(Sweep):
    workload = "attention over cached levels"
    tolerance = 1.0

    def jobs(self) -> list[Job]:
        found = []
        for form in FORMATS:
            cuts = PLAIN_CUTS if form == "bf16" else CUTS
            if form != "bf16":
                found += [Job(CHECKED, "decode", 3, form, cut, timed=False) for cut in (None, *cuts)]
                found += [Job(case, "prefill", 361, form, timed=False) for case in ("as they are", "widened")]
            for rows, length in DECODES:
                some = cuts if form != "e5m2" and (rows, length) in CUT_AT else ()
                found += [Job(f"of {length}", "decode", rows, form, cut) for cut in (None, *some)]
            found += [Job(f"of {length}", "prefill", new, form) for new, (length, _) in PREFILLS.items()]
        return found

    def arguments(self, job: Job) -> list[Any]:
        if not job.timed:
            return [self._small_decode(job.form) if job.op == "decode" else self._small_prefill(job)]
        return self._decodes(job) if job.op == "decode" else [self._prefill(job)]

    def _small_decode(self, form: str) -> tuple[list[Any], dict[str, Any]]:
        lengths = (self.small(700, 70), 90, 1)
        case = DecodeCase(lengths=lengths, num_heads=8, num_kv_heads=2, head_dim=DIM, rotary_dim=DIM, block_size=BLOCK)
        projected, batch = case.inputs(self.dtype, torch.device("cpu"))
        (k, v), scales = self._quantized(projected.k_cache_NGPD, projected.v_cache_NGPD, FORMATS[form])
        projected = projected._replace(k_cache_NGPD=k, v_cache_NGPD=v, scales=scales)
        return moved(([projected, batch], case.options(self.dtype, torch.device("cpu"))), self.device)

    def _small_prefill(self, job: Job) -> tuple[Any, ...]:
        rows = ((20, 70), (1, 9)) if self.dry else ((300, 700), (1, 90), (60, 60))
        case = AttentionCase(rows=rows, num_heads=8, num_kv_heads=2, head_dim=DIM, block_size=BLOCK)
        q_THD, k, v, batch = case.inputs(self.dtype, torch.device("cpu"))
        (k, v), scales = self._quantized(k, v, FORMATS[job.form])
        wide = self._wide(2) if job.case == "widened" else None
        options = case.options(self.dtype, torch.device("cpu"))
        return moved((q_THD, k, v, scales, batch, wide, options), self.device)

    @staticmethod
    def _quantized(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], KVScales]:
        scales = [kv_cache.row_scales(x, dtype) for x in (k, v)]
        levels = [kv_cache.levels(x, scale, dtype) for x, scale in zip((k, v), scales, strict=True)]
        return levels, KVScales(pairs_NGP2=torch.stack(scales, -1))

    def _wide(self, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Return memory for widened keys and values."""
        blocks = self.small(WIDE_BYTES, 1 << 24) // (4 * kv_heads * BLOCK * DIM)
        units = torch.empty(blocks, 2, kv_heads, BLOCK, DIM, dtype=self.dtype, device=self.device)
        return units[:, 0], units[:, 1]

    def _cache(self, form: str) -> CachePool:
        """Return a cache of random numbers of order one, as large as the largest case needs."""
        dtype = self.dtype if form == "bf16" else FORMATS[form]
        most = max(self.small(rows, 2) * -(-self.small(length, 130) // BLOCK) for rows, length in DECODES)
        turns = 2 * 200_000_000 // (BLOCK * 2 * KV_HEADS * DIM * dtype.itemsize)
        shape = (max(most, 0 if self.dry else turns), 2, KV_HEADS, BLOCK, DIM)
        if form == "bf16":
            units = torch.empty(shape, dtype=dtype, device=self.device)
            for part in units.split(4096):
                part.normal_()
            return CachePool(units[:, 0], units[:, 1], None)
        units = torch.empty(shape, dtype=torch.uint8, device=self.device)
        for part in units.split(4096):
            part.random_(0, 255)
            if dtype != torch.int8:
                part.bitwise_and_(0xB7 if dtype == torch.float8_e4m3fn else 0xBB)  # no infinities, no NaN
        pairs = torch.full((shape[0], KV_HEADS, BLOCK, 2), 1 / 64, dtype=torch.bfloat16, device=self.device)
        units = units.view(dtype)
        return CachePool(units[:, 0], units[:, 1], KVScales(pairs_NGP2=pairs))

    def _shape(self, job: Job) -> tuple[int, int]:
        """Return (rows or new tokens, length)."""
        return self.small(job.tokens, 2 if job.op == "decode" else 70), self.small(int(job.case[3:]), 130)

    def _held(self, job: Job) -> CachePool:
        return self.kept("cache", job.form, lambda: self._cache(job.form))

    def _ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _decodes(self, job: Job) -> list[Any]:
        """Return the arguments of several layers, whose blocks are scattered over the cache."""
        cache, (rows, length) = self._held(job), self._shape(job)
        columns = -(-length // BLOCK)
        layers = min(self.turns(rows * length * cache.token_bytes, 16), len(cache.k_NGPD) // (rows * columns))
        order = torch.randperm(len(cache.k_NGPD), device=self.device)[: layers * rows * columns].int()
        kv_len_R, start_R1, slots_R = (
            self._ints(*[length] * rows),
            self._ints(*range(rows + 1)),
            self._ints(*range(rows)),
        )
        qkv_TX = self.normal(rows, (HEADS + 2 * KV_HEADS) * DIM)
        angles = torch.rand(length, DIM // 2, device=self.device) * 6.3
        table_ZY, found = torch.cat((angles.cos(), angles.sin()), -1), []
        of_layers = AttentionShape(num_tokens=rows, tokens_each=1, num_heads=HEADS, num_kv_heads=KV_HEADS)
        schedule = make_schedule(start_R1, kv_len_R, slots_R, of_layers)
        for table_SC in order.view(layers, rows, columns):
            batch = RaggedBatch(
                slots_R=slots_R, block_table_SC=table_SC, start_R1=start_R1, kv_len_R=kv_len_R, tokens_each=1,
                schedule=schedule,
            )  # fmt: skip
            place_T = (table_SC[:, -1] * BLOCK + (length - 1) % BLOCK).long()
            projected = Projected(
                qkv_TX, None, None, 1e-6, table_ZY, (kv_len_R - 1).long(), cache.k_NGPD, cache.v_NGPD, place_T, HEADS,
                KV_HEADS, scales=cache.scales,
            )  # fmt: skip
            found.append(((projected, batch), {"scale": DIM**-0.5}))
        return found

    def _prefill(self, job: Job) -> tuple[Any, ...]:
        cache, (new, length), (_, known) = self._held(job), self._shape(job), PREFILLS[job.tokens]
        batch = RaggedBatch(
            slots_R=self._ints(0),
            block_table_SC=torch.randperm(len(cache.k_NGPD), device=self.device)[None, : -(-length // BLOCK)].int(),
            start_R1=self._ints(0, new),
            kv_len_R=self._ints(length),
            tokens_each=0,
            num_tokens_R=np.array([new], np.int32) if known else None,  # larger steps than captured ones
            kv_bound_R=np.array([length], np.int32) if known else None,
        )
        wide = self._wide(KV_HEADS) if cache.scales else None
        q_THD = self.normal(new, HEADS, DIM)
        return q_THD, cache.k_NGPD, cache.v_NGPD, cache.scales, batch, wide, {"scale": DIM**-0.5}

    def launch(self, job: Job, arguments: Any) -> Tensor:
        if job.op == "decode":
            with cut_to(job.cut) if job.cut else nullcontext():
                return decoding.decode_attention(*arguments[0], **arguments[1])
        q_THD, k, v, scales, batch, wide, options = arguments
        of_layers = AttentionShape(
            num_tokens=len(q_THD),
            tokens_each=0,
            num_heads=q_THD.shape[1],
            num_kv_heads=k.shape[1],
            cache_NGPD=k if scales is None else wide[0] if wide else None,
            head_bytes=DIM * 2,
            widened=wide is not None,
        )
        schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers)
        batch = replace(batch, schedule=schedule, wide=wide if schedule.hopper and scales else None, derived={})
        return attention.paged_attention(q_THD, k, v, batch, **options, scales=scales)

    def interpreted(self, job: Job) -> Any:
        return (job.op, job.form) if not job.timed and job.form == "fp8" else None

    def reference(self, job: Job, arguments: Any) -> Tensor | None:
        if job.timed:
            return None
        if job.op == "decode":
            given, options = moved(arguments, self.device)  # copies, since the op writes the newest keys
            return decode_op.decode_attention(*given, **options).double()
        q_THD, k, v, scales, batch, _, options = arguments
        return paged_attention_reference(q_THD, k, v, batch, **options, scales=scales).double()

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        """Return the largest error over its bound. Both results are rounded to the activations' type, so they may be
        one step apart: eps times the number. Probabilities times scales are rounded to float16, which moves an average
        of values of up to 5 by 5 / 2**11 at most; where values are widened, by 5 roundings of the activations' type."""
        eps = torch.finfo(self.dtype).eps
        rounding = max(2.0**-11, eps / 2) if job.case == "widened" else 2.0**-11
        return float(((got[0].double() - want[0]).abs() / (eps * want[0].abs() + 5 * rounding)).max())

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        new, length = self._shape(job)
        if job.op == "decode":
            moved = new * length * self._held(job).token_bytes
            return self.least(moved, 4.0 * DIM * HEADS * new * length)
        pairs = new * length - (new * new - new) / 2
        return self.least(length * self._held(job).token_bytes, 4.0 * DIM * HEADS * pairs)
