"""Makes an `OpGraph` of a graph of torch.fx, as AOTAutograd gives it: functional, of aten's ops, each with a type.

Ops that a kernel could compute become pointwise nodes and reductions, with every conversion of a dtype said as a cast.
All others become calls of what fx called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from ridgeline.compiler.graph import (
    GraphNode,
    GraphValue,
    InvalidGraph,
    Number,
    Operand,
    OpGraph,
    TensorType,
    made_type,
)
from ridgeline.compiler.ops import FLOATS, INTEGERS, POINTWISE, TAKEN

aten, prims = torch.ops.aten, torch.ops.prims
WRITE = aten.copy_.default  # what AOTAutograd puts at the end of a graph for inputs that are written
HALF = (torch.float16, torch.bfloat16)


def _overloads(names: Iterable[str], kinds: Iterable[str]) -> dict[object, str]:
    """Return aten's overloads of these kinds → the name, which is ours too."""
    found = {(name, kind): getattr(getattr(aten, name), kind, None) for name in names for kind in kinds}
    return {overload: name for (name, _), overload in found.items() if overload is not None}


SAME = _overloads(("mul", "div", "eq", "ne", "lt", "le", "gt", "ge"), ("Tensor", "Scalar"))
SAME |= _overloads(("neg", "abs", "exp", "log", "sqrt", "tanh", "erf", "sin", "cos"), ("default",))
SAME |= _overloads(("maximum", "minimum"), ("default",))
SAME |= {aten.where.self: "where"}
SUMS = _overloads(("add", "sub"), ("Tensor", "Scalar"))  # with a factor of the second operand
ALIASES = (
    aten.detach.default,
    aten.alias.default,
    aten.expand.default,
    aten.view.default,
    aten.clone.default,
)  # of one shape
RSQRT = (aten.rsqrt.default, prims.rsqrt.default)
REDUCED = {aten.sum.dim_IntList: "sum", aten.mean.dim: "mean", aten.amax.default: "amax", aten.amin.default: "amin"}


