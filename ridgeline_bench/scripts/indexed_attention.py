"""Attention to the tokens that an indexer chooses (DeepSeek-V3.2) beside attention to all of them, on a GPU.

    python -m ridgeline_bench.scripts.indexed_attention [--lengths 8192 16384 32768 65536 131072] [--rows 64]
        [--step 2048] [--heads 128] [--keys auto int8] [--phases decode prefill] [--repeats 5] [--quick]
        [--output FILE.jsonl]

One layer with DeepSeek-V3.2's shapes in bfloat16, random numbers, scattered blocks. Decode: --rows rows of one token
each. Prefill: the last --step tokens of a prompt. All ways are first compared with the references at short lengths.
`indexer` scores, `top-k` chooses by the scores, `attention` reads what was chosen, and their sum is `sparse`. `dense`
is attention to all cached tokens as the engine computes it: to latents in decode, to expanded keys and values in
prefill, expansion included. `masked` is the latter under a mask of the choice, with indexer and top-k. `limit` is the
least time by bytes and FLOPs, at the rates of a large copy and of the largest product of the same run. `whole` are the
times of a whole prompt, added up from its steps, with times between the measured lengths interpolated. --quick
compares alone, on the CPU, with small shapes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline.kernels.attention.expanded import triton as expanded_ops
from ridgeline.kernels.attention.expanded.cost import expanded_attention_cost, expansion_cost
from ridgeline.kernels.attention.expanded.op import LongRows
from ridgeline.kernels.attention.latent import triton as latent_ops
from ridgeline.kernels.attention.latent.cost import latent_attention_cost
from ridgeline.kernels.attention.paged.cases import scattered
from ridgeline.kernels.attention.sparse import triton as sparse_ops
from ridgeline.kernels.attention.sparse.cases import IndexTopkCase, SparseCase
from ridgeline.kernels.attention.sparse.cost import index_topk_cost, sparse_attention_cost
from ridgeline.kernels.attention.sparse.op import (
    IndexCache,
    index_topk_reference,
    sparse_attention_reference,
)
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.kv_cache import levels, row_scales, torch_type
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.whole_attention import peak_flops, seconds

WITHIN = 2e-2  # of the norm of the reference
RANK, ROPE, KEY, VALUE, BLOCK, SELECTED, INDEX = 512, 64, 128, 128, 64, 2048, {"heads": 64, "dim": 128}
SCALE = (KEY + ROPE) ** -0.5


def errors(device: str, keys: list[str]) -> dict[str, float]:
    """Return the share of places that are not the reference's by format, and the error of attention over the norm."""
    small = device == "cpu"
    shapes: dict[str, Any] = {"num_heads": 16, "rank": RANK, "rope_dim": ROPE, "block_size": BLOCK}
    case = SparseCase(rows=((3, 90), (1, 70)), selected=33, heads=20, dim=32)
    if not small:
        case = SparseCase(rows=((3, 5120), (1, 2560)), selected=SELECTED, **INDEX, **shapes)
    dtype, where = torch.float32 if small else torch.bfloat16, torch.device(device)
    found: dict[str, float] = {}
    for form in keys:
        choice = IndexTopkCase(**{**vars(case), "keys": form})
        inputs, options = choice.inputs(dtype, where), choice.options(dtype, where)
        want = index_topk_reference(*inputs, **options)
        found[f"choice, {form} keys"] = (sparse_ops.index_topk(*inputs, **options) != want).float().mean().item()
    inputs, options = case.inputs(dtype, where), case.options(dtype, where)
    exact = sparse_attention_reference(*inputs, **options).double()
    found["attention"] = ((sparse_ops.sparse_attention(*inputs, **options) - exact).norm() / exact.norm()).item()
    return found


