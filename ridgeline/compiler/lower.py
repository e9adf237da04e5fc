"""Lowers a kernel's text to LLVM: MLIR's passes in stages, each of which can be printed.

The schedule is a script of the transform dialect: the last operation runs row by row, and what it takes is computed for
the same row just before, so what lies between stays in the first cache. Without reductions fusion leaves one loop, and
there is nothing to schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.compiler.linalg import KernelText
from ridgeline.compiler.mlir import MlirModule

SCHEDULE = """module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%module: !transform.any_op) {
    %end = transform.structured.match ops{["bufferization.materialize_in_destination"]} in %module
        : (!transform.any_op) -> !transform.any_op
    %root = transform.get_producer_of_operand %end[0] : (!transform.any_op) -> !transform.any_op
    %tiled, %loop = transform.structured.fuse %root tile_sizes [1, 0] {apply_cleanup}
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %function = transform.structured.match ops{["func.func"]} in %module : (!transform.any_op) -> !transform.any_op
    transform.apply_patterns to %function {
      transform.apply_patterns.tensor.fold_tensor_empty
    } : !transform.any_op
    transform.yield
  }
}
"""
STAGES = {
    "fused": "func.func(linalg-fuse-elementwise-ops),canonicalize,cse",
    "scheduled": "transform-interpreter,canonicalize,cse",
    "bufferized": "eliminate-empty-tensors,one-shot-bufferize{bufferize-function-boundaries=1},"
    "func.func(buffer-hoisting,buffer-loop-hoisting),buffer-deallocation-pipeline,canonicalize,cse",
    "loops": "func.func(convert-linalg-to-loops),fold-memref-alias-ops,canonicalize,cse",
    "llvm": "expand-strided-metadata,lower-affine,convert-scf-to-cf,arith-expand{include-bf16=true},"
    "convert-math-to-llvm,convert-math-to-libm,finalize-memref-to-llvm,convert-func-to-llvm,convert-index-to-llvm,"
    "convert-arith-to-llvm,convert-cf-to-llvm,convert-ub-to-llvm,reconcile-unrealized-casts,canonicalize,cse",
}


VECTORS = (
    "convert-scf-to-cf,convert-math-to-llvm,convert-math-to-libm,convert-vector-to-llvm,convert-func-to-llvm,"
    "convert-index-to-llvm,convert-arith-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts,canonicalize,cse"
)  # from a kernel of vectors (cpu_mapping.py) to LLVM


def lower_vectors(text: str, told: Callable[[str, str], None] | None = None) -> str:
    """Return LLVM's text of a kernel of vectors. told: gets the name and text of each stage."""
    module = MlirModule(text)
    module.run(VECTORS)
    if told is not None:
        told("llvm dialect", str(module))
    llvm = module.to_llvm()
    if told is not None:
        told("llvm", llvm)
    return llvm


def lower(kernel: KernelText, told: Callable[[str, str], None] | None = None) -> str:
    """Return LLVM's text of a kernel. told: gets the name and text of each stage."""
    scheduled = kernel.reduces and kernel.rows > 0
    module = MlirModule(kernel.text + ("\n" + SCHEDULE if scheduled else ""))
    for name, passes in STAGES.items():
        if name == "scheduled" and not scheduled:
            continue
        module.run(passes)
        if name == "scheduled":
            module.drop_modules()
        if told is not None:
            told(name, str(module))
    return module.to_llvm()
