"""Writes operations of MLIR as text: each gets a name of its own, and constants are said once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TextWriter:
    """The operations of one function, in their order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._constants: dict[tuple[str, str], str] = {}
        self._count = 0
        self._depth = 0

    def name(self) -> str:
        self._count += 1
        return f"%{self._count}"

    def do(self, text: str) -> None:
        """Write an operation that makes nothing."""
        self.lines.append("  " * self._depth + text)

    def make(self, text: str) -> str:
        """Write an operation that makes one value, and return its name."""
        name = self.name()
        self.do(f"{name} = {text}")
        return name

    def constant(self, number: object, type: str = "i32") -> str:
        """Return the name of a constant, which stands before all operations."""
        key = (str(number), type)
        if key not in self._constants:
            self._constants[key] = f"%c{len(self._constants)}"
        return self._constants[key]

    def constants(self) -> list[str]:
        return [f"{name} = arith.constant {number} : {type}" for (number, type), name in self._constants.items()]

    def integer(self, op: str, a: str, b: str | int, type: str = "i32") -> str:
        """Return `a op b` of integers. op: of arith, without its name, such as "addi"."""
        right = b if isinstance(b, str) else self.constant(b, type)
        if isinstance(b, int) and (b, op) in ((0, "addi"), (1, "muli"), (1, "divui")):
            return a
        return self.make(f"arith.{op} {a}, {right} : {type}")

    def compare(self, predicate: str, a: str, b: str | int, type: str = "i32") -> str:
        right = b if isinstance(b, str) else self.constant(b, type)
        return self.make(f"arith.cmpi {predicate}, {a}, {right} : {type}")

    def choose(self, condition: str, a: str, b: str, type: str = "i32") -> str:
        return self.make(f"arith.select {condition}, {a}, {b} : {type}")

    @contextmanager
    def inside(self, head: str, tail: str = "}") -> Iterator[None]:
        """Write a region of an operation between two lines; without a head, that of another branch."""
        if head:
            self.do(head)
        self._depth += 1
        yield
        self._depth -= 1
        self.do(tail)
