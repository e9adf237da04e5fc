"""Machine code of this processor: LLVM's text through llvmlite, kept by its text while a program has it."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from ridgeline.compiler.linalg import KernelText
from ridgeline.compiler.lower import lower
from ridgeline.compiler.mlir import EXTRA
from ridgeline.core.errors import InvalidConfig

WORTH_A_THREAD = 1 << 15  # numbers that a thread takes at least: some 10 µs of work, which starting it costs


@cache
def _llvm() -> tuple[Any, Callable[[], Any]]:
    """Return llvmlite's bindings, and a function that returns a machine that makes code for this processor. Whatever
    runs the code owns its machine. Raise InvalidConfig."""
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise InvalidConfig(f"the compiler needs llvmlite; install it: {EXTRA}.") from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return llvm, partial(target.create_target_machine, cpu=llvm.get_host_cpu_name(), features=features, opt=3)


@cache
def thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ridgeline-compiler")


os.register_at_fork(after_in_child=thread_pool.cache_clear)  # its threads are not in the child


class MachineCode:
    """The machine code of a function `kernel` in LLVM's text, which takes so many descriptors of memory."""

    def __init__(self, text: str, parameters: int) -> None:
        llvm, machine_of = _llvm()
        machine = machine_of()
        module = llvm.parse_assembly(_with_widest_vectors(text))
        module.verify()
        tuning = llvm.create_pipeline_tuning_options(speed_level=3)
        tuning.loop_vectorization = tuning.slp_vectorization = True
        passes = llvm.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(module, passes)
        self.assembly = machine.emit_assembly(module)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        address = self._engine.get_function_address("_mlir_ciface_kernel")
        self.call: Callable[..., None] = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * parameters)(address)


def _with_widest_vectors(llvm: str) -> str:
    """Return LLVM's text with 512 bits as the width that its vectorizer prefers, where the processor has them.

    By itself it prefers 256. On a Xeon with AVX-512 four of six chains in float32 took 8 to 22 % less, in one run each.
    """
    return re.sub(r"^(define [^{]*)\{", r'\1"prefer-vector-width"="512" {', llvm, flags=re.MULTILINE)


class CpuKernel:
    """A kernel of memory. Its call fills `out`, in as many threads as torch has and the work is worth."""

    def __init__(self, text: KernelText, code: MachineCode) -> None:
        self.text, self.code = text, code
        self._size = max(torch.Size(shape).numel() for shape in text.shapes)

    def __call__(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """inputs: dense, of the shapes that the kernel was made for. out: the same, and written."""
        tensors = (*inputs, out)
        rows, threads = self.text.rows, min(torch.get_num_threads(), max(1, self._size // WORTH_A_THREAD))
        if rows < threads or threads == 1:
            self._part(tensors, 0, rows)
            return
        bounds = [rows * at // threads for at in range(threads + 1)]
        waiting = [thread_pool().submit(self._part, tensors, *bounds[at : at + 2]) for at in range(1, threads)]
        self._part(tensors, bounds[0], bounds[1])
        for each in waiting:
            each.result()

    def _part(self, tensors: Sequence[torch.Tensor], begin: int, end: int) -> None:
        held = [
            _descriptor(tensor, shape, begin if divided else 0, end - begin if divided else 0)
            for tensor, shape, divided in zip(tensors, self.text.shapes, self.text.divided, strict=True)
        ]
        self.code.call(*map(ctypes.byref, held))


_codes: WeakValueDictionary[tuple[str, bool], MachineCode] = WeakValueDictionary()


def cpu_kernel(text: KernelText) -> CpuKernel:
    """Return the kernel of a text; equal texts are compiled once, as long as a program has their kernel."""
    key = (text.text, text.reduces)
    code = _codes.get(key)
    if code is None:
        code = _codes[key] = MachineCode(lower(text), len(text.shapes))
    return CpuKernel(text, code)


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


def _descriptor(tensor: torch.Tensor, shape: tuple[int, ...], first: int, rows: int) -> ctypes.Structure:
    """Describe so many rows of a dense tensor from `first` on, or all of it (rows = 0)."""
    sizes = (rows, *shape[1:]) if rows else shape
    strides = [1] * len(shape)
    for at in reversed(range(len(shape) - 1)):
        strides[at] = strides[at + 1] * shape[at + 1]
    address = tensor.data_ptr() + (first * strides[0] * tensor.itemsize if first else 0)
    kind = _fields(len(shape))
    if not shape:
        return kind(address, address, 0)
    array = ctypes.c_int64 * len(shape)
    return kind(address, address, 0, array(*sizes), array(*strides))
