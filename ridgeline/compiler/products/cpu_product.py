"""A product on a CPU: from linalg to machine code, and its call in as many threads as torch has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import torch

from ridgeline.compiler.cpu import MachineCode, memory_descriptor, thread_pool
from ridgeline.compiler.graph import GraphNode, InvalidGraph
from ridgeline.compiler.mlir import MlirModule
from ridgeline.compiler.products.cpu_schedule import CpuSchedule
from ridgeline.compiler.products.matrices import ByK, as_they_lie
from ridgeline.compiler.products.schedule import ANY, script_of
from ridgeline.compiler.products.text import ProductSpec, product_text
from ridgeline.compiler.products.tiled import tiled
from ridgeline.compiler.products.vectors import VectorWriter
from ridgeline.core.errors import RidgelineError

TURNED = script_of(
    [
        f'%function = transform.structured.match ops{{["func.func"]}} in %module : ({ANY}) -> {ANY}',
        "transform.apply_patterns to %function {",
        "  transform.apply_patterns.vector.lower_transpose lowering_strategy = shuffle_16x16",
        f"}} : {ANY}",
        "transform.yield",
    ]
)  # squares are turned by shuffles
PASSES = (
    "canonicalize,cse,expand-strided-metadata,lower-affine,convert-scf-to-cf,arith-expand{include-bf16=true},"
    "convert-math-to-llvm,convert-math-to-libm,convert-vector-to-llvm,finalize-memref-to-llvm,convert-func-to-llvm,"
    "convert-index-to-llvm,convert-arith-to-llvm,convert-cf-to-llvm,convert-ub-to-llvm,reconcile-unrealized-casts,"
    "canonicalize,cse"
)
Told = Callable[[str, str], None]


DEEPEST, FEWEST_COLUMNS, FEWEST_ROWS = 256, 64, 48  # of products whose epilogue gains more than torch's product does


def worth_on_cpu(product: ProductSpec) -> bool:
    """Return True if a product with its epilogue is faster than torch's with a kernel behind it: oneDNN multiplies some
    tenth faster, and a kernel behind it reads and writes the result once more, so it is where K is small."""
    floats = product.dtype == product.out == torch.float32
    return floats and product.k <= DEEPEST and product.n >= FEWEST_COLUMNS and product.m >= FEWEST_ROWS


class CpuProducts:
    """A product node for matrices that lie either way: a kernel for each way that comes."""

    def __init__(self, node: GraphNode) -> None:
        """Raises InvalidConfig and InvalidGraph where there is no kernel."""
        (m, k), n = node.values[0].tensor.shape, node.values[1].tensor.shape[1]
        self._spec = ProductSpec(m, n, k, node.attributes["body"], torch.float32)
        self._made: dict[ByK, CpuProduct] = {}
        self._product((True, True))

    def _product(self, by_k: ByK) -> CpuProduct:
        if by_k not in self._made:
            spec = replace(self._spec, left_by_k=by_k[0], right_by_k=by_k[1])
            try:
                self._made[by_k] = CpuProduct(spec, CpuSchedule())
            except RidgelineError:
                raise
            except Exception as error:  # of classes that MLIR and LLVM keep to themselves
                raise InvalidGraph(f"the product of {spec.m} x {spec.k} x {spec.n} has no kernel: {error}") from error
        return self._made[by_k]

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """inputs: [m, k], [k, n] and what the epilogue reads. outputs: [m, n], which is written."""
        by_k, left, right = as_they_lie(*inputs[:2])
        self._product(by_k)(left, right, inputs[2:], outputs[0])


class CpuProduct:
    """A product in float32 for any number of rows."""

    def __init__(self, spec: ProductSpec, schedule: CpuSchedule, told: Told | None = None) -> None:
        """told: gets the name and text of each stage. Raises InvalidConfig and InvalidGraph."""
        self.spec, self.schedule = spec, schedule.checked()
        text, script = product_text(spec, elementary=True), schedule.script(epilogue=bool(spec.epilogue.nodes))
        if told is not None:
            told("linalg", text)
            told("schedule", script)
        product = tiled(f"{text}\n{script}", CpuSchedule.of_annotations, told)
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
        module = MlirModule(f"{text}\n{TURNED}")
        module.run("transform-interpreter")
        module.drop_modules()
        module.run(PASSES)
        if told is not None:
            told("llvm", str(module))
        code = _codes[text] = MachineCode(module.to_llvm(), parameters)
    return code
