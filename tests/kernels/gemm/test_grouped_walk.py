"""How programs of the Hopper kernels divide experts' products: every block of every item once, whatever the counts.

Work is divided by functions of the kernels themselves. They run here in Python, over all programs, with a stand-in for
Gluon's language.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
from ridgeline.kernels.gemm.experts import hopper_load, hopper_stream, hopper_tiles, hopper_walk


class Pointer:
    """An address in an array; reading outside of it is an error."""

    def __init__(self, values: list[int], at: Any = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.at + offset)


class Language:
    """The part of Gluon's language that the walk uses, for numbers and vectors. One program runs at a time."""

    def __init__(self, program: int, programs: int) -> None:
        self.program, self.programs = program, programs

    def program_id(self, axis: int) -> int:
        return self.program

    def num_programs(self, axis: int) -> int:
        return self.programs

    def num_warps(self) -> int:
        return 4

    @staticmethod
    def load(pointer: Pointer, mask: Any = True, other: int = 0, cache_modifier: str = "") -> Any:
        at, mask = np.broadcast_arrays(pointer.at, mask)
        read = [pointer.values[i] if real else other for i, real in zip(at.flat, mask.flat, strict=True)]
        assert all(i >= 0 for i, real in zip(at.flat, mask.flat, strict=True) if real)
        return np.array(read) if at.ndim else read[0]

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, a, b) if np.ndim(condition) else (a if condition else b)

    @staticmethod
    def associative_scan(x: Any, axis: int, combine: Callable[[int, int], int]) -> Any:
        assert combine(2, 3) == 5
        return np.cumsum(x)

    minimum, maximum = staticmethod(min), staticmethod(max)
    expand_dims = staticmethod(np.expand_dims)
    SliceLayout = staticmethod(lambda *_: None)
    arange = staticmethod(lambda start, end, layout: np.arange(start, end))
    sum = staticmethod(lambda x, axis: int(x.sum()))
    max = staticmethod(lambda x, axis: int(x.max()))
    static_range = range
    BlockedLayout = staticmethod(lambda *_: None)


def in_python(function: Any, language: Language, **names: Any) -> Any:
    """Return a kernel's function as one of Python, with the walk's functions likewise, and others replaced."""
    found: dict[str, Any] = {"gl": language, "slots": hopper_walk.slots, "range": range, "min": min} | names
    found["hear"] = lambda table, place: table[place]
    for name in ("_added", "share", "counts_of", "begin_share", "next_piece", "find_item", "owner"):
        found[name] = FunctionType(getattr(hopper_walk, name).fn.__code__, found)
    return FunctionType(function.fn.__code__, found, argdefs=function.fn.__defaults__)


def start_of(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)]


def patterns() -> Iterator[list[int]]:
    """Pairs of each expert: uniform, skewed, one expert, gaps, none at all."""
    draw = random.Random(0)
    yield from ([0] * 8, [0, 0, 1, 0], [300], [0] * 100 + [7] + [0] * 27, [16, 17, 15, 0, 33, 1])
    for experts in (4, 32, 60, 128):
        for most in (1, 3, 60):
            yield [draw.randrange(most + 1) * (draw.random() < 0.7) for _ in range(experts)]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("tokens", "tiles", "blocks", "programs"),
    [
        pytest.param(*cut, programs, marks=pytest.mark.thorough if programs == slow else ())
        for cut, slow in (((16, 3, 12), 132), ((64, 2, 3), 264), ((32, 1, 1), 132), ((16, 1, 45), 264))
        for programs in (1, 5, 132, 264)
    ],
)
def test_shares_hold_every_block_of_every_item_once(tokens: int, tiles: int, blocks: int, programs: int) -> None:
    """The four roles of a program walk alike, and the programs of an item that is cut know each other."""
    rows, inputs, outputs = 64, blocks * 64, tiles * 64
    for counts in patterns():
        start, experts = start_of(counts), len(counts)
        done: Counter[tuple[int, int, int, int]] = Counter()
        shares, pieces, told = [], {}, {}
        for program in range(programs):
            language, walked = Language(program, programs), _Walked()
            known = in_python(hopper_walk.counts_of, language)(Pointer(start), experts)
            begin = in_python(hopper_walk.begin_share, language)(
                *known, program, programs, experts, tokens, tiles, blocks
            )
            at, end, total, expert, place, first, count = begin
            shares.append((at, end))
            walk = (at, end, expert, place, first, count)
            walked.run(language, counts, walk, total, rows, tokens, tiles, inputs, outputs)
            owner = in_python(hopper_walk.owner, language)
            for number, (_, steps, block, row, pair, last, expert_row, width) in enumerate(walked.consumed):
                done.update((expert_row, row, pair, block + i) for i in range(steps))
                assert pair < last
                assert width == 8 if last - pair <= 8 else tokens
                # A program has places for two parts: of its first item and, if it begins there, of its last
                assert block == 0 or number == 0
                assert block + steps == blocks or number == len(walked.consumed) - 1
                item, first_block = (expert_row, row, pair), walked.at[number] - block
                pieces.setdefault(item, []).append(program)
                told[program, item] = tuple(
                    owner(each, programs, total) for each in (first_block, first_block + blocks - 1)
                )
            assert walked.gathered == [
                (step, steps, pair, min(last - pair, 10**9), block, width)
                for step, steps, block, _, pair, last, _, width in walked.consumed
            ]
            assert walked.streamed == [
                (step + i, expert_row + row, block + i)
                for step, steps, block, row, _, _, expert_row, _ in walked.consumed
                for i in range(steps)
            ]
            assert walked.scaled == [  # of 32 inputs each, so half as many as there are blocks of 64 of a row
                (expert_row + row) * blocks * 2 for _, _, _, row, _, _, expert_row, _ in walked.consumed
            ]
        lengths = [end - at for at, end in shares]
        assert max(lengths) - min(lengths) <= 1
        expected = Counter(
            (expert * outputs, tile * rows, start[expert] + pair, block)
            for expert, count in enumerate(counts)
            for tile in range(tiles)
            for pair in range(0, count, tokens)
            for block in range(blocks)
        )
        assert done == expected
        for (_, item), (begin, last_program) in told.items():
            assert pieces[item] == list(range(begin, last_program + 1))


