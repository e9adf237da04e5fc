"""Runs PTX of the compiler's kernels without a GPU: all threads of a grid in step, as arrays of NumPy.

It knows the instructions that kernels without NVIDIA's library of functions have, and refuses others. Threads that are
behind go first, so that those of a branch meet the others again behind it. Reads and writes outside the tensors fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

GUARD = 4096  # bytes between tensors, which no thread may touch
Bits = np.ndarray


class PtxFault(Exception):
    """A thread did what no GPU's would: memory that is no tensor's, or an instruction that is not known."""


def run(ptx: str, grid: int, tensors: Sequence[torch.Tensor], count: int) -> None:
    """Run the kernel over `tensors` (inputs, then outputs, which are written) and the number `count`."""
    _Machine(ptx, grid, tensors, count).run()


class _Machine:
    def __init__(self, ptx: str, grid: int, tensors: Sequence[torch.Tensor], count: int) -> None:
        (threads,) = (int(each) for each in re.findall(r"\.maxntid (\d+)", ptx))
        self.size, self.threads, self.grid = grid * threads, threads, grid
        self.memory = np.zeros(GUARD + sum(t.nbytes + GUARD + 256 for t in tensors), np.uint8)
        self.allowed = np.zeros_like(self.memory, bool)
        self.tensors, self.places = tensors, []
        at = GUARD
        for each in tensors:
            at = -(-at // 256) * 256
            self.places.append(at)
            self.memory[at : at + each.nbytes] = _bytes(each)
            self.allowed[at : at + each.nbytes] = True
            at += each.nbytes + GUARD
        parameters = re.findall(r"\.param \.\w+ .*?(kernel_param_\d+)", ptx)
        self.parameters = dict(zip(parameters, [*self.places, count], strict=True))
        self.symbols: dict[str, int] = {}
        shared = 0
        for name, size in re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\]", ptx):
            self.symbols[name], shared = shared, shared + int(size)
        self.shared = np.zeros((grid, max(shared, 8)), np.uint8)
        self.registers: dict[str, Bits] = {}
        self.code: list[tuple[str, bool, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        self.block = np.arange(self.size) // threads
        self._parse(ptx)

    def _parse(self, ptx: str) -> None:
        for raw in ptx.partition("{")[2].splitlines():
            line = raw.split("//")[0].strip()
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line and line[0] not in "{}.)" and line.endswith(";"):
                guard, rest = "", line[:-1]
                if rest.startswith("@"):
                    guard, _, rest = rest[1:].partition(" ")
                op, _, operands = rest.strip().partition(" ")
                parts = [each.strip() for each in re.split(r",(?![^{\[]*[}\]])", operands.strip())]
                self.code.append((guard.lstrip("!"), guard.startswith("!"), op, parts))

    def run(self) -> None:
        at = np.zeros(self.size, np.int64)
        while True:
            here = int(at.min())
            if here >= len(self.code):
                break
            mask = at == here
            guard, negated, op, operands = self.code[here]
            if guard:
                mask &= self.registers[guard].astype(bool) != negated
            at[at == here] = here + 1
            if op.startswith("bra"):
                at[mask] = self.labels[operands[0]]
            elif op == "ret":
                at[mask] = len(self.code)
            elif mask.any():
                self._step(op, operands, mask)
        for each, place in zip(self.tensors, self.places, strict=True):
            _bytes(each)[:] = self.memory[place : place + each.nbytes]

    # operands

    def read(self, operand: str) -> Bits:
        if operand.startswith("%tid"):
            return (np.arange(self.size) % self.threads).astype(np.uint64)
        if operand.startswith("%ctaid"):
            return self.block.astype(np.uint64)
        if operand.startswith("%"):
            return self.registers[operand]
        if operand in self.symbols:
            number = self.symbols[operand]
        elif operand[:2] in ("0f", "0d", "0x"):
            number = int(operand[2:], 16)
        else:
            number = int(operand)
        return np.full(self.size, number & (1 << 64) - 1, np.uint64)

    def write(self, name: str, value: Bits, mask: Bits) -> None:
        old = self.registers.get(name)
        if old is None:
            old = np.zeros(self.size, np.uint64)
        self.registers[name] = np.where(mask, value.astype(np.uint64), old)

    def address(self, operand: str) -> Bits:
        base, _, offset = operand[1:-1].partition("+")
        return self.read(base).astype(np.int64) + int(offset or 0)

    # instructions

    def _step(self, op: str, operands: list[str], mask: Bits) -> None:
        name, *rest = op.split(".")
        kind = rest[-1] if rest else ""
        if name in ("ld", "st"):
            self._memory(name, rest, operands, mask)
        elif name == "bar":
            if not mask.all():
                raise PtxFault("some threads wait at a barrier that others do not reach")
        elif name == "mov" and operands[0].startswith("{"):
            names = [each.strip() for each in operands[0][1:-1].split(",")]
            each = int(kind[1:]) // len(names)
            whole = self.read(operands[1])
            for place, part in enumerate(names):
                if part != "_":
                    self.write(part, whole >> np.uint64(place * each) & np.uint64((1 << each) - 1), mask)
        elif name == "mov" and operands[1].startswith("{"):
            names = [part.strip() for part in operands[1][1:-1].split(",")]
            each = int(kind[1:]) // len(names)
            parts = [self.read(part) << np.uint64(place * each) for place, part in enumerate(names)]
            self.write(operands[0], np.bitwise_or.reduce(parts), mask)
        elif name == "shfl":
            distance = int(operands[2])
            lane = np.arange(self.size) ^ distance
            if not mask.all():
                raise PtxFault("some lanes of a warp do not take part in a shuffle")
            self.write(operands[0].split("|")[0], self.read(operands[1])[lane], mask)
        elif name == "cvt":
            self.write(operands[0], _converted(rest, [self.read(each) for each in operands[1:]]), mask)
        elif name in ("setp", "selp") or f"{name}.{rest[0]}" in _OPS or name in _OPS:
            self.write(operands[0], self._computed(name, rest, [self.read(each) for each in operands[1:]]), mask)
        else:
            raise PtxFault(f"{op} is not known")

    def _computed(self, name: str, rest: list[str], values: list[Bits]) -> Bits:
        kind = rest[-1]
        if name == "selp":
            return np.where(values[2].astype(bool), values[0], values[1])
        if kind == "pred":
            kind = "b1"
        if kind.endswith("x2"):
            low, high = ([v >> np.uint64(s) & np.uint64(0xFFFF) for v in values] for s in (0, 16))
            one = [*rest[:-1], kind[:-2]]
            return self._computed(name, one, low) | self._computed(name, one, high) << np.uint64(16)
        function = _OPS.get(f"{name}.{rest[0]}") or _OPS[name]
        if name == "setp":
            return _compared(rest[0], [_typed(each, kind) for each in values]).astype(np.uint64)
        if rest[0] == "wide":
            bits = int(kind[1:])
            a, b = (_typed(each, kind).astype(object) for each in values)
            return _bits(a * b, f"{kind[0]}{2 * bits}")
        typed = [_typed(each, kind) for each in values]
        with np.errstate(all="ignore"):
            return _bits(function(*typed), kind)

    def _memory(self, name: str, rest: list[str], operands: list[str], mask: Bits) -> None:
        space, kind = rest[0], rest[-1]
        place, moved = (operands[1], operands[0]) if name == "ld" else (operands[0], operands[1])
        if space == "param":
            self.write(moved, np.full(self.size, self.parameters[place[1:-1]], np.uint64), mask)
            return
        names = [each.strip() for each in moved.strip("{}").split(",")]
        size = int(kind[1:]) // 8
        start = self.address(place)
        if space == "global" and ((start[mask] % (size * len(names))) != 0).any():
            raise PtxFault(f"{name}.{'.'.join(rest)} at an address that is no multiple of {size * len(names)}")
        for at, each in enumerate(names):
            where = start + at * size
            for byte in range(size):
                self._byte(name, space, each, where + byte, byte, mask)

    def _byte(self, name: str, space: str, register: str, where: Bits, byte: int, mask: Bits) -> None:
        active, shift = np.nonzero(mask)[0], np.uint64(8 * byte)
        places = where[active]
        if space == "global":
            if (places < 0).any() or (places >= len(self.memory)).any() or not self.allowed[places].all():
                raise PtxFault("an access outside the tensors")
            index: tuple[Bits, ...] = (places,)
            memory = self.memory
        else:
            index, memory = (self.block[active], places), self.shared
        if name == "st":
            memory[index] = (self.read(register)[active] >> shift & np.uint64(255)).astype(np.uint8)
            return
        part = np.zeros(self.size, np.uint64)
        part[active] = memory[index].astype(np.uint64) << shift
        self.write(register, part if byte == 0 else self.registers[register] | part, mask)


def _bytes(tensor: torch.Tensor) -> Bits:
    return np.asarray(tensor.view(-1).view(torch.uint8).numpy())


def _typed(bits: Bits, kind: str) -> Bits:
    """Return numbers of a type of their bits."""
    if kind == "b1":
        return bits.astype(bool)
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    letter, size = kind[0], kind[1:]
    unsigned = bits.astype(f"u{int(size) // 8}")
    if letter == "f":
        return unsigned.view(f"f{int(size) // 8}")
    return unsigned.view(f"i{int(size) // 8}") if letter == "s" else unsigned


def _bits(numbers: Bits, kind: str) -> Bits:
    if kind == "b1":
        return np.asarray(numbers).astype(np.uint64)
    if kind == "bf16":
        wide = np.asarray(numbers).astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = (wide + np.uint64(0x7FFF) + (wide >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        nan = (wide & np.uint64(0x7FFFFFFF)) > np.uint64(0x7F800000)
        return np.where(nan, np.uint64(0x7FFF), rounded & np.uint64(0xFFFF))
    letter, size = kind[0], int(kind[1:])
    if letter == "f":
        return np.asarray(numbers).astype(f"f{size // 8}").view(f"u{size // 8}").astype(np.uint64)
    return np.asarray(np.asarray(numbers).astype(object) & ((1 << size) - 1)).astype(np.uint64)


def _converted(rest: list[str], values: list[Bits]) -> Bits:
    target, source = rest[-2], rest[-1]
    with np.errstate(all="ignore"):
        if target.endswith("x2"):
            high, low = (_bits(_typed(each, source), target[:-2]) for each in values)
            return high << np.uint64(16) | low
        number = _typed(values[0], source)
        if "rni" in rest:
            number = np.rint(number)
        if target[0] in "us" and source[0] in "fb" and source != "b16":
            limits = np.iinfo(f"{'i' if target[0] == 's' else 'u'}{int(target[1:]) // 8}")
            number = np.clip(np.nan_to_num(np.trunc(number.astype(np.float64))), limits.min, limits.max)
            number = np.array([int(each) for each in number], object)
        return _bits(number, target)


def _compared(how: str, values: list[Bits]) -> Bits:
    a, b = values
    lost = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(len(a), bool)
    plain: dict[str, Callable[[Bits, Bits], Bits]] = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal,
    }  # fmt: skip
    if how in ("nan", "num"):
        return lost if how == "nan" else ~lost
    if how[:2] in plain and how[2:] in ("", "u"):
        made = plain[how[:2]](a, b)
        if a.dtype.kind == "f":
            return made | lost if how.endswith("u") else made & ~lost
        return made
    raise PtxFault(f"setp.{how} is not known")


def _flushed(x: Bits) -> Bits:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x.astype(np.float32))


def _fma(a: Bits, b: Bits, c: Bits) -> Bits:
    wide = np.longdouble if a.dtype == np.float64 else np.float64
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def _most(a: Bits, b: Bits, keep: Callable[[Bits, Bits], Bits]) -> Bits:
    return np.where(np.isnan(a) | np.isnan(b), np.nan, keep(a, b)).astype(a.dtype)


def _integer(function: Callable[..., Bits]) -> Callable[..., Bits]:
    return lambda *values: function(*(each.astype(object) for each in values))


def _added(a: Bits, b: Bits) -> Bits:
    return a + b if a.dtype.kind == "f" else a.astype(object) + b.astype(object)


def _lessened(a: Bits, b: Bits) -> Bits:
    return a - b if a.dtype.kind == "f" else a.astype(object) - b.astype(object)


_OPS: dict[str, Callable[..., Bits]] = {
    "add": _added, "sub": _lessened, "mul.rn": lambda a, b: a * b, "fma": _fma, "mul.wide": _added,
    "mul.lo": _integer(lambda a, b: a * b), "mad.lo": _integer(lambda a, b, c: a * b + c),
    "mul.hi": lambda a, b: np.array([int(x) * int(y) >> 8 * a.itemsize for x, y in zip(a, b, strict=True)], object),
    "shl": _integer(lambda a, b: np.where(b < 64, a << np.minimum(b, 64), 0)),
    "shr": lambda a, b: np.array([int(x) >> int(y) for x, y in zip(a, b, strict=True)], object),
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a: ~a,
    "neg": lambda a: -a, "abs": np.abs, "max.NaN": lambda a, b: _most(a, b, np.fmax),
    "min.NaN": lambda a, b: _most(a, b, np.fmin), "max": np.fmax, "min": np.fmin, "mov": lambda a: a, "setp": _added,
    "ex2": lambda a: _flushed(np.exp2(_flushed(a).astype(np.float64))), "rcp": lambda a: _flushed(1 / _flushed(a)),
    "div": lambda a, b: a / b, "sqrt": np.sqrt, "tanh": lambda a: np.tanh(a.astype(np.float64)),
    "copysign": lambda a, b: np.copysign(b, a), "rem": _integer(lambda a, b: a % b),
    "div.u32": _integer(lambda a, b: a // b),
}  # fmt: skip
