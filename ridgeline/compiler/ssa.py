"""Static single assignment: the form of a program of blocks and jumps in which each variable is written once. Graphs
of `graph.py` have this form from the start, since they have no jumps.

    dominators           Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm" (2001), figure 3
    dominance frontiers  the same, figure 5
    liveness             variables that are read before they are written again, backwards to a fixed point
    φ                    Cytron et al., "Efficiently Computing Static Single Assignment Form" (1991), section 5.1: at
                         the iterated frontier of a variable's writes, where it is live; then names, section 5.2

A variable that is read before any write has the name `NAME.0`, which the caller gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.errors import RidgelineError

Names = frozenset[str]


class InvalidFlow(RidgelineError):
    """A program whose jumps or blocks do not fit each other."""


@dataclass(frozen=True)
class FlowInstruction:
    """target = op(operands); an operand is a variable, or a number."""

    target: str
    op: str
    operands: tuple[str | float, ...] = ()

    @property
    def reads(self) -> Names:
        return frozenset(each for each in self.operands if isinstance(each, str))


@dataclass(frozen=True)
class PhiNode:
    """target = the variable of the block that control came from. sources: block → variable."""

    target: str
    sources: Mapping[str, str]


@dataclass(frozen=True)
class FlowBlock:
    """Instructions, then a jump: to none (the end, which gives out `result`), to one block, or by `condition` to the
    first of two if it is not 0."""

    instructions: tuple[FlowInstruction, ...] = ()
    targets: tuple[str, ...] = ()
    condition: str = ""
    result: str = ""
    phis: tuple[PhiNode, ...] = ()

    @property
    def ends_with(self) -> Names:
        return frozenset({self.condition, self.result} - {""})


@dataclass(frozen=True)
class FlowProgram:
    """blocks: the first one is where control begins, and no block jumps there."""

    blocks: Mapping[str, FlowBlock]

    def __post_init__(self) -> None:
        """Raise InvalidFlow for a jump that leads nowhere, or into the first block, or a wrong number of targets."""
        if not self.blocks:
            raise InvalidFlow("a program has at least one block.")
        for name, block in self.blocks.items():
            for target in block.targets:
                if target not in self.blocks or target == self.entry:
                    raise InvalidFlow(f"block {name!r} jumps to {target!r}, which is no block that may be entered.")
            if len(block.targets) != (2 if block.condition else min(1, len(block.targets))):
                raise InvalidFlow(f"block {name!r} jumps to {len(block.targets)} blocks.")

    @property
    def entry(self) -> str:
        return next(iter(self.blocks))

    def reached(self) -> list[str]:
        """Return the blocks that control can come to, each behind its dominator (reverse postorder)."""
        order: list[str] = []
        seen, stack = {self.entry}, [(self.entry, iter(self.blocks[self.entry].targets))]
        while stack:
            name, rest = stack[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                order.append(name)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.blocks[following].targets)))
        return order[::-1]

    def predecessors(self) -> dict[str, list[str]]:
        """Return the reached blocks that jump to each reached one, each named once."""
        found: dict[str, list[str]] = {name: [] for name in self.reached()}
        for name in found:
            for target in dict.fromkeys(self.blocks[name].targets):
                found[target].append(name)
        return found


def immediate_dominators(program: FlowProgram) -> dict[str, str]:
    """Return of each reached block but the first the nearest one that every way to it goes through."""
    order = program.reached()
    place, before = {name: at for at, name in enumerate(order)}, program.predecessors()
    found = {program.entry: program.entry}

    def common(a: str, b: str) -> str:
        while a != b:
            if place[a] < place[b]:
                b = found[b]
            else:
                a = found[a]
        return a

    changed = True
    while changed:
        changed = False
        for name in order[1:]:
            known = [each for each in before[name] if each in found]
            nearest = known[0]
            for each in known[1:]:
                nearest = common(nearest, each)
            changed |= found.get(name) != nearest
            found[name] = nearest
    return {name: found[name] for name in order[1:]}


def dominance_frontiers(program: FlowProgram) -> dict[str, set[str]]:
    """Return of each reached block where its dominance ends: the blocks that it does not dominate strictly, though it
    dominates one that jumps there."""
    above, found = immediate_dominators(program), {name: set[str]() for name in program.reached()}
    for name, before in program.predecessors().items():
        for each in before:
            while name not in above or each != above[name]:
                found[each].add(name)
                if each not in above:
                    break
                each = above[each]
    return found


def live_at_entry(program: FlowProgram) -> dict[str, Names]:
    """Return the variables that each reached block, or one behind it, reads before it writes them."""
    order = program.reached()
    reads, writes = dict[str, Names](), dict[str, Names]()
    for name in order:
        block, written, read = program.blocks[name], set[str](), set[str]()
        for each in block.instructions:
            read |= each.reads - written
            written.add(each.target)
        reads[name], writes[name] = frozenset(read | (block.ends_with - written)), frozenset(written)
    live = dict.fromkeys(order, frozenset[str]())
    changed = True
    while changed:
        changed = False
        for name in reversed(order):
            behind = frozenset[str]().union(*(live[each] for each in program.blocks[name].targets))
            now = reads[name] | (behind - writes[name])
            changed |= now != live[name]
            live[name] = now
    return live


def phi_places(program: FlowProgram) -> dict[str, list[str]]:
    """Return the variables that each reached block begins with a φ of, in the order of their names."""
    frontiers, live = dominance_frontiers(program), live_at_entry(program)
    found = {name: set[str]() for name in frontiers}
    writers: dict[str, list[str]] = {}
    for name in frontiers:
        for each in program.blocks[name].instructions:
            writers.setdefault(each.target, []).append(name)
    for variable, where in writers.items():
        waiting = list(where)
        while waiting:
            for name in frontiers[waiting.pop()]:
                if variable in live[name] and variable not in found[name]:
                    found[name].add(variable)
                    waiting.append(name)
    return {name: sorted(each) for name, each in found.items()}


def single_assignment(program: FlowProgram) -> FlowProgram:
    """Return the program with each variable written once, and without blocks that control cannot come to. A variable
    `x` becomes `x.1`, `x.2` …; the value that it had before the program is `x.0`."""
    places, above = phi_places(program), immediate_dominators(program)
    below: dict[str, list[str]] = {name: [] for name in places}
    for name, over in above.items():
        below[over].append(name)
    counts: dict[str, int] = {}
    made: dict[str, FlowBlock] = {}
    phis: dict[str, dict[str, tuple[str, dict[str, str]]]] = {name: {} for name in places}

    def written(variable: str) -> str:
        counts[variable] = counts.get(variable, 0) + 1
        return f"{variable}.{counts[variable]}"

    waiting: list[tuple[str, dict[str, str]]] = [(program.entry, {})]  # a block, and the names when control comes there
    while waiting:
        name, names = waiting.pop()
        block, names = program.blocks[name], dict(names)
        for variable in places[name]:
            names[variable] = written(variable)
            phis[name][variable] = names[variable], phis[name].get(variable, ("", {}))[1]
        instructions = []
        for each in block.instructions:
            operands = tuple(_named(x, names) if isinstance(x, str) else x for x in each.operands)
            names[each.target] = written(each.target)
            instructions.append(FlowInstruction(names[each.target], each.op, operands))
        for target in block.targets:
            for variable in places[target]:
                kept = phis[target].setdefault(variable, ("", {}))
                kept[1][name] = _named(variable, names)
        made[name] = replace(
            block, instructions=tuple(instructions), condition=_named(block.condition, names),
            result=_named(block.result, names),
        )  # fmt: skip
        waiting += [(each, names) for each in below[name]]
    return FlowProgram({
        name: replace(made[name], phis=tuple(PhiNode(*phis[name][variable]) for variable in places[name]))
        for name in program.reached()
    })  # fmt: skip


def _named(variable: str, names: Mapping[str, str]) -> str:
    return names.get(variable, f"{variable}.0") if variable else ""


def run(program: FlowProgram, given: Mapping[str, float], ops: Mapping[str, object], steps: int = 1000) -> float | None:
    """Return the result of a program, None after so many blocks without one. φs of a block read before they write.

    given: variables before the program. ops: name → function of numbers.
    """
    values, name, came = dict(given), program.entry, ""
    for _ in range(steps):
        block = program.blocks[name]
        values.update({phi.target: values[phi.sources[came]] for phi in block.phis})
        for each in block.instructions:
            function = ops[each.op]
            assert callable(function)
            values[each.target] = function(*(values[x] if isinstance(x, str) else x for x in each.operands))
        if not block.targets:
            return values[block.result] if block.result else 0.0
        chosen = 0 if not block.condition or values[block.condition] else 1
        came, name = name, block.targets[chosen]
    return None


def written_twice(program: FlowProgram) -> Sequence[str]:
    """Return the variables of a program that more than one instruction or φ writes."""
    seen, twice = set[str](), list[str]()
    for block in program.blocks.values():
        for target in (*(each.target for each in block.phis), *(each.target for each in block.instructions)):
            (twice.append if target in seen else seen.add)(target)
    return twice
