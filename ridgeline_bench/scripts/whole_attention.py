"""Attention of whole sequences, forward and backward, beside torch's kernels: FlashAttention-2 and cuDNN.

    python -m ridgeline_bench.scripts.whole_attention [--lengths 2048 8192 16384] [--sizes 64 128] [--tokens 32768]
        [--channels 2048] [--tiles] [--quick] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.whole_attention --short [--sequences 1 4 11 44 176] [--output FILE.jsonl]

Causal, bfloat16, --channels in all heads together, --tokens in a batch. Each way is first compared with the plain
reference in float64 at a shorter length, gradients included. TFLOP/s count the products of pairs that are seen: 4
operations a pair and channel forward, 10 backward. `limit` is their time at the rate of the largest product that torch
reaches in the same run. --tiles times other tiles of our kernels, too.

--short times a layer of 12 heads of 64 over sequences of 128 tokens in one kernel, beside three launches of torch's
kernels: both in a graph, over four sets of weights in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention import triton_sdpa
from ridgeline.kernels.attention.ladder.short_layer import ShortLayer, ShortShape, predicted, three_launches
from ridgeline.kernels.attention.triton_sdpa import Tiles, sdpa, sdpa_reference
from ridgeline.kernels.cuda.predict import chip_here
from ridgeline_bench.machine.timing import QUICK, device_seconds, median_seconds
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep

WITHIN = 2e-2  # of the norm of the reference
WAYS: dict[str, SDPBackend | None] = {
    "ours": None,
    "torch, FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "torch, cuDNN": SDPBackend.CUDNN_ATTENTION,
}
OTHERS = {
    "forward": [
        Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3),
        Tiles(128, 128, 8, 3), Tiles(64, 128, 4, 3),
    ],
    "keys": [
        Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3),
        Tiles(32, 128, 4, 2), Tiles(128, 128, 8, 2),
    ],
    "queries": [
        Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 2), Tiles(64, 128, 8, 2),
        Tiles(128, 32, 8, 3), Tiles(64, 64, 4, 2),
    ],
}  # fmt: skip


def inputs(batch: int, heads: int, length: int, size: int, device: str) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    drawn = (torch.randn(batch, length, heads, size, device=device, dtype=torch.float32) for _ in range(4))
    return [x.to(dtype).transpose(1, 2) for x in drawn]


def attend(way: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    backend = WAYS[way]
    if backend is None:
        return sdpa(q, k, v)
    with sdpa_kernel(backend) if q.is_cuda else nullcontext():
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def error(way: str, size: int, device: str, length: int) -> float:
    """Return the largest error of the output and the gradients, over the norm of each in float64."""
    *qkv, grad = inputs(1, 2, length, size, device)
    found = []
    for function, dtype in ((lambda *x: attend(way, *x), qkv[0].dtype), (sdpa_reference, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
        out = function(*leaves)
        out.backward(grad.to(dtype))
        found.append([out.detach(), *(x.grad for x in leaves)])
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True))


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median of several calls."""
    work()
    times = sorted(device_seconds(work) for _ in range(repeats))
    return times[len(times) // 2]


def peak_flops(side: int, repeats: int) -> float:
    """Return the rate of a square product in bfloat16 of torch's."""
    a, b = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b, repeats)


def timed(way: str, heads: int, batch: int, length: int, size: int, repeats: int) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward call."""
    q, k, v, grad = inputs(batch, heads, length, size, "cuda")
    with torch.no_grad():
        forward = seconds(lambda: attend(way, q, k, v), repeats)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(way, *leaves)
    return forward, seconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), repeats)


def other_tiles(heads: int, batch: int, length: int, size: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the times with other tiles of one kernel each; a tile that does not fit the device is left out."""
    for kernel, choices in OTHERS.items():
        for tiles in choices:
            try:
                with patch.dict(triton_sdpa.TILES, {(kernel, size): tiles}):
                    forward, backward = timed("ours", heads, batch, length, size, repeats)
            except Exception as refused:
                print(f"{kernel} {tiles}: {type(refused).__name__}", flush=True)
                continue
            yield {"kernel": kernel, "tiles": list(vars(tiles).values()), "forward": forward, "backward": backward}


