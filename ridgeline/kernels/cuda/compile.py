"""CUDA C++ files compiled for GPUs, without one: by NVRTC from NVIDIA's wheels, or by nvcc where that is installed.

`pip install "ridgeline[ladders]"` brings cuda-core, NVRTC and the headers.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ridgeline.kernels.base.aot import nvidia_code

HEADERS = Path(__file__).parent
TIMEOUT = 900  # seconds; a file takes 1 to 5, CUTLASS' templates 30 of a processor that does nothing else
SERIALIZED = "wgmma.mma_async instructions are serialized"  # warnings C7510 to C7519
CONTROL = " \n\0"
_IMPORTS = threading.Lock()  # cuda-core fills its own names, and another thread's import finds some of them missing


class NoCudaCompiler(Exception):
    """Neither NVRTC nor nvcc is here. The message says how to get one."""


class CudaError(Exception):
    """A file that does not compile. The message is the compiler's."""


@dataclass(frozen=True)
class MachineCode:
    """Registers and bytes of stack of a thread (spills lie there), and the disassembly."""

    registers: int
    stack: int
    listing: str

    def has(self, mnemonic: str) -> bool:
        """Return True if an instruction begins so."""
        return any(f" {mnemonic}" in line for line in self.listing.splitlines())


def compilers() -> list[str]:
    """Return the compilers that are here, the preferred one first."""
    found = ["nvrtc"] if includes() and all(map(_found, ("cuda.core", "cuda.bindings.nvrtc"))) else []
    return found + (["nvcc"] if shutil.which("nvcc") else [])


def cubin(source: Path, arch: str, defines: Mapping[str, str], compiler: str = "") -> bytes:
    """Return the machine code of a file for one architecture ("sm_90a").

    compiler: "nvrtc" or "nvcc"; by default the first that is here. Raises NoCudaCompiler and CudaError, the latter
    also where ptxas makes each wgmma wait for the one before.
    """
    here = compilers()
    if not here or (compiler and compiler not in here):
        wanted = compiler or "CUDA compiler"
        raise NoCudaCompiler(f'no {wanted} is installed; try: pip install "ridgeline[ladders]" (for NVRTC).')
    compile_one = {"nvrtc": _by_nvrtc, "nvcc": _by_nvcc}[compiler or here[0]]
    code, told = compile_one(source, arch, {key: str(value) for key, value in defines.items()})
    if SERIALIZED in told:
        raise CudaError(f"{source.name} for {arch}: {told.strip(CONTROL)} (wgmma.cuh says what to mend.)")
    return code


def machine_code(code: bytes) -> MachineCode:
    """Disassemble a cubin by the tools in Triton's package."""
    return MachineCode(*nvidia_code(code, disassemble=True))


def _by_nvrtc(source: Path, arch: str, defines: Mapping[str, str]) -> tuple[bytes, str]:
    with _IMPORTS:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=source.name, std="c++17", arch=arch, lineinfo=True, include_path=[str(HEADERS), *map(str, includes())],
        define_macro=list(defines.items()) or None,
    )  # fmt: skip
    told = io.StringIO()
    try:
        return bytes(Program(source.read_text(), "c++", options).compile("cubin", logs=told).code), told.getvalue()
    except Exception as error:  # of a class that cuda-core keeps to itself
        raise CudaError(f"{source.name} for {arch}: {error}") from error


def _by_nvcc(source: Path, arch: str, defines: Mapping[str, str]) -> tuple[bytes, str]:
    return by_nvcc(source, arch, defines, ("-cubin", "-lineinfo"))


def by_nvcc(
    source: Path, arch: str, defines: Mapping[str, str], flags: Sequence[str], headers: Sequence[Path] = ()
) -> tuple[bytes, str]:
    """Return the output of nvcc for a file with such flags ("-cubin", or "-shared" for the host), and its messages.

    headers: folders that it includes from. Raises NoCudaCompiler and CudaError.
    """
    if not shutil.which("nvcc"):
        raise NoCudaCompiler(f"{source.name} needs nvcc, which is not on the PATH; the wheel nvidia-cuda-nvcc has it.")
    target = f"arch={arch.replace('sm_', 'compute_')},code={arch}"
    found = [f"-I{each}" for each in (HEADERS, *headers)]
    defined = [f"-D{key}={value}" for key, value in defines.items()]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "out"
        command = ["nvcc", "-std=c++17", *flags, "-gencode", target, *found, *defined, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=TIMEOUT)
        if done.returncode:
            raise CudaError(f"{source.name} for {arch}: {done.stderr}")
        return made.read_bytes(), done.stderr


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def includes() -> list[Path]:
    """Return the folders of CUDA's headers: those of the wheels, or of the toolkit."""
    wheels = find_spec("nvidia")
    places = list(wheels.submodule_search_locations or ()) if wheels else []
    candidates = [folder for place in places for folder in sorted(Path(place).glob("*/include"))]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home) / "include")
    return [folder for folder in candidates if (folder / "cuda_bf16.h").is_file()]
