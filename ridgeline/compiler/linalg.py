"""Says a fused node as MLIR: one function of tensors, in which each node is a `linalg.generic`.

The domain of a group has d sizes. Sizes of 1 are left out, and neighbours that every value has or lacks together become
one. A value's indexing map names the sizes that it has. The first size is not in the text where the result has it, so
one kernel serves any number of rows, and threads take parts of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ridgeline.compiler.elementary import OperationWriter, exponential, hyperbolic_tangent, quotient, root, select
from ridgeline.compiler.graph import GraphNode, GraphValue, InvalidGraph, Operand, OpGraph
from ridgeline.compiler.ops import FLOATS, POINTWISE, REDUCTIONS, TAKEN


@dataclass(frozen=True)
class KernelText:
    """shapes: of the inputs and of the output as the function takes them, with the whole first size. rows: the first
    size if threads may divide it, else 0. divided: which of the inputs and the output have it."""

    text: str
    shapes: tuple[tuple[int, ...], ...]
    rows: int
    divided: tuple[bool, ...]
    reduces: bool


class LoopDomain:
    """The loops of a group, and what of them each value has."""

    def __init__(self, sizes: tuple[int, ...], values: list[GraphValue]) -> None:
        shapes = {value: (1,) * (len(sizes) - len(value.tensor.shape)) + value.tensor.shape for value in values}
        axes = [at for at, size in enumerate(sizes) if size != 1]
        joined: list[list[int]] = []
        for at in axes:
            same = joined and all((s[at] == 1) == (s[joined[-1][-1]] == 1) for s in shapes.values())
            joined = [*joined[:-1], [*joined[-1], at]] if same else [*joined, [at]]
        self.sizes = tuple(torch.Size([sizes[at] for at in each]).numel() for each in joined)
        self._has = {
            value: tuple(i for i, each in enumerate(joined) if shapes[value][each[0]] != 1) for value in values
        }

    def has(self, value: GraphValue) -> tuple[int, ...]:
        """The loops that a value has."""
        return self._has[value]

    def shape(self, value: GraphValue) -> tuple[int, ...]:
        return tuple(self.sizes[at] for at in self.has(value))

    def map(self, value: GraphValue, loops: tuple[int, ...]) -> str:
        """The indexing map of a value in an operation that runs over these loops."""
        names = ", ".join(f"d{at}" for at in loops)
        return f"affine_map<({names}) -> ({', '.join(f'd{at}' for at in self.has(value))})>"


def kernel_text(node: GraphNode) -> KernelText:
    """Return the text of a fused node's kernel: `kernel(inputs…, output)` of memory."""
    body: OpGraph = node.attributes["body"]
    if len(body.outputs) > 1:
        raise InvalidGraph(f"a kernel of linalg has one output, and {node.result.name} has {len(body.outputs)}.")
    (output,) = body.outputs
    values = [*body.inputs, *(each.result for each in body.nodes)]
    domain = LoopDomain(node.attributes["domain"], values)
    writer = _KernelWriter(domain, output)
    parameters = [*(f"%in{at}" for at in range(len(body.inputs))), "%out"]
    ends = [*body.inputs, output]
    types = [writer.type(value, "memref") for value in ends]
    signature = ", ".join(f"{name}: {type}" for name, type in zip(parameters, types, strict=True))
    lines = [f"func.func @kernel({signature}) attributes {{llvm.emit_c_interface}} {{"]
    if writer.divides:
        lines += ["  %zero = arith.constant 0 : index", f"  %rows = memref.dim %out, %zero : {types[-1]}"]
    for name, value, type in zip(parameters, ends, types, strict=True):
        writable, own = (" writable", "%written") if name == "%out" else ("", value.name.replace("%", "%v"))
        tensor = writer.type(value, "tensor")
        lines.append(f"  {own} = bufferization.to_tensor {name} restrict{writable} : {type} to {tensor}")
    for each in body.nodes:
        lines += [f"  {line}" for line in writer.node(each)]
    done, target = output.name.replace("%", "%v"), f"({writer.type(output, 'tensor')}, {types[-1]}) -> ()"
    lines += [
        f"  bufferization.materialize_in_destination {done} in restrict writable %out : {target}",
        "  return",
        "}",
    ]
    rows = domain.sizes[0] if writer.divides else 0
    divided = tuple(writer.divides and 0 in domain.has(value) for value in ends)
    return KernelText("\n".join(lines), tuple(map(domain.shape, ends)), rows, divided, node.attributes["reduced"] > 0)