def short_layers(counts: list[int], output: Path | None, tokens: int = 128, heads: int = 12) -> Table:
    """Return the times of one kernel and of three launches; both are compared with float64 before."""
    table, model, device = (
        Table("sequences", "one kernel, µs", "three, µs", "predicted", "times faster"),
        64 * heads,
        "cuda",
    )
    for count in counts:
        shapes = (count, tokens, model), (3 * model, model), (model, model)
        sets = [[torch.randn(x, device=device).bfloat16() / x[-1] ** 0.5 for x in shapes] for _ in range(4)]
        layers = [ShortLayer(qkv, o, heads, (count, tokens)) for _, qkv, o in sets]
        calls: dict[str, list[Callable[[], torch.Tensor]]] = {
            "one kernel": [partial(layer, x[0]) for layer, x in zip(layers, sets, strict=True)],
            "three launches": [partial(three_launches, *x, heads) for x in sets],
        }
        exact = three_launches(*(x.double() for x in sets[0]), heads)
        line: dict[str, Any] = {"workload": "short layer", "gpu": gpu(), "sequences": count, "tokens": tokens}
        for name, ways in calls.items():
            off = float((ways[0]().double() - exact).norm() / exact.norm())
            if not off < WITHIN:
                raise SystemExit(f"{name}, {count} sequences: wrong by {off:.1e} of the norm.")
            line[name] = median_seconds(ways, torch.device(device), QUICK)
        keep(output, line)
        ours, theirs = (1e6 * line[name] for name in calls)
        cells = [1e6 * x for x in predicted(ShortShape(count, tokens, heads), chip_here(gpu()))]
        table.add_row(
            str(count), f"{ours:.1f}", f"{theirs:.1f}", f"{cells[0]:.1f}, {cells[1]:.1f}", f"{theirs / ours:.2f}"
        )
    return table


def main() -> None:
    a = asked(
        __doc__, lengths=[2048, 8192, 16384], sizes=[64, 128], tokens=32768, channels=2048, repeats=11,
        tiles=(False, "other tiles, too"), short=(False, "the layer of short sequences alone"),
        sequences=[1, 4, 11, 44, 176], quick=(False, "errors alone, on the CPU"), output=Path,
    )  # fmt: skip
    if a.quick:
        for size in a.sizes:
            print(f"{size} channels: error {error('ours', size, 'cpu', 70):.2g}")
        return
    if a.short:
        Console(width=100).print(short_layers(a.sequences, a.output))
        return
    peak = peak_flops(8192, a.repeats)
    about = {"workload": "whole attention", "gpu": gpu(), "dtype": "bfloat16", "product": peak}
    table = Table(
        "channels", "length", "way", "forward, ms", "TFLOP/s", "of limit", "backward, ms", "TFLOP/s", "of limit"
    )
    for size in a.sizes:
        heads = a.channels // size
        off = {way: error(way, size, "cuda", 333) for way in WAYS}
        print(f"{size} channels: errors {off}, a square product {peak / 1e12:.0f} TFLOP/s", flush=True)
        wrong = [way for way, each in off.items() if not each < WITHIN]
        if wrong:
            raise SystemExit(f"{', '.join(wrong)}: wrong by more than {WITHIN} of the norm.")
        for length in a.lengths:
            batch = max(1, a.tokens // length)
            pairs = batch * heads * length * (length + 1) / 2
            shape = {"channels": size, "heads": heads, "batch": batch, "length": length}
            for way in WAYS:
                forward, backward = timed(way, heads, batch, length, size, a.repeats)
                line = {**shape, "way": way, "error": off[way], "forward": forward, "backward": backward}
                keep(a.output, {**about, **line})
                reached = [4 * pairs * size / forward, 10 * pairs * size / backward]
                cells = [f"{t * 1e3:.3f}" for t in (forward, backward)]
                shares = [(cell, f"{r / 1e12:.0f}", f"{r / peak:.0%}") for cell, r in zip(cells, reached, strict=True)]
                table.add_row(str(size), f"{length:,}", way, *shares[0], *shares[1])
        for line in other_tiles(heads, max(1, a.tokens // 8192), 8192, size, 5) if a.tiles else ():
            keep(a.output, {**about, "channels": size, "heads": heads, "length": 8192, **line})
            print(size, line, flush=True)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
