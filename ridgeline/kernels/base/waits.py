"""Loops of a kernel that end only when another program has written something, found in its PTX.

Such a loop asks again and again for a number in global memory, and its end depends on the answer. It may wait for ever
where the program that should write has no place on the device, so a kernel that has one needs a cooperative launch, or
waits for another device. Taking tickets is no wait: an addition of more than nothing changes what it asks for, so each
turn goes on.

A loop is found as a set of blocks that reach each other, and the loops inside it likewise without its first block. A
read is a wait if its address is the same in every turn and the loop's end depends on it: by registers, by what one
thread tells the others through shared memory, or by a branch that decides which of several values a register gets. A
plain load beside a counter of turns is a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

_REGISTER = re.compile(r"%[a-z]+\d+|\b[a-z]\w*\b")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"([$\w]+):(?!:)")
_WRITES_NOTHING = (
    "st", "red", "bar", "barrier", "bra", "brx", "ret", "exit", "fence", "membar", "cp", "prefetch", "mbarrier",
    "wgmma", "nanosleep", "trap", "griddepcontrol", "setmaxnreg", "stmatrix", "call",
)  # fmt: skip
_ANSWERS = ("mbarrier.try_wait", "mbarrier.test_wait", "mbarrier.arrive")  # these write what they find
_PLAIN = re.compile(r"ld\.global(?!.*(acquire|relaxed|volatile))")
Register = str


@dataclass
class _Statement:
    """A statement. guard: the predicate on which it runs. to: labels of a branch."""

    op: str
    rest: str
    guard: Register = ""
    writes: tuple[Register, ...] = ()
    reads: tuple[Register, ...] = ()
    to: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(f"{self.op} {self.rest}".split())


Writers = dict[
    Register, list[tuple[int, _Statement]]
]  # register → the statements of a loop that write it, each with its block


@dataclass
class _CodeBlock:
    lines: list[_Statement] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


class _FlowGraph:
    """The blocks of a kernel, of which the last one is its end."""

    def __init__(self, ptx: str) -> None:
        self.blocks, tables = [_CodeBlock()], _tables(ptx)
        labels: dict[str, list[int]] = {}
        jumps: list[tuple[int, _Statement]] = []
        for item in _items(ptx):
            if isinstance(item, str):
                self.blocks.append(_CodeBlock())
                labels.setdefault(item, []).append(len(self.blocks) - 1)
                continue
            self.blocks[-1].lines.append(item)
            if item.op.startswith(("bra", "brx", "ret", "exit", "trap")):
                jumps.append((len(self.blocks) - 1, item))
                self.blocks.append(_CodeBlock())
        self.blocks.append(_CodeBlock())
        for here, block in enumerate(self.blocks[:-1]):
            block.next = [here + 1]
        for here, line in jumps:
            to = tables.get(line.to[-1], line.to) if line.to else ()
            # Inline assembly has the same label several times, each in its own braces
            there = [max((at for at in labels[t] if at <= here), default=labels[t][0]) for t in to]
            self.blocks[here].next = [*(there or [len(self.blocks) - 1]), *([here + 1] if line.guard else [])]

    @cached_property
    def decides(self) -> dict[int, set[int]]:
        """Block → the blocks whose branch decides whether it runs."""
        count = len(self.blocks)
        after = [(1 << count) - 1] * count
        after[-1] = 1 << (count - 1)
        changed = True
        while changed:
            changed = False
            for here in range(count - 2, -1, -1):
                found = -1
                for there in self.blocks[here].next:
                    found &= after[there]
                found = (found | 1 << here) & ((1 << count) - 1)
                changed, after[here] = changed or found != after[here], found
        decides: dict[int, set[int]] = {}
        for here, block in enumerate(self.blocks):
            if len(block.next) > 1:
                for there in block.next:
                    for each in range(count):
                        if after[there] >> each & 1 and (each == here or not after[here] >> each & 1):
                            decides.setdefault(each, set()).add(here)
        return decides

    def loops(self, some: Sequence[int]) -> Iterator[list[int]]:
        """Yield the loops among these blocks, each before those within it."""
        for part in self._circles(some):
            yield part
            inside = set(part)
            heads = {
                there for here in range(len(self.blocks)) if here not in inside for there in self.blocks[here].next
            }
            first = min(heads & inside, default=part[0])
            yield from self.loops([here for here in part if here != first])

    def _circles(self, some: Sequence[int]) -> list[list[int]]:
        """Return the sets of blocks that reach each other (Tarjan, without recursion)."""
        inside, number, low = set(some), dict[int, int](), dict[int, int]()
        stack: list[int] = []
        found = []
        for root in some:
            if root in number:
                continue
            todo = [(root, iter(self.blocks[root].next))]
            number[root] = low[root] = len(number)
            stack.append(root)
            while todo:
                here, later = todo[-1]
                for there in later:
                    if there not in inside:
                        continue
                    if there not in number:
                        number[there] = low[there] = len(number)
                        stack.append(there)
                        todo.append((there, iter(self.blocks[there].next)))
                        break
                    if there in stack:
                        low[here] = min(low[here], number[there])
                else:
                    todo.pop()
                    if todo:
                        low[todo[-1][0]] = min(low[todo[-1][0]], low[here])
                    if low[here] == number[here]:
                        part = stack[stack.index(here) :]
                        del stack[stack.index(here) :]
                        if len(part) > 1 or here in self.blocks[here].next:
                            found.append(sorted(part))
        return found


def waits(ptx: str) -> list[str]:
    """Return the instructions by which a kernel waits for other programs, in the order of its loops."""
    code, found = _FlowGraph(ptx), dict[str, None]()
    for loop in code.loops(range(len(code.blocks) - 1)):
        found |= dict.fromkeys(line.text for line in _awaited(code, loop))
    return list(found)


def _awaited(code: _FlowGraph, loop: list[int]) -> Iterator[_Statement]:
    """Yield the reads of global memory on which the end of a loop depends."""
    inside = set(loop)
    writers: Writers = {}
    told: list[Register] = []  # what threads write to shared memory
    for here in loop:
        for line in code.blocks[here].lines:
            for register in line.writes:
                writers.setdefault(register, []).append((here, line))
            if line.op.startswith("st.shared"):
                told += line.reads
    if not any(_reads_memory(line) for lines in writers.values() for _, line in lines):
        return
    for here in loop:
        if any(there not in inside for there in code.blocks[here].next) and code.blocks[here].lines:
            yield from _asked(code, inside, writers, told, code.blocks[here].lines[-1].guard)


def _asked(
    code: _FlowGraph, inside: set[int], writers: Writers, told: list[Register], predicate: Register
) -> Iterator[_Statement]:
    """Yield the reads of global memory on which a predicate depends, within a loop."""
    todo, known, found = [predicate] if predicate else [], set[Register](), dict[int, _Statement]()
    while todo:
        register = todo.pop()
        if register in known:
            continue
        known.add(register)
        several = len(writers.get(register, ())) > 1
        for here, line in writers.get(register, ()):
            if _reads_memory(line) and not _moves(writers, line):
                found[id(line)] = line
            todo += [*line.reads, *([line.guard] if line.guard else [])]
            if line.op.startswith("ld.shared"):
                todo += told
            if several:
                deciding = (code.blocks[each].lines[-1].guard for each in code.decides.get(here, ()) if each in inside)
                todo += filter(None, deciding)
    # Where a loop counts its turns, a plain load is a bound that no other program changes
    counts = found and any(_depends_on_itself(writers, [register]) for register in known)
    yield from (line for line in found.values() if not counts or not _PLAIN.match(line.op))


def _reads_memory(line: _Statement) -> bool:
    """Return True for reads of global memory, and for atomic operations that may leave a number as it is."""
    if line.op.startswith("atom"):
        return ".shared" not in line.op
    return line.op.startswith(("ld.global", "ld.acquire", "ld.volatile", "ld.relaxed")) and ".shared" not in line.op


def _moves(writers: Writers, line: _Statement) -> bool:
    """Return True where every turn of a loop asks for another number, or changes what it asks for."""
    if line.op.startswith("atom") and re.search(r"\.(add|inc|dec)\b", line.op):
        given = line.rest.rpartition(",")[2].strip()
        return not (given == "0" or _is_zero(writers, given))
    return _depends_on_itself(writers, _registers(line.rest.partition("[")[2].partition("]")[0]), by_reading=True)


def _depends_on_itself(writers: Writers, registers: Sequence[Register], *, by_reading: bool = False) -> bool:
    """Return True where one of these registers follows from what it was a turn before, by arithmetic or `by_reading`
    what it points to."""
    todo: list[tuple[Register, frozenset[Register]]] = [(register, frozenset()) for register in registers]
    known = set[Register]()
    while todo:
        register, before = todo.pop()
        if register in before:
            return True
        if register in known:
            continue
        known.add(register)
        for _, writer in writers.get(register, ()):
            if by_reading or not _reads_memory(writer):
                todo += [(each, before | {register}) for each in writer.reads]
    return False


def _is_zero(writers: Writers, register: Register) -> bool:
    """Return True unless a loop gives the register another constant than 0."""
    given = [line for _, line in writers.get(register, ())]
    return all(line.op.startswith("mov") and line.rest.rpartition(",")[2].strip() == "0" for line in given)


def _items(ptx: str) -> Iterator[_Statement | str]:
    """Yield the labels and the statements of the kernel's body."""
    body = re.sub(r"//[^\n]*|^\s*\.loc[^\n]*", "", ptx, flags=re.MULTILINE)
    body = body[body.index("{", body.index(".entry")) + 1 :]
    for statement in re.split(r"[;{}](?![^\[\]]*\])", _joined(body)):
        text = statement.strip()
        while label := _LABEL.match(text):
            yield label[1]
            text = text[label.end() :].strip()
        found = _STATEMENT.fullmatch(text)
        if found is not None and not text.startswith("."):
            yield _line(found[3], found[4].strip(), found[2] or "")


def _joined(body: str) -> str:
    """Return the text with vectors of registers in brackets that do not open a scope."""
    return re.sub(r"\{([^{};]*)\}", lambda found: f"<{found[1]}>", body)


def _line(op: str, rest: str, guard: Register) -> _Statement:
    if op.startswith(("bra", "brx")):
        to = tuple(part.strip() for part in rest.split(","))
        return _Statement(op, rest, guard, (), _registers(rest), to)
    name = op.partition(".")[0]
    if name in _WRITES_NOTHING and not op.startswith(_ANSWERS):
        return _Statement(op, rest, guard, (), _registers(rest))
    first = re.match(r"\s*(<[^>]*>|[^,]*)", rest)
    target = first[0] if first else ""
    return _Statement(op, rest, guard, _registers(target), _registers(rest[len(target) :]))


def _registers(text: str) -> tuple[Register, ...]:
    return tuple(dict.fromkeys(_REGISTER.findall(text)))


def _tables(ptx: str) -> dict[str, tuple[str, ...]]:
    """Return the targets of each table of an indexed branch."""
    found = re.findall(r"([$\w]+):\s*\.branchtargets\s+([^;]+);", ptx)
    return {name: tuple(each.strip() for each in to.split(",")) for name, to in found}