class _KernelWriter:
    def __init__(self, domain: LoopDomain, output: GraphValue) -> None:
        self.domain = domain
        self.output = output
        self.divides = 0 in domain.has(output)

    def type(self, value: GraphValue, kind: str) -> str:
        sizes = ["?" if at == 0 and self.divides else str(self.domain.sizes[at]) for at in self.domain.has(value)]
        return f"{kind}<{'x'.join([*sizes, TAKEN[value.tensor.dtype]])}>"

    def node(self, node: GraphNode) -> Iterator[str]:
        """Yield the lines of one node: an empty tensor, what it starts from, and the operation."""
        result, name = node.result, node.result.name.replace("%", "%v")
        type, element = self.type(result, "tensor"), TAKEN[result.tensor.dtype]
        start = "%written"
        if result is not self.output:
            start = f"{name}_empty"
            yield f"{start} = tensor.empty({'%rows' if type.startswith('tensor<?') else ''}) : {type}"
        over = self.domain.has(result)
        if node.op in REDUCTIONS:
            over = self.domain.has(node.values[0])
            yield f"{name}_first = arith.constant {literal(REDUCTIONS[node.op].start, result.tensor.dtype)} : {element}"
            yield f"{name}_start = linalg.fill ins({name}_first : {element}) outs({start} : {type}) -> {type}"
            start = f"{name}_start"
        values = node.values
        maps = ", ".join(self.domain.map(each, over) for each in (*values, result))
        loops = ", ".join('"parallel"' if at in self.domain.has(result) else '"reduction"' for at in over)
        taken = ", ".join(each.name.replace("%", "%v") for each in values)
        types = ", ".join(self.type(each, "tensor") for each in values)
        yield (
            f"{name} = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{loops}]}} "
            f"ins({taken} : {types}) outs({start} : {type}) {{"
        )
        inner = [f"%x{at}: {TAKEN[each.tensor.dtype]}" for at, each in enumerate(values)]
        yield f"^bb0({', '.join([*inner, f'%y: {element}'])}):"
        inside: list[str] = []
        made = self.computed(node, inside)
        yield from (f"  {line}" for line in inside)
        yield f"  linalg.yield {made} : {element}"
        yield f"}} -> {type}"

    def computed(self, node: GraphNode, lines: list[str]) -> str:
        """Add the lines of a region, and return the name of what it makes of %x0, %x1 … and, in a reduction, of %y."""

        def emit(made: str) -> str:
            lines.append(f"%e{len(lines)} = {made}")
            return f"%e{len(lines) - 1}"

        if node.op in REDUCTIONS:
            combine = POINTWISE[REDUCTIONS[node.op].combine].floating
            return emit(f"{combine} %x0, %y fastmath<reassoc> : {TAKEN[node.result.tensor.dtype]}")
        return computation(node, [f"%x{at}" for at in range(len(node.values))], OperationWriter(emit))


def literal(number: float, dtype: torch.dtype) -> str:
    """Return a number as MLIR says it, of a float its bits."""
    if dtype == torch.bool:
        return "true" if number else "false"
    if dtype not in FLOATS:
        return str(int(number))
    if dtype == torch.float32:
        return f"0x{struct.pack('>f', torch.tensor(number, dtype=dtype).item()).hex().upper()}"
    return f"0x{struct.pack('>d', number).hex().upper()}"


