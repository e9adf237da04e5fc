"""From a kernel's text to machine code: MLIR's passes to PTX, and ptxas to a cubin, with what it says of registers."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ridgeline.compiler.mlir import MlirModule
from ridgeline.core.errors import InvalidConfig, RidgelineError

PASSES = (
    "convert-scf-to-cf,gpu.module(convert-nvvm-to-llvm,convert-math-to-llvm,convert-arith-to-llvm,convert-index-to-llvm),"
    "convert-cf-to-llvm,reconcile-unrealized-casts,canonicalize,cse"
)


class AssemblerError(RidgelineError):
    """ptxas refused a kernel, or made of it what is slow: it spilled, or made each wgmma wait for the one before."""


@dataclass(frozen=True)
class AssembledKernel:
    """cubin: machine code. ptx: its text. registers, spilled (bytes): as ptxas says them."""

    cubin: bytes
    ptx: str
    registers: int
    spilled: int


def assembled(text: str, arch: str = "sm_90a", told: Callable[[str, str], None] | None = None) -> AssembledKernel:
    """Return the machine code of a module of GPU kernels. Raises AssemblerError, and InvalidConfig without ptxas."""
    ptx = to_ptx(text, told)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [ptxas(), "-v", f"-arch={arch}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssemblerError(f"ptxas refused the kernel: {done.stderr.strip()}")
        if slow := re.search(r".*C751\d.*|.*serializ.*", done.stderr):
            raise AssemblerError(f"ptxas makes products wait for each other: {slow[0]}")
        registers = int(re.findall(r"Used (\d+) registers", done.stderr)[0])
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
        return AssembledKernel(target.read_bytes(), ptx, registers, spilled)


def to_ptx(text: str, told: Callable[[str, str], None] | None = None) -> str:
    module = MlirModule(text)
    module.run(PASSES)
    if told is not None:
        told("llvm", str(module))
    module.run("gpu-module-to-binary{format=isa}")
    found = re.search(r'assembly = "((?:[^"\\]|\\.)*)"', str(module))
    assert found is not None, "gpu-module-to-binary makes an object with assembly"
    bytes_of = re.sub(r"\\([0-9A-F]{2})|\\(.)", lambda each: chr(int(each[1], 16)) if each[1] else each[2], found[1])
    return bytes_of.rstrip("\0")


@cache
def ptxas() -> str:
    """Return the path of ptxas: the one that Triton brings, or one on the path. Raises InvalidConfig."""
    try:
        import triton

        brought = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        if brought.is_file():
            return str(brought)
    except ImportError:
        pass
    if found := shutil.which("ptxas"):
        return found
    raise InvalidConfig("machine code for GPUs needs ptxas; install triton, which brings it.")
