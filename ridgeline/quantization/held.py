"""Weights that are held in the form of their files: allocated empty, filled part by part, then settled.

Legend:
    E  experts
    O  outputs
    I  inputs
    J  inputs, in the order of the columns
    S  rows of scales, or runs of 256 inputs
    C  columns of scales
    B  bytes of a row of codes
    G  groups of a row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from ridgeline.kernels.base.op import REFERENCE
from ridgeline.kernels.base.weight_format import BLOCK, SUPER, CodedFormat, Fp8Format, Held, HeldMatrix, Int8Format
from ridgeline.kernels.gemm.codes.op import TABLES, Coded
from ridgeline.kernels.gemm.codes.panels import holds_values
from ridgeline.kernels.gemm.fp8.op import LARGEST, Fp8
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.quantization.layout import laid_out
from ridgeline.quantization.scheme import Scheme, SchemeOf
from ridgeline.quantization.weight import FormedWeight, Weight, weight_of

Field = tuple[tuple[int, ...], torch.dtype]
EIGHTS = 64.0  # the standard deviation of random numbers of E4M3, whose largest is 448
WHOLE = ("x_scale", "scale", "order_I")  # fields that all outputs share


def keeping(forms: Mapping[str, HeldMatrix], others: Scheme) -> SchemeOf:
    """Return a `SchemeOf` that keeps these modules' weights in these forms, and gives all others the same scheme."""
    return lambda module: replace(others, held=forms[module].helds) if module in forms else others


def runs_well(form: HeldMatrix, ops: Ops) -> bool:
    """Return True if the platform has an implementation of its own of the op that multiplies with a form. torch's, as
    the reference, makes plain numbers of the whole weight at each call, and panels hold some values of codes alone."""
    return all(_runs_well(held, ops) for held in form.helds if held is not None)


def _runs_well(held: Held, ops: Ops) -> bool:
    chosen, how = ops.chosen[_op(held)], held.format
    if chosen == "panels" and isinstance(how, CodedFormat):
        return holds_values(how)
    return chosen not in (REFERENCE, "torch")


def _op(held: Held) -> str:
    if isinstance(held.format, Int8Format):
        return "w8a8_linear"
    return "fp8_linear" if isinstance(held.format, Fp8Format) else "coded_linear"


