"""The ranks on which experts lie, with copies of those that have most to do.

As in DeepSeek's load balancer (EPLB; DeepSeek-V3, arXiv 2412.19437, section 3.4) copies go first, then places. Each
further copy is of the expert with the most tokens a copy. Then the copies, in falling order of their tokens, go each to
the rank that has least so far (longest processing time first; Graham, SIAM J. Appl. Math. 17(2), 1969). At last
copies of the rank that has most are swapped with others as long as that helps.

Legend:
    E  experts
    R  ranks
    S  an expert's copies that lie on one rank: its slots
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

RankExperts = tuple[tuple[int, ...], ...]  # of each rank: the experts in its slots


def placed(tokens_E: ArrayLike, ranks: int, slots: int) -> RankExperts:
    """Return the experts of each rank, in ascending order, if every rank has `slots` of them. Every expert lies
    somewhere, and no rank has two copies of one as long as there are so many experts. Equal loads are placed in the
    order of experts, so the same load gives the same places.

    tokens_E: what each expert got in some run. An expert's copies share its tokens equally.
    """
    load_E = np.asarray(tokens_E, np.float64)
    if ranks * slots < len(load_E):
        raise ValueError(f"{ranks} ranks of {slots} slots have no room for {len(load_E)} experts")
    copies_E = copies(load_E, ranks, ranks * slots)
    share_E = load_E / copies_E
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for expert in sorted(range(len(load_E)), key=lambda expert: (-share_E[expert], expert)):
        for _ in range(copies_E[expert]):
            free = [rank for rank in range(ranks) if len(held[rank]) < slots]
            rank = min(free, key=lambda rank: (expert in held[rank], sums[rank], rank))
            if expert in held[rank] and slots <= len(load_E):  # ranks without it are full: one makes room
                lacking = [other for other in range(ranks) if expert not in held[other]]
                other = min(lacking, key=lambda other: (sums[other], other))
                given = next(each for each in reversed(held[other]) if each not in held[rank])
                held[other].remove(given)
                held[rank].append(given)
                sums[other] -= share_E[given]
                sums[rank] += share_E[given]
                rank = other
            held[rank].append(expert)
            sums[rank] += share_E[expert]
    while _swap(held, share_E):
        pass
    return tuple(tuple(sorted(each)) for each in held)


def copies(load_E: np.ndarray, ranks: int, total: int) -> list[int]:
    """Return the number of copies of each expert, of `total`. More than one on each rank would be of no use."""
    found = [1] * len(load_E)
    for _ in range(total - len(found)):
        share = [(-load / count, expert) for expert, (load, count) in enumerate(zip(load_E, found, strict=True))]
        useful = [each for each in share if found[each[1]] < ranks]
        found[min(useful or share)[1]] += 1
    return found


def rank_loads(tokens_E: ArrayLike, held: RankExperts) -> np.ndarray:
    """Return each rank's share of the tokens, if an expert's copies share them equally: float64 [R]."""
    load_E = np.asarray(tokens_E, np.float64)
    count = Counter(expert for each in held for expert in each)
    return np.array([sum(load_E[expert] / count[expert] for expert in each) for each in held])


def equal_parts(experts: int, ranks: int) -> RankExperts:
    """Return the places without a measured load: each rank has the next part of the experts."""
    part = experts // ranks
    return tuple(tuple(range(part * rank, part * (rank + 1))) for rank in range(ranks))


def _swap(held: Sequence[list[int]], share_E: np.ndarray) -> bool:
    """Swap a copy of the rank that has most with another rank's, so that the larger of both sums falls most. Return
    False if no swap helps.

    Legend:
        A  copies of the rank that has most
        B  copies of another
    """
    held_RB = np.array(held)
    share_RB = share_E[held_RB]
    sum_R = share_RB.sum(1)
    most = int(sum_R.argmax())
    own_A, before = held_RB[most], sum_R[most]
    less_RAB = share_RB[most][:, None] - share_RB[:, None, :]
    after_RAB = np.maximum(before - less_RAB, sum_R[:, None, None] + less_RAB)
    shared_RAB = own_A[:, None] == held_RB[:, None, :]
    after_RAB[shared_RAB.any(2)] = np.inf  # no rank needs two copies of an expert
    after_RAB.swapaxes(1, 2)[shared_RAB.any(1)] = np.inf
    rank, i, j = map(int, np.unravel_index(after_RAB.argmin(), after_RAB.shape))
    if not after_RAB[rank, i, j] < before * (1 - 1e-9):  # 1e-9: what rounding makes of nothing
        return False
    held[most][i], held[rank][j] = held[rank][j], held[most][i]
    return True
