"""Reads an ONNX model into the compiler: its nodes become functions of torch, traced for one set of shapes.

    program = compile_onnx(Path("model.onnx"), *inputs)      # a CompiledProgram; inputs in the order of the graph's
    outputs = program(*inputs)

What depends on constants and on the inputs' shapes alone is computed while the model is read, as sizes are. The rest is
traced to aten's ops, and takes the way of every graph: capture, passes, kernels. Weights are constants of the program.
ONNX's operators are those of its default domain, as its specification says them for opsets 13 to 23; a model with
another operator, domain or opset is refused. Control flow is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from ridgeline.compiler.backend import CompilationStages, compile_graph, decompositions
from ridgeline.compiler.program import CompiledProgram
from ridgeline.core.errors import InvalidConfig

EXTRA = "pip install 'ridgeline[onnx]'"
OPSETS = range(13, 24)
MOST_FOLDED = 1 << 30  # bytes of a tensor that is computed while a model is read
MOST_PARTS = 1 << 16  # of a Split
FAULTS = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
)  # of numbers that do not fit
DTYPES = {  # ONNX's number of a type → torch's
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip

Given = list[Any]  # the inputs of a node: tensors, None for one that is left out
Attributes = Mapping[str, Any]
OnnxOperator = Callable[[Given, Attributes], Any]  # a tensor, or a tuple of the node's outputs


def compile_onnx(file: Path, *inputs: Tensor, stages: CompilationStages | None = None) -> CompiledProgram:
    """Return the program of a model's file for inputs of these shapes, and a tuple of outputs when it is called.

    Raise InvalidConfig if the file is no model, wants other inputs, or has something that is not read.
    """
    return compile_graph(traced(OnnxFunction(file), *inputs), stages)


def traced(function: OnnxFunction, *inputs: Tensor) -> fx.GraphModule:
    """Return the graph of aten's ops of a model, for inputs of these shapes. Raise InvalidConfig."""
    function.check(inputs)
    trace = make_fx(function, decompositions(), "fake", _allow_non_fake_inputs=True)
    return trace(*(each.detach() for each in inputs))


class OnnxFunction:
    """A model as a function of tensors: inputs in the graph's order → a tuple of its outputs."""

    def __init__(self, file: Path) -> None:
        """Read a file with the weights beside it. Raise InvalidConfig."""
        try:
            import onnx
            from google.protobuf.message import DecodeError
        except ImportError as error:
            raise InvalidConfig(f"reading ONNX needs the package onnx; install it: {EXTRA}.") from error
        try:
            model = onnx.load(str(file))
            onnx.checker.check_model(str(file))  # by its path: a message of more than 2 GiB is not checked
        except (OSError, ValueError, DecodeError, onnx.checker.ValidationError) as error:
            raise InvalidConfig(f"{str(file)!r} is no ONNX model that can be read ({error}).") from error
        opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)
        if opset not in OPSETS:
            raise InvalidConfig(f"the model is of opset {opset}; opsets {OPSETS[0]} to {OPSETS[-1]} are read.")
        for node in model.graph.node:
            if node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS:
                named = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
                raise InvalidConfig(f"the operator {named} is not read; known: {', '.join(sorted(OPERATORS))}.")
        self._constants = {each.name: _tensor(each, onnx) for each in model.graph.initializer}
        self._nodes = [(each, _attributes(each, onnx)) for each in model.graph.node]
        self._inputs = [each for each in model.graph.input if each.name not in self._constants]
        self._outputs = [each.name for each in model.graph.output]

    @property
    def input_names(self) -> list[str]:
        return [each.name for each in self._inputs]

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise InvalidConfig for inputs of another number, type or shape than the model's."""
        if len(inputs) != len(self._inputs):
            raise InvalidConfig(f"the model takes {len(self._inputs)} inputs, got {len(inputs)}.")
        for each, given in zip(self._inputs, inputs, strict=True):
            kind = each.type.tensor_type
            if (wanted := DTYPES.get(kind.elem_type)) != given.dtype:
                raise InvalidConfig(f"input {each.name!r} is of {wanted}, got {given.dtype}.")
            dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
            fits = len(dims) == given.dim() and all(a in (None, b) for a, b in zip(dims, given.shape, strict=True))
            if kind.HasField("shape") and not fits:
                raise InvalidConfig(f"input {each.name!r} is of shape {dims} (None: any), got {list(given.shape)}.")

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[str, Any] = {"": None, **self._constants}
        known = set(values)  # what does not depend on the inputs' numbers
        values.update(zip(self.input_names, inputs, strict=True))
        for node, attributes in self._nodes:
            given = [values[name] for name in node.input]
            try:
                if node.op_type == "Shape" or known.issuperset(node.input):
                    with _disable_current_modes():  # so numbers can be read
                        made = _bounded(OPERATORS[node.op_type](given, attributes), node.op_type)
                    known.update(node.output)
                else:
                    made = OPERATORS[node.op_type](given, attributes)
            except FAULTS as error:
                raise InvalidConfig(f"{node.op_type} of {node.output[0]!r} cannot be computed: {error}") from error
            many = made if isinstance(made, tuple) else (made,)
            if len(many) < len(node.output):
                raise InvalidConfig(f"{node.op_type} with {len(node.output)} outputs is not read.")
            values.update(zip(node.output, many, strict=False))
        return tuple(values[name] for name in self._outputs)


