"""The assembly that makes operands of codes, run by a small machine of our own: every code of every format becomes the
number that it stands for, at the place where the matrix units multiply it with its own input."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.gemm.codes.cases import CASES
from ridgeline.kernels.gemm.codes.fragments import arranged, fits, span, unit
from ridgeline.kernels.gemm.codes.op import TABLES, Coded

asm = pytest.importorskip("ridgeline.kernels.gemm.codes.fragments_asm")

MASK = 0xFFFFFFFF
FORMATS = list(dict.fromkeys(replace(case.format, group=case.format.group or 384) for case in CASES))


def run(text: str, arguments: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the value that the instructions leave in $0. Registers are int64 tensors of 32 bits each."""
    held = {f"${i + 1}": x for i, x in enumerate(arguments)}

    def value(name: str) -> Tensor:
        return held[name] if name in held else torch.tensor(int(name, 0))

    def numbers(x: Tensor) -> Tensor:
        halves = torch.stack([x & 0xFFFF, x >> 16 & 0xFFFF], -1)
        return torch.where(halves > 0x7FFF, halves - 0x10000, halves).to(torch.int16).view(dtype).double()

    for line in filter(None, (part.strip() for part in re.sub(r"[{}]|\.reg[^;]*;", "", text).split(";"))):
        name, _, rest = line.partition(" ")
        to, *names = [x.strip() for x in rest.split(",")]
        a = [value(x) for x in names]
        match name.split("."):
            case ["mov", _]:
                held[to] = a[0]
            case ["shr", _]:
                held[to] = a[0] >> a[1]
            case ["shl", _]:
                held[to] = a[0] << a[1] & MASK
            case ["shf", "r", "wrap", _]:
                held[to] = (a[1] << 32 | a[0]) >> a[2] & MASK if int(a[2]) else a[0]
            case ["and", _]:
                held[to] = a[0] & a[1]
            case ["add", "u32" | "s32"]:
                held[to] = a[0] + a[1] & MASK
            case ["or", _]:
                held[to] = a[0] | a[1]
            case ["lop3", _]:
                table = int(a[3])
                held[to] = sum((f(a[0], i >> 2) & f(a[1], i >> 1) & f(a[2], i)) for i in range(8) if table >> i & 1)  # type: ignore[assignment]
            case ["prmt", _]:
                both = a[0] | a[1] << 32
                held[to] = sum((both >> 8 * (a[2] >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))  # type: ignore[assignment]
                assert not (a[2] & 0x8888).any()
            case ["mad", "lo", _]:
                held[to] = a[0] * a[1] + a[2] & MASK
            case ["fma", "rn", _] | ["mul", _] | ["add", _]:
                exact = numbers(a[0]) + numbers(a[1]) if name.startswith("add") else numbers(a[0]) * numbers(a[1])
                if len(a) > 2:
                    exact = exact + numbers(a[2])
                bits = exact.to(dtype).view(torch.int16).long() & 0xFFFF
                held[to] = bits[..., 0] | bits[..., 1] << 16
            case _:
                raise AssertionError(f"no instruction {name}")
    return numbers(held["$0"])


def f(x: Tensor, wanted: int) -> Tensor:
    """Return the bits of x, or their complement if a zero bit is wanted."""
    return x if wanted & 1 else ~x & MASK


def operands(weight: Coded, zero_OG: Tensor, i: int, dtype: torch.dtype) -> Tensor:
    """Return slice i of each unit of the first tile, as the kernel makes it: [units, 16 rows, 16 places]."""
    how, first = weight.format, 0
    units = weight.inputs // unit(how)
    words = weight.code_OB[:16].contiguous().view(torch.int16).view(units, -1).long() & 0xFFFF
    planes = []
    for bits in how.planes():
        raw = words[:, first : first + unit(how) * bits].reshape(units, 1, -1, 8, 4, 2, 2, 2)
        tiles = raw.permute(0, 1, 6, 3, 5, 4, 7, 2).reshape(units, 16, 16, -1)
        here = tiles[..., i // (16 // bits)]
        planes.append(here[..., 0::2] | here[..., 1::2] << 16)
        first += unit(how) * bits
    if how.zeros == "levels":
        planes.append(zero_OG)
    found = run(asm.instructions(how, dtype)[i], planes, dtype)
    return found.flatten(-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_every_code_becomes_its_number(how: object, dtype: torch.dtype) -> None:
    case = next(c for c in CASES if replace(c.format, group=c.format.group or 384) == how)
    inputs = 768 if case.format.group == 0 else 512
    case = replace(case, in_width=inputs, out_width=32)
    weight = case.inputs(torch.float32, torch.device("cpu"))[1]
    fresh, how = arranged(weight), weight.format
    assert fits(weight)
    group = how.group or inputs
    codes = weight.codes()[:16].double()
    wanted = codes if how.values == "levels" else torch.tensor(TABLES[how.values]).double()[codes.long()]
    if how.zeros == "middle" and how.values == "levels":
        wanted = codes - 2.0 ** (how.bits - 1)
    size, width, each = unit(how), span(how), span(how) // 16
    for i in range(size // 16):
        half, thread, pair = torch.meshgrid(torch.arange(2), torch.arange(4), torch.arange(2), indexing="ij")
        place = (i // each * width + thread * (width // 4) + i % each * 4 + half * 2 + pair).flatten()
        columns = torch.arange(0, inputs, size)[:, None] + place
        minus = torch.zeros((), dtype=torch.long)
        expected = wanted[:, columns].transpose(0, 1)
        if how.zeros == "levels":
            assert weight.zero_OG is not None
            zero = weight.zero_OG[:16].double()[:, columns[:, 0] // group].T[..., None]
            expected = expected - zero
            number = -zero - {torch.bfloat16: 128.0, torch.float16: 1024.0}[dtype]
            bits = number.to(dtype).view(torch.int16).long() & 0xFFFF
            minus = bits | bits << 16
        got = operands(fresh, minus, i, dtype)
        torch.testing.assert_close(got, expected.to(dtype).double(), rtol=0, atol=0)
