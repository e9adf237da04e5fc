"""Rungs 1 to 6 in HIP, by a table of words: `python -m ridgeline.kernels.gemm.ladder.hip` prints what changes.

clang alone compiles them, for GPUs that need not be there. The emulator runs them, and no AMD GPU has run them.
"""

from __future__ import annotations

import difflib
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from ridgeline.kernels.cuda.compile import HEADERS, CudaError, NoCudaCompiler
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Rung

COMPILERS = ("clang-22", "clang-21", "clang-20")
ARCHS = ("gfx942", "gfx1100")
LAST = 6  # cp.async of 16 bytes, which rung 7 is about, is not on these GPUs
TABLE = {
    '"numbers.cuh"': '"hip.cuh"',
    '"ptx.cuh"': '"hip.cuh"',
    "__shfl_xor_sync(~0u, ": "__shfl_xor(",  # the lanes of a wave run together
    "i += 32": "i += WAVE",  # 64 lanes on gfx942, 32 on gfx1100
    "mask = 16": "mask = WAVE / 2",
}


def in_hip(rung: Rung) -> str:
    """Return a rung's file with HIP's words in place of CUDA's."""
    text = rung.source.read_text()
    for ours, theirs in TABLE.items():
        text = text.replace(ours, theirs)
    return text


def changes(rung: Rung) -> list[str]:
    """Return the lines that differ, as `diff -u0` has them, without its headers."""
    lines = difflib.unified_diff(rung.source.read_text().splitlines(), in_hip(rung).splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def hip_rungs() -> Iterator[Rung]:
    """Yield the rungs that the table turns into HIP."""
    return (rung for rung in RUNGS if rung.number <= LAST)


def clang() -> str:
    """Return a clang that knows these GPUs, or ""."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), "")


def compile_hip(text: str, arch: str, defines: Mapping[str, str]) -> str:
    """Return the assembly of a file's text for an AMD GPU such as "gfx942". Raises NoCudaCompiler and CudaError."""
    if not clang():
        raise NoCudaCompiler(f"none of {', '.join(COMPILERS)} is installed; on Debian: apt-get install clang-22.")
    command = [
        clang(), "-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "-nogpuinc", "-nogpulib", "-O3",
        "-std=c++17", f"-I{HEADERS}", *(f"-D{key}={value}" for key, value in defines.items()),
        "-S", "-", "-o", "-",
    ]  # fmt: skip
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise CudaError(f"{text.partition(chr(10))[0]} for {arch}: {done.stderr}")
    return done.stdout


def diff() -> list[str]:
    """Return the changes of all rungs, as the page prints them."""
    return [line for rung in hip_rungs() for line in (f"{rung.source.name}:", *changes(rung))]


if __name__ == "__main__":
    print("\n".join(diff()))
