"""Occupancy by arithmetic, beside NVIDIA's own header and the figures of AMD's compiler."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path

import pytest

from ridgeline.kernels.base.native import compiler, has_compiler
from ridgeline.kernels.base.occupancy import COMPUTE_UNITS, MULTIPROCESSORS, occupancy, waves
from ridgeline.kernels.cuda.compile import includes

HEADERS = [folder for folder in includes() if (folder / "cuda_occupancy.h").is_file()]
CALCULATOR = """
#include <climits>
#include <cuda_occupancy.h>
extern "C" __attribute__((visibility("default")))
int blocks(int major, int minor, int warps, int shared, int block_shared, int threads, int registers, int own,
           int barriers) {
  cudaOccDeviceProp device;
  device.computeMajor = major; device.computeMinor = minor; device.warpSize = 32; device.numSms = 100;
  device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = 32 * warps;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536; device.sharedMemPerBlock = 49152;
  device.sharedMemPerMultiprocessor = shared; device.sharedMemPerBlockOptin = block_shared;
  device.reservedSharedMemPerBlock = 1024;
  cudaOccFuncAttributes kernel = {};
  kernel.maxThreadsPerBlock = INT_MAX; kernel.numRegs = registers; kernel.numBlockBarriers = barriers;
  kernel.partitionedGCConfig = PARTITIONED_GC_OFF; kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  kernel.maxDynamicSharedSizeBytes = block_shared;
  cudaOccDeviceState state;
  state.cacheConfig = CACHE_PREFER_SHARED; state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult result;
  int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, own);
  return error ? -error : result.activeBlocksPerMultiprocessor;
}
"""


@pytest.mark.skipif(not (has_compiler() and HEADERS), reason="it needs a C++ compiler and cuda_occupancy.h")
def test_the_arithmetic_is_nvidias(tmp_path: Path) -> None:
    library = tmp_path / "occupancy.so"
    command = [compiler(), "-O1", "-shared", "-fPIC", "-w", f"-I{HEADERS[0]}", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=CALCULATOR, text=True, check=True)
    theirs, draw = ctypes.CDLL(str(library)), random.Random(0)
    for _ in range(5000):
        arch, of = draw.choice(list(MULTIPROCESSORS.items()))
        threads, registers = draw.randint(1, 1024), draw.randint(1, 255)
        shared, barriers = draw.choice([0, draw.randint(0, of.block_shared)]), draw.choice([1, 2, 16])
        digits = arch.removeprefix("sm_")
        device = int(digits[:-1]), int(digits[-1]), of.warps, of.shared, of.block_shared
        wanted = theirs.blocks(*device, threads, registers, shared, barriers)
        assert occupancy(arch, threads, registers, shared, barriers).blocks == wanted, (
            arch,
            threads,
            registers,
            shared,
        )


def test_what_keeps_blocks_away_is_named() -> None:
    rung = occupancy("sm_90a", threads=384, registers=168, shared=196_672)
    assert (rung.blocks, rung.limits) == (1, ["registers", "shared memory"])
    assert rung.share == 12 / 64
    assert occupancy("sm_90", threads=1024, registers=65, shared=0).blocks == 0, "72 registers for 32 warps do not fit"
    assert occupancy("sm_90", threads=32, registers=16, shared=0).limits == ["blocks"]


# Vector registers and bytes of LDS of a workgroup of 256, and the waves of a SIMD that clang 22 printed for them.
@pytest.mark.parametrize(("arch", "registers", "lds", "printed"), [
    ("gfx1100", 77, 0, 16), ("gfx1100", 193, 0, 7), ("gfx1100", 23, 40_960, 6),
    ("gfx942", 66, 0, 7), ("gfx942", 168, 0, 3), ("gfx942", 369, 0, 1), ("gfx942", 32, 40_960, 1),
])  # fmt: skip
def test_waves_of_a_simd_are_those_that_amds_compiler_prints(arch: str, registers: int, lds: int, printed: int) -> None:
    of, found = COMPUTE_UNITS[arch], waves(arch, 256, registers, lds)
    if lds:
        assert found.blocks * found.warps_of_block // of.simds == printed
        assert found.limits == ["LDS"]
    else:
        assert of.waves_by(registers) == printed
        assert found.blocks == printed * of.simds // found.warps_of_block


@pytest.mark.parametrize(
    "bad", [{"arch": "sm_75"}, {"threads": 0}, {"threads": 1025}, {"registers": 256}, {"shared": -1}, {"barriers": 17}]
)
def test_numbers_that_no_block_has_are_refused(bad: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=r"not listed|a block has"):
        occupancy(**{"arch": "sm_90", "threads": 32, "registers": 32, "shared": 0, **bad})  # type: ignore[arg-type]


def test_numbers_that_no_workgroup_has_are_refused() -> None:
    for threads, registers, lds in ((0, 32, 0), (1025, 32, 0), (64, 513, 0), (64, 32, -1)):
        with pytest.raises(ValueError, match=f"got {threads} with {registers}"):
            waves("gfx942", threads, registers, lds)
    with pytest.raises(ValueError, match="not listed"):
        waves("gfx908", 64, 32, 0)
