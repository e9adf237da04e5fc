"""A product on a CPU: from linalg to machine code, and its call in as many threads as torch has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch

from ridgeline.compiler.cpu import MachineCode, memory_descriptor, thread_pool
from ridgeline.compiler.mlir import MlirModule
from ridgeline.compiler.products.cpu_schedule import CpuSchedule
from ridgeline.compiler.products.text import ProductSpec, product_text
from ridgeline.compiler.products.tiled import tiled
from ridgeline.compiler.products.vectors import VectorWriter

PASSES = (
    "canonicalize,cse,expand-strided-metadata,lower-affine,convert-scf-to-cf,arith-expand{include-bf16=true},"
    "convert-math-to-llvm,convert-math-to-libm,convert-vector-to-llvm,finalize-memref-to-llvm,convert-func-to-llvm,"
    "convert-index-to-llvm,convert-arith-to-llvm,convert-cf-to-llvm,convert-ub-to-llvm,reconcile-unrealized-casts,"
    "canonicalize,cse"
)
Told = Callable[[str, str], None]


class CpuProduct:
    """A product in float32 for any number of rows."""

    def __init__(self, spec: ProductSpec, schedule: CpuSchedule, told: Told | None = None) -> None:
        """told: gets the name and text of each stage. Raises InvalidConfig and InvalidGraph."""
        self.spec, self.schedule = spec, schedule.checked()
        text, script = product_text(spec, elementary=True), schedule.script(epilogue=bool(spec.epilogue.nodes))
        if told is not None:
            told("linalg", text)
            told("schedule", script)
        product = tiled(text, script, CpuSchedule.of_annotations, told)
        by_k = (product.left_by_k, product.right_by_k)
        self.text = VectorWriter((product.n, product.k), by_k, product.schedule, product.epilogue).text()
        if told is not None:
            told("vectors", self.text)
        self.code = _code(self.text, 3 + len(spec.epilogue.inputs) - 1, told)

    def __call__(
        self, left: torch.Tensor, right: torch.Tensor, extra: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Write the product to `out` [m, n]. The matrices are dense as the specification has them; extra: the inputs of
        the epilogue, dense."""
        near, rows = self.schedule.near, out.shape[0]
        threads = max(1, min(torch.get_num_threads(), rows // (2 * near)))
        bounds = [min(rows, -(-rows * at // (threads * near)) * near) for at in range(threads)] + [rows]
        waiting = [
            thread_pool().submit(self._part, left, right, extra, out, bounds[at], bounds[at + 1])
            for at in range(1, threads)
        ]
        self._part(left, right, extra, out, bounds[0], bounds[1])
        for each in waiting:
            each.result()

    def _part(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        extra: Sequence[torch.Tensor],
        out: torch.Tensor,
        begin: int,
        end: int,
    ) -> None:
        mine = left[begin:end] if self.spec.left_by_k else left[:, begin:end]
        held = [memory_descriptor(each) for each in (mine, right)]
        for value, each in zip(self.spec.epilogue.inputs[1:], extra, strict=True):
            axes = self.spec.axes(value)
            view = each.reshape([out.shape[axis] for axis in axes])
            held.append(memory_descriptor(view[begin:end] if 0 in axes else view))
        held.append(memory_descriptor(out[begin:end]))
        self.code.call(*map(ctypes.byref, held))


_codes: WeakValueDictionary[str, MachineCode] = WeakValueDictionary()


def _code(text: str, parameters: int, told: Told | None) -> MachineCode:
    """Return the code of a text; equal texts are compiled once, as long as a product has it."""
    code = _codes.get(text)
    if code is None:
        module = MlirModule(text)
        module.run(PASSES)
        if told is not None:
            told("llvm", str(module))
        code = _codes[text] = MachineCode(module.to_llvm(), parameters)
    return code
