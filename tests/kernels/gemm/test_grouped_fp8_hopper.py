"""FP8 experts on Hopper: what the kernels' own functions compute for a tile, run in Python on arrays, against products
of dequantized numbers. Rings, barriers and matrix units have stand-ins; addresses of scales and rows are the kernels'.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
from ridgeline.kernels.gemm.experts import hopper_finish, hopper_load, hopper_stream, hopper_sums, hopper_tiles
from ridgeline.kernels.hopper import ring
from tests.kernels.gemm.test_grouped_walk import Language, Pointer, in_python

EXPERTS, INPUTS, TOKENS, SPAN = 3, 320, 40, 128  # two blocks of inputs and half a one


class Array(np.ndarray[Any, Any]):
    """A tensor of Gluon: numbers, and a layout that no test reads."""

    type = SimpleNamespace(layout=None)

    def permute(self, axes: tuple[int, ...]) -> Array:
        return self.transpose(axes)

    def to(self, dtype: Any, bitcast: bool = False) -> Array:
        return np.asarray(self, np.int32).view(np.float32).astype(np.float64).view(Array) if bitcast else self


def array(values: Any) -> Array:
    return np.asarray(values, dtype=np.float64).view(Array)


class Ring:
    """A ring of shared memory that holds every stage at once."""

    dtype = SimpleNamespace(primitive_bitwidth=8)
    type = SimpleNamespace(layout=None)

    def __init__(self, stages: list[Any]) -> None:
        self.stages = stages
        self.shape = (len(stages), *np.shape(stages[0]))

    def index(self, i: int) -> Any:
        return self.stages[i]


class Scales(Array):
    """A row of scales in shared memory."""

    def slice(self, first: int, size: int) -> Any:
        return SimpleNamespace(load=lambda layout: self[first : first + size].view(Array))


class Problem:
    """Experts' weights and rows of x in small whole numbers, with scales: everything is exact in float64."""

    def __init__(self, outputs: int, parts: int, blocked: bool, gather: bool) -> None:
        draw = np.random.default_rng(0)
        self.height, self.blocks = parts * outputs, -(-INPUTS // SPAN)
        self.w = draw.integers(-4, 5, (EXPERTS, self.height, INPUTS))
        self.x = draw.integers(-4, 5, (TOKENS, INPUTS))
        lines = -(-self.height // SPAN) if blocked else self.height
        self.w_scale = draw.integers(1, 5, (EXPERTS, lines, self.blocks if blocked else 1)) / 4.0
        self.x_scale = draw.integers(1, 5, (self.blocks if blocked else 1, TOKENS)) / 4.0
        self.token = draw.permutation(TOKENS) if gather else np.arange(TOKENS)
        self.blocked = blocked

    def exact(self, expert: int, rows: np.ndarray, pairs: np.ndarray, first: int, end: int) -> np.ndarray:
        """The products [C, W] of some rows and pairs, from inputs `first` to `end`."""
        every = np.arange(INPUTS)
        column = every // SPAN if self.blocked else every * 0
        line = np.arange(self.height) // SPAN if self.blocked else np.arange(self.height)
        w = self.w[expert] * self.w_scale[expert][line][:, column]
        x = (self.x * self.x_scale.T[:, column])[self.token[pairs]]
        return w[rows, first:end] @ x[:, first:end].T

    def panels(self, matrix: np.ndarray) -> list[Array]:
        """Blocks of 128 inputs of a matrix, as the ring holds them."""
        padded = np.pad(matrix, ((0, 0), (0, -INPUTS % (2 * SPAN))))
        return [array(padded[:, at : at + SPAN]) for at in range(0, padded.shape[1], SPAN)]

    def pointers(self) -> tuple[Pointer, Pointer, Pointer]:
        """Where the scales of weights, those of x, and the tokens lie."""
        return tuple(Pointer(x.ravel().tolist()) for x in (self.w_scale, self.x_scale, self.token))  # type: ignore[return-value]


def language() -> Any:
    known: Any = Language(0, 1)
    known.static_range, known.float32, known.num_warps = range, None, lambda: 4
    known.zeros = lambda shape, dtype, layout: array(np.zeros(shape))
    return known


def stand_ins() -> dict[str, Any]:
    quiet = SimpleNamespace(wait=lambda *_: None, arrive=lambda *_, **__: None)

    def multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        return array((acc if use_acc else 0) + a @ b)

    def waited(number: int, deps: tuple[Any, ...]) -> Any:
        return deps[0]

    return {
        "mbarrier": quiet, "fence_async_shared": lambda: None, "warpgroup_mma": multiply,
        "sums_layout": lambda *_: None,
        "awaited": lambda sums, pending, parts: sums, "first_rows": lambda tile, width: tile[:width],
        "warpgroup_mma_wait": waited,
    }  # fmt: skip


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("panels", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("blocked", [False, True])
def test_a_piece_of_a_streamed_tile_is_exact(blocked: bool, parts: int, panels: int, gather: bool) -> None:
    outputs, rows, width, expert, row, pair, last = 256, 64, 16, 2, 192, 7, 7 + 13
    problem, names = Problem(outputs, parts, blocked, gather), stand_ins()
    for module, name in (
        (ring, "zeros"), (hopper_sums, "_scales"), (hopper_sums, "products"), (hopper_sums, "promoted"),
        (hopper_sums, "rescaled"),
    ):  # fmt: skip
        names[name] = in_python(getattr(module, name), language(), **names)
    finished: list[Any] = []
    names |= {"store": lambda sums, *_: finished.append(sums), "tall": lambda *_: None}
    names |= {"_arrives_last": names["store"]}  # as the first to come, it leaves its sums
    finish = in_python(hopper_stream._finish, language(), **names)
    part_rows = [part * outputs + row + np.arange(rows) for part in range(parts)]
    pairs = np.arange(pair, last)
    for block in range(0, -(-problem.blocks // panels)):
        steps = -(-problem.blocks // panels) - block if block == 0 else 1
        total = steps if block == 0 else 1  # blocks of the one program, which then has the item or a part of it
        some = range(block * panels, (block + steps) * panels)
        w = Ring([problem.panels(problem.w[expert, at])[i] for i in some for at in part_rows])
        if panels == 2:  # a stage has both panels of one part, then those of the other
            w = Ring(
                [problem.panels(problem.w[expert, at])[i + j] for i in some[::2] for at in part_rows for j in (0, 1)]
            )
        x_rows = np.zeros((width, INPUTS))
        x_rows[: len(pairs)] = problem.x[problem.token[pairs]]
        x = Ring([problem.panels(x_rows)[i] for i in some])
        scales = np.zeros((len(some), width))
        for at, i in enumerate(some):
            if blocked and i < problem.blocks:
                scales[at, : len(pairs)] = problem.x_scale[i, problem.token[pairs]]
        s = Ring([one.view(Scales) for one in scales])
        scale, x_scale, token = problem.pointers()
        finish(
            w, s, s, x, Ring([0] * 9), Ring([0] * 9), scale, x_scale, token, 0, 0, 0, 0, 0, 0, steps, block, total,
            expert, row, pair, last, width, INPUTS, outputs, rows, parts, width, panels * SPAN, 9, "fp8",
            SPAN if blocked else 1, False, gather, False, "" if parts == 1 else "silu", False, False,
        )  # fmt: skip
        for part, got in enumerate(finished.pop()):
            first, end = block * panels * SPAN, min(INPUTS, (block + steps) * panels * SPAN)
            want = problem.exact(expert, part_rows[part], pairs, first, end)
            if block > 0 and not blocked:  # what is left for another program has no scales yet
                bare = Problem(outputs, parts, False, gather)
                bare.w_scale[:], bare.x_scale[:] = 1, 1
                want = bare.exact(expert, part_rows[part], pairs, first, end)
            np.testing.assert_array_equal(got[:, : len(pairs)], want)


@pytest.mark.parametrize("factor", [True, False])
@pytest.mark.parametrize("panels", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_tile_with_an_exponent_for_each_32_inputs_is_exact(parts: int, panels: int, factor: bool) -> None:
    """MXFP8, of which the last rows of a tile lie behind the last output."""
    outputs, inputs, rows, width, expert, row, pairs = 240, 512, 64, 16, 2, 192, 13
    draw, known, names = np.random.default_rng(1), language(), stand_ins()
    known.minimum, known.load = np.minimum, lambda pointer: np.asarray(Language.load(pointer)).view(Array)
    w = draw.integers(-4, 5, (EXPERTS, parts * outputs, inputs))
    power = draw.integers(-2, 3, (EXPERTS, parts * outputs, inputs // 32))
    words = (power + 127).astype(np.uint8).view(np.int32)
    x, x_scale = draw.integers(-4, 5, (width, inputs)), draw.integers(1, 5, (inputs // SPAN, width)) / 4.0
    for module, name in ((ring, "zeros"), (hopper_sums, "_scales"), (hopper_sums, "promoted_by_rows")):
        names[name] = in_python(getattr(module, name), known, **names)
    names["times"] = in_python(hopper_sums.times, known, **names)
    finished: list[Any] = []
    names |= {"store": lambda sums, *_: finished.append(sums), "tall": lambda *_: None}
    at = [np.minimum(part * outputs + row + np.arange(rows), parts * outputs - 1) for part in range(parts)]
    blocks = inputs // SPAN
    some = [(i + j, lines) for i in range(0, blocks, panels) for lines in at for j in range(panels)]
    weights = Ring([Columns(w[expert, lines, i * SPAN : (i + 1) * SPAN]) for i, lines in some])
    gathered = Ring([Columns(x[:, i * SPAN : (i + 1) * SPAN]) for i in range(blocks)])
    gathered.shape = (blocks, width, SPAN)
    scales = Ring([array(each).view(Scales) for each in x_scale])
    in_python(hopper_stream._finish, known, **names)(
        weights, scales, scales, gathered, Ring([0] * 9), Ring([0] * 9), Pointer(words.ravel().tolist()), 0, 0,
        Pointer([1.0, 1.0, 0.5]), 0, 0, 0, 0, 0, blocks // panels, 0, blocks // panels, expert, row, 0, pairs,
        width, inputs, outputs, rows, parts, width, panels * SPAN, 9, "fp8", 32, factor, False, False,
        "" if parts == 1 else "silu", False, False,
    )  # fmt: skip
    exact = w[expert] * 2.0 ** power[expert].repeat(32, 1) * (0.5 if factor else 1.0)
    for part, got in enumerate(finished.pop()):
        kept = min(rows, outputs - row)
        first = part * outputs + row
        want = exact[first : first + kept] @ (x * x_scale.T.repeat(SPAN, 1)).T
        np.testing.assert_array_equal(got[:kept], want)


class Columns:
    """A panel of the ring, of which columns are cut off."""

    layout = None

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = array(values), values.shape

    def slice(self, first: int, size: int, axis: int) -> Array:
        assert axis == 1
        return self.values[:, first : first + size].view(Array)

    def __getitem__(self, rows: slice) -> Columns:
        return Columns(self.values[rows])


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("panels", [1, 2])
def test_rows_and_their_scales_are_gathered_together(panels: int, gather: bool) -> None:
    problem, width, pair, pairs, block = Problem(256, 1, True, gather), 16, 7, 13, 1
    known, copied = language(), {}
    known.BlockedLayout, known.int64 = lambda *_: None, None
    known.arange = lambda start, end, layout: np.arange(start, end).view(Array)
    plain = known.load
    known.load = lambda *given, **named: plain(*given, **named).view(Array)

    def copy(tile: Any, pointers: Pointer, mask: np.ndarray) -> None:
        at, mask = np.broadcast_arrays(pointers.at, mask)
        numbers = [pointers.values[i] if real else 0.0 for i, real in zip(at.flat, mask.flat, strict=True)]
        copied[tile] = np.reshape(numbers, at.shape)

    names: dict[str, Any] = {"mbarrier": SimpleNamespace(wait=lambda *_: None), "load_rows": copy}
    names |= {"first_rows": lambda tile, width: tile, "async_copy": SimpleNamespace(mbarrier_arrive=lambda *_, **__: 0)}
    x = SimpleNamespace(shape=(9, width, SPAN), index=lambda i: ("x", i))
    s = SimpleNamespace(index=lambda i: SimpleNamespace(slice=lambda first, size: ("s", i)))
    rows, (_, scale, token) = Pointer(problem.x.ravel().tolist()), problem.pointers()
    steps = -(-problem.blocks // panels) - block
    in_python(hopper_load.gather_rows, known, **names)(
        rows, token, x, s, s, Ring([0] * 9), Ring([0] * 9), scale, scale, TOKENS, 0, steps, pair, pairs, block, 0,
        width, INPUTS, 256, 1, panels * SPAN, 9, gather, "rows", False, 4,
    )  # fmt: skip
    lines = problem.token[pair : pair + pairs]
    for i in range(steps * panels):
        column = block * panels + i
        inputs = problem.x[lines, column * SPAN : (column + 1) * SPAN]
        want = np.zeros((width, SPAN))
        want[: inputs.shape[0], : inputs.shape[1]] = inputs
        np.testing.assert_array_equal(copied["x", i], want)
        scales = problem.x_scale[column, lines] if column < problem.blocks else np.zeros(pairs)
        np.testing.assert_array_equal(copied["s", i], np.pad(scales, (0, width - pairs)))


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("blocked", [False, True])
def test_half_of_a_large_tile_is_exact(blocked: bool, parts: int, half: int, gather: bool) -> None:
    outputs, expert, pair, pairs = 256, 1, 3, 30 if half == 0 else 64 + 30
    rows = 128 if blocked else 256
    tile = 1 if rows // parts < outputs else 0
    first = tile * (rows // parts)
    problem, names = Problem(outputs, parts, blocked, gather), stand_ins()
    if half:  # the second warpgroup's pairs begin 64 behind; the first one's are not looked at here
        pair -= 64
    own = np.arange(max(pair, pair + 64 * half), pair + 64 * half + 30)
    at_rows = np.concatenate(
        [part * outputs + first + np.arange(rows // 2) for part in range(2)]
        if parts == 2
        else [first + np.arange(rows)]
    )
    w = Ring(problem.panels(problem.w[expert, at_rows])[: problem.blocks])
    x_rows = np.zeros((128, INPUTS))
    x_rows[64 * half : 64 * half + 30] = problem.x[problem.token[own]]
    x = Ring(problem.panels(x_rows)[: problem.blocks])
    x.shape = (9, 128, SPAN)
    news = iter([(pair, pairs, expert, tile), (0, 0, 0, 0)])
    written: list[tuple[Any, Any, int, int, int]] = []
    names |= {
        "viewed": lambda box, shape, layout: SimpleNamespace(index=lambda i: box.reshape(2, 64, -1)[i]),
        "halves": lambda x: (x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]), "_news": lambda *_: next(news),
        "write": lambda low, high, bias, y, pair, pairs, column, *_: written.append((low, high, pair, pairs, column)),
    }  # fmt: skip
    for module, name in (
        (hopper_finish, "lines_of"), (hopper_finish, "_scaled"), (hopper_finish, "finish"),
        (hopper_tiles, "_products"), (hopper_tiles, "_promoted"),
    ):  # fmt: skip
        names[name] = in_python(getattr(module, name), language(), **names)
    consumer = in_python(hopper_tiles._consumer, language(), **names)
    scale, x_scale, token = problem.pointers()
    consumer(
        x, w, Ring([0] * 9), Ring([0] * 9), 0, 0, 0, scale, x_scale, token, TOKENS, 0, 0, half, outputs, parts,
        problem.blocks, 9, "fp8", SPAN if blocked else 1, gather, False, "" if parts == 1 else "silu",
    )  # fmt: skip
    got = np.zeros((2 * outputs, 30))
    for low, high, own_pair, own_pairs, column in written:
        assert (own_pair, own_pairs) == (own[0], 30)
        got[column + np.arange(low.shape[1])] = low[:30].T
        if parts == 2:
            got[outputs + column + np.arange(high.shape[1])] = high[:30].T
    np.testing.assert_array_equal(got[at_rows], problem.exact(expert, at_rows, own, 0, INPUTS))
