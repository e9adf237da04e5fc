"""Sparse attention beside dense attention of the same length: BigBird's blocks, MoBA and NSA, forward.

    python -m ridgeline_bench.scripts.sparse_attention [--lengths 16384 65536] [--heads 64] [--groups 4] [--size 128]
        [--quick] [--output FILE.jsonl]

Causal, bfloat16, one sequence. Dense ways are ours (triton_sdpa.py) and torch's kernels. Each sparse way is first
compared with its definition in float64 at a shorter length; NSA's selected part with the blocks that were chosen.
Selection and gating are inside the times. `pairs` counts the keys that queries read, the compressed ones too, and
`limit` is how many times fewer they are than dense attention's. --quick prints these counts and errors, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention import triton_block_sparse, triton_moba, triton_nsa
from ridgeline.kernels.attention.ladder.expert_layer import Sparse, keys_read
from ridgeline.kernels.attention.triton_block_sparse import BlockMask, big_bird
from ridgeline.kernels.attention.triton_moba import Moba
from ridgeline.kernels.attention.triton_nsa import KeysValues, Nsa
from ridgeline.kernels.attention.triton_sdpa import attend_intervals, sdpa
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.whole_attention import seconds

WITHIN = 2e-2  # of the norm of the reference


def pairs(way: str, length: int, moba: Moba, nsa: Nsa) -> float:
    """Return how many keys all queries of one head read, on paper: of blocks that are partly read the middle."""
    if way == "BigBird":
        return BlockMask(big_bird(length // 128)).density * length * length
    chosen: dict[str, Sparse] = {"MoBA": moba, "NSA": nsa}
    return keys_read(chosen.get(way), length)


class Inputs:
    """Queries, keys and values of one sequence, and what NSA wants besides."""

    def __init__(self, length: int, heads: int, groups: int, size: int, nsa: Nsa, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self.q, self.k, self.v = (
            draw(1, heads, length, size),
            draw(1, groups, length, size),
            draw(1, groups, length, size),
        )
        self.weights, self.gates = draw(nsa.length, size).float().softmax(0), draw(1, heads, length, 3).sigmoid()
        self.moba, self.nsa, self.mask = Moba(), nsa, BlockMask(big_bird(-(-length // 128)))

    def branches(self) -> tuple[KeysValues, KeysValues, KeysValues]:
        """The three of NSA; their keys and values are the same, which no kernel knows."""
        coarse = KeysValues(*(triton_nsa.compress(x, self.weights, self.nsa) for x in (self.k, self.v)))
        return coarse, KeysValues(self.k, self.v), KeysValues(self.k, self.v)

    def ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        def torchs(backend: SDPBackend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, enable_gqa=True)

        return {
            "dense, ours": lambda: sdpa(self.q, self.k, self.v),
            "dense, FlashAttention-2": lambda: torchs(SDPBackend.FLASH_ATTENTION),
            "dense, cuDNN": lambda: torchs(SDPBackend.CUDNN_ATTENTION),
            "BigBird": lambda: triton_block_sparse.block_sparse(self.q, self.k, self.v, self.mask),
            "MoBA": lambda: triton_moba.moba_attention(self.q, self.k, self.v, self.moba),
            "NSA": lambda: triton_nsa.nsa_attention(self.q, *self.branches(), self.gates, self.nsa),
        }

    def errors(self) -> dict[str, float]:
        """Return the errors of the sparse ways, over the norms in float64."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        coarse, own, _ = self.branches()
        scale = self.q.shape[-1] ** -0.5
        intervals = triton_nsa.compressed_intervals(q.shape[2], self.nsa, q.device)
        _, log = attend_intervals(self.q, *coarse, intervals, scale)
        chosen = triton_nsa.choose(self.q, coarse.k, log, self.nsa, scale=scale)
        at = torch.arange(q.shape[2], device=q.device)
        seen = (chosen.long()[..., None, :] == (at // self.nsa.block)[:, None]).any(-1) & (at <= at[:, None])
        seen = seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
        found = {
            "BigBird": (
                triton_block_sparse.block_sparse(self.q, self.k, self.v, self.mask),
                triton_block_sparse.block_sparse_reference(q, k, v, self.mask),
            ),
            "MoBA": (
                triton_moba.moba_attention(self.q, self.k, self.v, self.moba),
                triton_moba.moba_reference(q, k, v, self.moba),
            ),
            "NSA": (
                triton_nsa.attend_selected(self.q, own, chosen, self.nsa, scale=scale),
                scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True),
            ),
        }
        return {way: ((a.double() - b).norm() / b.norm()).item() for way, (a, b) in found.items()}


def main() -> None:
    a = asked(
        __doc__, lengths=[16384, 65536], heads=64, groups=4, size=128, repeats=7,
        quick=(False, "counts and errors alone, on the CPU"), output=Path,
    )  # fmt: skip
    nsa, device = Nsa(), "cpu" if a.quick else "cuda"
    short = Inputs(
        200 if a.quick else 4200, 4 if a.quick else 16, 2 if a.quick else 1, 16 if a.quick else a.size, nsa, device
    )
    errors = short.errors()
    wrong = [f"{way} ({each:.2g})" for way, each in errors.items() if not each < WITHIN]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: wrong by more than {WITHIN} of the norm.")
    table = Table("length", "way", "pairs of a head", "limit", "ms", "times the best dense", "error")
    for length in a.lengths:
        inputs = None if a.quick else Inputs(length, a.heads, a.groups, a.size, nsa, device)
        times: dict[str, float] = {}
        for way in (inputs or short).ways():
            if inputs is not None:
                with torch.no_grad():
                    times[way] = seconds(inputs.ways()[way], a.repeats)
            count, best = pairs(way, length, Moba(), nsa), min((t for w, t in times.items() if "dense" in w), default=0)
            limit = pairs("dense", length, Moba(), nsa) / count
            line = {"length": length, "way": way, "pairs": count, "limit": limit, "error": errors.get(way)}
            line |= {"heads": a.heads, "groups": a.groups, "channels": a.size, "seconds": times.get(way)}
            if inputs is not None:
                keep(a.output, {"workload": "sparse attention", "gpu": gpu(), "dtype": "bfloat16", **line})
            cells = f"{times[way] * 1e3:.2f}" if times else "", f"{best / times[way]:.2f}" if times else ""
            table.add_row(f"{length:,}", way, f"{count:,.0f}", f"{limit:.1f}", *cells, f"{errors.get(way, 0):.1e}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
