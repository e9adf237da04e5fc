"""The way from one placement of experts to another, in moves of which each leaves every expert somewhere.

Legend:
    S  slots of all ranks: slot s of rank r has the number r · slots + s
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ridgeline.perf.placement import RankExperts

Takes = tuple[tuple[int, int], ...]  # slots, and for each the slot whose expert it takes; all of them at once


def near(held: RankExperts, wanted: RankExperts) -> RankExperts:
    """Return an arrangement as good as `wanted` for which few slots of `held` change. Ranks are alike, so each gets the
    wanted part of which it has most already, and an expert that stays on its rank stays in its slot."""
    shared = {
        (rank, part): (Counter(own) & Counter(other)).total()
        for rank, own in enumerate(held)
        for part, other in enumerate(wanted)
    }
    part_of: dict[int, int] = {}
    for rank, part in sorted(shared, key=lambda pair: (-shared[pair], pair)):
        if rank not in part_of and part not in part_of.values():
            part_of[rank] = part
    return tuple(_in_place(own, wanted[part_of[rank]]) for rank, own in enumerate(held))


def takes(held: RankExperts, wanted: RankExperts, most: int) -> Iterator[Takes]:
    """Yield the moves from `held` to `wanted`, of at most so many slots each (two at least). A slot whose expert lies
    elsewhere too takes another one; where there is none, two slots swap."""
    now_S, goal_S = [expert for each in held for expert in each], [expert for each in wanted for expert in each]
    before_S = list(now_S)
    while wrong := [slot for slot, expert in enumerate(now_S) if expert != goal_S[slot]]:
        count = Counter(now_S)
        spare = next((slot for slot in wrong if count[now_S[slot]] > 1), None)
        changed = {spare: goal_S[spare]} if spare is not None else _swapped(wrong[0], now_S, goal_S)
        changing = {slot for slot in range(len(now_S)) if now_S[slot] != before_S[slot]} | set(changed)
        if len(changing) > most:
            yield _between(before_S, now_S)
            before_S = list(now_S)
        for slot, expert in changed.items():
            now_S[slot] = expert
    if now_S != before_S:
        yield _between(before_S, now_S)


def _in_place(own: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the wanted experts, those that are there already in their slots."""
    coming = Counter(wanted)
    kept: list[int | None] = []
    for expert in own:
        stays = coming[expert] > 0
        coming[expert] -= stays
        kept.append(expert if stays else None)
    rest = iter(sorted(coming.elements()))
    return tuple(next(rest) if expert is None else expert for expert in kept)


def _swapped(slot: int, now_S: Sequence[int], goal_S: Sequence[int]) -> dict[int, int]:
    """Return the experts of two slots, once the only copy of this slot's expert has gone where it is wanted."""
    other = goal_S.index(now_S[slot])
    return {slot: now_S[other], other: now_S[slot]}


def _between(before_S: Sequence[int], after_S: Sequence[int]) -> Takes:
    return tuple((slot, before_S.index(expert)) for slot, expert in enumerate(after_S) if expert != before_S[slot])
