"""Rules of ops: the dimensions of operands and result that belong together, as GSPMD and Shardy have them of each op.

A rule names factors. A dimension of an operand that is divided along a factor asks that every other dimension with this
factor is divided likewise; then each rank computes its part alone. A factor that the result lacks was reduced, and the
parts of the result are summands (or largest numbers), of which the sum is due. A dimension without a factor must be
whole. A dimension of several factors, behind a reshape, is divided along the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.compiler.graph import GraphNode
from ridgeline.compiler.ops import POINTWISE, REDUCTIONS
from ridgeline.compiler.sharding.layout import TensorLayout
from ridgeline.compiler.sharding.products import ATTENTION, DIVIDED, batched_product, product

aten = torch.ops.aten
Factors = tuple[int, ...]
Dims = tuple[Factors, ...]
RESULT = -1  # the place of the result among the operands' numbers


@dataclass(frozen=True)
class OpRule:
    """operands: of each value in the order of `GraphNode.values`, the factors of its dimensions. result: the same.
    sizes: of each factor. reduced: the factors that the result lacks, each with what puts parts together.
    segments: of dimensions (number of the operand or RESULT, dimension) whose segments differ from others' of their
    factor."""

    operands: tuple[Dims, ...]
    result: Dims
    sizes: tuple[int, ...]
    reduced: dict[int, str] = field(default_factory=dict)
    segments: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def values(self) -> list[tuple[int, Dims]]:
        """Return the operands and the result, with their numbers."""
        return [*enumerate(self.operands), (RESULT, self.result)]

    def divisible(self, factor: int) -> bool:
        """True if a factor is the first of all dimensions that have it."""
        return all(factor not in each[1:] for _, dims in self.values() for each in dims)


class _Letters:
    """Factors while a rule is made. Dimensions of one number have none."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def of(self, size: int) -> Factors:
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def all_of(self, shape: Sequence[int]) -> list[Factors]:
        return [self.of(size) for size in shape]


def rule_of(node: GraphNode, layouts: Sequence[TensorLayout]) -> OpRule | None:
    """Return the rule of a node; None: all that it takes and makes is whole. layouts: of its values as they are, which
    decide whether a piece of a segmented dimension is a segment."""
    if node.result.type is None or any(value.type is None for value in node.values):
        return None
    if node.op in POINTWISE:
        return _broadcast(node)
    if node.op in REDUCTIONS:
        rank = len(node.values[0].tensor.shape)
        return _reduced(node, range(rank - node.attributes["dims"], rank), node.op, kept=True)
    target = node.attributes["target"]
    if target in LAID_OUT_RULES:
        return LAID_OUT_RULES[target](node, layouts)
    if target in RULES:
        return RULES[target](node)
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return _broadcast(node)
    return None


def argument(node: GraphNode, place: int, name: str = "", default: Any = None) -> Any:
    """Return an argument of a call, given by place or by name."""
    arguments = node.attributes["arguments"]
    return arguments[place] if place < len(arguments) else node.attributes["named"].get(name, default)


def _shapes(node: GraphNode) -> list[tuple[int, ...]]:
    return [value.tensor.shape for value in node.values]


def _broadcast(node: GraphNode) -> OpRule:
    """Every dimension alone, counted from the last."""
    made, letters = node.result.tensor.shape, _Letters()
    result = letters.all_of(made)
    operands = []
    for shape in _shapes(node):
        behind = result[len(made) - len(shape) :]
        operands.append(tuple(each if size != 1 else () for size, each in zip(shape, behind, strict=True)))
    return OpRule(tuple(operands), tuple(result), tuple(letters.sizes))


def _reduced(node: GraphNode, over: Sequence[int], how: str, *, kept: bool) -> OpRule:
    letters = _Letters()
    operand = letters.all_of(node.values[0].tensor.shape)
    result = [() if at in over else each for at, each in enumerate(operand) if kept or at not in over]
    reduced = {factor: how for at in over for factor in operand[at]}
    return OpRule((tuple(operand),), tuple(result), tuple(letters.sizes), reduced)