def _bounded(made: Any, name: str) -> Any:
    """Return an operator's outputs. Raise InvalidConfig if one is larger than MOST_FOLDED."""
    for each in made if isinstance(made, tuple) else (made,):
        if isinstance(each, Tensor):
            _check_size(each.numel() * each.itemsize, name)
    return made


def _check_size(size: int, name: str) -> None:
    if size > MOST_FOLDED:
        raise InvalidConfig(f"{name} makes a constant of {size} bytes; {MOST_FOLDED} are the most that is read.")


def _tensor(proto: Any, onnx: Any) -> Tensor:
    """Return a constant of the file."""
    if proto.data_type not in DTYPES:
        raise InvalidConfig(f"constant {proto.name!r} has ONNX's type {proto.data_type}, which is not read.")
    array, dtype = onnx.numpy_helper.to_array(proto), DTYPES[proto.data_type]
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view("int16").copy()).view(dtype)
    return torch.from_numpy(array.copy())


def _attributes(node: Any, onnx: Any) -> Attributes:
    found = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {name: _tensor(each, onnx) if name == "value" else each for name, each in found.items()}


def _numbers(tensor: Any) -> list[Any]:
    """Return the numbers of a tensor that must be known, like sizes. Raise InvalidConfig."""
    if isinstance(tensor, torch._subclasses.FakeTensor) or not isinstance(tensor, Tensor):
        raise InvalidConfig("the model computes a size or an axis from an input's numbers; such models are not read.")
    with _disable_current_modes():
        found: list[Any] = tensor.flatten().tolist()
        return found


def _operand(given: Any) -> Any:
    """Return a number in the place of a known tensor of one: what a kernel writes into its text."""
    if type(given) is Tensor and given.dim() == 0 and given.dtype != torch.bool:
        return _numbers(given)[0]
    return given


def _pointwise(function: Callable[..., Any]) -> OnnxOperator:
    def made(given: Given, _: Attributes) -> Any:
        first, *rest = given
        return function(first, *map(_operand, rest))

    return made


def _folded(function: Callable[[Any, Any], Any]) -> OnnxOperator:
    """An operator of any number of inputs, like Max."""

    def made(given: Given, _: Attributes) -> Any:
        found = given[0]
        for each in given[1:]:
            found = function(found, each)
        return found

    return made


def _divide(a: Tensor, b: Any) -> Tensor:
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _power(a: Tensor, b: Any) -> Tensor:
    return torch.pow(a, b).to(a.dtype)


def _clip(given: Given, _: Attributes) -> Tensor:
    x, low, high = (*given, None, None)[:3]
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _gelu(given: Given, attributes: Attributes) -> Tensor:
    return functional.gelu(given[0], approximate=attributes.get("approximate", b"none").decode())


def _reduced(function: Callable[..., Any]) -> OnnxOperator:
    """A reduction: its axes are an attribute or, in newer opsets, an input; none are all of them."""

    def made(given: Given, attributes: Attributes) -> Any:
        x, axes = given[0], attributes.get("axes")
        if len(given) > 1 and given[1] is not None:
            axes = _numbers(given[1])
        if not axes and attributes.get("noop_with_empty_axes", 0):
            return x
        dims = sorted(axis % x.dim() for axis in axes) if axes else list(range(x.dim()))
        return function(x, dims, bool(attributes.get("keepdims", 1)))

    return made


def _softmax(given: Given, attributes: Attributes) -> Tensor:
    return torch.softmax(given[0], attributes.get("axis", -1))


def _scaled(given: Given, axis: int) -> tuple[Tensor, list[int], int]:
    """Return x, the shape that is normalized, and the first axis of it."""
    x = given[0]
    first = axis % x.dim()
    return x, list(x.shape[first:]), first


def _layer_norm(given: Given, attributes: Attributes) -> Tensor:
    x, shape, _ = _scaled(given, attributes.get("axis", -1))
    weight, bias = (*given[1:], None, None)[:2]
    return functional.layer_norm(x, shape, weight.expand(shape), bias, attributes.get("epsilon", 1e-5))


