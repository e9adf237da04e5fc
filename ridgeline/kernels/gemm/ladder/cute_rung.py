"""The CuTe DSL rung of the GEMM ladder: how it is compiled (`pip install "ridgeline[cutlass]"`) and launched.

The DSL compiles without a GPU. It runs in a process of its own, and what comes back is a cubin, which can be carried
and is launched as those of other rungs: the machine with the GPU needs no package for it.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.cuda.compile import TIMEOUT, CudaError, NoCudaCompiler
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel, tensor_map

NAME, ARCH, STEPS = "cute-dsl-bias-gelu", "sm_90a", ("Bias", "Gelu")
SOURCE = Path(__file__).parent / "cutlass" / "cute_dsl.py"
TILE, STAGES, THREADS = (128, 256, 64), 4, 384
SHARED = 1024 + 2 * STAGES * TILE[2] * (TILE[0] + TILE[1])  # barriers, then stages at multiples of 1,024 bytes
NEEDS = ("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D", "USETMAXREG")
REGISTERS = 168


class SizesArgument(ctypes.Structure):
    """A tensor of coordinates, as the kernel takes what TMA reads: rows and columns."""

    _fields_ = (("rows", ctypes.c_int), ("columns", ctypes.c_int))


class MatrixArgument(ctypes.Structure):
    """A row-major matrix, as the kernel takes it."""

    _fields_ = (("data", ctypes.c_void_p), ("sizes", SizesArgument), ("stride", ctypes.c_int64))


class VectorArgument(ctypes.Structure):
    """A vector, as the kernel takes it."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_int))


def has_dsl() -> bool:
    """Return True if the CuTe DSL is installed."""
    return find_spec("cutlass") is not None and find_spec("cutlass.cute") is not None


def cute_cubin() -> bytes:
    """Return the machine code. Raises NoCudaCompiler without the DSL, and CudaError with what it says."""
    if not has_dsl():
        raise NoCudaCompiler('the CuTe DSL is not installed; try: pip install "ridgeline[cutlass]".')
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "CUTE_DSL_ARCH": ARCH, "CUTE_DSL_DUMP_DIR": folder}
        done = subprocess.run(
            [sys.executable, str(SOURCE)], env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
        made = list(Path(folder).glob("*.cubin"))
        if done.returncode or len(made) != 1:
            raise CudaError(f"{SOURCE.name} for {ARCH}: {done.stderr[-2000:]}")
        return made[0].read_bytes()


def cute_file(folder: Path) -> Path:
    """Return the path of the machine code in a folder."""
    return folder / f"{NAME}.{ARCH}.cubin"


def kernel_name(code: bytes) -> str:
    """Return the name of a cubin's only kernel; the DSL's names say the types of all arguments."""
    names = set(re.findall(rb"\0\.text\.(\w+)(?=\0)", code))
    if len(names) != 1:
        raise ValueError(f"a cubin with one kernel is needed, got {len(names)}.")
    return names.pop().decode()


class LoadedCute:
    """The rung on the current CUDA device.

    folder: where its cubin lies; without one it is compiled. Raises NoCudaCompiler, CudaError and DriverError.
    """

    def __init__(self, folder: Path | None = None, driver: CudaDriver | None = None) -> None:
        self._driver = driver or CudaDriver()
        if folder and not cute_file(folder).is_file():
            raise NoCudaCompiler(f"{cute_file(folder)} is not there; ridgeline.kernels.gemm.ladder.run makes it.")
        code = cute_file(folder).read_bytes() if folder else cute_cubin()
        device = torch.cuda.current_device()
        self._kernel = Kernel(self._driver, code, kernel_name(code), device=device, shared=SHARED)

    def __call__(self, a_MK: Tensor, b_NK: Tensor, c_MN: Tensor, bias_N: Tensor) -> None:
        """Write gelu(A · Bᵀ + bias) to C, on torch's current stream. All are contiguous bfloat16."""
        (m, k), n, (rows, columns, depth) = a_MK.shape, len(b_NK), TILE
        a, b = (
            tensor_map(self._driver, (x.data_ptr(), len(x), k), x.element_size(), (box, depth))
            for x, box in ((a_MK, rows), (b_NK, columns))
        )
        matrices = [
            a,
            SizesArgument(m, k),
            b,
            SizesArgument(n, k),
            MatrixArgument(c_MN.data_ptr(), SizesArgument(m, n), n),
            VectorArgument(bias_N.data_ptr(), n),
        ]
        arguments = [*matrices, ctypes.c_bool(False)]  # the last: if products add to sums, which the kernel sets itself
        grid = (-(-n // columns), -(-m // rows), 1)
        self._kernel.launch(grid, (THREADS, 1, 1), torch.cuda.current_stream().cuda_stream, arguments)