def _reduction_call(node: GraphNode) -> OpRule | None:
    rank = len(node.values[0].tensor.shape)
    over = [dim % rank for dim in argument(node, 1, "dim") or range(rank)] if rank else []
    how = {aten.amax.default: "amax", aten.amin.default: "amin"}.get(node.attributes["target"], "sum")
    return _reduced(node, over, how, kept=bool(argument(node, 2, "keepdim", default=False)))


def _einsum(*names: str) -> Callable[[GraphNode], OpRule]:
    """Return a function that makes the rule of a product: operands and result by one letter a dimension, with * for
    all leading ones."""

    def rule(node: GraphNode) -> OpRule:
        *operands, made = names
        sizes: dict[str, int] = {}
        spelled = []
        for name, shape in zip(operands, _shapes(node), strict=True):
            letters = _spelled(name, len(shape))
            spelled.append(letters)
            sizes.update({letter: size for letter, size in zip(letters, shape, strict=True) if size != 1})
        result = _spelled(made, len(node.result.tensor.shape))
        number = {letter: at for at, letter in enumerate(sizes)}
        dims = [tuple((number[each],) if each in number else () for each in letters) for letters in (*spelled, result)]
        reduced = {at: "sum" for letter, at in number.items() if letter not in result}
        return OpRule(tuple(dims[:-1]), dims[-1], tuple(sizes.values()), reduced)

    return rule


def _spelled(name: str, rank: int) -> list[str]:
    if "*" not in name:
        return list(name)
    return [*(f"leading {at}" for at in range(rank - len(name) + 1)), *name.replace("*", "")]


def _reshape(node: GraphNode, layouts: Sequence[TensorLayout]) -> OpRule | None:
    """Dimensions that are split or merged have the factors of the finer side, unless the sides cross. Segments stay
    segments if they consist of whole pieces."""
    (before,), after, letters = _shapes(node), node.result.tensor.shape, _Letters()
    if 0 in before:
        return None
    operand: list[Factors] = [()] * len(before)
    result: list[Factors] = [()] * len(after)
    segments: dict[tuple[int, int], tuple[int, ...]] = {}
    a = b = 0
    while a < len(before) and b < len(after):
        left, right = [a], [b]
        while (m := math.prod(before[at] for at in left)) != (n := math.prod(after[at] for at in right)):
            if m < n:
                left.append(left[-1] + 1)
            else:
                right.append(right[-1] + 1)
        a, b = left[-1] + 1, right[-1] + 1
        left, right = [at for at in left if before[at] != 1], [at for at in right if after[at] != 1]
        if len(left) == 1:
            made = letters.all_of([after[at] for at in right])
            operand[left[0]] = tuple(each for factors in made for each in factors)
            for at, factors in zip(right, made, strict=True):
                result[at] = factors
            segments |= _split_segments(layouts[0].dims[left[0]].segments, left[0], right, after)
        elif len(right) == 1:
            made = letters.all_of([before[at] for at in left])
            result[right[0]] = tuple(each for factors in made for each in factors)
            for at, factors in zip(left, made, strict=True):
                operand[at] = factors
    return OpRule((tuple(operand),), tuple(result), tuple(letters.sizes), {}, segments)