def computation(node: GraphNode, taken: Sequence[str], w: OperationWriter) -> str:
    """Emit what a pointwise node computes of the names of its values, and return the result's name."""
    places, dtype = iter(taken), _data(node)
    element = TAKEN[dtype]
    if node.op == "cast":
        return _cast(w, next(places), node.values[0].tensor.dtype, node.result.tensor.dtype)
    operands = [
        next(places) if isinstance(each, GraphValue) else w.literal(literal(each, dtype), element)
        for each in node.operands
    ]
    kind = POINTWISE[node.op]
    name = kind.floating if dtype in FLOATS else kind.integer
    if node.op == "where":
        return select(w, operands[0], operands[1], operands[2], element)
    if kind.compares:
        return w.op(f"arith.cmp{'f' if dtype in FLOATS else 'i'} {name},", *operands, element=element)
    if w.machine == "nvidia" and node.op == "div" and node.operands[0] == 1.0 and dtype == torch.float32:
        return w.instruction("reciprocal", operands[1])
    if dtype == torch.float32 and node.op in ELEMENTARY:
        return ELEMENTARY[node.op](w, *operands)
    return w.op(name, *operands, element=element)


ELEMENTARY: dict[str, Callable[..., str]] = {
    "exp": exponential,
    "tanh": hyperbolic_tangent,
    "div": quotient,
    "sqrt": root,
}


def _data(node: GraphNode) -> torch.dtype:
    """Return the dtype that a pointwise node computes in."""
    data: tuple[Operand, ...] = node.operands[1:] if node.op == "where" else node.operands
    return next((each.tensor.dtype for each in data if isinstance(each, GraphValue)), node.result.tensor.dtype)


def _cast(w: OperationWriter, x: str, source: torch.dtype, target: torch.dtype) -> str:
    """Emit a conversion to a float or, of integers and truth, to an integer of another dtype. Between 16 bits and
    others than float32 it goes by way of float32, as torch's does."""
    a, b = TAKEN[source], TAKEN[target]
    if not target.is_floating_point:
        convert = "extui" if source == torch.bool else "extsi" if target == torch.int64 else "trunci"
        return w.convert(f"arith.{convert}", x, a, b)
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
    if not source.is_floating_point:
        first = "f32" if width[b] == 16 else b
        x, a = w.convert("arith.uitofp" if source == torch.bool else "arith.sitofp", x, a, first), first
    elif {width[a], width[b]} in ({16}, {16, 64}):
        x, a = w.convert("arith.extf" if width[a] == 16 else "arith.truncf", x, a, "f32"), "f32"
    if a == b:
        return x
    if w.width == 1 and w.machine in ("", "avx512") and {a, b} == {"f32", "bf16"}:
        return _rounded_to_bfloat16(w, x) if b == "bf16" else _widened_bfloat16(w, x)
    return w.convert("arith.extf" if width[a] < width[b] else "arith.truncf", x, a, b)


def _rounded_to_bfloat16(w: OperationWriter, x: str) -> str:
    """Round a float32 in operations of integers: LLVM's code for single numbers of bfloat16 fails where they are stored
    and computed with as well."""
    bits, half = w.convert("arith.bitcast", x, "f32", "i32"), w.whole(16)
    odd = w.op("arith.andi", w.op("arith.shrui", bits, half, element="i32"), w.whole(1), element="i32")
    up = w.op("arith.addi", w.op("arith.addi", bits, odd, element="i32"), w.whole(0x7FFF), element="i32")
    quiet = w.op("arith.ori", bits, w.whole(1 << 22), element="i32")
    kept = select(w, w.op("arith.cmpf uno,", x, x), quiet, up, "i32")
    short = w.convert("arith.trunci", w.op("arith.shrui", kept, half, element="i32"), "i32", "i16")
    return w.convert("arith.bitcast", short, "i16", "bf16")


def _widened_bfloat16(w: OperationWriter, x: str) -> str:
    bits = w.convert("arith.extui", w.convert("arith.bitcast", x, "bf16", "i16"), "i16", "i32")
    return w.convert("arith.bitcast", w.op("arith.shli", bits, w.whole(16), element="i32"), "i32", "f32")