class GraphBuilder:
    """A graph while nodes are added. Values are named %0, %1 … in order."""

    def __init__(self) -> None:
        self.inputs: list[GraphValue] = []
        self.nodes: list[GraphNode] = []
        self.spare: set[GraphValue] = set()

    def input(self, type: TensorType | None) -> GraphValue:
        value = GraphValue(f"%{self._count}", type)
        self.inputs.append(value)
        return value

    def add(self, op: str, *operands: Operand, dims: int = 0) -> GraphValue:
        """Add a pointwise op or a reduction."""
        attributes = {"dims": dims} if dims else {}
        return self._node(op, operands, made_type(op, operands, dims), attributes)

    def cast(self, operand: Operand, dtype: torch.dtype) -> Operand:
        """Return an operand of another dtype; numbers stay as they are."""
        if not isinstance(operand, GraphValue) or operand.tensor.dtype == dtype:
            return operand
        return self._node("cast", (operand,), TensorType(operand.tensor.shape, dtype), {})

    def call(
        self, type: TensorType | None, target: object, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> GraphValue:
        return self._node(
            "call", tuple(_values((arguments, named))), type, {"target": target, "arguments": arguments, "named": named}
        )

    def done(self, outputs: tuple[Any, ...]) -> OpGraph:
        """Return the graph, without the `spare` nodes that nothing takes."""
        taken, kept = set(_values(outputs)), list[GraphNode]()
        for node in reversed(self.nodes):
            if node.result not in self.spare or node.result in taken:
                taken.update(node.values)
                kept.append(node)
        return OpGraph(tuple(self.inputs), tuple(reversed(kept)), outputs)

    @property
    def _count(self) -> int:
        return len(self.inputs) + len(self.nodes)

    def _node(
        self, op: str, operands: tuple[Operand, ...], type: TensorType | None, attributes: Mapping[str, Any]
    ) -> GraphValue:
        result = GraphValue(f"%{self._count}", type)
        self.nodes.append(GraphNode(op, operands, result, attributes))
        return result


def capture(module: fx.GraphModule, device: str = "cpu") -> OpGraph:
    """Return the graph of a module, with what tensors of a type of device take part in. Attributes of the module become
    constants of the calls that take them.

    A kernel's result is dense, and a clone is what kernels read in its place. Calls and outputs take what torch would
    make of them: a tensor of torch's strides, and of its own memory.
    """
    builder = GraphBuilder()
    values: dict[fx.Node, Any] = {}
    outside: dict[fx.Node, Any] = {}  # what calls and outputs take in their place
    outputs: tuple[Any, ...] = ()

    def taken(argument: Any, by: Mapping[fx.Node, Any]) -> Any:
        return fx.node.map_arg(argument, lambda node: by.get(node, values[node]))

    for node in module.graph.nodes:
        type = type_of(node.meta.get("val"), device)
        if node.op == "placeholder":
            values[node] = builder.input(type)
        elif node.op == "get_attr":
            constant = operator.attrgetter(str(node.target))(module)
            values[node] = builder.call(type_of(constant, device), _constant, (constant,), {})
        elif node.op == "output":
            (given,) = taken(node.args, outside)
            outputs = tuple(given) if isinstance(given, tuple | list) else (given,)
        else:
            arguments, named = taken(node.args, outside), taken(node.kwargs, outside)
            target = node.target if node.op != "call_method" else _method(str(node.target))
            if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and target is not WRITE:
                raise InvalidGraph(f"{node.name} = {target} writes to what it takes; functionalize the graph first.")
            if (number := _number(target, arguments, type)) is not None:
                values[node], outside[node] = number, builder.call(type, target, arguments, named)
                builder.spare.add(outside[node])
                continue
            made = None
            if type is not None:
                made = _as_kernel(builder, target, taken(node.args, {}), taken(node.kwargs, {}), type)
            if made is None:
                values[node] = builder.call(type, target, arguments, named)
                continue
            values[node] = made
            if target is aten.clone.default:
                outside[node] = builder.call(type, target, arguments, named)
                builder.spare.add(outside[node])
            elif target in ALIASES:
                outside[node] = arguments[0]
            elif not node.meta["val"].is_contiguous():
                outside[node] = builder.call(type, _laid_out, (made, node.meta["val"].stride()), {})
                builder.spare.add(outside[node])
    return builder.done(outputs)


def type_of(value: object, device: str = "cpu") -> TensorType | None:
    """Return the type of a dense tensor of such a device with a known shape; else None, and only calls take it."""
    if type(value) is not torch.Tensor and not isinstance(value, torch._subclasses.FakeTensor | torch.nn.Parameter):
        return None
    assert isinstance(value, torch.Tensor)
    if (
        value.layout != torch.strided
        or value.device.type != device
        or not all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    ):
        return None
    return TensorType(tuple(value.shape), value.dtype)


def _constant(value: object) -> object:
    return value


def _laid_out(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides, which are those of views and outputs that follow."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _number(target: object, arguments: tuple[Any, ...], type: TensorType | None) -> float | None:
    """Return the number of a tensor that is one number of a float's dtype and made of a constant, else None."""
    if type is None or type.shape or type.dtype not in (torch.float32, *HALF):
        return None
    number = {aten.full.default: arguments[1:2], aten.scalar_tensor.default: arguments[:1]}.get(target, ())  # type: ignore[call-overload]
    if not number or not isinstance(number[0], bool | int | float):
        return None
    return float(torch.tensor(number[0], dtype=type.dtype, device="cpu").item())


def _method(name: str) -> Callable[..., Any]:
    return operator.methodcaller(name)


def _values(tree: object) -> list[GraphValue]:
    if isinstance(tree, GraphValue):
        return [tree]
    if isinstance(tree, Mapping):
        return _values(tuple(tree.values()))
    if isinstance(tree, slice):
        return _values((tree.start, tree.stop, tree.step))
    return [each for part in tree for each in _values(part)] if isinstance(tree, tuple | list) else []


def _as_kernel(
    builder: GraphBuilder, target: object, arguments: tuple[Any, ...], named: Mapping[str, Any], type: TensorType
) -> GraphValue | None:
    """Add what an op computes, and return its value; None if it must stay a call."""
    if target in ALIASES and isinstance(arguments[0], GraphValue) and arguments[0].type == type:
        return arguments[0]
    if type.dtype not in TAKEN or not all(_fits(each) for each in arguments[: 3 if target is aten.where.self else 2]):
        return None
    if target in REDUCED:
        return _reduction(builder, REDUCED[target], arguments, named, type)
    if target is prims.convert_element_type.default or (
        target is aten._to_copy.default and _only_casts(arguments[0], named)
    ):
        return _cast(builder, arguments[0], type.dtype)
    if (target is aten.pow.Tensor_Scalar and arguments[1] in (2, 0.5, -0.5)) or target in (
        *RSQRT,
        aten.reciprocal.default,
        aten.sigmoid.default,
        aten.relu.default,
    ):
        return _composed(builder, target, arguments, type)
    if target in SAME and not named:
        return _pointwise(builder, SAME[target], arguments, type)
    if target in SUMS and set(named) <= {"alpha"}:
        if named.get("alpha", arguments[2] if len(arguments) > 2 else 1) != 1:
            return None
        return _pointwise(builder, SUMS[target], arguments[:2], type)
    return None


def _only_casts(operand: object, named: Mapping[str, Any]) -> bool:
    """True if a copy with these options makes a tensor that differs in dtype alone. Its device is the operand's, since
    the result's type is known."""
    return (
        isinstance(operand, GraphValue)
        and "dtype" in named
        and set(named) <= {"dtype", "layout", "device"}
        and named.get("layout", torch.strided) == torch.strided
    )


def _fits(operand: object) -> bool:
    if isinstance(operand, GraphValue):
        return operand.type is not None and operand.type.dtype in TAKEN
    return isinstance(operand, bool | int | float | list | tuple)


def _computed_in(operands: tuple[Operand, ...], given: torch.dtype | None = None) -> torch.dtype | None:
    """Return the dtype that torch computes with: what operands are promoted to, float32 for 16 bits."""
    found = given or promoted(operands)
    return torch.float32 if found in HALF else found if found in (*FLOATS, *INTEGERS) else None


def promoted(operands: tuple[Operand, ...]) -> torch.dtype:
    """Return the dtype that torch promotes operands to."""
    examples = [
        torch.empty((1,) * bool(o.tensor.shape), dtype=o.tensor.dtype, device="meta")
        if isinstance(o, GraphValue)
        else o
        for o in operands
    ]
    result = examples[0]
    found = result.dtype if isinstance(result, torch.Tensor) else torch.result_type(result, result)
    for each in examples[1:]:
        found = torch.result_type(result, each)
        shapes = [len(x.shape) for x in (result, each) if isinstance(x, torch.Tensor)]
        result = torch.empty((1,) * max(shapes), dtype=found, device="meta") if shapes else each
    return found


def _pointwise(builder: GraphBuilder, op: str, operands: tuple[Operand, ...], type: TensorType) -> GraphValue | None:
    data = operands[1:] if op == "where" else operands
    within, compares = _computed_in(data), POINTWISE[op].compares
    floats = op in ("div", "neg", "abs", "exp", "log", "sqrt", "tanh", "erf", "sin", "cos")
    if (
        within is None
        or (floats and within not in FLOATS)
        or not any(isinstance(each, GraphValue) for each in operands)
    ):
        return None
    if op == "where" and not (isinstance(operands[0], GraphValue) and operands[0].tensor.dtype == torch.bool):
        return None
    if not all(_holds(within, each) for each in data):
        return None
    cast = tuple(builder.cast(_rounded(builder, each, promoted(data), compares), within) for each in data)
    if op == "where" and not any(isinstance(each, GraphValue) for each in cast):
        return None
    made = builder.add(op, *((operands[0],) if op == "where" else ()), *cast)
    result = made if made.tensor.dtype == torch.bool else builder.cast(made, type.dtype)
    assert isinstance(result, GraphValue)
    return result if result.type == type else None


def _holds(dtype: torch.dtype, operand: Operand) -> bool:
    """False for a whole number that an integer's dtype lacks; torch says what is to be done."""
    if dtype not in INTEGERS or isinstance(operand, GraphValue):
        return True
    return torch.iinfo(dtype).min <= operand <= torch.iinfo(dtype).max


def _rounded(builder: GraphBuilder, operand: Operand, dtype: torch.dtype, compares: bool) -> Operand:
    """Return an operand as torch takes it where operands are promoted to a dtype of 16 bits: rounded to it, but for
    single numbers in arithmetic."""
    if dtype not in HALF:
        return operand
    if isinstance(operand, GraphValue):
        return builder.cast(operand, dtype) if compares or operand.tensor.shape else operand
    return torch.tensor(operand, dtype=dtype, device="cpu").item() if compares else operand


def _composed(builder: GraphBuilder, target: object, arguments: tuple[Any, ...], type: TensorType) -> GraphValue | None:
    within = _computed_in(arguments[:1], type.dtype)
    if within not in FLOATS or not isinstance(arguments[0], GraphValue):
        return None
    x = builder.cast(arguments[0], within)
    if target is aten.pow.Tensor_Scalar:
        power = arguments[1]
        made = builder.add("mul", x, x) if power == 2 else builder.add("sqrt", x)
        made = builder.add("div", 1.0, made) if power == -0.5 else made
    elif target in RSQRT:
        made = builder.add("div", 1.0, builder.add("sqrt", x))
    elif target is aten.reciprocal.default:
        made = builder.add("div", 1.0, x)
    elif target is aten.relu.default:
        made = builder.add("where", builder.add("lt", x, 0.0), 0.0, x)  # -0 stays
    else:
        made = builder.add("div", 1.0, builder.add("add", builder.add("exp", builder.add("neg", x)), 1.0))
    result = builder.cast(made, type.dtype)
    assert isinstance(result, GraphValue)
    return result


def _cast(builder: GraphBuilder, operand: Operand, dtype: torch.dtype) -> GraphValue | None:
    """Conversions between floats, and of integers and truth to floats: torch's others are not MLIR's."""
    if not isinstance(operand, GraphValue) or dtype not in (*FLOATS, *HALF):
        return None
    if operand.tensor.dtype == dtype:
        return None
    result = builder.cast(operand, dtype)
    assert isinstance(result, GraphValue)
    return result


def _reduction(
    builder: GraphBuilder, op: str, arguments: tuple[Any, ...], named: Mapping[str, Any], type: TensorType
) -> GraphValue | None:
    """Reductions of trailing dimensions that are kept as 1, of floats."""
    x, dims, *rest = (*arguments, None)[: max(2, len(arguments))]
    kept = rest[0] if rest and rest[0] is not None else named.get("keepdim", False)
    if (
        not isinstance(x, GraphValue)
        or not isinstance(dims, list | tuple)
        or not dims
        or set(named) - {"keepdim"}
        or not kept
    ):
        return None
    rank = len(x.tensor.shape)
    along = sorted(int(dim) % rank for dim in dims) if rank else []
    if not along or along != list(range(rank - len(along), rank)) or 0 in x.tensor.shape:
        return None
    within = _computed_in((x,), type.dtype)
    if within not in FLOATS or x.tensor.dtype not in (*FLOATS, *HALF):
        return None
    made = builder.add("sum" if op == "mean" else op, builder.cast(x, within), dims=len(along))
    if op == "mean":
        number: Number = float(torch.Size(x.tensor.shape[rank - len(along) :]).numel())
        made = builder.add("div", made, number)
    result = builder.cast(made, type.dtype)
    assert isinstance(result, GraphValue)
    return result