def _split_segments(
    segments: Sequence[int], dim: int, parts: Sequence[int], sizes: Sequence[int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the segments of a dimension that is split into parts, and those of the first part."""
    inner = math.prod(sizes[at] for at in parts[1:])
    if len(parts) < 2 or not segments or any(size % inner for size in segments):
        return {}
    return {(0, dim): tuple(segments), (RESULT, parts[0]): tuple(size // inner for size in segments)}


def _permuted(node: GraphNode, order: Sequence[int]) -> OpRule:
    letters = _Letters()
    operand = letters.all_of(node.values[0].tensor.shape)
    return OpRule((tuple(operand),), tuple(operand[at] for at in order), tuple(letters.sizes))


def _transposed(node: GraphNode) -> OpRule:
    rank = len(node.values[0].tensor.shape)
    order = list(range(rank))
    if rank > 1:
        pair = (0, 1) if node.attributes["target"] is aten.t.default else (argument(node, 1), argument(node, 2))
        a, b = (at % rank for at in pair)
        order[a], order[b] = order[b], order[a]
    return _permuted(node, order)


def _reordered(node: GraphNode) -> OpRule:
    rank = len(node.values[0].tensor.shape)
    return _permuted(node, [at % rank for at in argument(node, 1)])


def _along(*places: int) -> Callable[[GraphNode], OpRule]:
    """Return a function that makes the rule of an op of one operand and a result of as many dimensions, of which
    those that these arguments name must be whole."""

    def rule(node: GraphNode) -> OpRule:
        letters, shape = _Letters(), node.values[0].tensor.shape
        named = [argument(node, place, "dim", -1) for place in places]
        along = [dim % len(shape) for each in named for dim in (each if isinstance(each, list | tuple) else [each])]
        same = [size == made for size, made in zip(shape, node.result.tensor.shape, strict=True)]
        dims = [letters.of(size) if same[at] and at not in along else () for at, size in enumerate(shape)]
        return OpRule((tuple(dims),), tuple(dims), tuple(letters.sizes))

    return rule


def _matrices(node: GraphNode) -> OpRule:
    """The last two dimensions are whole."""
    letters = _Letters()
    *leading, _, _ = node.result.tensor.shape
    dims = (*letters.all_of(leading), (), ())
    return OpRule((dims,), dims, tuple(letters.sizes))


def _slice(node: GraphNode, layouts: Sequence[TensorLayout]) -> OpRule:
    """A piece of a dimension. It is divided as the dimension is if it consists of whole segments."""
    shape, made = node.values[0].tensor.shape, node.result.tensor.shape
    dim, letters = argument(node, 1, "dim", 0) % len(shape), _Letters()
    operand = [letters.of(size) if at != dim or size == made[dim] else () for at, size in enumerate(shape)]
    result, segments = list(operand), {}
    if shape[dim] != made[dim]:
        start, end = piece(node)
        pieces = _pieces(layouts[0].dims[dim].segments, start, end)
        if pieces and argument(node, 4, "step", 1) == 1:
            operand[dim] = result[dim] = letters.of(made[dim])
            segments = {(0, dim): layouts[0].dims[dim].segments, (RESULT, dim): pieces if len(pieces) > 1 else ()}
    return OpRule((tuple(operand),), tuple(result), tuple(letters.sizes), {}, segments)


def piece(node: GraphNode) -> tuple[int, int]:
    """Return the start and the end of a slice, both within the dimension."""
    shape = node.values[0].tensor.shape
    size = shape[argument(node, 1, "dim", 0) % len(shape)]
    start, end, _ = slice(argument(node, 2, "start"), argument(node, 3, "end")).indices(size)
    return start, max(start, end)


def _pieces(segments: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """Return the segments that lie between two places, if these are borders of segments; else nothing."""
    found, at = [], 0
    for size in segments:
        if start <= at and at + size <= end:
            found.append(size)
        at += size
    return tuple(found) if sum(found) == end - start else ()


def _cat(node: GraphNode, layouts: Sequence[TensorLayout]) -> OpRule:
    """Dimensions beside each other. They are divided, as segments, where all of them are by the same axes."""
    made, letters = node.result.tensor.shape, _Letters()
    dim = argument(node, 1, "dim", 0) % len(made)
    result = [letters.of(size) if at != dim else () for at, size in enumerate(made)]
    operands = [list(result) for _ in node.values]
    segments: dict[tuple[int, int], tuple[int, ...]] = {}
    held = [layout.dims[dim] for layout in layouts if len(layout.dims) == len(made)]
    if len(held) == len(node.values) and held[0].axes and len({each.axes for each in held}) == 1:
        factor = letters.of(made[dim])
        result[dim] = factor
        parts: list[int] = []
        for at, (each, shape) in enumerate(zip(held, _shapes(node), strict=True)):
            operands[at][dim] = factor
            segments[at, dim] = each.segments
            parts += each.segments or (shape[dim],)
        segments[RESULT, dim] = tuple(parts) if len(parts) > 1 else ()
    dims = [tuple(each if size != 1 else () for each, size in zip(own, shape, strict=True)) if len(shape) == len(made)
            else ((),) * len(shape) for own, shape in zip(operands, _shapes(node), strict=True)]  # fmt: skip
    return OpRule(tuple(dims), tuple(result), tuple(letters.sizes), {}, segments)


def _select(node: GraphNode) -> OpRule:
    letters, shape = _Letters(), node.values[0].tensor.shape
    dim = argument(node, 1, "dim", 0) % len(shape)
    operand = [letters.of(size) if at != dim else () for at, size in enumerate(shape)]
    return OpRule((tuple(operand),), tuple(operand[:dim] + operand[dim + 1 :]), tuple(letters.sizes))


def _embedding(node: GraphNode) -> OpRule:
    """Rows of a table. Ranks that have some rows find zeros for the others, so the sum is due."""
    (rows, width), ids = _shapes(node)
    letters = _Letters()
    table = letters.all_of((rows, width))
    places = letters.all_of(ids)
    reduced = dict.fromkeys(table[0], "sum")
    plain: dict[tuple[int, int], tuple[int, ...]] = {(0, 0): ()}  # places of segmented rows are others
    return OpRule((tuple(table), tuple(places)), (*places, table[1]), tuple(letters.sizes), reduced, plain)


def _embedding_gradient(node: GraphNode) -> OpRule:
    """aten.embedding_dense_backward(gradient, ids, rows, …): each token adds its gradient to a row."""
    gradient, ids = _shapes(node)
    letters = _Letters()
    places = letters.all_of(ids)
    width = letters.of(gradient[-1])
    reduced = {factor: "sum" for each in places for factor in each}
    return OpRule(((*places, width), tuple(places)), ((), width), tuple(letters.sizes), reduced)


def _indexed(node: GraphNode) -> OpRule | None:
    """Rows by one tensor of places; other forms are left whole."""
    indices = argument(node, 1)
    at = [place for place, each in enumerate(indices) if each is not None]
    shape, letters = node.values[0].tensor.shape, _Letters()
    if len(at) != 1 or len(node.values) != 2 or node.values[1].tensor.dtype == torch.bool:
        return None
    operand = [letters.of(size) if place != at[0] else () for place, size in enumerate(shape)]
    places = letters.all_of(node.values[1].tensor.shape)
    result = [*operand[: at[0]], *places, *operand[at[0] + 1 :]]
    return OpRule((tuple(operand), tuple(places)), tuple(result), tuple(letters.sizes))


def _gathered(node: GraphNode) -> OpRule | None:
    """aten.gather(x, dim, index): other dimensions alone, where both have as many. Ranks that have a part of the
    dimension find zeros for others' places, so the sum is due."""
    shape, index = _shapes(node)
    if not shape:
        return None
    dim, letters = argument(node, 1) % len(shape), _Letters()
    dims = [letters.of(a) if at == dim or a == b else () for at, (a, b) in enumerate(zip(shape, index, strict=True))]
    places = [each if at != dim else letters.of(index[at]) for at, each in enumerate(dims)]
    reduced = dict.fromkeys(dims[dim], "sum")
    return OpRule((tuple(dims), tuple(places)), tuple(places), tuple(letters.sizes), reduced, {(0, dim): ()})


def _scattered(node: GraphNode) -> OpRule | None:
    """aten.scatter_add(x, dim, index, source): as gather, and each rank adds what falls into its part."""
    shape, index, source = _shapes(node)
    if not shape or index != source:
        return None
    dim, letters = argument(node, 1) % len(shape), _Letters()
    dims = [letters.of(a) if at == dim or a == b else () for at, (a, b) in enumerate(zip(shape, index, strict=True))]
    places = tuple(each if at != dim else () for at, each in enumerate(dims))
    plain: dict[tuple[int, int], tuple[int, ...]] = {(0, dim): (), (RESULT, dim): ()}
    return OpRule((tuple(dims), places, places), tuple(dims), tuple(letters.sizes), {}, plain)


def _slice_gradient(node: GraphNode) -> OpRule:
    """aten.slice_backward(gradient, sizes, dim, …): the dimension that was cut must be whole."""
    shape, made = node.values[0].tensor.shape, node.result.tensor.shape
    dim, letters = argument(node, 2) % len(made), _Letters()
    dims = tuple(letters.of(size) if at != dim or size == shape[at] else () for at, size in enumerate(made))
    return OpRule((dims,), dims, tuple(letters.sizes))


def _select_gradient(node: GraphNode) -> OpRule:
    """aten.select_backward(gradient, sizes, dim, index): all other dimensions alone."""
    made = node.result.tensor.shape
    dim, letters = argument(node, 2) % len(made), _Letters()
    dims = tuple(letters.of(size) if at != dim else () for at, size in enumerate(made))
    return OpRule(((*dims[:dim], *dims[dim + 1 :]),), dims, tuple(letters.sizes))


def _filled(node: GraphNode) -> OpRule:
    """A tensor of one number, of any part."""
    letters = _Letters()
    return OpRule(((),) * len(node.values), tuple(letters.all_of(node.result.tensor.shape)), tuple(letters.sizes))


def _attention(node: GraphNode) -> OpRule:
    """Batches and heads alone, the width of values, and queries if every one of them sees all keys. Key heads that
    several query heads share go with them."""
    q, k, v, *masks = _shapes(node)
    letters = _Letters()
    batch, heads = letters.of(q[0]), letters.of(k[1])
    shared = letters.of(q[1] // k[1])
    width = letters.of(v[-1])
    free = () if argument(node, 4, "causal", default=False) else letters.of(q[2])
    queries = (batch, heads + shared, free, ())
    dims: list[Dims] = [queries, (batch, heads, (), ()), (batch, heads, (), width)]
    for mask in masks:
        behind = (batch, heads + shared, free, ())[4 - len(mask) :]
        dims.append(tuple(each if size != 1 else () for size, each in zip(mask, behind, strict=True)))
    return OpRule(tuple(dims), (batch, heads + shared, free, width), tuple(letters.sizes))


RESHAPES = (
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
)  # fmt: skip
LAID_OUT_RULES: dict[object, Callable[[GraphNode, Sequence[TensorLayout]], OpRule | None]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
}
RULES: dict[object, Callable[[GraphNode], OpRule | None]] = {
    **dict.fromkeys((aten.t.default, aten.transpose.int), _transposed),
    aten.permute.default: _reordered,
    aten.expand.default: _broadcast,
    aten.select.int: _select,
    aten.mm.default: _einsum("mk", "kn", "mn"),
    aten.bmm.default: _einsum("bmk", "bkn", "bmn"),
    product: _einsum("*k", "kn", "*n"),
    batched_product: _einsum("*mk", "*kn", "*mn"),
    ATTENTION: _attention,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_gradient,
    aten.index.Tensor: _indexed,
    aten.gather.default: _gathered,
    aten.scatter_add.default: _scattered,
    aten.slice_backward.default: _slice_gradient,
    aten.select_backward.default: _select_gradient,
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default, aten.amax.default, aten.amin.default), _reduction_call),
    **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default), _filled),
    **dict.fromkeys(
        (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default),
        _broadcast,
    ),
    **dict.fromkeys((aten.cumsum.default, aten.flip.default), _along(1)),
    **dict.fromkeys((aten.tril.default, aten.triu.default), _matrices),
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default), _broadcast),
    **dict.fromkeys((aten._to_copy.default, DIVIDED), _broadcast),
}
