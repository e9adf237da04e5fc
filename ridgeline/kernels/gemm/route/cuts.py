"""The cuts of the kernels that route, which a sweep tries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from ridgeline.kernels.base.case import Cuts, Tuning
from ridgeline.kernels.base.routing import RoutingSpec
from ridgeline.kernels.base.tuned import ShapeClass
from ridgeline.kernels.gemm.route.cases import RouteCase
from ridgeline.kernels.gemm.route.choose import MATRIX_BLOCK, MOST_TOKENS, Few, Many, choose, class_of, power_of_two
from ridgeline.kernels.gemm.route.triton import route

PROCESSORS = 132  # of an H200
FEW_PROGRAMS = range(32, 1057)  # of few.py that a GPU of some 132 multiprocessors starts at once
SHARED = 227_000  # bytes of shared memory that a program on Hopper takes
SEVERAL = 8  # tokens up to which a tile of the matrix units is mostly empty


def candidates(case: RouteCase) -> list[Few | Many]:
    """Return the chosen cut, then others whose tiles registers and shared memory hold."""
    chosen = choose(case.tokens, case.width, case.how.experts, hopper=True)
    vector = choose(case.tokens, case.width, case.how.experts, itemsize=4)
    few = _few(vector, case) if isinstance(vector, Few) else ()
    return list(dict.fromkeys((chosen, *few, *_matrix(case), *_many(case))))


def _few(chosen: Few, case: RouteCase) -> Iterator[Few]:
    tokens, number = case.tokens, case.how.experts
    for rows, each, warps in itertools.product((1, 2, 4, 8), (1, 2, 4), (2, 4, 8)):
        fits = max(rows, 2 * each) * chosen.block <= 128 * 32 * warps
        programs = -(-number // rows) * -(-tokens // each)
        if fits and each <= tokens and programs in FEW_PROGRAMS:
            for group in {max(power_of_two(tokens), warps), max(each, warps)}:
                if group * chosen.experts <= 1024 * warps:
                    yield replace(chosen, rows=rows, each=each, group=group, warps=warps)


def _matrix(case: RouteCase) -> Iterator[Few]:
    """Yield cuts of few.py on the matrix units, whose programs keep their operands in registers."""
    tokens, padded, block = case.tokens, power_of_two(case.how.experts), max(256, power_of_two(case.width))
    for each, rows in itertools.product((8, 16), (16, 32)):
        fits = (each + rows) * block <= 48 * 2048 and rows <= padded
        if SEVERAL <= tokens <= MOST_TOKENS and block <= MATRIX_BLOCK and fits:
            warps = block // 256
            yield Few(rows, each, block, power_of_two(tokens), max(16, padded), max(each, warps), warps, matrix=True)


def _many(case: RouteCase) -> Iterator[Many]:
    padded = power_of_two(case.how.experts)
    for tile, block, warps, stages in itertools.product((16, 32, 64), (64, 128), (4, 8), (3, 4, 5)):
        fits = tile * padded <= 2048 * warps and 2 * (tile + padded) * block * stages <= SHARED
        if case.tokens > SEVERAL and fits:
            yield Many(tile, max(16, padded), block, warps, stages)


def with_cut(cut: Few | Many) -> Callable[..., Any]:
    return partial(route, plan=cut)


def cost(case: RouteCase, cut: Few | Many) -> float:
    """Return a rank of a cut: those of about as many programs as multiprocessors come first, and of these the ones that
    read x and the router's rows the least often."""
    tokens, experts = case.tokens, case.how.experts
    if isinstance(cut, Many):
        laps = math.ceil(math.ceil(tokens / cut.tokens) / PROCESSORS)
        return 7e-6 + laps * (2e-6 + case.width * (cut.tokens + experts) / 5e10) - 1e-8 * cut.stages
    columns, rows = -(-tokens // cut.each), -(-experts // cut.rows)
    programs = columns * rows
    read = programs * case.width * 2 * (cut.rows + cut.each) / 6e12
    chosen = 0.3e-6 * max(1.0, cut.group / cut.warps) * experts / 128
    return 3e-6 + read + chosen + 0.6e-6 * max(0.0, programs / PROCESSORS - 1) + 0.4e-6 * max(0.0, 1 - programs / 100)


def shape(case: RouteCase) -> ShapeClass:
    """Return the class of a case, for `triton._tuned`."""
    return class_of(case.tokens, case.width, case.how.experts)


def drawn(random: Random) -> RouteCase:
    """Return the routing of any number of tokens, by a mixture of a class or another small one."""
    other = 128 * random.randint(8, 48), random.choice((16, 32, 64, 128)), random.choice((2, 4, 8))
    width, experts, used = random.choice((random.choice(MIXTURES), other))
    how = RoutingSpec(experts=experts, top_k=used, renormalize=True)
    return RouteCase(random.randint(1, 300), width, how, exact=True)


MIXTURES = ((2048, 128, 8), (2880, 32, 4), (1536, 40, 8))
CLASSES = [
    RouteCase(tokens, width, RoutingSpec(experts=experts, top_k=used, renormalize=True), exact=True)
    for width, experts, used in MIXTURES for tokens in (1, 8, 64, 256)
]  # fmt: skip
OP_CUTS = {
    "route": Cuts(
        candidates, with_cut, interpreted=(Few, Many), cost=cost, tuning=Tuning(CLASSES, shape, drawn, (Few, Many))
    )
}
