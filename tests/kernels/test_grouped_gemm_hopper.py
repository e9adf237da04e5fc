"""Experts' products on Hopper: how programs divide them, their machine code, and on a GPU their results.

Work is divided by functions of the kernels themselves. They run here in Python, over all programs, with a stand-in for
Gluon's language.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.kernels.grouped_gemm import op
from ridgeline.kernels.grouped_gemm.hopper_plans import RING, Stream, Tiles, choose, stream

pytest.importorskip("triton")
from ridgeline.kernels.grouped_gemm import hopper, hopper_stream, hopper_tiles, hopper_walk

# Division of the work


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
    arange = staticmethod(lambda start, end, layout: np.arange(start, end))
    sum = staticmethod(lambda x, axis: int(x.sum()))
    max = staticmethod(lambda x, axis: int(x.max()))
    static_range = range
    BlockedLayout = staticmethod(lambda *_: None)


def in_python(function: Any, language: Language, **names: Any) -> Any:
    """Return a kernel's function as one of Python, with the walk's functions likewise, and others replaced."""
    found: dict[str, Any] = {"gl": language, "slots": hopper_walk.slots, "range": range, "min": min} | names
    found["hear"] = lambda table, place: table[place]
    for name in ("_added", "share", "counts_of", "begin_share", "next_piece", "find_item"):
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


@pytest.mark.parametrize("programs", [1, 5, 132, 264])
@pytest.mark.parametrize(("tokens", "tiles", "blocks"), [(16, 3, 12), (64, 2, 3), (32, 1, 1), (16, 1, 45)])
def test_shares_hold_every_block_of_every_item_once(tokens: int, tiles: int, blocks: int, programs: int) -> None:
    """The three roles of a program walk alike, and an item that is cut is put together from the right programs."""
    rows, inputs, outputs = 64, blocks * 64, tiles * 64
    for counts in patterns():
        start, experts = start_of(counts), len(counts)
        done: Counter[tuple[int, int, int, int]] = Counter()
        shares, finished, left = [], [], {}
        for program in range(programs):
            language, walked = Language(program, programs), _Walked()
            known = in_python(hopper_walk.counts_of, language)(Pointer(start), experts)
            begin = in_python(hopper_walk.begin_share, language)(
                *known, program, programs, experts, tokens, tiles, blocks
            )
            at, end, total, expert, place, first, count = begin
            shares.append((at, end))
            walk = (at, end, expert, place, first, count)
            walked.run(hopper_stream, language, counts, walk, total, rows, tokens, tiles, inputs, outputs)
            for number, (_, steps, block, row, pair, last, expert_row, width) in enumerate(walked.consumed):
                done.update((expert_row, row, pair, block + i) for i in range(steps))
                assert pair < last
                assert width == 8 if last - pair <= 8 else tokens
                if block > 0:
                    assert number == 0  # a program leaves one part at most
                    left[program] = (expert_row, row, pair, block, block + steps)
                else:
                    finished.append((program, expert_row, row, pair, steps))
            assert walked.gathered == [
                (step, steps, pair, min(last - pair, 10**9), block, width)
                for step, steps, block, _, pair, last, _, width in walked.consumed
            ]
            assert walked.streamed == [
                (step + i, expert_row + row, block + i)
                for step, steps, block, row, _, _, expert_row, _ in walked.consumed
                for i in range(steps)
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
        for program, *item, steps in finished:
            covered, other = steps, program
            while covered < blocks:
                other += 1
                behind = min(covered + lengths[other], blocks)
                assert left.pop(other) == (*item, covered, behind)
                covered = behind
        assert not left


class _Walked:
    """What each role of a program is told to do."""

    def __init__(self) -> None:
        self.consumed: list[tuple[int, ...]] = []
        self.gathered: list[tuple[int, ...]] = []
        self.streamed: list[tuple[int, ...]] = []

    def run(
        self, module: Any, language: Language, counts: list[int], walk: tuple[int, ...], total: int,
        rows: int, tokens: int, tiles: int, inputs: int, outputs: int,
    ) -> None:  # fmt: skip
        at, end, *expert = walk

        def finish(w, x, full, empty, bias, y, sums, flag, step, steps, block, all_, row, pair, last, width, *rest):  # type: ignore[no-untyped-def]
            assert all_ == total
            self.consumed.append((step, steps, block, row, pair, last, bias, width))

        def gather(x, token, ring, full, empty, step, steps, pair, pairs, block, width, *rest):  # type: ignore[no-untyped-def]
            self.gathered.append((step, steps, pair, pairs, block, width))

        def load(descriptor: Any, corner: list[int], bar: Any, tile: Any) -> None:
            self.streamed.append((load.step, corner[0], corner[1] // 64))  # type: ignore[attr-defined]
            load.step += 1  # type: ignore[attr-defined]

        load.step = 0  # type: ignore[attr-defined]
        ring = SimpleNamespace(index=lambda i: None)
        quiet = SimpleNamespace(wait=lambda *_: None, expect=lambda *_: None)
        names = {"mbarrier": quiet, "PANEL": 64, "_finish": finish, "gather_rows": gather, "load_tile": load}
        consumer, gatherer, streamer = (
            in_python(getattr(module, name), language, **names) for name in ("_consumer", "_gatherer", "_streamer")
        )
        cut = {"TOKENS": tokens, "TILES": tiles, "BLOCK": 64, "STAGES": 4, "INPUTS": inputs}
        consumer(
            None, None, None, None, counts, 0, 0, 0, 0, at, end, total, *expert,
            OUTPUTS=outputs, ROWS=rows, PARTS=1, NARROW=8, BIAS=False, GATE="", **cut,
        )  # fmt: skip
        gatherer(None, None, counts, None, None, None, *walk, NARROW=8, GATHER=True, PDL=False, **cut)
        streamer(None, counts, ring, ring, ring, *walk, OUTPUTS=outputs, ROWS=rows, PARTS=1, **cut)


@pytest.mark.parametrize("programs", [1, 7, 132])
def test_tickets_hand_out_every_tile_once_and_the_counter_is_left_at_zero(programs: int) -> None:
    tiles = 6
    for counts in patterns():
        start, ticket, told = start_of(counts), [0], []

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


# Plans


def test_every_cut_chosen_fits_the_device() -> None:
    for experts, used, width, inner in (
        (128, 8, 2048, 768),
        (60, 4, 2048, 1408),
        (32, 4, 2880, 2880),
        (8, 2, 4096, 14336),
    ):
        for tokens in (1, 2, 8, 33, 64, 200, 512, 1024, 3000, 8192):
            for gated, inputs in ((True, width), (False, inner)):
                plan = choose(tokens * used, experts, inputs, gated=gated)
                if isinstance(plan, Tiles):
                    assert tokens * used > 64 * experts
                    continue
                parts = 2 if gated else 1
                assert (plan.rows * parts + plan.tokens) * plan.block * 2 * plan.stages <= RING
                assert plan.stages >= 3
                assert plan.tokens % plan.narrow == 0
                assert plan.narrow % 8 == 0
                assert plan.tokens * parts <= 256  # sums in registers, 16 rows a warp


def test_two_programs_on_a_multiprocessor_share_its_registers() -> None:
    plan = stream(64, 32, 8, 64, 2048, gated=True, resident=2)
    assert plan.registers is not None
    assert plan.registers * 32 * (plan.warps + 8) * 2 <= 65_536
    assert plan.stages * (2 * 64 + 32) * 64 * 2 * 2 <= RING


# Machine code


def test_machine_code_uses_warpgroup_products_and_wide_copies() -> None:
    """Compiled in a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "ignore", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[0])
    assert len(found) == 5
    for name, counts in found.items():
        assert counts["HGMMA"] >= 8, name
        assert counts["HMMA"] == 0
        assert counts["UTMALDG"]
        assert counts["USETMAXREG"]
        assert counts["LDGSTS.E"] == counts["LDGSTS.E.BYPASS.128"]  # 16 bytes at a time, past the first-level cache
        assert bool(counts["LDGSTS.E"]) == ("GATHER=True" in name or "stream" in name)
        assert counts["WARPGROUP.DEPBAR"] == 4  # two loops; a product that ptxas serializes has a wait of its own
        assert counts["stack"] <= 64  # a role's arguments may be kept there, sums may not


