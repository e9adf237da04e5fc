"""ThunderKittens' kernels for the arguments of our ops, built from a checkout of its repository.

    python -m ridgeline_bench.sweep.thunderkittens CHECKOUT      # nvcc builds build/thunderkittens.so
    ridgeline bench sweep linear | paged_attention               # on a Hopper GPU, beside ours

ThunderKittens (github.com/HazyResearch/ThunderKittens) is CUDA C++ in headers, and nothing of it is here. The build
takes two kernel files of the checkout, without their own `main` or binding, and puts two C functions around them that
launch on a stream; it needs no GPU. Results are compared with the op's reference before anything is timed.

    linear            kernels/gemm/bf16_h100: tiles of 128 x 256, so tokens and outputs are multiples of these. It reads
                      the weight as [I, O], which is made once and not timed.
    paged_attention   kernels/attention/mha_h100, causal, heads of 128: no pages and no ragged rows. Rows are whole
                      prompts of one length, with keys and values taken from the pages and padded to a multiple of 384
                      once, not timed. It also writes the log of the softmax's sum, which ours does not.

Legend:
    B  sequences
    N  their tokens, padded
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline_bench.machine import built

LIBRARY = built.FOLDER / "thunderkittens.so"
GEMM = Path("kernels/gemm/bf16_h100/bf16_h100_gemm.cu")
ATTENTION = Path("kernels/attention/mha_h100/mha_h100.cu")
ROWS, COLUMNS, DEPTH = 128, 256, 64  # of the product's tiles
PADDED = 384  # tokens: three warpgroups of 64 queries, and blocks of 128 keys
FLAGS = "-std=c++20 --use_fast_math -DNDEBUG -DKITTENS_HOPPER"

PRODUCT = """
#define main unused_main
#include "{file}"
#undef main
extern "C" int product(void *a, void *b, void *c, size_t m, size_t n, size_t k, void *stream) {{
    using kind = matmul_template<2, 4, 8>;
    using matrices = typename kind::layout::globals;
    using matrix = typename kind::layout::global_layout;
    constexpr int shared = MAX_SHARED_MEMORY - 1024;
    auto kernel = prototype::lcf::kernel<kind>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    matrices all{{matrix{{(bf16 *)a, nullptr, nullptr, m, k}}, matrix{{(bf16 *)b, nullptr, nullptr, k, n}},
                 matrix{{(bf16 *)c, nullptr, nullptr, m, n}}}};
    dim3 block(kittens::prototype::detail::NUM_THREADS_v<kind>);
    kernel<<<kind::grid(m, n, k), block, shared, (cudaStream_t)stream>>>(all);
    return (int)cudaGetLastError();
}}
"""

ATTEND = """
#include "{file}"
extern "C" int attend(void *q, void *k, void *v, void *o, void *l, unsigned batch, unsigned heads, unsigned kv_heads,
                      unsigned tokens, void *stream) {{
    using given = fwd_globals<128>;
    constexpr int shared = kittens::MAX_SHARED_MEMORY - 1024;
    auto kernel = fwd_attend_ker<128, true>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    given all{{typename given::q_gl{{(bf16 *)q, batch, heads, tokens, 128U}},
              typename given::k_gl{{(bf16 *)k, batch, kv_heads, tokens, 128U}},
              typename given::v_gl{{(bf16 *)v, batch, kv_heads, tokens, 128U}},
              typename given::l_gl{{(float *)l, batch, heads, 1U, tokens}},
              typename given::o_gl{{(bf16 *)o, batch, heads, tokens, 128U}}, (int)tokens, (int)(heads / kv_heads)}};
    dim3 grid(tokens / (CONSUMER_WARPGROUPS * kittens::TILE_ROW_DIM<bf16> * 4), heads, batch);
    kernel<<<grid, 32 * NUM_WORKERS, shared, (cudaStream_t)stream>>>(all);
    return (int)cudaGetLastError();
}}
"""


def sources(checkout: Path, folder: Path) -> list[Path]:
    """Write what is compiled to a folder. Raise SystemExit if the checkout lacks a kernel."""
    made = []
    for file, text in ((GEMM, PRODUCT), (ATTENTION, ATTEND)):
        if not (checkout / file).is_file():
            raise SystemExit(f"{checkout} has no {file}; name a checkout of ThunderKittens 2.0.")
        kernel = folder / f"kernel_{file.name}"
        # Behind this line stand its binding to Python, and its own benchmark
        kernel.write_text((checkout / file).read_text().split("#ifdef TORCH_COMPILE")[0])
        made.append(folder / file.name)
        made[-1].write_text(text.format(file=kernel))
    return made


def build(checkout: Path, library: Path = LIBRARY, nvcc: str = "nvcc") -> Path:
    """Build the library with nvcc, for sm_90a. Raise SystemExit with its words if that fails."""
    folder = library.parent / "thunderkittens"
    folder.mkdir(parents=True, exist_ok=True)
    root = checkout.resolve()
    headers = [root / name for name in ("include", "prototype", GEMM.parent)]
    return built.built(library, sources(root, folder), FLAGS, headers, nvcc)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[], Tensor]:
    """The product, of whole tiles."""
    (tokens, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    if tokens % ROWS or outputs % COLUMNS or inputs % DEPTH or bias_O is not None:
        raise ValueError(f"ThunderKittens' product takes multiples of {ROWS} x {COLUMNS} x {DEPTH}, without a bias.")
    weight_IO = weight_OI.T.contiguous()

    def call() -> Tensor:
        y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
        built.launch(LIBRARY, "product", (x_TI, weight_IO, y_TO), list(map(ctypes.c_size_t, (tokens, outputs, inputs))))
        return y_TO

    return call


class Packed(NamedTuple):
    """Whole prompts of one length: queries [B, H, N, D], keys and values [B, G, N, D], with zeros behind `length`."""

    q_BHND: Tensor
    k_BGND: Tensor
    v_BGND: Tensor
    length: int

    def unpacked(self, out_BHND: Tensor) -> Tensor:
        """Return the results of the tokens that there are: [T, H, D]."""
        return out_BHND[:, :, : self.length].transpose(1, 2).flatten(0, 1)


def packed(
    q_THD: Tensor, k_cache_NGPD: Tensor, v_cache_NGPD: Tensor, batch: RaggedBatch, softmax: Softmax, scales: Any = None
) -> Packed:
    """Take prompts out of the pages. Raise ValueError for what is no batch of whole prompts of one length."""
    lengths, starts = batch.kv_len_R.tolist(), batch.start_R1.tolist()
    whole = [b - a for a, b in pairwise(starts)] == lengths and len(set(lengths)) == 1
    odd = (softmax.softcap, softmax.sinks_H, softmax.slopes_H, softmax.window, scales, batch.tree)
    if not whole or any(each is not None for each in odd):
        raise ValueError("ThunderKittens' attention takes whole prompts of one length, and plain softmax.")
    if abs(softmax.scale * q_THD.shape[-1] ** 0.5 - 1) > 1e-6:
        raise ValueError("ThunderKittens' attention scales by the width of heads alone.")
    length, rows, block_size = lengths[0], len(lengths), k_cache_NGPD.shape[2]
    padding = (0, 0, 0, -length % PADDED)
    blocks = batch.block_table_SC[batch.slots_R.long(), : -(-length // block_size)].long()
    k_BGND, v_BGND = (
        F.pad(cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :length], padding)
        for cache in (k_cache_NGPD, v_cache_NGPD)
    )
    return Packed(F.pad(q_THD.unflatten(0, (rows, length)).transpose(1, 2), padding), k_BGND, v_BGND, length)


def paged_attention(q_THD: Tensor, *given: Any, **options: Any) -> Callable[[], Tensor]:
    """Causal attention of whole prompts."""
    if q_THD.shape[-1] != 128:
        raise ValueError("ThunderKittens' attention is built for heads of 128.")
    rows = packed(q_THD, *given, **options)
    q, k, v = (x.contiguous() for x in rows[:3])

    def call() -> Tensor:
        out_BHND, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2])
        built.launch(LIBRARY, "attend", (q, k, v, out_BHND, sums), list(map(ctypes.c_uint, sizes)))
        return rows.unpacked(out_BHND)

    return call


PEERS: dict[str, Callable[..., Callable[[], Tensor]]] = {"linear": linear, "paged_attention": paged_attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--nvcc", default="nvcc")
    given = parser.parse_args()
    file = build(given.checkout, nvcc=given.nvcc)
    sys.stdout.write(f"{file}: {file.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