def fields(held: Held | None, outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, Field]:
    """Return the shape and the dtype of each tensor of a weight. dtype: of a plain weight, which `held` None means."""
    how = None if held is None else held.format
    if held is None or how is None:
        return {"weight_OI": ((outputs, inputs), dtype)}
    if isinstance(how, Int8Format):
        return {"level_OI": ((outputs, inputs), torch.int8), "scale_O": ((outputs,), torch.float32)}
    if isinstance(how, Fp8Format):
        scales = (-(-outputs // BLOCK), -(-inputs // BLOCK)) if how.block else (outputs, 1)
        found: dict[str, Field] = {
            "weight_OI": ((outputs, inputs), torch.float8_e4m3fn),
            "scale_SC": (scales, torch.float32),
        }
        return {**found, "x_scale": ((), torch.float32)} if how.activations == "static" else found
    return _coded_fields(held, how, outputs, inputs)


def _coded_fields(held: Held, how: CodedFormat, outputs: int, inputs: int) -> dict[str, Field]:
    groups, scales = (outputs, inputs // (how.group or inputs)), getattr(torch, held.scales)
    found: dict[str, Field] = {
        "code_OB": ((outputs, inputs * how.bits // 8), torch.uint8),
        "scale_OG": (groups, scales),
    }
    if how.zeros != "middle":
        found["zero_OG"] = groups, torch.uint8 if how.zeros == "levels" else scales
    if how.nested:
        found["outer_OS"] = (outputs, inputs // SUPER), torch.float16
        if how.zeros == "minimum":
            found["outer_minimum_OS"] = found["outer_OS"]
    if held.factor:
        found["scale"] = (), torch.float32
    if held.ordered:
        found["order_I"] = (inputs,), torch.int32
    return found


def formed(held: Held, tensors: Mapping[str, Tensor]) -> Fp8 | Coded | Levels:
    """Return a weight, or a stack of them, of the tensors of its fields."""
    if isinstance(held.format, Int8Format):
        return Levels(tensors["level_OI"], tensors["scale_O"], held.format)
    if isinstance(held.format, Fp8Format):
        return Fp8(tensors["weight_OI"], tensors["scale_SC"], tensors.get("x_scale"), held.format)
    return Coded(**{name: tensors.get(name) for name in Coded._fields[:-1]}, format=held.format)  # type: ignore[arg-type]


def dequantized(held: Held, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the numbers that the tensors of a weight, or of a stack of them, stand for, in float32."""
    first = next(iter(tensors.values()))
    if first.ndim > 2:
        experts = ({name: tensor[expert] for name, tensor in tensors.items()} for expert in range(len(first)))
        return torch.stack([dequantized(held, expert) for expert in experts])
    return formed(held, tensors).dequantized()


def weight(ops: Ops, held: Held | None, tensors: Mapping[str, Tensor]) -> Weight:
    """Return the form that multiplies with these tensors."""
    return weight_of(ops, tensors["weight_OI"] if held is None else formed(held, tensors))


@dataclass(frozen=True)
class Filling:
    """A weight, or a stack of them, while it is filled.

    held: its form; None is a plain weight.
    parts: the numbers of the fused projections that it holds, and their rows.
    tensors: its tensors, by the names of their fields. Stacks have one more dimension in front.
    """

    held: Held | None
    parts: Mapping[int, int]
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def rows(self, field: str) -> list[Tensor]:
        """Return the part of a field's tensor that belongs to each projection. Rows are the dimension before the last,
        or the last one of scales for each output."""
        tensor = self.tensors[field]
        dim = tensor.ndim - (1 if field == "scale_O" else 2)
        *ends, total = accumulate(self.parts.values())
        how = None if self.held is None else self.held.format
        if field == "scale_SC" and isinstance(how, Fp8Format) and how.block:  # the last part need not fill its blocks
            return list(tensor.tensor_split([end // BLOCK for end in ends], dim))
        return list(tensor.tensor_split([end * tensor.shape[dim] // total for end in ends], dim))


def empty(
    helds: Sequence[Held | None],
    parts: Sequence[int],
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    experts: int | None = None,
) -> list[Filling]:
    """Return uninitialised weights for projections that are fused, as few as their forms allow.

    helds: the form of each. Neighbours of one form lie in one weight, but for blocks of FP8 that they would share.
    """
    found = []
    for held, numbers in _neighbours(helds, parts):
        rows = {number: parts[number] for number in numbers}
        front = () if experts is None else (experts,)
        made = {
            name: torch.empty((*front, *shape), dtype=kind, device=device)
            for name, (shape, kind) in fields(held, sum(rows.values()), inputs, dtype).items()
        }
        found.append(Filling(held, rows, made))
    return found


def _neighbours(helds: Sequence[Held | None], parts: Sequence[int]) -> Iterator[tuple[Held | None, list[int]]]:
    for held, group in groupby(range(len(helds)), helds.__getitem__):
        numbers = list(group)
        block = held is not None and isinstance(held.format, Fp8Format) and held.format.block
        if block and any(parts[number] % BLOCK for number in numbers[:-1]):
            yield from ((held, [number]) for number in numbers)
        else:
            yield held, numbers


def joined(ops: Ops, fillings: Sequence[Filling]) -> Weight:
    """Return the form that multiplies with all of them."""
    weights = [weight(ops, filling.held, filling.tensors) for filling in fillings]
    return weights[0] if len(weights) == 1 else JoinedWeight(ops, weights)


def settled(loaded: Weight, dtype: torch.dtype) -> Weight:
    """Return a filled weight in the layout that the platform multiplies fastest. dtype: of the activations."""
    if isinstance(loaded, JoinedWeight):
        return JoinedWeight(loaded.ops, [settled(each, dtype) for each in loaded.weights])
    if not isinstance(loaded, FormedWeight) or not isinstance(form := loaded.form, Fp8 | Coded | Levels):
        return loaded
    if isinstance(form, Coded) and _in_order(form.order_I):
        form = form._replace(order_I=None)
    return laid_out(loaded.ops, form, dtype)


def _in_order(order_I: Tensor | None) -> bool:
    return order_I is not None and torch.equal(order_I.cpu(), torch.arange(len(order_I), dtype=order_I.dtype))


def one_by_one(ops: Ops, filling: Filling, dtype: torch.dtype) -> list[Weight]:
    """Return each expert's weight of a stack, filled."""
    count = len(next(iter(filling.tensors.values())))
    return [
        settled(weight(ops, filling.held, {name: tensor[expert] for name, tensor in filling.tensors.items()}), dtype)
        for expert in range(count)
    ]


def fill_random(filling: Filling, std: float, generator: torch.Generator) -> None:
    """Fill a weight with numbers of about this standard deviation."""
    held, tensors = filling.held, filling.tensors
    how = None if held is None else held.format
    if how is None:
        tensors["weight_OI"].normal_(0, std, generator=generator)
    elif isinstance(how, Int8Format):
        tensors["level_OI"].random_(-127, 128, generator=generator)
        tensors["scale_O"].fill_(std * 3**0.5 / 127)
    elif isinstance(how, Fp8Format):
        _fill_eights(tensors["weight_OI"], generator)
        tensors["scale_SC"].fill_(std / EIGHTS)
        if "x_scale" in tensors:
            tensors["x_scale"].fill_(6 / LARGEST)
    else:
        _fill_codes(how, tensors, std, generator)


def _fill_eights(weight: Tensor, generator: torch.Generator) -> None:
    """Fill a tensor of E4M3 with numbers whose standard deviation is EIGHTS."""
    for some in weight.view(-1, weight.shape[-1]).split(1 << 12):
        some.copy_(torch.empty(some.shape, device=some.device).normal_(0, EIGHTS, generator=generator))


def _fill_codes(how: CodedFormat, tensors: Mapping[str, Tensor], std: float, generator: torch.Generator) -> None:
    levels = 1 << how.bits
    if how.values == "e4m3":
        _fill_eights(tensors["code_OB"].view(torch.float8_e4m3fn), generator)
        spread = EIGHTS
    else:
        tensors["code_OB"].random_(0, 256, generator=generator)
        spread = (levels**2 / 12) ** 0.5 if how.values == "levels" else float(torch.tensor(TABLES[how.values]).std())
    step = std / spread
    if how.nested:
        tensors["scale_OG"].fill_(32)
        tensors["outer_OS"].fill_(step / 32)
    elif tensors["scale_OG"].dtype == torch.uint8:
        tensors["scale_OG"].fill_(127 + round(torch.tensor(step).log2().item()))
    elif "scale" in tensors:
        tensors["scale_OG"].copy_(torch.ones_like(tensors["scale_OG"], dtype=torch.float32))
        tensors["scale"].fill_(step)
    else:
        tensors["scale_OG"].fill_(step)
    if how.zeros == "levels":
        tensors["zero_OG"].fill_(levels // 2)
    elif how.zeros == "minimum":
        tensors["zero_OG"].fill_(levels // 2 if how.nested else step * levels / 2)
        if how.nested:
            tensors["outer_minimum_OS"].fill_(step)
    if "order_I" in tensors:
        order = tensors["order_I"]
        order.copy_(torch.rand(order.shape, generator=generator, device=order.device).argsort(-1))