# On a GPU

PLANS = [
    *(stream(64, 16, 8, 64, 2048, gated=True, resident=resident) for resident in (1, 2)),
    stream(64, 32, 16, 128, 2048, gated=True),
    stream(64, 128, 32, 64, 2048, gated=True),
    stream(128, 64, 16, 64, 2048, gated=True),
    Tiles(),
]
CASES = [
    op.Case(1, 256, 128, experts=8, used=2),
    op.Case(8, 2048, 768, experts=128, used=8, add=True),
    op.Case(64, 2048, 768, experts=128, used=8, add=True, skew=3.0, dead=5),
    op.Case(40, 512, 1408, experts=60, used=4, bias=True, gate="gelu_tanh", dead=40),
    op.Case(333, 256, 1536, experts=16, used=1, gate="gelu", skew=9.0, dead=7),
    op.Case(300, 2880, 2880, experts=32, used=4, bias=True, gate="swiglu_clamped"),
    op.Case(1000, 1032, 200, experts=4, used=2, bias=True, add=True, skew=0.5, dead=1),
    op.Case(3000, 512, 264, experts=1, used=1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", [*PLANS, None], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ops_equal_the_reference(
    case: op.Case, plan: Stream | Tiles | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NaN in every row of x and h that belongs to nobody, and in memory that was never written."""
    device = torch.device("cuda")
    x_TM, weight_EGM, bias_EG, routes, gate = case.gate_up_inputs(dtype, device)
    h_PF, weight_EMF, bias_EM, _, add_TM = case.down_inputs(dtype, device)
    if not hopper.supports(x_TM, weight_EGM):
        pytest.skip("not a Hopper GPU")
    kept = int(routes.start_E1[-1])
    x_TM[case.tokens - case.dead :] = torch.nan
    h_PF[kept:] = torch.nan
    up = op.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate)
    down = op.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM)
    eps = torch.finfo(dtype).eps
    for _ in range(2):  # the second time flags and tickets must be where the first needed them
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", nan)
            got_up = hopper.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate, plan)
            got_down = hopper.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM, plan)
        torch.testing.assert_close(got_up[:kept], up[:kept], rtol=4 * eps, atol=8 * eps)
        torch.testing.assert_close(got_down, down, rtol=4 * eps, atol=8 * eps)


@pytest.mark.gpu
def test_the_sum_of_a_tokens_pairs_is_in_float32_and_in_the_order_of_its_choice() -> None:
    device = torch.device("cuda")
    case = op.Case(50, 2880, 64, experts=16, used=4, add=True, dead=3)
    h_PF, weight_EMF, _, routes, add_TM = case.down_inputs(torch.bfloat16, device)
    y_PM = torch.randn(len(h_PF), case.width, device=device).bfloat16()
    y_PM[int(routes.start_E1[-1]) :] = torch.nan
    assert add_TM is not None
    total = torch.zeros(case.tokens, case.width, device=device)
    for k in range(case.used):
        real_T = routes.expert_TK[:, k] < case.experts
        rows_TM = y_PM[routes.place_TK[:, k].long()].float()
        total[real_T] = torch.addcmul(total, routes.weight_TK[:, k, None], rows_TM)[real_T]
    got = hopper.combine(y_PM, routes, add_TM, len(weight_EMF))
    torch.testing.assert_close(got, (total + add_TM).bfloat16(), rtol=2**-7, atol=0)


def nan(*shape: int, **options: Any) -> Tensor:
    """Fresh memory: what a kernel leaves unwritten, or reads before writing, shows."""
    return torch.full(shape, torch.nan, **options)


def machine_code() -> dict[str, dict[str, int]]:
    """How often instructions occur, and bytes of stack, in each kernel of the list that is for Hopper alone."""
    import triton

    from ridgeline.kernels.aot import build

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    wanted = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS.E", "LDGSTS.E.BYPASS.128", "USETMAXREG", "WARPGROUP.DEPBAR")
    found = {}
    for kernel in hopper.AOT:
        if kernel.options.archs != ("sm_90",):
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(build(kernel, "sm_90").asm["cubin"])
            file.flush()

            def run(tool: str, option: str, path: str = file.name) -> str:
                return subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True).stdout

            listing, usage = run("nvdisasm", "-c"), run("cuobjdump", "-res-usage")
        counts = {name: len(re.findall(rf"(?<![A-Z]){re.escape(name)}", listing)) for name in wanted}
        counts["stack"] = int(re.findall(r"STACK:(\d+)", usage)[0])
        found[kernel.name] = counts
    return found


if __name__ == "__main__":
    print(json.dumps(machine_code()), flush=True)
