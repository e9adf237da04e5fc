"""The CUTLASS rungs of the GEMM ladder: NVIDIA's templates for Hopper, plain and with bias and ReLU.

They need nvcc and CUTLASS' headers (`pip install "ridgeline[cutlass]"`) and take nvcc half a minute each. A rung is two
files: a cubin, and a library for the host that fills the kernel's only argument. Both can be carried to the GPU.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.cuda.compile import NoCudaCompiler, by_nvcc
from ridgeline.kernels.cuda.driver import LIBRARY, CudaDriver, Kernel

SOURCE = Path(__file__).parent / "cutlass" / "gemm.cu"
ARCH = "sm_90a"
RELAXED = "--expt-relaxed-constexpr"  # CUTLASS' headers call constexpr functions of the host on the device
DIRECT = "CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL"  # else a second CUDA runtime would look for the driver's function
CUBIN = ("-cubin", RELAXED)
HOST = ("-shared", RELAXED, "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xlinker=-s,--gc-sections,--exclude-libs,ALL")


@dataclass(frozen=True, kw_only=True)
class CutlassRung:
    """CUTLASS' kernel with one epilogue.

    steps: of the epilogue, as those of `LadderEnding`.
    needs: mnemonics that its machine code must have.
    registers: the most registers that a thread has.
    """

    name: str
    steps: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("HGMMA.64x256x16.F32.BF16", "UTMALDG.3D.MULTICAST", "UTMASTG.3D", "USETMAXREG")
    registers: int = 168

    @property
    def defines(self) -> Mapping[str, str]:
        """The definitions with which the file is compiled for the GPU."""
        return {"NDEBUG": "1", **({"BIAS_RELU": "1"} if self.steps else {})}

    def cubin(self) -> bytes:
        """Return the machine code. Raises NoCudaCompiler and CudaError."""
        return by_nvcc(SOURCE, ARCH, self.defines, CUBIN, [headers()])[0]

    def host_library(self) -> bytes:
        """Return the shared library that fills the kernel's argument. Raises NoCudaCompiler and CudaError."""
        return by_nvcc(SOURCE, ARCH, {**self.defines, "HOST": "1", DIRECT: "1"}, HOST, [headers()])[0]

    def write(self, folder: Path) -> None:
        """Compile both files into a folder. Raises NoCudaCompiler and CudaError."""
        for file, make in zip(self.files(folder), (self.cubin, self.host_library), strict=True):
            file.write_bytes(make())

    def files(self, folder: Path) -> tuple[Path, Path]:
        """Return the paths of the two files in a folder."""
        return folder / f"{self.name}.{ARCH}.cubin", folder / f"{self.name}.{ARCH}.so"


CUTLASS_RUNGS = (CutlassRung(name="cutlass"), CutlassRung(name="cutlass-bias-relu", steps=("Bias", "Relu")))


def write_rungs(folder: Path) -> None:
    """Compile all of them into a folder. Raises NoCudaCompiler and CudaError."""
    for rung in CUTLASS_RUNGS:
        rung.write(folder)


class CutlassLaunch(ctypes.Structure):
    """The same as in gemm.cu: bytes of the argument and of shared memory, threads of a block, blocks."""

    _fields_ = (("size", ctypes.c_int), ("shared", ctypes.c_int), ("block", ctypes.c_int), ("grid", ctypes.c_int * 3))


class ArgumentFiller:
    """The host library of a rung: it fills the argument of launches.

    driver: the library whose cuTensorMapEncodeTiled it calls. Raises OSError where there is none.
    """

    def __init__(self, library: Path, driver: str = LIBRARY) -> None:
        ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
        self._fill = ctypes.CDLL(str(library)).gemm_params
        self.launch = CutlassLaunch()
        self._call(None, (0, 0, 0, 0), (0, 0, 0), 1)

    def argument(
        self, pointers: tuple[int, int, int, int], sizes: tuple[int, int, int], multiprocessors: int
    ) -> ctypes.Array[ctypes.c_ubyte]:
        """Return the argument, and leave the blocks in `launch`. pointers: A, B, C and bias. sizes: M, N and K.

        Raises ValueError for a shape that the kernel does not take.
        """
        made = (ctypes.c_ubyte * self.launch.size)()
        if self._call(made, pointers, sizes, multiprocessors):
            raise ValueError(f"CUTLASS' kernel takes N and K that are multiples of 8, got {sizes[1]} and {sizes[2]}.")
        return made

    def _call(
        self, to: object, pointers: tuple[int, int, int, int], sizes: tuple[int, int, int], multiprocessors: int
    ) -> int:
        numbers = map(ctypes.c_int, (*sizes, multiprocessors))
        return self._fill(to, ctypes.byref(self.launch), *map(ctypes.c_void_p, pointers), *numbers)


class LoadedCutlass:
    """A CUTLASS rung on the current CUDA device.

    folder: where its files lie; without one it is compiled. Raises NoCudaCompiler, CudaError and DriverError.
    """

    def __init__(self, rung: CutlassRung, folder: Path | None = None, driver: CudaDriver | None = None) -> None:
        device = torch.cuda.current_device()
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        with tempfile.TemporaryDirectory() as made:
            if folder is None:
                rung.write(Path(made))
            code, library = rung.files(folder or Path(made))
            if not (code.is_file() and library.is_file()):
                raise NoCudaCompiler(f"{code} or its .so is not there; ridgeline.kernels.gemm.ladder.run makes both.")
            self._filler = ArgumentFiller(library)
            shared = self._filler.launch.shared
            self._kernel = Kernel(driver or CudaDriver(), code.read_bytes(), "gemm", device=device, shared=shared)

    def __call__(self, a_MK: Tensor, b_NK: Tensor, c_MN: Tensor, bias_N: Tensor | None = None) -> None:
        """Write A · Bᵀ, or relu(A · Bᵀ + bias), to C, on torch's current stream. All are contiguous bfloat16."""
        sizes = (len(a_MK), len(b_NK), a_MK.shape[1])
        pointers = (a_MK.data_ptr(), b_NK.data_ptr(), c_MN.data_ptr(), 0 if bias_N is None else bias_N.data_ptr())
        argument = self._filler.argument(pointers, sizes, self._multiprocessors)
        launch, stream = self._filler.launch, torch.cuda.current_stream().cuda_stream
        self._kernel.launch(tuple(launch.grid), (launch.block, 1, 1), stream, [argument])


def headers() -> Path:
    """Return the folder of CUTLASS' headers, of the wheel nvidia-cutlass. Raises NoCudaCompiler where it is missing."""
    package = find_spec("cutlass_library")
    for place in (package.submodule_search_locations or ()) if package else ():
        if (found := Path(place) / "source" / "include").is_dir():
            return found
    raise NoCudaCompiler('CUTLASS\' headers are not installed; try: pip install "ridgeline[cutlass]".')
