"""FlashAttention-3's gradients, built from a checkout of its repository: no wheel that loads beside torch has them.

    python -m ridgeline_bench.ladders.flash3_gradients CHECKOUT CUTLASS   # nvcc builds build/flash3.so; needs no GPU
    ridgeline bench kernels --ladder attention                  # on a Hopper GPU, beside the rungs

CHECKOUT is a clone of github.com/Dao-AILab/flash-attention, CUTLASS a folder with CUTLASS' headers, such as
`cutlass_library/source/include` of the wheel nvidia-cutlass. Nothing of either is here. The build makes a C function of
its causal gradients in bfloat16 for heads of 64 and of 128 channels, with the tiles that it takes for these itself; it
takes some minutes. The functions launch its three kernels: products of outputs with their gradients and zeros for the
sums, the gradients, and the sums rounded.

Legend:
    B  sequences
    T  tokens
    H  heads
    D  channels
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ridgeline_bench.machine import built

LIBRARY = built.FOLDER / "flash3.so"
HEADER = Path("hopper/flash_bwd_launch_template.h")
ROWS = {64: 128, 128: 64}  # queries of a step, by channels
FLAGS = (
    "-std=c++17 --use_fast_math -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90 "
    "-DCUTLASS_DEBUG_TRACE_LEVEL=0"
)
LN2 = 0.6931471805599453

SOURCE = """
#include <cstring>
#include "flash_bwd_launch_template.h"

// Tensors are [B, T, H, D] without gaps, sums and numbers of queries [B, H, T]; T is a multiple of 128.
template <int channels, int rows, int down>
static int gradients(void *q, void *k, void *v, void *out, void *grad, void *dq, void *dk, void *dv, void *sums,
                     void *log, void *log2, void *delta, int *locks, int batch, int heads, int tokens, void *stream) {
    Flash_bwd_params all;
    memset(&all, 0, sizeof all);
    int64_t row = (int64_t)heads * channels, whole = row * tokens;
    all.q_ptr = q, all.k_ptr = k, all.v_ptr = v, all.o_ptr = out, all.do_ptr = grad;
    all.dq_ptr = dq, all.dk_ptr = dk, all.dv_ptr = dv, all.dq_accum_ptr = sums, all.dq_semaphore = locks;
    all.softmax_lse_ptr = log, all.softmax_lse_log2_ptr = log2, all.dsoftmax_sum = delta;
    all.q_head_stride = all.k_head_stride = all.v_head_stride = all.o_head_stride = all.do_head_stride = channels;
    all.dq_head_stride = all.dk_head_stride = all.dv_head_stride = channels;
    all.q_row_stride = all.k_row_stride = all.v_row_stride = all.o_row_stride = all.do_row_stride = row;
    all.dq_row_stride = all.dk_row_stride = all.dv_row_stride = row;
    all.q_batch_stride = all.k_batch_stride = all.v_batch_stride = all.o_batch_stride = all.do_batch_stride = whole;
    all.dq_batch_stride = all.dk_batch_stride = all.dv_batch_stride = whole;
    all.b = batch, all.h = all.h_k = heads, all.d = all.d_rounded = all.dv = all.dv_rounded = channels;
    all.seqlen_q = all.seqlen_k = all.seqlen_q_rounded = all.seqlen_k_rounded = tokens;
    all.total_q = all.total_k = batch * tokens, all.scale_softmax = 1 / sqrtf(channels);
    all.is_bf16 = all.is_causal = true, all.window_size_left = -1, all.arch = 90;
    int device;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&all.num_sm, cudaDevAttrMultiProcessorCount, device);
    run_flash_bwd<90, channels, rows, 128, cutlass::bfloat16_t, true, false, false, false, false, false,
                  2, 2, true, false, false, 2, 1, 2, down, false>(all, (cudaStream_t)stream);
    return (int)cudaGetLastError();
}
#define FUNCTION(CHANNELS, ROWS, DOWN)                                                                          \\
    extern "C" int gradients_##CHANNELS(void *q, void *k, void *v, void *out, void *grad, void *dq, void *dk,   \\
                                        void *dv, void *sums, void *log, void *log2, void *delta, void *locks,  \\
                                        int batch, int heads, int tokens, void *stream) {                       \\
        return gradients<CHANNELS, ROWS, DOWN>(q, k, v, out, grad, dq, dk, dv, sums, log, log2, delta,          \\
                                               (int *)locks, batch, heads, tokens, stream);                     \\
    }
FUNCTION(64, 128, 2)
FUNCTION(128, 64, 1)
"""


def build(checkout: Path, cutlass: Path, library: Path = LIBRARY, nvcc: str = "nvcc") -> Path:
    """Build the library with nvcc, for sm_90a. Raise SystemExit if headers are not there, or with nvcc's words."""
    for folder, file in (checkout, HEADER), (cutlass, Path("cute/tensor.hpp")):
        if not (folder / file).is_file():
            raise SystemExit(f"{folder} has no {file}; name a clone of flash-attention, and CUTLASS' include folder.")
    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".cu")
    source.write_text(SOURCE)
    headers = [checkout.resolve() / HEADER.parent, cutlass.resolve()]
    return built.built(library, [source], FLAGS, headers, nvcc)


def gradients(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, out_BTHD: Tensor, log_BHT: Tensor, grad_BTHD: Tensor
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Return a call that gives the gradients of q, k and v, [B, T, H, D] each.

    log_BHT: logarithms to base 2 of the sums of exponentials, float32. Raises ValueError for shapes that are not built;
    the call RuntimeError if a launch fails.
    """
    batch, tokens, heads, size = q_BTHD.shape
    if size not in ROWS or tokens % 128 or k_BTHD.shape != q_BTHD.shape or q_BTHD.dtype != torch.bfloat16:
        raise ValueError(
            f"FlashAttention-3's gradients are built for bfloat16, as many key as query heads of {set(ROWS)} channels "
            f"and multiples of 128 tokens, not {tuple(q_BTHD.shape)} and {tuple(k_BTHD.shape)} in {q_BTHD.dtype}."
        )
    given = [x.contiguous() for x in (q_BTHD, k_BTHD, v_BTHD, out_BTHD, grad_BTHD)]
    log, steps = (log_BHT * LN2).contiguous(), -(-tokens // ROWS[size])
    sizes = [ctypes.c_int(each) for each in (batch, heads, tokens)]

    def call() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in given[:3])
        sums = log.new_empty(batch, heads, tokens, size)
        log2, delta = torch.empty_like(log), torch.empty_like(log)
        locks = torch.empty(steps * batch * heads, dtype=torch.int32, device=log.device)
        buffers = (*given, dq, dk, dv, sums, log, log2, delta, locks)
        built.launch(LIBRARY, f"gradients_{size}", buffers, sizes)
        return dq, dk, dv

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("cutlass", type=Path)
    parser.add_argument("--nvcc", default="nvcc")
    given = parser.parse_args()
    file = build(given.checkout, given.cutlass, nvcc=given.nvcc)
    sys.stdout.write(f"{file}: {file.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