@dataclass
class Layer:
    """A layer's cache for rows of (new tokens, cached tokens), and the queries of its new tokens."""

    rows: list[tuple[int, int]]
    heads: int

    def __post_init__(self) -> None:
        device = torch.device("cuda")
        self.batch, blocks = scattered(self.rows, BLOCK, device, torch.Generator().manual_seed(0))
        tokens = sum(new for new, _ in self.rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        self.cache_NPW, self.keys_NPD = draw(blocks, BLOCK, RANK + ROPE), draw(blocks, BLOCK, INDEX["dim"])
        self.q_THL, self.q_THY = draw(tokens, self.heads, RANK), draw(tokens, self.heads, ROPE)
        self.q_TID, self.weights_TI = draw(tokens, *INDEX.values()), draw(tokens, INDEX["heads"]).float()

    def index(self, form: str) -> IndexCache:
        """Return the index keys in a format."""
        kept = torch_type(kv_format(form), torch.bfloat16)
        if not kv_format(form).quantized:
            return IndexCache(self.keys_NPD)
        scale_NP = row_scales(self.keys_NPD, kept)
        return IndexCache(levels(self.keys_NPD, scale_NP, kept), scale_NP)

    def choose(self, cache: IndexCache) -> Tensor:
        return sparse_ops.index_topk(self.q_TID, self.weights_TI, cache, self.batch, count=SELECTED)

    def attend(self, chosen_TK: Tensor) -> Tensor:
        return sparse_ops.sparse_attention(self.q_THL, self.q_THY, self.cache_NPW, self.batch, chosen_TK, scale=SCALE)

    def dense(self, chosen_TK: Tensor | None = None) -> Callable[[], object]:
        """Return attention to all that is cached, or with a mask of what is chosen."""
        if len(self.rows) > 1:
            scheduled = replace(self.batch, schedule=latent_ops.schedule_of(self.q_THL, self.q_THY, self.batch))
            return lambda: latent_ops.latent_attention(self.q_THL, self.q_THY, self.cache_NPW, scheduled, scale=SCALE)
        [(new, kv)] = self.rows
        weight = torch.randn(self.heads * (KEY + VALUE), RANK, device="cuda", dtype=torch.bfloat16) * RANK**-0.5
        q_THK = torch.randn(new, self.heads, KEY, device="cuda", dtype=torch.bfloat16)
        out_THV, place_J = torch.empty_like(q_THK), torch.arange(kv, device="cuda")
        block_J = self.batch.block_table_SC[0, place_J // BLOCK].long()

        def attend() -> None:
            kept_JW, some = self.cache_NPW[block_J, place_J % BLOCK], max(1, (1 << 27) // (kv * (KEY + VALUE) * 2))
            rows = LongRows(
                first_R=np.array([0]), tokens_R=np.array([new]), begin_R=np.array([0]), bound_R=np.array([kv]),
                kv_len_R=self.batch.kv_len_R.int(),
            )  # fmt: skip
            bits_TW = None if chosen_TK is None else sparse_ops.choice_bits(chosen_TK, -(-kv // 64))
            for at in range(0, self.heads, some):
                heads = slice(at, min(at + some, self.heads))
                kv_JHX = kept_JW[:, :RANK] @ weight.unflatten(0, (self.heads, -1))[heads].flatten(0, 1).T
                k_JHK, v_JHV = kv_JHX.unflatten(1, (-1, KEY + VALUE)).split((KEY, VALUE), dim=-1)
                parts = out_THV[:, heads], q_THK[:, heads], self.q_THY[:, heads], k_JHK, v_JHV, kept_JW[:, RANK:]
                expanded_ops.expanded_attention(*parts, rows, scale=SCALE, chosen_TW=bits_TW)

        return attend


def costs(rows: list[tuple[int, int]], heads: int, form: str) -> dict[str, Cost]:
    """Return the least work of the three ops, and of attention to all."""
    (new_R, kv_R), sizes = zip(*rows, strict=True), {"num_heads": heads, "rope_dim": ROPE, "itemsize": 2}
    kept = kv_format(form).itemsize(INDEX["dim"], "bfloat16")
    found = {
        "choice": index_topk_cost(new_R, kv_R, **INDEX, count=SELECTED, itemsize=2, key_itemsize=kept),
        "attention": sparse_attention_cost(new_R, kv_R, **sizes, rank=RANK, count=SELECTED),
    }
    if len(rows) > 1:
        return found | {"dense": latent_attention_cost(new_R, kv_R, **sizes, rank=RANK)}
    parts = {"key_dim": KEY, "value_dim": VALUE}
    made = expansion_cost(kv_R[0], num_heads=heads, **parts, rank=RANK, itemsize=2)
    return found | {"dense": expanded_attention_cost(new_R, kv_R, **sizes, **parts) + made}


def timed(rows: list[tuple[int, int]], a: Namespace) -> dict[str, Any]:
    """Return seconds of a layer's ways: "dense", "attention", in prefill "mask" (attention under a mask), and by format
    "indexer" and "top-k"."""
    layer, found = Layer(rows, a.heads), dict[str, Any]()
    found["dense"] = seconds(layer.dense(), a.repeats)
    for form in a.keys:
        cache = layer.index(form)
        chosen_TK = layer.choose(cache)
        both = seconds(lambda cache=cache: layer.choose(cache), a.repeats)
        with patch.object(sparse_ops, "index_scores_kernel", _Nothing()):  # memory keeps the scores of the call before
            choice = seconds(lambda cache=cache: layer.choose(cache), a.repeats)
        found[form] = {"indexer": both - choice, "top-k": choice}
    found["attention"] = seconds(lambda: layer.attend(chosen_TK), a.repeats)
    if len(rows) == 1:
        found["mask"] = seconds(layer.dense(chosen_TK), a.repeats)
    return found


class _Nothing:
    """Stands for a kernel, and launches nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def lines(a: Namespace, product: float, read: float) -> Iterator[dict[str, Any]]:
    """Yield a record for each phase, length and format."""
    for phase in a.phases:
        for length in a.lengths:
            rows = [(1, length)] * a.rows if phase == "decode" else [(a.step, length)]
            times = timed(rows, a)
            torch.cuda.empty_cache()
            for form in a.keys:
                own = {"dense": times["dense"], **times[form], "attention": times["attention"]}
                limit = {name: max(c.bytes / read, c.flops / product) for name, c in costs(rows, a.heads, form).items()}
                rate = costs(rows, a.heads, form)["attention"].flops / times["attention"]
                choice = own["indexer"] + own["top-k"]
                own["sparse"] = choice + own["attention"]
                if "mask" in times:
                    own["masked"] = choice + times["mask"]
                about = {"phase": phase, "length": length, "rows": len(rows), "tokens": sum(new for new, _ in rows)}
                about |= {"keys": form, "heads": a.heads, "seconds": own, "limit": limit}
                yield about | {"attention_flops": rate, "product": product, "read": read}


def whole(records: list[dict[str, Any]], way: str, length: int, step: int) -> float:
    """Return the seconds of a whole prompt, step by step."""
    known = [(line["length"], line["seconds"][way]) for line in records]
    first = step, known[0][1] * step / known[0][0]  # steps without chosen tokens are counted like the dense way's
    ends = np.arange(step, length + 1, step)
    return float(np.interp(ends, *zip(first, *known, strict=True)).sum())


def copy_rate(size: int, repeats: int) -> float:
    """Return the bytes a second, read and written, of a large copy."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / seconds(lambda: target.copy_(source), repeats)


def main() -> None:
    a = asked(
        __doc__, lengths=[8192, 16384, 32768, 65536, 131072], rows=64, step=2048, heads=128, keys=["auto", "int8"],
        phases=["decode", "prefill"],
        repeats=5, quick=(False, "errors alone, on the CPU"), output=Path,
    )  # fmt: skip
    found = errors("cpu" if a.quick else "cuda", a.keys)
    print("errors", {name: f"{error:.2g}" for name, error in found.items()}, flush=True)
    wrong = [name for name, error in found.items() if not error <= (0 if "choice" in name else WITHIN)]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: not those of the reference.")
    if a.quick:
        return
    read = copy_rate(1 << 30, a.repeats)
    product = peak_flops(8192, a.repeats)
    print(f"{gpu()}: copy {read / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s", flush=True)
    names = "dense", "indexer", "top-k", "attention", "sparse", "masked"
    table = Table(
        "phase", "length", "keys", *(f"{name}, ms" for name in names), "dense/sparse", "limit", "TFLOP/s", "whole"
    )
    records = []
    for line in lines(a, product, read):
        records.append(line)
        keep(a.output, {"workload": "indexed attention", "gpu": gpu(), "dtype": "bfloat16", **line})
        print(line["phase"], line["length"], line["keys"], line["seconds"], flush=True)
    for line in records:
        own, limit = line["seconds"], line["limit"]
        alike = [x for x in records if (x["phase"], x["keys"]) == (line["phase"], line["keys"])]
        sums = [whole(alike, way, line["length"], a.step) for way in ("dense", "sparse")]
        cells = (f"{own[name] * 1e3:.3f}" if name in own else "" for name in names)
        table.add_row(
            line["phase"], f"{line['length']:,}", line["keys"], *cells,
            f"{own['dense'] / own['sparse']:.2f}",
            f"{limit['dense'] * 1e3:.3f} / {(limit['choice'] + limit['attention']) * 1e3:.3f}",
            f"{line['attention_flops'] / 1e12:.0f}",
            f"{sums[0] * 1e3:.0f} / {sums[1] * 1e3:.0f}" if line["phase"] == "prefill" else "",
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
