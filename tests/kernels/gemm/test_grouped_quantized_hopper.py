"""Experts' products on Hopper with matrices in MXFP4, levels and FP8: the order of packed codes, what threads make of
them, the cuts that are chosen, and on a GPU every path against float64.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import CodedFormat, Fp8Format
from ridgeline.kernels.gemm.codes.op import MXFP4, MXFP8, NVFP4, W4, W4_ZEROS
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.choose import Widened
from ridgeline.kernels.gemm.experts.hopper_plans import (
    Stream,
    Tiles,
    choose_coded,
    choose_fp8,
    choose_mxfp8,
    coded,
    stream,
)
from ridgeline.kernels.gemm.experts.matrices import arranged, part
from ridgeline.kernels.gemm.experts.op import GROUPED_GATE_UP
from ridgeline.kernels.gemm.experts.packed import fits, packed
from ridgeline.kernels.gemm.fp8.op import rounded
from ridgeline.kernels.gemm.plain.choose import RING

pytest.importorskip("triton")
from ridgeline.kernels.gemm.experts import hopper, hopper_codes, hopper_load
from tests.kernels.gemm.test_coded_asm import run
from tests.kernels.gemm.test_grouped_gemm_hopper import nan
from tests.kernels.gemm.test_grouped_quantized import assert_close, check_down, check_gate_up, exact_down, exact_gate_up
from tests.kernels.gemm.test_grouped_walk import Language, in_python

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = ExpertsCase(9, 192, 128, experts=3, used=2, format=MXFP4, scales=torch.uint8, bias=True, gate="swiglu_clamped")
LEVELS = replace(SMALL, width=256, format=W4, scales=torch.float16)
IN_64 = replace(LEVELS, format=replace(W4, group=64), scales=torch.bfloat16)
ZEROED = replace(IN_64, format=replace(W4_ZEROS, group=64))
TOKEN, BLOCK = Fp8Format(), Fp8Format(block=True, activations="block")

# The order of codes


def test_packed_matrices_are_the_same_numbers() -> None:
    for case in (SMALL, replace(SMALL, width=64, inner=64), LEVELS, IN_64, ZEROED):
        weight = case.gate_up_inputs(torch.float32, DEVICE)[1]
        other = packed(weight)
        assert other.nbytes == weight.nbytes
        assert torch.equal(other.codes(), weight.codes())
        for expert in range(case.experts):
            assert torch.equal(part(other, expert).dequantized(), part(weight, expert).dequantized())


def test_only_whole_tiles_of_mxfp4_and_of_levels_are_packed() -> None:
    for case, able in (
        (SMALL, True),
        (replace(SMALL, width=96), False),
        (replace(SMALL, inner=48), False),
        (replace(SMALL, format=NVFP4, scales=torch.float8_e4m3fn), False),
        (LEVELS, True),
        (IN_64, True),
        (ZEROED, True),
        (replace(IN_64, width=192), False),
        (replace(LEVELS, inner=48), False),
        (replace(LEVELS, scales=torch.float32), False),
        (replace(LEVELS, format=replace(W4_ZEROS, zeros="minimum")), False),
        (replace(LEVELS, format=replace(W4, group=32)), False),
    ):
        weight = case.gate_up_inputs(torch.float32, torch.device("cpu"))[1]
        assert fits(weight) == able
        assert arranged(weight, torch.bfloat16, (64,)) is weight  # a CPU takes them as they are


@pytest.mark.parametrize("case", [SMALL, LEVELS, IN_64, ZEROED], ids=str)
def test_packed_matrices_widened_in_memory_multiply_alike(case: ExpertsCase, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16
    monkeypatch.setattr(ExpertsCase, "_operands", _packed_operands(ExpertsCase._operands))
    check_gate_up("triton", case, dtype, DEVICE.type, plan=Widened())
    check_down("triton", case, dtype, DEVICE.type, plan=Widened())


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str)
def test_experts_without_a_gate_take_packed_matrices(device: torch.device) -> None:
    case, dtype = replace(LEVELS, gate="relu2"), torch.bfloat16 if device.type == "cuda" else torch.float16
    x_TM, weight, *rest = case.gate_up_inputs(dtype, device)
    op = GROUPED_GATE_UP.choose(Platform.of(device), "triton")
    assert_close(op(x_TM, packed(weight), *rest), op(x_TM, weight, *rest).double())


def _packed_operands(plain: Any) -> Any:
    def made(self: ExpertsCase, *given: Any) -> Any:
        x, weight = plain(self, *given)
        return x, packed(weight)

    return made


def test_codes_and_scales_become_operands_at_their_places() -> None:
    """For every stage of a tile: what the ring's two producers copy, the registers that a thread reads of it, the
    instructions, and the fragment of a warpgroup's left operand as the PTX manual draws it (wgmma, m64k16)."""
    case = replace(SMALL, width=320)  # two stages and half a one
    weight = case.gate_up_inputs(torch.float32, torch.device("cpu"))[1]
    other, inputs, outputs, rows = packed(weight), case.width, case.inner, 128
    words, scale = other.code_OB.view(torch.int16).reshape(-1, 64), other.scale_OG.reshape(-1)
    expert, panels = 1, inputs // 64
    exact = part(weight, expert).dequantized().double() / weight.scale[expert].double()  # type: ignore[index]
    boxes: list[Any] = []
    names: dict[str, Any] = {"viewed": lambda w, shape, layout: SimpleNamespace(index=lambda i: i)}
    names |= {"load_tile": lambda descriptor, corner, full, tile: boxes.append((corner[0], tile))}
    load_codes = in_python(hopper_load._load_codes, Language(0, 1), **names)
    names = {"load_rows": lambda tile, pointers, mask: boxes.append((pointers, mask))}
    language: Any = Language(0, 1)
    language.BlockedLayout = lambda *_: None
    code_scales = in_python(hopper_load._code_scales, language, **names)
    lane, thread = torch.arange(128) % 32, torch.arange(128)
    for which in range(2):  # gates, then ups
        for block in range(-(-panels // 2)):
            first = expert * 2 * outputs
            ring = SimpleNamespace(shape=(rows // 2, 64), layout=None)
            load_codes(None, ring, None, first + which * outputs, block, inputs)
            held = [words[at : at + 32] for at, _ in sorted(boxes, key=lambda box: box[1])]
            boxes.clear()
            ring = _scale_ring((4, rows // 64, 256), 8)
            code_scales(first * (inputs // 32), ring, 0, block, 0, 2, inputs, outputs, 4)
            pointers, mask = np.broadcast_arrays(*boxes[which])
            boxes.clear()
            for tile in range(rows // 64):
                for panel in range(min(2, panels - 2 * block)):
                    assert mask[tile, panel * 128 : panel * 128 + 128].all()
                    known = scale[torch.from_numpy(pointers[tile].copy())].view(2, 4, 8, 2, 2)[panel]
                    mine = (held[tile].reshape(2, 128, 4, 2)[panel].long() & 0xFFFF).unbind(-1)
                    register = mine[0] | mine[1] << 16  # [threads, four registers]
                    for i, j in np.ndindex(4, 4):
                        row = thread // 32 * 16 + lane // 4 + 8 * (i % 2)
                        column = (block * 2 + panel) * 64 + j * 16 + lane % 4 * 2 + 8 * (i // 2)
                        bits = known[thread // 32, lane // 4, i % 2, j // 2].long() + 63 << 7
                        got = run(hopper_codes._ASM.value[j], [register[:, i], bits | bits << 16], torch.bfloat16)
                        want = exact[which * outputs + tile * 64 + row[:, None], column[:, None] + torch.arange(2)]
                        assert torch.equal(got * hopper_codes.LIFT.value, want)


@pytest.mark.parametrize("row", [0, 128])
def test_no_scales_are_read_behind_the_last_row(row: int) -> None:
    """Of a tile with fewer rows than others, behind which memory of the last expert ends."""
    found: list[Any] = []
    language: Any = Language(0, 1)
    language.BlockedLayout = lambda *_: None
    names: dict[str, Any] = {"load_rows": lambda tile, pointers, mask: found.append((pointers, mask))}
    inputs, outputs = 256, 192
    scales = in_python(hopper_load._code_scales, language, **names)
    scales(row // 64 * inputs * 2, _scale_ring((4, 2, 256), 8), 0, 1, row, 1, inputs, outputs, 4)
    pointers, mask = np.broadcast_arrays(*found[0])
    assert mask[0].all()
    assert mask[1].all() == (row == 0)
    assert pointers[mask].max() < outputs // 64 * inputs * 2


def _scale_ring(shape: tuple[int, ...], bits: int) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, index=lambda i: None, dtype=SimpleNamespace(primitive_bitwidth=bits))


def test_exponents_become_multipliers_two_at_a_time() -> None:
    """Four scales of E8M0 of a thread's word, in its order, less half of the lift."""
    scale = torch.randint(0, 192, (64, 4), generator=torch.Generator().manual_seed(3))
    word = (scale << torch.arange(0, 32, 8)).sum(1)
    text = hopper_codes._SCALE_ASM.value
    for half, result in enumerate(("$0", "$1")):
        ours = text.replace(result, "out").replace("$1" if half == 0 else "$0", "other").replace("$2", "$1")
        got = run(ours.replace("out", "$0"), [word], torch.bfloat16)
        assert torch.equal(got, 2.0 ** (scale[:, 2 * half : 2 * half + 2].double() - 127 + 63))


@pytest.mark.parametrize("case", [LEVELS, IN_64, ZEROED], ids=str)
def test_levels_become_operands_at_their_places(case: ExpertsCase) -> None:
    """Likewise for levels, whose scales meet the sums of their group."""
    weight = case.gate_up_inputs(torch.float32, torch.device("cpu"))[1]
    other, inputs, rows, each = packed(weight), case.width, 128, 128 // case.format.group  # type: ignore[union-attr]
    words, scale = other.code_OB.view(torch.int16).reshape(-1, 1024), other.scale_OG.reshape(-1)
    want, want_OG = weight.codes().flatten(0, 1).double() - 5, weight.scale_OG.flatten(0, 1)
    less = torch.full((128,), 0xC300C300) + 0x50005  # of a zero of 5 (`_less`)
    thread, found = torch.arange(128), []
    lane = thread % 32
    for tile, panel in np.ndindex(want.shape[0] // 64, inputs // 64):
        mine = (words[tile * (inputs // 64) + panel].view(128, 4, 2).long() & 0xFFFF).unbind(-1)
        register = mine[0] | mine[1] << 16
        for i, j in np.ndindex(4, 4):
            row = tile * 64 + thread // 32 * 16 + lane // 4 + 8 * (i % 2)
            column = panel * 64 + j * 16 + lane % 4 * 2 + 8 * (i // 2)
            got = run(hopper_codes._LEVEL_ASM.value[j], [register[:, i], less], torch.bfloat16)
            assert torch.equal(got, want[row[:, None], column[:, None] + torch.arange(2)])
    language: Any = Language(0, 1)
    language.BlockedLayout = lambda *_: None
    names: dict[str, Any] = {"load_rows": lambda tile, pointers, mask: found.append((pointers, mask))}
    code_scales = in_python(hopper_load._code_scales, language, **names)
    for block in range(inputs // 128):
        found.clear()
        code_scales(0, _scale_ring((4, rows // 64, 64 * each), 16), 0, block, 0, 2, inputs, case.inner, 1)
        for which, (pointers, mask) in enumerate(found):
            assert np.broadcast_arrays(*(pointers, mask))[1].all()
            for tile in range(rows // 64):
                held = scale[torch.from_numpy(pointers[tile].copy())].view(4, 8, 2, each)  # warp, row of 8, half
                first = which * case.inner + tile * 64
                known = want_OG[first : first + 64, block * each : block * each + each].view(4, 2, 8, each)
                assert torch.equal(held.permute(0, 2, 1, 3), known)


def test_threads_read_their_own_registers_of_the_ring() -> None:
    """The layouts with which shared memory is read give thread t its eight words, and its rows' scales."""

    def places(layout: Any, width: int) -> np.ndarray:
        """Flat places by (register, lane, warp)."""
        at = [
            [sum(np.array(basis) * (i >> bit & 1) for bit, basis in enumerate(bases)) for i in range(1 << len(bases))]
            for bases in (layout.reg_bases, layout.lane_bases, layout.warp_bases)
        ]
        flat = [np.array([np.ravel(one) @ [width, 1] if np.ndim(one) else 0 for one in each]) for each in at]
        return flat[0][:, None, None] + flat[1][None, :, None] + flat[2][None, None]

    register, lane, warp = np.ogrid[:16, :32, :4]
    codes = places(hopper_codes._code_layout.fn(1, 4), 64)
    assert np.array_equal(codes, register // 8 * 1024 + (warp * 32 + lane) * 8 + register % 8)
    register = np.arange(8)[:, None, None]
    scales = places(hopper_codes._scale_layout.fn(1, 4), 256)
    assert np.array_equal(scales, register // 4 * 128 + warp * 32 + lane // 4 * 4 + register % 4)
    for warps in (4, 8):  # a second tile is in the same threads, or in those of four warps more
        for layout, width, size, one in (
            (hopper_codes._code_layout, 64, 2048, codes), (hopper_codes._scale_layout, 256, 256, scales)
        ):  # fmt: skip
            both = np.concatenate([one, one + size], axis=0 if warps == 4 else 2)
            assert np.array_equal(places(layout.fn(2, warps), width), both)
    for each in (1, 2):
        register = np.arange(2 * each)[:, None, None]
        groups = (warp * 8 + lane // 4) * 2 * each + register
        assert np.array_equal(places(hopper_codes._group_layout.fn(1, each), 64 * each), groups)
        both = np.concatenate([groups, groups + 64 * each])
        assert np.array_equal(places(hopper_codes._group_layout.fn(2, each), 64 * each), both)


# Plans


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("experts", "used", "inputs"), [(128, 8, 2048), (128, 8, 768), (32, 4, 2880), (8, 2, 14_336)])
def test_every_cut_chosen_fits_the_device(experts: int, used: int, inputs: int, gated: bool) -> None:
    parts = 2 if gated else 1
    for tokens in (1, 4, 8, 33, 64, 256, 1024, 8192):
        for blocked in (False, True):
            plan = choose_fp8(tokens * used, experts, inputs, gated=gated, blocked=blocked)
            if isinstance(plan, Tiles):
                assert plan.rows == (128 if blocked else 256)
                assert (plan.rows + 128) * 128 * plan.stages <= RING
                continue
            stage = (plan.rows * parts + plan.tokens) * plan.block + plan.tokens * plan.block // 32
            assert stage * plan.stages * plan.resident <= RING
            assert plan.stages >= 3
            assert plan.tokens % plan.narrow == plan.narrow % 8 == plan.block % 128 == 0
            assert inputs > plan.block
        plan = choose_mxfp8(tokens * used, experts, inputs, gated=gated)
        stage = (plan.rows * parts + plan.tokens) * plan.block + plan.tokens * plan.block // 32
        assert stage * plan.stages * plan.resident <= RING
        assert inputs > plan.block
        for levels in (False, True):
            plan = choose_coded(tokens * used, experts, gated=gated, levels=levels)
            stage = plan.rows * parts * (64 + 4) + plan.tokens * 256
            assert stage * plan.stages * plan.resident <= RING
            assert plan.stages >= 3
            assert plan.apart or not levels
            assert plan.tokens * parts * plan.rows // 64 <= 256 * plan.warps // 4  # sums in registers


# On a GPU

SHAPES = (
    ExpertsCase(50, 2880, 2880, experts=32, used=4, format=MXFP4, scales=torch.uint8, bias=True, gate="swiglu_clamped"),
    ExpertsCase(50, 2048, 768, experts=128, used=8, format=TOKEN),
    ExpertsCase(50, 2048, 768, experts=128, used=8, format=BLOCK, bias=True),
    ExpertsCase(50, 384, 256, experts=9, used=3, format=Fp8Format(activations="static")),
    ExpertsCase(50, 320, 384, experts=5, used=2, format=MXFP4, scales=torch.uint8),
    ExpertsCase(50, 2048, 768, experts=128, used=8, format=MXFP8, scales=torch.uint8, bias=True),
    ExpertsCase(50, 384, 256, experts=9, used=3, format=MXFP8, scales=torch.uint8),
    ExpertsCase(50, 2048, 768, experts=128, used=8, format=W4),
    ExpertsCase(50, 256, 384, experts=5, used=2, format=replace(W4, group=64), scales=torch.bfloat16, bias=True),
    ExpertsCase(50, 512, 384, experts=9, used=3, format=W4_ZEROS),
    ExpertsCase(50, 256, 384, experts=5, used=2, format=replace(W4_ZEROS, group=64), scales=torch.bfloat16),
)
CODED = (
    None,
    *(coded(r, t, max(8, t // 4), gated=True, resident=n) for r, t, n in ((64, 32, 2), (64, 128, 1), (128, 64, 1))),
    *(
        coded(r, t, t // 2, gated=True, resident=n, apart=True)
        for r, t, n in ((64, 16, 3), (128, 16, 3), (64, 32, 3), (128, 32, 2))
    ),
)
LEVELED = (
    None,
    *(plan for plan in CODED if plan and plan.apart),
    coded(64, 64, 32, gated=True, resident=2, apart=True),
)
EIGHT = (None, *(stream(64, t, 8, 128, 2048, gated=True, resident=n, itemsize=1) for t, n in ((16, 2), (64, 1))))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 200, 1500])
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ops_are_exact(shape: ExpertsCase, number: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside FP8 with activations as rounded as the format says. With NaN in rows that belong to no pair."""
    case, device = replace(shape, tokens=tokens, dead=tokens // 5, skew=1.0, add=True), torch.device("cuda")
    plans: tuple[Any, ...] = (*EIGHT, _tiles(shape))
    if isinstance(shape.format, CodedFormat) and shape.format.bits == 4:
        plans = CODED if shape.format == MXFP4 else LEVELED
    if number >= len(plans):
        pytest.skip("no such cut")
    plan = plans[number]
    if shape.format == MXFP8 and isinstance(plan, Tiles):
        pytest.skip("tiles of MXFP8 are streamed")
    x_TM, weight, *rest = case.gate_up_inputs(torch.bfloat16, device)
    h_PF, second, *last = case.down_inputs(torch.bfloat16, device)
    ours, theirs = (arranged(one, torch.bfloat16, (64, 64)) for one in (weight, second))
    if not (hopper.supports(x_TM, ours, gated=True) and hopper.supports(h_PF, theirs)):
        pytest.skip("not on Hopper")
    kept = int(rest[1].start_E1[-1])
    want_PF = exact_gate_up(_rounded(x_TM, shape), weight, *rest)[:kept]
    want_TM = exact_down(_rounded(h_PF, shape), second, *last)
    x_TM[case.tokens - case.dead :] = h_PF[kept:] = torch.nan
    down = replace(plan, stages=plan.stages // 2 + 1, resident=1) if isinstance(plan, Stream) else plan
    for _ in range(2):  # the second time flags and tickets must be where the first needed them
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", nan)
            got_PF = hopper.grouped_gate_up(x_TM, ours, *rest, plan)
            got_TM = hopper.grouped_down(h_PF, theirs, *last, down)
        assert_close(got_PF[:kept], want_PF)
        assert_close(got_TM, want_TM)


def _tiles(shape: ExpertsCase) -> Tiles:
    return Tiles(6, 128) if shape.format is BLOCK else Tiles()


def _rounded(x: Tensor, shape: ExpertsCase) -> Tensor:
    if shape.format == MXFP8:
        return rounded(x, BLOCK, None)
    if not isinstance(shape.format, Fp8Format):
        return x
    mode = "block" if shape.format.block else "token"
    return rounded(x, replace(shape.format, activations=mode), None)
