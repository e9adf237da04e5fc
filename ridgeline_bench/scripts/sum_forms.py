"""Sums over many ranks by a ring, a tree, two trees and on two levels, counted message by message.

    python -m ridgeline_bench.scripts.sum_forms

A simulation, no measurement. A message of n bytes keeps its sender and its target for n β, each of which sends one and
receives one at a time, and is there α later. Adding up is free. Between ranks of a host messages take the fast link,
else the slow one. What ranks end with is checked: the whole sum, with every rank's numbers in it once.

    ring         S / n goes around twice. 2 (n - 1) messages in turn, and the fewest bytes: 2 (n - 1) / n S
    tree         up to a root and down again, in pieces. Some 2 log2 n messages in turn, but an inner rank sends 3 S
    two trees    a half of S in each of two trees: the leaves of one are inner ranks of the other, so that each rank
                 sends and receives 2 S (Sanders, Speck, Träff, Parallel Computing 35(12), 2009)
    two levels   a reduce-scatter in each host, a ring over hosts for each part, an all-gather in each host
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

PIECE, MOST_PIECES = 65_536, 64  # bytes of a piece that goes through a tree, and pieces at most


class Link(NamedTuple):
    """Seconds of a message without bytes, and seconds a byte."""

    alpha: float
    beta: float


FAST = Link(2e-6, 1 / 300e9)  # about what two H200s of one host have
SLOW = Link(5e-6, 1 / 50e9)  # an adapter of 400 Gbit/s for each GPU


class Message(NamedTuple):
    """Parts of the tensor on their way. step: order. add: to what the target has of them; else in place of it."""

    step: int
    source: int
    target: int
    parts: tuple[int, ...]
    nbytes: float
    add: bool


def ring(ranks: int, nbytes: float, hosts: int = 1) -> list[Message]:
    return around(range(ranks), [(part,) for part in range(ranks)], nbytes)


def around(ranks: Iterable[int], parts: Sequence[tuple[int, ...]], nbytes: float, step: int = 0) -> list[Message]:
    """Return a reduce-scatter, and then an all-gather, in a ring of these ranks. Place r of them adds up part r + 1."""
    ring = list(ranks)
    n = len(ring)
    return [
        Message(step + turn, ring[r], ring[(r + 1) % n], parts[(r - turn) % n], nbytes / n, turn < n - 1)
        for turn in range(2 * (n - 1))
        for r in range(n)
    ]


def tree(ranks: int, nbytes: float, hosts: int = 1) -> list[Message]:
    return through([parents(ranks)], nbytes)


def two_trees(ranks: int, nbytes: float, hosts: int = 1) -> list[Message]:
    first = parents(ranks)
    return through([first, {(rank + 1) % ranks: (parent + 1) % ranks for rank, parent in first.items()}], nbytes)


def through(trees: list[dict[int, int]], nbytes: float) -> list[Message]:
    """Return an equal share of the bytes in each tree, piece behind piece."""
    share = nbytes / len(trees)
    pieces = max(1, min(MOST_PIECES, round(share / PIECE)))
    found = []
    for number, parent in enumerate(trees):
        depth = {rank: depth_of(rank, parent) for rank in parent}
        deepest = max(depth.values())
        for piece in range(pieces):
            part, n = (number * pieces + piece,), share / pieces
            for rank, d in depth.items():
                up, down = 2 * piece + deepest - d, 2 * piece + deepest + d
                found += [Message(up, rank, parent[rank], part, n, True)]
                found += [Message(down, parent[rank], rank, part, n, False)]
    return sorted(found)


def parents(ranks: int) -> dict[int, int]:
    """Return the parent of every rank but the root, in a binary tree in whose order ranks lie, with all even ranks as
    leaves."""
    found: dict[int, int] = {}

    def grow(low: int, high: int, parent: int | None) -> None:
        if low < high:
            top = max(range(low, high), key=lambda rank: (rank + 1) & -(rank + 1))
            if parent is not None:
                found[top] = parent
            grow(low, top, top)
            grow(top + 1, high, top)

    grow(0, ranks, None)
    return found


def depth_of(rank: int, parent: dict[int, int]) -> int:
    return 1 + depth_of(parent[rank], parent) if rank in parent else 0


def two_levels(ranks: int, nbytes: float, hosts: int) -> list[Message]:
    local = ranks // hosts
    parts = [tuple(range(part * hosts, (part + 1) * hosts)) for part in range(local)]
    within = [m for host in range(hosts) for m in around(range(host * local, (host + 1) * local), parts, nbytes)]
    between = []
    for place in range(local):
        own = [(part,) for part in parts[(place + 1) % local]]
        between += around(range(place, ranks, local), own, nbytes / local, step=local)
    behind = [m._replace(step=m.step + local + 2 * hosts) for m in within if not m.add]
    return sorted([m for m in within if m.add] + between + behind)


FORMS: dict[str, Callable[[int, float, int], list[Message]]] = {
    "ring": ring, "tree": tree, "two trees": two_trees, "two levels": two_levels
}  # fmt: skip


def seconds(messages: list[Message], ranks: int, hosts: int = 1) -> float:
    """Return the seconds until all ranks have the sum. Messages leave in the order of their steps, but none waits for
    one that cannot leave yet. Raise AssertionError if ranks do not get the sum."""
    has: dict[tuple[int, int], int] = {}  # whose numbers a rank has added up of a part, one bit for each
    into: dict[tuple[int, int], list[int]] = defaultdict(list)
    after: list[list[int]] = [[] for _ in messages]
    missing = [0] * len(messages)
    for index, message in enumerate(messages):
        for part in message.parts:
            for before in into[message.source, part]:
                after[before].append(index)
                missing[index] += 1
            into[message.target, part].append(index)
    for part in {part for message in messages for part in message.parts}:
        has |= {(rank, part): 1 << rank for rank in range(ranks)}
    ready = [index for index, count in enumerate(missing) if not count]
    sending, receiving, under_way, now = set[int](), set[int](), list[tuple[float, int, bool]](), 0.0
    while ready or under_way:
        for index in list(ready):
            _, source, target, _, nbytes, _ = messages[index]
            if source not in sending and target not in receiving:
                link = FAST if source * hosts // ranks == target * hosts // ranks else SLOW
                heappush(under_way, (now + nbytes * link.beta, index, False))
                heappush(under_way, (now + nbytes * link.beta + link.alpha, index, True))
                sending.add(source)
                receiving.add(target)
                ready.remove(index)
        now, index, arrives = heappop(under_way)
        _, source, target, parts, _, add = messages[index]
        if not arrives:
            sending.remove(source)
            receiving.remove(target)
            continue
        for part in parts:
            sent = has[source, part]
            assert not add or not sent & has[target, part], "some numbers would be added twice"
            has[target, part] = has[target, part] | sent if add else sent
        for following in after[index]:
            missing[following] -= 1
            if not missing[following]:
                insort(ready, following)
    assert set(has.values()) == {(1 << ranks) - 1}, "not the sum"
    return now


def table() -> str:
    """Return microseconds of every form: a table in Markdown."""
    lines = ["| hosts x ranks | bytes | " + " | ".join(FORMS) + " |", "|---|--:|" + "--:|" * len(FORMS)]
    for hosts, local in ((1, 2), (1, 8), (4, 8), (16, 8)):
        for name, nbytes in (("8 KiB", 2**13), ("1 MiB", 2**20), ("64 MiB", 2**26)):
            ranks = hosts * local
            times = {form: 1e6 * seconds(make(ranks, nbytes, hosts), ranks, hosts) for form, make in FORMS.items()}
            best = min(times.values())
            cells = [f"**{t:,.0f}**" if t <= 1.02 * best else f"{t:,.0f}" for t in times.values()]
            lines.append(f"| {hosts} x {local} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