def _rms_norm(given: Given, attributes: Attributes) -> Tensor:
    """As the specification says it: in float32, and rounded before the weight."""
    x, shape, first = _scaled(given, attributes.get("axis", -1))
    wide = x.double() if x.dtype == torch.float64 else x.float()
    square = (wide * wide).mean(list(range(first, x.dim())), True) + attributes.get("epsilon", 1e-5)
    return (wide * torch.rsqrt(square)).to(x.dtype) * given[1].expand(shape)


def _gemm(given: Given, attributes: Attributes) -> Tensor:
    a, b, c = (*given, None)[:3]
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    a, b = (x.T if attributes.get(name, 0) else x for x, name in ((a, "transA"), (b, "transB")))
    made = a @ b if alpha == 1 else alpha * (a @ b)
    return made if c is None else made + (c if beta == 1 else beta * c)


def _attention(given: Given, attributes: Attributes) -> Tensor:
    """Heads of queries, keys and values [B, H, S, D], or [B, S, H D] with their numbers as attributes."""
    q, k, v, mask, *past = (*given, None, None, None)[:6]
    odd = [name for name in ("softcap", "qk_matmul_output_mode") if attributes.get(name)]
    if odd or any(each is not None for each in past):
        raise InvalidConfig(f"Attention with {odd[0] if odd else 'past keys among its inputs'} is not read.")
    flat = q.dim() == 3
    if flat:
        heads, kv_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
        q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    made = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=bool(attributes.get("is_causal", 0)) and mask is None,
        scale=attributes.get("scale"), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    if attributes.get("is_causal", 0) and mask is not None:
        raise InvalidConfig("Attention that is causal and has a mask as well is not read.")
    return made.transpose(1, 2).flatten(2) if flat else made