class _Walked:
    """What each role of a program is told to do."""

    def __init__(self) -> None:
        self.consumed: list[tuple[int, ...]] = []
        self.gathered: list[tuple[int, ...]] = []
        self.streamed: list[tuple[int, ...]] = []
        self.scaled: list[int] = []
        self.at: list[int] = []

    def run(
        self, language: Language, counts: list[int], walk: tuple[int, ...], total: int,
        rows: int, tokens: int, tiles: int, inputs: int, outputs: int,
    ) -> None:  # fmt: skip
        at, end, *expert = walk

        def finish(*given):  # type: ignore[no-untyped-def]
            step, steps, at, all_, expert, row, pair, last, width = given[14:23]
            assert all_ == total
            self.at.append(at)
            self.consumed.append((step, steps, at % (inputs // 64), row, pair, last, expert * outputs, width))

        def gather(*given):  # type: ignore[no-untyped-def]
            beside, _, _, step, steps, pair, pairs, block, _, width = given[7:17]
            self.gathered.append((step, steps, pair, pairs, block, width))
            self.scaled.append(beside)

        def load(descriptor: Any, corner: list[int], bar: Any, tile: Any) -> None:
            self.streamed.append((load.step, corner[0], corner[1] // 64))  # type: ignore[attr-defined]
            load.step += 1  # type: ignore[attr-defined]

        load.step = 0  # type: ignore[attr-defined]

        number = SimpleNamespace(primitive_bitwidth=16)
        ring = SimpleNamespace(index=lambda i: None, shape=(0, 4, 64), dtype=number)
        quiet = SimpleNamespace(wait=lambda *_: None, expect=lambda *_: None)
        names = {"mbarrier": quiet, "_finish": finish, "gather_rows": gather, "load_tile": load}
        names["_load_panels"] = in_python(hopper_load._load_panels, language, **names)
        consumer, gatherer, streamer = (
            in_python(role, language, **names)
            for role in (hopper_stream._consumer, hopper_load.gatherer, hopper_load.streamer)
        )
        cut = {"TOKENS": tokens, "TILES": tiles, "BLOCK": 64, "STAGES": 4, "INPUTS": inputs}
        cut |= {"OUTPUTS": outputs, "ROWS": rows, "PARTS": 1}
        consumer(
            *(None,) * 6, counts, *(0,) * 8, at, end, total, *expert, NARROW=8, KIND="", SPAN=1, FACTOR=False,
            GATHER=True, BIAS=False, GATE="", APART=False, ZEROS=False, PDL=False, **cut,
        )  # fmt: skip
        beside = {"NARROW": 8, "GATHER": True, "BESIDE": "codes", "ZEROS": False, "PDL": False}
        scales = SimpleNamespace(shape=(0, rows // 64, 256))  # 32 inputs share one
        gatherer(None, None, 0, 0, 0, counts, None, scales, None, None, None, *walk, **beside, **cut)
        streamer(None, counts, ring, ring, ring, *walk, BYTES=128, CODED=False, **cut)


@pytest.mark.few(3)
@pytest.mark.parametrize("before", [0, 37], ids="{} pairs of other experts".format)
@pytest.mark.parametrize("programs", [1, 7, 132])
def test_tickets_hand_out_every_tile_once_and_the_counter_is_left_at_zero(programs: int, before: int) -> None:
    tiles = 6
    for counts in patterns():
        start, ticket, told = [before + first for first in start_of(counts)], [0], []

        def add(pointer: Pointer, value: int, sem: str) -> int:
            pointer.values[0] += value
            return pointer.values[0] - value

        def put(pointer: Pointer, value: int) -> None:
            pointer.values[0] = value

        for program in range(programs):  # the first one draws nearly all, as if the others were slow
            news: dict[int, int] = {}

            def tell(slots: dict[int, int], place: int, value: int) -> None:
                slots[place % 4] = value

            def arrive(bar: Any, count: int, news: Any = news, told: Any = told) -> None:
                if news[1]:
                    told.append(tuple(news[i] for i in range(4)))

            language = Language(program, programs)
            language.atomic_add, language.store = add, put  # type: ignore[attr-defined]
            bars = SimpleNamespace(index=lambda i: None)
            scheduler = in_python(
                hopper_tiles._scheduler, language, PAIRS=128, tell=tell,
                mbarrier=SimpleNamespace(wait=lambda *_: None, arrive=arrive),
            )  # fmt: skip
            # Vectors of experts are as long as the real ones; reading behind the last expert would be an error
            scheduler(Pointer(start), Pointer(ticket), news, bars, bars, len(counts), tiles, False)
        assert ticket == [0]
        assert Counter(told) == Counter(
            (start[expert] + pair, min(128, count - pair), expert, tile)
            for expert, count in enumerate(counts)
            for tile in range(tiles)
            for pair in range(0, count, 128)
        )
