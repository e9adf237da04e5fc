"""A check of Hopper's machine code: uniform registers that are read where nothing can have written them.

Descriptors of warpgroup products lie in uniform registers. ptxas 12.8 sometimes takes one from a register that it never
writes, and the product then reads shared memory anywhere. No interpreter or address check of Triton's sees that.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?(U?P\w+) )?\s*(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+):")
_PAIRS = ("UIADD3.64", "UMOV.64")


def unwritten(listing: str) -> list[str]:
    """Return the instructions of a kernel, as `nvdisasm -c` prints it, that read a uniform register to which no path
    from the beginning leads through a write."""
    code: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            code.append((found[1] or "", found[2], found[3]))
    moves = [_written_and_read(op, rest) for _, op, rest in code]
    written: list[int | None] = [None] * len(code)
    todo = [(0, 0)]
    while todo:
        at, before = todo.pop()
        known = written[at]
        if known is not None and before | known == known:
            continue
        written[at] = known = before | (known or 0)
        todo += [(there, known | moves[at][0]) for there in _next(code, labels, at)]
    return [
        " ".join(filter(None, code[at]))
        for at, known in enumerate(written)
        if known is not None and moves[at][1] & ~known
    ]


def _written_and_read(op: str, rest: str) -> tuple[int, int]:
    """Return the uniform registers that an instruction writes and reads, as bits."""
    operands = [operand.strip() for operand in re.split(r",(?![^\[]*\])", rest)]
    if "GMMA" in op:  # two descriptors of two registers each; only the second one if rows come from registers
        found = re.search(r"gdesc\[UR(\d+)\]", rest)
        first = 2 if re.match(r"R\d+, *R\d[^,]*, *gdesc", rest) else 0
        return 0, 0 if found is None else _bits(int(found[1]) + first, 4 - first)
    if op.startswith("SYNCS"):  # of its last operands nothing is known
        return 0, 0
    results = 1 if not re.fullmatch(r"U?P\w+", operands[0]) else 2
    target = re.fullmatch(r"UR(\d+)", operands[results - 1]) if results <= len(operands) else None
    writes = _bits(int(target[1]), 2 if ".64" in op or "WIDE" in op else 1) if target else 0
    reads = 0
    for operand in operands[results if target else 0 :]:
        width = 2 if op.startswith(_PAIRS) or "desc[" in operand else 1
        for register in re.findall(r"\bUR(\d+)", operand):
            reads |= _bits(int(register), width)
    return writes, reads


def _bits(first: int, count: int) -> int:
    return ((1 << count) - 1) << first


def _next(code: list[tuple[str, str, str]], labels: dict[str, int], at: int) -> list[int]:
    """Return the places of the instructions that can follow."""
    predicate, op, rest = code[at]
    target = re.search(r"`\((\.L_x_\d+)\)", rest) if op.startswith("BRA") else None
    goes_on = bool(predicate) or not op.startswith(("BRA", "EXIT")) or bool(re.match(r"!?U?P\d", rest)) or ".DIV" in op
    there = [labels[target[1]]] if target else []
    return [*there, *([at + 1] if goes_on and at + 1 < len(code) else [])]
