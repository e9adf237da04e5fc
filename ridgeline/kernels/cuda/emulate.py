"""CUDA C++ files run on a CPU: g++ compiles a file with `emulator.cuh`, and ctypes calls it.

The emulator is for checks of small shapes, not for speed: a thread of a block is a fiber. `emulator.cuh` says where it
is stricter than a GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.kernels.base.native import compiler

HEADERS = Path(__file__).parent
FLAGS = ("-O1", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique", "-w")
MAP_BYTES = 128  # of a tensor map, on the host as on a GPU


class EmulationError(RuntimeError):
    """A launch that a GPU would not survive, or whose result it would not promise. The message says where and why."""


class _LaunchFields(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint), ("shared", ctypes.c_uint), ("order", ctypes.c_uint),
    )  # fmt: skip


class TensorMap(ctypes.Structure):
    """A row-major matrix that TMA reads in boxes, as `emulator::Map` has it. `pitch` is the bytes of a row."""

    _fields_ = (
        ("base", ctypes.c_void_p), ("rows", ctypes.c_uint64), ("columns", ctypes.c_uint64), ("pitch", ctypes.c_uint64),
        ("box_rows", ctypes.c_uint32), ("box_columns", ctypes.c_uint32), ("item", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32), ("unused", ctypes.c_ubyte * (MAP_BYTES - 48)),
    )  # fmt: skip


@dataclass(frozen=True)
class LaunchShape:
    """A launch: blocks, threads of a block, blocks of a cluster, bytes of dynamic shared memory.

    order: 0 runs threads in their order, 1 backwards, each larger number in a random order of its own.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int = 1
    shared: int = 0
    order: int = 0


@dataclass(frozen=True)
class SharedCounts:
    """Accesses to shared memory by warps, the wavefronts that they took, and the bytes that TMA delivered."""

    accesses: int
    wavefronts: int
    tma_bytes: int


class Emulated:
    """A kernel that runs on the CPU."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulate.restype = ctypes.c_char_p

    def launch(self, shape: LaunchShape, arguments: Sequence[ctypes._SimpleCData | ctypes.Structure]) -> None:
        """Run the kernel to its end. Raises EmulationError."""
        three = ctypes.c_uint * 3
        launch = _LaunchFields(three(*shape.grid), three(*shape.block), shape.cluster, shape.shared, shape.order)
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        problem = self._library.emulate(ctypes.byref(launch), places)
        if problem is not None:
            raise EmulationError(problem.decode())

    def counted(self) -> SharedCounts:
        """Return the counts of the last launch."""
        out = (ctypes.c_ulong * 3)()
        self._library.counted(out)
        return SharedCounts(*out)


def build(source: Path, kernel: str, defines: Mapping[str, str], folder: Path) -> Emulated:
    """Compile a .cu file for the CPU, into `folder`. Raises NoLibrary without a compiler.

    Raises EmulationError if the file is not valid C++ with the emulator's header.
    """
    name = "-".join((source.stem, *(f"{key}={value}" for key, value in defines.items()))).replace(" ", "")
    library = folder / f"{name}.so"
    text = f'#include "emulator.cuh"\n#include "{source}"\nEMULATE({kernel})\n'
    flags = (*FLAGS, f"-I{HEADERS}", *(f"-D{key}={value}" for key, value in defines.items()))
    command = [compiler(), *flags, "-x", "c++", "-", "-o", str(library)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise EmulationError(f"{source.name} does not compile for the CPU: {done.stderr[:2000]}")
    return Emulated(library)
