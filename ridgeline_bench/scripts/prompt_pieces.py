"""Attention of a few tokens of a prompt to many keys, with keys cut into pieces and whole.

    python -m ridgeline_bench.scripts.prompt_pieces [--tokens 64 196 224 515 1024] [--keys 512 8192 32768 100000]
        [--decoding 32] [--behind 64] [--heads 32 8 128] [--quick] [--output FILE.jsonl]

One row of a prompt with so many cached keys comes beside --decoding rows that decode behind --behind tokens, in one
layer of Llama-3.1-8B, bfloat16, as in a captured step: the host knows no lengths. Keys lie scattered in blocks of 64.

    whole   before keys were cut: items of 128 queries read all keys, and steps below 256 tokens run in Triton
    pieces  as the engine does it now

Both must agree to a hundredth of the norm. The limit is the time of the products at the rate of the largest one that
torch reaches in the same run, or of the bytes at 4.0 TB/s, whichever is longer.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline.kernels.attention.paged import schedule
from ridgeline.kernels.attention.paged.cost import attention_cost
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch, Softmax
from ridgeline.kernels.attention.paged.triton import paged_attention
from ridgeline_bench.machine.timing import QUICK, median_seconds
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, check_counts, keep
from ridgeline_bench.scripts.whole_attention import peak_flops

BLOCK = 64  # tokens
BANDWIDTH = 4.0e12
LARGEST = 200_000  # keys of all layers that calls take in turn, lest the second-level cache helps
WITHIN = 1e-2  # of the norm


class Load:
    """A step's inputs for some layers."""

    def __init__(self, tokens: int, keys: int, decoding: list[int], heads: list[int], device: str) -> None:
        self.heads, self.kv_heads, self.dim = heads
        rows = [(tokens, keys), *[(1, length) for length in decoding]]
        blocks = [math.ceil(length / BLOCK) for _, length in rows]
        order = 1 + torch.randperm(sum(blocks))
        table_SC = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            table_SC[row, : len(part)] = part
        starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0)
        self.batch = RaggedBatch(
            slots_R=torch.arange(len(rows), dtype=torch.int32, device=device),
            block_table_SC=table_SC.to(device),
            start_R1=starts.to(torch.int32).to(device),
            kv_len_R=torch.tensor([length for _, length in rows], dtype=torch.int32, device=device),
            tokens_each=0,
        )
        self.tokens = int(starts[-1])
        layers = max(1, min(8, LARGEST // keys)) if device == "cuda" else 1
        self.q_THD = torch.randn(self.tokens, self.heads, self.dim, device=device).bfloat16()
        shape = (1 + sum(blocks), 2, self.kv_heads, BLOCK, self.dim)
        self.caches = [torch.randn(shape, device=device, dtype=torch.bfloat16).unbind(1) for _ in range(layers)]
        new_R, length_R = zip(*rows, strict=True)
        self.cost = attention_cost(
            new_R, length_R, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.dim, itemsize=2,
            kv_itemsize=2,
        )  # fmt: skip

    def scheduled(self) -> RaggedBatch:
        shape = AttentionShape(
            num_tokens=self.tokens, tokens_each=0, num_heads=self.heads, num_kv_heads=self.kv_heads,
            cache_NGPD=self.caches[0][0], head_bytes=2 * self.dim,
        )  # fmt: skip
        batch = self.batch
        made = schedule.make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
        return replace(batch, schedule=made)

    def attend(self, batch: RaggedBatch, layer: int) -> Tensor:
        return paged_attention(self.q_THD, *self.caches[layer], batch, Softmax(self.dim**-0.5))


def measured(load: Load, way: str) -> tuple[dict[str, Any], Tensor]:
    """Return what a way takes, and what it makes of the first layer."""
    with ExitStack() as stack:
        if way == "whole":
            stack.enter_context(patch.object(schedule, "SPLIT_WAVES", 0))
            stack.enter_context(patch.object(schedule, "SMALL_HOPPER_TOKENS", schedule.HOPPER_TOKENS))
        batch = load.scheduled()
    out = load.attend(batch, 0)
    if not out.is_cuda:
        return {"way": way}, out
    calls = [lambda layer=layer: load.attend(batch, layer) for layer in range(len(load.caches))]
    work = batch.schedule.hopper if batch.schedule else None
    merges = 0 if work is None or work.merge_count_1 is None else int(work.merge_count_1)
    entries = 0 if work is None else int(work.count_1)
    return {
        "way": way, "us": 1e6 * median_seconds(calls, out.device, QUICK), "entries": entries, "merges": merges,
    }, out  # fmt: skip


def main() -> None:
    a = asked(
        __doc__, tokens=[64, 196, 224, 515, 1024], keys=[512, 8192, 32_768, 100_000], decoding=32, behind=[64],
        heads=[32, 8, 128], quick=(False, "small shapes on the CPU, in Triton's interpreter"), output=Path,
    )  # fmt: skip
    check_counts(a, "tokens", "keys", "heads", "behind")
    device = "cpu" if a.quick else "cuda"
    if a.quick:
        a.tokens, a.keys, a.decoding, a.heads = [20], [200], 2, [4, 2, 64]
    peak = 1e12 if a.quick else peak_flops(8192, 5)
    about = {"workload": "pieces of keys", "gpu": gpu(), "dtype": "bfloat16", "product": peak}
    table = Table(
        "tokens", "keys", "behind", "whole, us", "pieces, us", "whole / pieces", "limit, us", "of limit", "TFLOP/s"
    )
    for tokens, keys, behind in product(a.tokens, a.keys, a.behind):
        if keys < tokens:
            continue
        load = Load(tokens, keys, [behind] * a.decoding, a.heads, device)
        limit = 1e6 * max(load.cost.flops / peak, load.cost.bytes / BANDWIDTH)
        found, outs = zip(*(measured(load, way) for way in ("whole", "pieces")), strict=True)
        off = ((outs[0].double() - outs[1].double()).norm() / outs[0].double().norm()).item()
        if not off < WITHIN:
            raise SystemExit(f"{tokens} tokens, {keys} keys: the ways differ by {off:.3g} of the norm.")
        if a.quick:
            print(f"{tokens} tokens, {keys} keys: off by {off:.2g}")
            continue
        for line in found:
            shape = {"tokens": tokens, "keys": keys, "decoding": a.decoding, "behind": behind, "heads": a.heads}
            keep(a.output, {**about, **shape, **line, "limit_us": limit, "off": off})
        whole, pieces = (line["us"] for line in found)
        table.add_row(
            *(f"{count:,}" for count in (tokens, keys, behind)), f"{whole:,.1f}", f"{pieces:,.1f}",
            f"{whole / pieces:.2f}", f"{limit:,.1f}", f"{limit / pieces:.0%}", f"{load.cost.flops / pieces / 1e6:.0f}",
        )  # fmt: skip
        del load
    if not a.quick:
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
