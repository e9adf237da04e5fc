"""Says a product and what follows it as linalg on tensors: a fill, one `linalg.matmul`, and a `linalg.generic` for each
node of its epilogue, which the first pass makes one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ridgeline.compiler.elementary import OperationWriter
from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph, TensorType
from ridgeline.compiler.linalg import computation, literal
from ridgeline.compiler.ops import TAKEN
from ridgeline.compiler.products.matrices import matrix_shapes


@dataclass(frozen=True)
class ProductSpec:
    """m, n, k: sizes. dtype: of the two matrices. left_by_k, right_by_k: whether K runs along a matrix's rows: [m, k]
    and [n, k]; else it is [k, m] or [k, n]. epilogue: a graph of pointwise nodes; its first input is the sum in float32
    of shape [m, n], and its output is of that shape too."""

    m: int
    n: int
    k: int
    epilogue: OpGraph
    dtype: torch.dtype = torch.bfloat16
    left_by_k: bool = True
    right_by_k: bool = True

    @property
    def out(self) -> torch.dtype:
        (output,) = self.epilogue.outputs
        made: torch.dtype = output.tensor.dtype
        return made

    def axes(self, value: GraphValue) -> tuple[int, ...]:
        """Return which of rows (0) and columns (1) a value of the epilogue has."""
        return axes(value, self.m, self.n)

    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of the two matrices in memory."""
        return matrix_shapes((self.m, self.n, self.k), (self.left_by_k, self.right_by_k))


def plain(m: int, n: int, dtype: torch.dtype) -> OpGraph:
    """Return the epilogue that only rounds the sum."""
    sums = GraphValue("%sum", TensorType((m, n), torch.float32))
    if dtype == torch.float32:
        return OpGraph((sums,), (), (sums,))
    out = GraphValue("%out", TensorType((m, n), dtype))
    return OpGraph((sums,), (GraphNode("cast", (sums,), out),), (out,))


def axes(value: GraphValue, m: int, n: int) -> tuple[int, ...]:
    """Return which of rows (0) and columns (1) a value of an epilogue has."""
    shape = (1,) * (2 - len(value.tensor.shape)) + value.tensor.shape[-2:]
    return tuple(
        at for at, size in enumerate((m, n)) if shape[at] != 1 or (size == 1 and len(value.tensor.shape) > 1 - at)
    )


def product_text(spec: ProductSpec, *, elementary: bool = False) -> str:
    """Return `product(left, right, inputs of the epilogue…) -> result`.

    elementary: exponentials are polynomials, and bits say how numbers are rounded (elementary.py); else they stay
    operations, for which a target has its own.
    """
    m, n = spec.m, spec.n
    body = spec.epilogue
    sums, (output,) = body.inputs[0], body.outputs
    element = TAKEN[spec.dtype]
    shapes = [f"tensor<{a}x{b}x{element}>" for a, b in spec.shapes()]
    extra = [(f"%e{at}", value) for at, value in enumerate(body.inputs[1:])]
    parameters = [f"%a: {shapes[0]}", f"%b: {shapes[1]}", *(f"{name}: {_type(v, m, n)}" for name, v in extra)]
    left, right = ("m, k" if spec.left_by_k else "k, m"), ("n, k" if spec.right_by_k else "k, n")
    maps = ", ".join(f"affine_map<(m, n, k) -> ({each})>" for each in (left, right, "m, n"))
    whole = f"tensor<{m}x{n}xf32>"
    lines = [
        f"func.func @product({', '.join(parameters)}) -> {_type(output, m, n)} {{",
        f"  %nothing = arith.constant {literal(0.0, torch.float32)} : f32",
        f"  %sums_memory = tensor.empty() : {whole}",
        f"  %sums_start = linalg.fill ins(%nothing : f32) outs(%sums_memory : {whole}) -> {whole}",
        f"  %sums = linalg.matmul indexing_maps = [{maps}] ins(%a, %b : {', '.join(shapes)}) "
        f"outs(%sums_start : {whole}) -> {whole}",
    ]
    names = {sums: "%sums", **{value: name for name, value in extra}}
    for at, node in enumerate(body.nodes):
        lines += [f"  {line}" for line in _node(node, names, f"%v{at}", (m, n), elementary)]
        names[node.result] = f"%v{at}"
    lines += [f"  return {names[output]} : {_type(output, m, n)}", "}"]
    return "\n".join(lines)


def _type(value: GraphValue, m: int, n: int) -> str:
    sizes = [str((m, n)[at]) for at in axes(value, m, n)]
    return f"tensor<{'x'.join([*sizes, TAKEN[value.tensor.dtype]])}>"


def _node(
    node: GraphNode, names: dict[GraphValue, str], name: str, sizes: tuple[int, int], elementary: bool
) -> Iterator[str]:
    over = axes(node.result, *sizes)
    loops = ", ".join(f"d{at}" for at in over)

    def map_of(value: GraphValue) -> str:
        return f"affine_map<({loops}) -> ({', '.join(f'd{at}' for at in axes(value, *sizes))})>"

    type, element = _type(node.result, *sizes), TAKEN[node.result.tensor.dtype]
    yield f"{name}_memory = tensor.empty() : {type}"
    maps = ", ".join(map_of(each) for each in (*node.values, node.result))
    kinds = ", ".join('"parallel"' for _ in over)
    taken = ", ".join(names[each] for each in node.values)
    types = ", ".join(_type(each, *sizes) for each in node.values)
    yield (
        f"{name} = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}} "
        f"ins({taken} : {types}) outs({name}_memory : {type}) {{"
    )
    inner = [f"%x{at}: {TAKEN[each.tensor.dtype]}" for at, each in enumerate(node.values)]
    yield f"^bb0({', '.join([*inner, f'%y: {element}'])}):"
    lines: list[str] = []

    def emit(made: str) -> str:
        lines.append(f"{name}_{len(lines)} = {made}")
        return f"{name}_{len(lines) - 1}"

    from_ = TAKEN[node.values[0].tensor.dtype]
    if node.op in ("exp", "tanh") and not elementary:
        made = emit(f"math.{node.op} %x0 : {element}")
    elif node.op == "cast" and not elementary and {from_, element} == {"bf16", "f32"}:
        made = emit(f"arith.{'truncf' if element == 'bf16' else 'extf'} %x0 : {from_} to {element}")
    else:
        made = computation(node, [f"%x{at}" for at in range(len(node.values))], OperationWriter(emit))
    yield from (f"  {line}" for line in lines)
    yield f"  linalg.yield {made} : {element}"
    yield f"}} -> {type}"