def _reshape(given: Given, attributes: Attributes) -> Tensor:
    x, sizes = given[0], _numbers(given[1])
    if not attributes.get("allowzero", 0):
        sizes = [x.shape[at] if size == 0 else size for at, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(given: Given, attributes: Attributes) -> Tensor:
    x, axis = given[0], attributes.get("axis", 1)
    before = torch.Size(x.shape[: axis if axis >= 0 else axis + x.dim()]).numel()
    return x.reshape(before, x.numel() // before if before else 0)


def _transpose(given: Given, attributes: Attributes) -> Tensor:
    x = given[0]
    return x.permute(attributes.get("perm", list(reversed(range(x.dim())))))


def _concat(given: Given, attributes: Attributes) -> Tensor:
    return torch.cat(given, attributes["axis"])


def _slice(given: Given, _: Attributes) -> Tensor:
    x, starts, ends = given[0], _numbers(given[1]), _numbers(given[2])
    axes = _numbers(given[3]) if len(given) > 3 and given[3] is not None else list(range(len(starts)))
    steps = _numbers(given[4]) if len(given) > 4 and given[4] is not None else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= x.dim()
        kept = range(*slice(start, end, step).indices(x.shape[axis]))
        if step > 0:
            x = x[(slice(None),) * axis + (slice(kept.start, max(kept.start, kept.stop), step),)]
        else:
            x = x.index_select(axis, torch.tensor(list(kept), dtype=torch.int64))
    return x


def _split(given: Given, attributes: Attributes) -> tuple[Tensor, ...]:
    x, axis = given[0], attributes.get("axis", 0)
    if len(given) > 1 and given[1] is not None:
        return tuple(x.split(_numbers(given[1]), axis))
    size, parts = x.shape[axis], attributes["num_outputs"]
    if not 1 <= parts <= MOST_PARTS:
        raise InvalidConfig(f"Split into {parts} parts is not read.")
    each = -(-size // parts)  # the last parts may be short
    return tuple(x.split([min(each, max(size - at * each, 0)) for at in range(parts)], axis))


def _unsqueeze(given: Given, _: Attributes) -> Tensor:
    x, axes = given[0], _numbers(given[1])
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(given: Given, _: Attributes) -> Tensor:
    x = given[0]
    if len(given) < 2 or given[1] is None:
        return x.squeeze()
    return x.squeeze([axis % x.dim() for axis in _numbers(given[1])])


def _expand(given: Given, _: Attributes) -> Tensor:
    x = given[0]
    return x.expand(torch.broadcast_shapes(x.shape, _numbers(given[1])))


def _tile(given: Given, _: Attributes) -> Tensor:
    x, repeats = given[0], _numbers(given[1])
    if type(x) is Tensor:
        _check_size(x.numel() * x.itemsize * math.prod(repeats), "Tile")
    return x.repeat(repeats)


def _gather(given: Given, attributes: Attributes) -> Tensor:
    x, places = given
    return x[(slice(None),) * (attributes.get("axis", 0) % x.dim()) + (places.long(),)]


def _gather_nd(given: Given, attributes: Attributes) -> Tensor:
    if attributes.get("batch_dims", 0):
        raise InvalidConfig("GatherND with batch_dims is not read.")
    return given[0][given[1].unbind(-1)]


def _shape(given: Given, attributes: Attributes) -> Tensor:
    sizes = list(given[0].shape)
    return torch.tensor(sizes[attributes.get("start", 0) : attributes.get("end", len(sizes))], dtype=torch.int64)


def _range(given: Given, _: Attributes) -> Tensor:
    first, end, step = (_numbers(each)[0] for each in given)
    _check_size(int((end - first) / step) * given[0].itemsize, "Range")
    return torch.arange(first, end, step, dtype=given[0].dtype)


def _constant(_: Given, attributes: Attributes) -> Tensor:
    for name, dtype in (("value_float", torch.float32), ("value_int", torch.int64)):
        if name in attributes:
            return torch.tensor(attributes[name], dtype=dtype)
        if f"{name}s" in attributes:
            return torch.tensor(list(attributes[f"{name}s"]), dtype=dtype)
    if "value" not in attributes:
        raise InvalidConfig(f"a Constant of {', '.join(attributes) or 'nothing'} is not read.")
    value: Tensor = attributes["value"]
    return value


def _constant_of_shape(given: Given, attributes: Attributes) -> Tensor:
    value, sizes = attributes.get("value", torch.zeros(1)), _numbers(given[0])
    _check_size(math.prod(sizes) * value.itemsize, "ConstantOfShape")
    return torch.full(sizes, _numbers(value)[0], dtype=value.dtype)


def _cast(given: Given, attributes: Attributes) -> Tensor:
    if attributes["to"] not in DTYPES:
        raise InvalidConfig(f"a Cast to ONNX's type {attributes['to']} is not read.")
    x: Tensor = given[0]
    return x.to(DTYPES[attributes["to"]])


def _triangle(given: Given, attributes: Attributes) -> Tensor:
    k = _numbers(given[1])[0] if len(given) > 1 and given[1] is not None else 0
    return torch.triu(given[0], k) if attributes.get("upper", 1) else torch.tril(given[0], k)


def _same(given: Given, _: Attributes) -> Any:
    return given[0]


OPERATORS: Mapping[str, OnnxOperator] = {
    "Add": _pointwise(torch.add), "Sub": _pointwise(torch.sub), "Mul": _pointwise(torch.mul),
    "Div": _pointwise(_divide), "Pow": _pointwise(_power), "Sqrt": _pointwise(torch.sqrt),
    "Exp": _pointwise(torch.exp), "Log": _pointwise(torch.log), "Neg": _pointwise(torch.neg),
    "Abs": _pointwise(torch.abs), "Reciprocal": _pointwise(torch.reciprocal), "Sin": _pointwise(torch.sin),
    "Cos": _pointwise(torch.cos), "Tanh": _pointwise(torch.tanh), "Erf": _pointwise(torch.erf),
    "Sigmoid": _pointwise(torch.sigmoid), "Relu": _pointwise(torch.relu), "Softplus": _pointwise(functional.softplus),
    "Equal": _pointwise(torch.eq), "Greater": _pointwise(torch.gt), "GreaterOrEqual": _pointwise(torch.ge),
    "Less": _pointwise(torch.lt), "LessOrEqual": _pointwise(torch.le), "And": _pointwise(torch.logical_and),
    "Or": _pointwise(torch.logical_or), "Not": _pointwise(torch.logical_not), "IsNaN": _pointwise(torch.isnan),
    "Max": _folded(torch.maximum), "Min": _folded(torch.minimum), "Sum": _folded(torch.add),
    "Where": lambda given, _: torch.where(*given), "Clip": _clip, "Gelu": _gelu, "Softmax": _softmax,
    "ReduceMean": _reduced(torch.mean), "ReduceSum": _reduced(torch.sum), "ReduceMax": _reduced(torch.amax),
    "ReduceMin": _reduced(torch.amin), "LayerNormalization": _layer_norm, "RMSNormalization": _rms_norm,
    "MatMul": lambda given, _: torch.matmul(*given), "Gemm": _gemm, "Attention": _attention, "Reshape": _reshape,
    "Flatten": _flatten, "Transpose": _transpose, "Concat": _concat, "Slice": _slice, "Split": _split,
    "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Expand": _expand, "Tile": _tile, "Gather": _gather,
    "GatherND": _gather_nd, "Shape": _shape, "Range": _range, "Constant": _constant,
    "ConstantOfShape": _constant_of_shape, "Cast": _cast, "Trilu": _triangle, "Identity": _same, "Dropout": _same,
}  # fmt: skip
