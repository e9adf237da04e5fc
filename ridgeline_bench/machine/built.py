"""Other projects' CUDA C++ as peers: a library of C functions around their headers, built by nvcc and loaded by ctypes.

The build needs no GPU, so a library can be carried to a machine that has one. It lies in `build/`, and what finds it
there is a peer. A function takes pointers and sizes and a stream last, and returns CUDA's error.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "build"
FLAGS = (
    "-O3 --expt-extended-lambda --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a "
    "-Xcompiler=-fPIC,-fno-strict-aliasing,-Wno-psabi -shared"
)


def built(library: Path, sources: Sequence[Path], flags: str, headers: Sequence[Path], nvcc: str) -> Path:
    """Build the library for sm_90a and return it. Raises SystemExit with nvcc's words if that fails."""
    library.parent.mkdir(parents=True, exist_ok=True)
    included = [f"-I{folder}" for folder in headers]
    command = [nvcc, *map(str, sources), *FLAGS.split(), *flags.split(), *included, "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"nvcc failed: {done.stderr[-2000:]}")
    return library


@cache
def loaded(library: Path) -> Any:
    """Load what was built. The driver's functions are found in the library that is loaded for all."""
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def launch(library: Path, name: str, tensors: Sequence[Tensor], sizes: Sequence[object]) -> None:
    """Call a function on the current stream with the tensors' pointers and the sizes, ctypes objects. Raises
    RuntimeError if the launch fails."""
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if code := getattr(loaded(library), name)(*pointers, *sizes, stream):
        raise RuntimeError(f"{name} of {library.name} failed with CUDA's error {code}.")
