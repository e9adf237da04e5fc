"""Machine code of this processor: LLVM's text through llvmlite, kept by its text while a program has it."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from ridgeline.compiler.cpu_mapping import CpuText
from ridgeline.compiler.linalg import KernelText
from ridgeline.compiler.lower import lower, lower_vectors
from ridgeline.compiler.mlir import MlirError, llvm_bindings
from ridgeline.kernels.base.native import openmp

WORTH_A_THREAD = 1 << 14  # numbers that a thread takes at least: some 5 µs of work, which waking it costs


@cache
def _llvm() -> tuple[Any, Callable[[], Any]]:
    """Return llvmlite's bindings, and a function that returns a machine that makes code for this processor. Whatever
    runs the code owns its machine. Raise InvalidConfig."""
    llvm = llvm_bindings()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    for name, address in _openmp_functions().items():
        llvm.add_symbol(name, address)
    return llvm, partial(target.create_target_machine, cpu=llvm.get_host_cpu_name(), features=features, opt=3)


@cache
def machine_name() -> str:
    """Return "avx512" if this processor has those instructions, else "". Raise InvalidConfig."""
    llvm, _ = _llvm()
    return "avx512" if llvm.get_host_cpu_features().get("avx512f") else ""


@cache
def _openmp_functions() -> dict[str, int]:
    """Return the addresses of functions of torch's OpenMP by their names; none without it."""
    if openmp() is None:
        return {}
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    names = ("omp_get_thread_num", "omp_get_num_threads")
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}


@cache
def thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ridgeline-compiler")


os.register_at_fork(after_in_child=thread_pool.cache_clear)  # its threads are not in the child


class MachineCode:
    """The machine code of LLVM's text. parameters: how many descriptors of memory its function `kernel` takes, by which
    `call` calls it; 0 if it takes none. Raises InvalidConfig, and MlirError for a text that is none."""

    def __init__(self, text: str, parameters: int = 0) -> None:
        llvm, machine_of = _llvm()
        machine = machine_of()
        try:
            module = llvm.parse_assembly(_with_widest_vectors(text))
            module.verify()
        except RuntimeError as error:
            raise MlirError(f"LLVM refused the text of a kernel ({str(error).strip()}).") from error
        tuning = llvm.create_pipeline_tuning_options(speed_level=3)
        tuning.loop_vectorization = tuning.slp_vectorization = True
        passes = llvm.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(module, passes)
        self.assembly = machine.emit_assembly(module)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        if parameters:
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * parameters)
            self.call: Callable[..., None] = kind(self.address("_mlir_ciface_kernel"))

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


def _with_widest_vectors(llvm: str) -> str:
    """Return LLVM's text with 512 bits as the width that its vectorizer prefers, where the processor has them.

    By itself it prefers 256. On a Xeon with AVX-512 four of six chains in float32 took 8 to 22 % less, in one run each.
    """
    wide = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'
    return re.sub(r"^(define [^{]*)\{", rf"\1{wide} {{", llvm, flags=re.MULTILINE)


class CpuKernel:
    """A kernel of vectors. Its call fills the outputs, in as many of torch's threads as the work is worth."""

    def __init__(self, text: CpuText, code: MachineCode, tensors: int) -> None:
        self.text, self._code = text, code
        self._threads = max(1, min(text.count, text.count * text.grain // WORTH_A_THREAD))
        self._arguments = ctypes.c_int64 * (tensors + 1)
        whole = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * tensors, ctypes.c_int64, ctypes.c_int64)
        self._whole: Callable[..., None] = whole(code.address("kernel"))
        self._worker = code.address("worker") if _openmp_functions() else 0

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """inputs, outputs: dense, of the shapes that the kernel was made for."""
        addresses = [each.data_ptr() for each in (*inputs, *outputs)]
        threads = min(self._threads, torch.get_num_threads())
        if threads == 1 or not self._worker:
            self._whole(*addresses, 0, self.text.count)
        else:
            _parallel()(self._worker, self._arguments(*addresses, self.text.count), threads, 0)


@cache
def _parallel() -> Callable[..., None]:
    """Return OpenMP's function that calls another in each of its threads."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(openmp() or 0)


class LinalgKernel:
    """A kernel that linalg's operations and a schedule of the transform dialect made, for one output."""

    def __init__(self, text: KernelText, code: MachineCode) -> None:
        self.text, self._code = text, code

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """inputs, outputs: dense, of the shapes that the kernel was made for."""
        parts = zip((*inputs, *outputs), self.text.shapes, strict=True)
        held = [_descriptor(tensor, shape) for tensor, shape in parts]
        self._code.call(*map(ctypes.byref, held))


_codes: WeakValueDictionary[str, MachineCode] = WeakValueDictionary()


def machine_code(key: str, lowered: Callable[[], str], parameters: int = 0) -> MachineCode:
    """Return the machine code of a text; equal texts are compiled once, as long as a program has their kernel.

    lowered: makes LLVM's text of it. parameters: of `MachineCode`.
    """
    code = _codes.get(key)
    if code is None:
        code = _codes[key] = MachineCode(lowered(), parameters)
    return code


def cpu_kernel(text: CpuText, tensors: int) -> CpuKernel:
    """Return the kernel of a text with so many inputs and outputs."""
    return CpuKernel(text, machine_code(text.text, lambda: lower_vectors(text.text)), tensors)


def linalg_kernel(text: KernelText) -> LinalgKernel:
    """Return the kernel of a text of linalg."""
    return LinalgKernel(text, machine_code(f"{text.text} {text.reduces}", lambda: lower(text), len(text.shapes)))


@cache
def _fields(rank: int) -> type[ctypes.Structure]:
    """MLIR's descriptor of memory of a rank: two pointers, an offset, sizes, strides."""
    numbers = [(name, ctypes.c_int64 * rank) for name in ("sizes", "strides")] if rank else []
    fields = [("allocated", ctypes.c_void_p), ("aligned", ctypes.c_void_p), ("offset", ctypes.c_int64), *numbers]
    return type("MemoryDescriptor", (ctypes.Structure,), {"_fields_": fields})


def memory_descriptor(tensor: torch.Tensor) -> ctypes.Structure:
    """Describe a tensor's memory as it lies."""
    kind, address = _fields(tensor.dim()), tensor.data_ptr()
    if not tensor.dim():
        return kind(address, address, 0)
    array = ctypes.c_int64 * tensor.dim()
    return kind(address, address, 0, array(*tensor.shape), array(*tensor.stride()))


def _descriptor(tensor: torch.Tensor, shape: tuple[int, ...]) -> ctypes.Structure:
    """Describe a dense tensor as one of these sizes."""
    strides = [1] * len(shape)
    for at in reversed(range(len(shape) - 1)):
        strides[at] = strides[at + 1] * shape[at + 1]
    address, kind = tensor.data_ptr(), _fields(len(shape))
    if not shape:
        return kind(address, address, 0)
    array = ctypes.c_int64 * len(shape)
    return kind(address, address, 0, array(*shape), array(*strides))
