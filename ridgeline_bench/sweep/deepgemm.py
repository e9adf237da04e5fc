"""DeepGEMM's product of blocks from the headers of its package, where the package itself does not load: its library is
built for one version of torch, and its kernels are templates that need none.

    python -m ridgeline_bench.sweep.deepgemm PACKAGE      # nvcc builds build/deepgemm.so; needs no GPU
    ridgeline bench sweep fp8_linear --beside --form fed  # on a Hopper GPU, beside ours

PACKAGE is the folder `deep_gemm` of an unpacked wheel (deep-gemm, sgl-deep-gemm) with its `include`; nothing of it is
here. The build makes C functions of its kernel for Hopper with scales of 1 x 128 and 128 x 128, for one size of weights
(4,096 outputs and inputs: DeepGEMM compiles both into a kernel), and for the tiles that it may choose for up to 64
tokens. Each number of columns is a peer of its own, and so is a launch that may begin before the kernel ahead has ended
("early"), which DeepGEMM leaves off. DeepGEMM's own choice for 132 multiprocessors is 32 columns.

Activations are rounded before, and their scales laid out as it reads them; neither is in its time.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ridgeline_bench.machine import built

LIBRARY = built.FOLDER / "deepgemm.so"
HEADER = Path("include/deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh")
SIZE = 4096  # outputs and inputs
ROWS, COLUMNS = (16, 32, 64), (16, 32, 64)  # of tiles
GROUP = 128  # inputs of a scale
FLAGS = f"-std=c++20 --diag-suppress=39,161,174,177,186,940 -DSIZE={SIZE}"

SOURCE = """
#include <cuda.h>
#include <cuda_runtime.h>
#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>

constexpr int size = SIZE, group = 128, room = 232448, most_stages = 16;
constexpr int up(int number, int step) {{ return (number + step - 1) / step * step; }}

// A map of a matrix whose rows are `stride` bytes apart. Boxes are `columns` wide, or as wide as their swizzle.
static int map(CUtensorMap *made, void *at, CUtensorMapDataType type, int item, int outer, int inner, int stride,
               int rows, int columns, int swizzle) {{
    cuuint64_t sizes[2] = {{(cuuint64_t)inner, (cuuint64_t)outer}}, strides[1] = {{(cuuint64_t)stride}};
    cuuint32_t box[2] = {{(cuuint32_t)(swizzle ? swizzle / item : columns), (cuuint32_t)rows}}, steps[2] = {{1, 1}};
    auto mixed = swizzle == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
               : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_NONE;
    return cuTensorMapEncodeTiled(made, type, 2, at, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, mixed,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}}

template <int rows, int columns>
static int product(void *x, void *x_scale, void *w, float *w_scale, void *y, int tokens, bool early, void *stream) {{
    constexpr int out = columns % 64 == 0 ? 128 : columns % 32 == 0 ? 64 : 32;
    constexpr int fixed = up(rows * columns * 2, 1024) + most_stages * 16 + up(size / group * 4, 8);
    constexpr int stage = (rows + columns) * group + up(rows * 4, 128);
    constexpr int stages = (room - fixed) / stage < most_stages ? (room - fixed) / stage : most_stages;
    auto kernel = deep_gemm::sm90_fp8_gemm_1d2d_impl<
        cute::UMMA::Major::K, 0, size, size, 1, rows, columns, group, 128, 128, out, stages, 128, 128, 1, false, 132,
        deep_gemm::GemmType::Normal, cutlass::bfloat16_t>;
    CUtensorMap maps[4];
    int scales = up(tokens, 4);
    if (int code = map(maps, x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, tokens, size, size, rows, group, 128)) return code;
    if (int code = map(maps + 1, w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, size, size, size, columns, group, 128))
        return code;
    if (int code = map(maps + 2, y, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, tokens, size, size * 2, rows, columns, out))
        return code;
    if (int code = map(maps + 3, x_scale, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, size / group, scales, scales * 4, 1,
                       rows, 0))
        return code;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how{{}};
    how.gridDim = dim3(132), how.blockDim = dim3(256), how.dynamicSmemBytes = fixed + stages * stage;
    how.stream = (cudaStream_t)stream, how.attrs = &attribute, how.numAttrs = early;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, fixed + stages * stage);
    return (int)cudaLaunchKernelEx(&how, kernel, w_scale, (int *)nullptr, (uint32_t)tokens, (uint32_t)size,
                                   (uint32_t)size, maps[0], maps[1], maps[2], maps[3]);
}}
{functions}
"""

FUNCTION = """
extern "C" int product_{rows}_{columns}(void *x, void *x_scale, void *w, void *w_scale, void *y, int tokens, int early,
                                        void *stream) {{
    return product<{rows}, {columns}>(x, x_scale, w, (float *)w_scale, y, tokens, early, stream);
}}
"""


def build(package: Path, library: Path = LIBRARY, nvcc: str = "nvcc") -> Path:
    """Build the library with nvcc, for sm_90a. Raise SystemExit if there is no such header, or with nvcc's words."""
    if not (package / HEADER).is_file():
        raise SystemExit(f"{package} has no {HEADER}; name the folder deep_gemm of its wheel, of 0.2 or later.")
    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".cu")
    source.write_text(
        SOURCE.format(functions="".join(FUNCTION.format(rows=m, columns=n) for m in ROWS for n in COLUMNS))
    )
    return built.built(library, [source], FLAGS, [package.resolve() / "include"], nvcc)


def by_channels(scale_TC: Tensor) -> Tensor:
    """Return the scales of activations as TMA reads them: [C, T], with T padded to a multiple of 4."""
    tokens, groups = scale_TC.shape
    laid_CT = scale_TC.new_zeros(groups, -(-tokens // 4) * 4)
    laid_CT[:, :tokens] = scale_TC.T
    return laid_CT


def product(
    columns: int, early: bool, q_TI: Tensor, scale_TC: Tensor, weight_OI: Tensor, scale_SC: Tensor
) -> Callable[[], Tensor]:
    """The product of activations in E4M3 [T, I] with scales [T, I / 128] and weights [O, I] with scales [O / 128,
    I / 128], in bfloat16. Raises ValueError for sizes that are not built; the call RuntimeError if a launch fails."""
    tokens, laid_CT = len(q_TI), by_channels(scale_TC)
    if weight_OI.shape != (SIZE, SIZE) or not 0 < tokens <= ROWS[-1]:
        raise ValueError(
            f"DeepGEMM is built for {SIZE} x {SIZE} and up to {ROWS[-1]} tokens, not {weight_OI.shape} and {tokens}."
        )
    rows = next(rows for rows in ROWS if tokens <= rows)
    y_TO = torch.empty(tokens, SIZE, dtype=torch.bfloat16, device=q_TI.device)
    given = q_TI.contiguous(), laid_CT, weight_OI.contiguous(), scale_SC.float().contiguous(), y_TO

    def call() -> Tensor:
        built.launch(LIBRARY, f"product_{rows}_{columns}", given, (ctypes.c_int(tokens), ctypes.c_int(early)))
        return y_TO

    return call


PRODUCTS: dict[str, Callable[..., Callable[[], Tensor]]] = {
    f"deepgemm {columns} columns" + ", early" * early: partial(product, columns, early)
    for columns in COLUMNS
    for early in (False, True)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--nvcc", default="nvcc")
    given = parser.parse_args()
    file = build(given.package, nvcc=given.nvcc)
    sys.stdout.write(f"{file}: {file.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
