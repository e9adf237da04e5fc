"""FP8 products: every kernel against float64, and the edges of E4M3.

Tolerances: kernels that leave activations as they are differ from the product with the same weights in float64 by 4
epsilons of the result's dtype and by float32 sums; those that round them, from the product of the rounded activations,
which the test takes from the kernel that rounds. Matrix units keep about 14 bits of a sum of E4M3 products unless sums
are promoted: each of I / 32 additions may lose 2**-13 of a sum of order one, in one direction.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.kernels.gemm.fp8.cases import CASES, Fp8Case
from ridgeline.kernels.gemm.fp8.op import (
    BY_TOKEN,
    FP8_LINEAR,
    FP8_NORM_LINEAR,
    IN_BLOCKS,
    round_activations,
    rounded,
    to_fp8,
)
from ridgeline.kernels.gemm.int8.cases import W8A8Case
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.small.activation.op import gated_activation
from ridgeline.kernels.small.norm.op import rms_norm

pytest.importorskip("triton")

from ridgeline.kernels.gemm.fp8 import products
from ridgeline.kernels.gemm.fp8.choose import (
    FIXED,
    Tile,
    Tiles,
    choose_hopper,
    fitting,
    groups,
    library_wins,
    rounded_before,
)
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.fp8.products import rounded_linear
from ridgeline.kernels.gemm.fp8.rounding import round_into, round_rows
from ridgeline.kernels.gemm.fp8.saturation import saturations, total_saturations
from ridgeline.kernels.gemm.fp8.tiles import launch_tiles
from ridgeline.kernels.gemm.fp8.triton import eight
from ridgeline.kernels.gemm.plain.choose import Stream
from ridgeline.kernels.gemm.plain.rounded import Rounded, buffer

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
STATIC = Fp8Format(activations="static")
UNROUNDED = Fp8Format(activations=None)


def assert_close(got: Tensor, want: Tensor, inputs: int, epsilons: int = 4, slack: float = 0.0) -> None:
    eps = torch.finfo(got.dtype).eps
    buffer = epsilons * eps + 4 * inputs * 2.0**-24 + slack
    torch.testing.assert_close(got.double(), want.double(), rtol=4 * eps, atol=buffer)


def tokens_of(x: Rounded, inputs: int) -> Tensor:
    """Return the rounded activations in float64."""
    if x.scale.ndim == 1:
        return x.q_TI.double() * x.scale.double()[:, None]
    return x.q_TI.double() * x.scale.double().T.repeat_interleave(128, 1)[:, :inputs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [case for case in CASES if case.tokens <= 40], ids=str)
@pytest.mark.parametrize("plan", [FIXED, Tile(16, 16, 64)], ids=str)
def test_any_gpu_multiplies_in_sixteen_bits(plan: Tile, case: Fp8Case, device: str) -> None:
    x_TI, weight, bias_O = case.inputs(torch.float16, torch.device(device))
    y_TO = launch_tiles(plan, x_TI, eight(weight), bias_O)
    want_TO = x_TI.double() @ weight.dequantized().double().T
    assert_close(y_TO, want_TO if bias_O is None else want_TO + bias_O.double(), case.in_width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [BY_TOKEN, IN_BLOCKS, STATIC], ids=["token", "block", "static"])
@pytest.mark.parametrize("normed", [False, True])
def test_activations_are_rounded_as_the_op_says(how: Fp8Format, normed: bool, device: str) -> None:
    """A number may fall to the other side of a tie, as reciprocals and products are not divisions."""
    generator = torch.Generator(device).manual_seed(1)
    x_TI = torch.randn(5, 400, generator=generator, device=device).half()
    x_TI[2] = 0
    x_TI[3] *= 1e-3
    x_scale = torch.tensor(2.0 / 448, device=device)
    norm_I = (1 + 0.3 * torch.randn(400, generator=generator, device=device)).half() if normed else None
    residual_TI = torch.randn(5, 400, generator=generator, device=device).half() if normed else None
    got, s_TI = round_rows(
        Operand(x_TI, residual_TI, norm_I, 1e-5), torch.float8_e4m3fn, how.activations or "token", x_scale
    )
    want_TI = x_TI.float()
    if residual_TI is not None and norm_I is not None:
        assert torch.equal(s_TI, x_TI + residual_TI)
        want_TI = rms_norm(s_TI.float(), None, norm_I, 1e-5)[0]
    q_TI, scale_TC = round_activations(want_TI, how, x_scale)
    scale = scale_TC[:, 0] if got.scale.ndim == 1 else scale_TC.T
    live = rounded(want_TI, how, x_scale).abs().amax(1) > 0
    torch.testing.assert_close(got.scale[..., live], scale[..., live], rtol=1e-5, atol=0)
    apart = (got.q_TI.float() - q_TI.float()).abs() / q_TI.float().abs().clamp(min=2.0**-6)
    assert apart.max() <= 0.125  # one step
    assert (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_a_number_stays_so_and_infinity_spoils_its_row_alone(device: str) -> None:
    x_TI = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
    x_TI[1, 3], x_TI[2, 200], x_TI[3] = torch.nan, torch.inf, 0
    for activations in ("token", "block"):
        got, _ = round_rows(Operand(x_TI), torch.float8_e4m3fn, activations, None)  # type: ignore[arg-type]
        sums_T = tokens_of(got, 256).sum(1)
        assert sums_T[0].item() == pytest.approx(256, rel=1e-6)
        assert torch.isnan(sums_T[1:3]).all()
        assert sums_T[3] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_a_static_scale_cuts_off_are_counted(device: str) -> None:
    x_TI = torch.tensor([[3.0] * 7 + [-5.0] + [0.5] * 248, [1.0] * 256], device=device)
    counter = saturations(x_TI.device)
    before, total = int(counter), total_saturations()
    got, _ = round_rows(Operand(x_TI), torch.float8_e4m3fn, "static", torch.tensor(2.0 / 448, device=device))
    assert int(counter) - before == 8
    assert total_saturations() - total == 8
    assert got.q_TI[0, 0].float() == 448
    assert got.q_TI[0, 7].float() == -448


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["triton", "torch", "batch_invariant"])
@pytest.mark.parametrize("case", [*CASES[:2], CASES[5]], ids=str)
def test_implementations_equal_the_reference(case: Fp8Case, kind: str, device: str) -> None:
    """Rounding moves an activation by 1 / 16 at most: an error of up to 1 / 28 in the mean square, of terms that sum up
    to a standard deviation of one."""
    arguments = case.inputs(torch.float16, torch.device(device))
    platform = Platform.of(torch.device(device))
    got = FP8_LINEAR.choose(platform, kind)(*arguments)
    want = FP8_LINEAR.reference(*arguments)
    assert (got - want).float().std() < 0.04
    x_TI, weight, bias_O = arguments
    norm_I = torch.ones(case.in_width, dtype=torch.float16, device=device)
    got_TO, s_TI = FP8_NORM_LINEAR.choose(platform, kind)(
        Operand(x_TI, x_TI, norm_I, 1e-5), weight, Epilogue(bias_O, "silu")
    )
    want_TO, want_TI = FP8_NORM_LINEAR.reference(Operand(x_TI, x_TI, norm_I, 1e-5), weight, Epilogue(bias_O, "silu"))
    assert (got_TO - want_TO).float().std() < 0.06
    assert torch.equal(s_TI, want_TI)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_has_the_same_bits_in_any_company(device: str) -> None:
    x_TI, weight, bias_O = Fp8Case(33 if device == "cpu" else 300, 384, 96, IN_BLOCKS, bias=True).inputs(
        torch.float16, torch.device(device)
    )
    linear = FP8_LINEAR.choose(Platform.of(torch.device(device)), "batch_invariant")
    together_TO = linear(x_TI, weight, bias_O)
    for token in (0, 16, 32):
        assert torch.equal(linear(x_TI[token : token + 1], weight, bias_O)[0], together_TO[token])


SHAPES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (14_336, 4096, True),
    "down": (4096, 14_336, False),
    "small": (512, 256, False),
}


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("processors", [132, 78])
def test_every_cut_chosen_fits_the_device(processors: int, blocked: bool) -> None:
    for tokens in (1, 2, 8, 16, 17, 48, 64, 100, 128, 129, 512, 8192):
        for outputs, inputs, gated in SHAPES.values():
            cut = choose_hopper(tokens, inputs, outputs, gated=gated, processors=processors, blocked=blocked)
            parts = 2 if gated else 1
            if blocked and isinstance(cut, Stream):
                assert fitting(cut, parts, groups(cut, inputs)).stages >= 2
                assert cut.tokens <= (64 if gated else 128)  # more would spill registers
            if isinstance(cut, Tiles):
                assert (cut.tokens + (128 if cut.promote else 256)) * 128 * cut.stages <= 232_448 - 6144
                continue
            assert (cut.rows * parts + cut.tokens) * cut.block * cut.stages <= 232_448 - 6144
            assert cut.stages >= 2
            assert cut.tokens * parts <= 256
            assert cut.split <= min(cut.tokens, -(-inputs // cut.block))
            tiles = -(-outputs // cut.rows) * -(-tokens // cut.tokens)
            assert cut.split == 1 or tiles * cut.split <= processors


# The fastest cuts of benchmarks/results/h200-fp8.jsonl
FASTEST = [
    ("qkv", 8, Stream(64, 16, 256, 10)),
    ("o", 8, Stream(64, 16, 256, 10)),
    ("gate_up", 8, Stream(128, 16, 128, 6)),
    ("down", 8, Stream(64, 16, 256, 10, 2)),
    ("qkv", 64, Stream(64, 64, 256, 6)),
    ("o", 64, Stream(64, 64, 256, 6)),
    ("gate_up", 64, Stream(128, 64, 128, 5)),
    ("down", 64, Stream(64, 64, 256, 6, 2)),
    ("qkv", 256, Stream(128, 128, 128, 6)),
    ("o", 256, Stream(64, 128, 128, 8)),
    ("gate_up", 256, Tiles()),
    ("down", 256, Stream(64, 128, 128, 8)),
    ("gate_up", 8192, Tiles()),
]


@pytest.mark.parametrize(("matrix", "tokens", "cut"), FASTEST)
def test_the_cuts_that_were_fastest_on_an_h200_are_chosen(matrix: str, tokens: int, cut: Stream | Tiles) -> None:
    outputs, inputs, gated = SHAPES[matrix]
    assert choose_hopper(tokens, inputs, outputs, gated=gated, processors=132) == cut


def test_the_library_multiplies_only_where_it_was_faster() -> None:
    assert [library_wins(8192, SHAPES[name][1], gated=SHAPES[name][2]) for name in ("qkv", "o", "gate_up", "down")] == [
        True, True, False, True,
    ]  # fmt: skip
    assert not library_wins(4096, 16_384, gated=False)
    assert not library_wins(256, 4096, gated=False)


CUTS = [
    Stream(64, 8, 512, 2),
    Stream(64, 16, 256, 4, 4),
    Stream(64, 64, 128, 6),
    Stream(64, 32, 256, 4, promote=True),
    Stream(128, 64, 128, 4, 2, promote=True),
    Stream(128, 128, 128, 4),
    Tiles(),
    Tiles(6, promote=True),
    Tiles(4, promote=True, tokens=256),
]


@pytest.mark.gpu
@pytest.mark.parametrize("how", [BY_TOKEN, IN_BLOCKS, STATIC], ids=["token", "block", "static"])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_matrix_units_multiply_rounded_activations(cut: Stream | Tiles, gate: str | None, how: Fp8Format) -> None:
    device = torch.device("cuda")
    if Platform.of(device).arch != "sm_90":
        pytest.skip("not a Hopper GPU")
    shapes = ((1, 512, 128, False), (61, 1040, 384, True), (300, 2048, 640, False))
    for seed, (tokens, inputs, outputs, bias) in enumerate(shapes):
        rows = 2 * outputs if gate else outputs
        x_TI, weight, bias_O = Fp8Case(tokens, inputs, rows, how, bias).inputs(torch.bfloat16, device, seed)
        x, _ = round_rows(Operand(x_TI), torch.float8_e4m3fn, how.activations or "token", weight.x_scale)
        want_TO = tokens_of(x, inputs) @ weight.dequantized().double().T
        want_TO = want_TO if bias_O is None else want_TO + bias_O.double()
        want_TO = gated_activation(want_TO, gate) if gate else want_TO
        exact = cut.promote or how.block
        slack = 0.0 if exact else inputs / 32 * 2.0**-13
        for _ in range(2):  # the second time the counters must be where the first needed them
            got_TO = rounded_linear(x, eight(weight), bias_O, gate, cut)
            assert_close(got_TO, want_TO, inputs, 32 if gate else 4, slack + (2.0**-9 if exact else 0))


@pytest.mark.gpu
@pytest.mark.parametrize("how", [BY_TOKEN, STATIC], ids=["token", "static"])
def test_the_library_multiplies_a_thousand_tokens(how: Fp8Format) -> None:
    device = torch.device("cuda")
    if Platform.of(device).arch != "sm_90":
        pytest.skip("not a Hopper GPU")
    assert library_wins(1100, 512, gated=False)
    x_TI, weight, bias_O = Fp8Case(1100, 512, 128, how, bias=True).inputs(torch.bfloat16, device)
    x, _ = round_rows(Operand(x_TI), torch.float8_e4m3fn, how.activations or "token", weight.x_scale)
    want_TO = tokens_of(x, 512) @ weight.dequantized().double().T
    assert bias_O is not None
    got_TO = rounded_linear(x, eight(weight), bias_O, None)
    assert_close(got_TO, want_TO + bias_O.double(), 512, 8, 512 / 32 * 2.0**-13)


@pytest.mark.gpu
def test_e4m3_weights_of_every_bit_pattern_reach_the_sums() -> None:
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()]
    weight = to_fp8(torch.ones(254, 256, device="cuda"), BY_TOKEN)
    weight = weight._replace(
        weight_OI=numbers[:, None].expand(254, 256).contiguous(), scale_SC=torch.ones(254, 1, device="cuda")
    )
    x_TI = torch.zeros(1, 256, dtype=torch.bfloat16, device="cuda")
    x_TI[0, 7] = 1
    y_TO = launch_tiles(FIXED, x_TI, eight(weight), None)
    assert torch.equal(y_TO[0].float(), numbers.float())


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("cut", [None, *(cut for cut in CUTS if not cut.promote)], ids=str)
def test_sums_of_int8_levels_are_exact_on_matrix_units(cut: Stream | Tiles | None, gate: str | None) -> None:
    device = torch.device("cuda")
    if Platform.of(device).arch != "sm_90":
        pytest.skip("not a Hopper GPU")
    for seed, (tokens, inputs, outputs) in enumerate(((1, 512, 128), (61, 1040, 384), (300, 2048, 640))):
        rows = 2 * outputs if gate else outputs
        case = W8A8Case(tokens, inputs, rows, bias=True)
        x_TI, (level_OI, scale_O, _), bias_O = case.inputs(torch.bfloat16, device, seed)
        x, _ = round_rows(Operand(x_TI), torch.int8, "token", None)
        want_TO = tokens_of(x, inputs) @ level_OI.double().T * scale_O.double()
        want_TO = want_TO + bias_O.double() if bias_O is not None else want_TO
        want_TO = gated_activation(want_TO, gate) if gate else want_TO
        got_TO = rounded_linear(x, Eight(level_OI, scale_O), bias_O, gate, cut)
        assert_close(got_TO, want_TO, inputs, 32 if gate else 4)


# Activations that the op before rounds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["triton", "torch", "batch_invariant", "reference"])
@pytest.mark.parametrize("how", [BY_TOKEN, IN_BLOCKS], ids=["token", "block"])
def test_every_implementation_takes_rounded_activations(how: Fp8Format, kind: str, device: str) -> None:
    """With the numbers that the activations stand for as the truth, nothing but the result is rounded (and these
    numbers to 16 bits, where products are in 16)."""
    x_TI, weight, bias_O = Fp8Case(5, 384, 160, how, bias=True).inputs(torch.float16, torch.device(device))
    x = buffer(5, 384, torch.float16, torch.device(device))
    round_into(x_TI, x)
    got_TO = FP8_LINEAR.choose(Platform.of(torch.device(device)), kind)(x, weight, bias_O)
    assert bias_O is not None
    want_TO = x.wide().double() @ weight.dequantized().double().T + bias_O.double()
    assert got_TO.dtype == torch.float16
    assert_close(got_TO, want_TO, 384, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["triton", "torch", "batch_invariant", "reference"])
def test_results_are_rounded_where_there_is_room(kind: str, device: str) -> None:
    x_TI, weight, _ = Fp8Case(5, 384, 2 * 300).inputs(torch.float16, torch.device(device))
    norm_I = torch.ones(384, dtype=torch.float16, device=device)
    normed = FP8_NORM_LINEAR.choose(Platform.of(torch.device(device)), kind)
    want_TO, want_TI = normed(Operand(x_TI, x_TI, norm_I, 1e-5), weight, Epilogue(gate="silu"))
    given = buffer(5, 300, torch.float16, torch.device(device))
    got_TO, s_TI = normed(Operand(x_TI, x_TI, norm_I, 1e-5), weight, Epilogue(None, "silu", given))
    assert torch.equal(s_TI, want_TI)
    assert got_TO.data_ptr() == given.q_TI.data_ptr()
    largest_CT = torch.nn.functional.pad(want_TO, (0, 84)).float().unflatten(1, (-1, 128)).abs().amax(-1).T
    torch.testing.assert_close(given.scale, largest_CT / 448, rtol=1e-3, atol=0)
    # Half a step of E4M3 is 1/16 of a number, or 2**-10 of the least normal one
    room_TO = want_TO.float().abs() / 16 + (given.scale.T * 2.0**-10).repeat_interleave(128, 1)[:, :300]
    assert ((given.wide() - want_TO.float()).abs() <= room_TO * 1.01).all()


def test_scales_of_inputs_leave_room_for_two_stages_in_every_cut_chosen() -> None:
    for tokens in (1, 8, 16, 33, 64):
        for outputs, inputs, gated in (*SHAPES.values(), (8192, 28_672, False), (16_384, 32_768, False)):
            assert rounded_before(tokens, inputs)
            cut = choose_hopper(tokens, inputs, outputs, gated=gated, processors=132)
            assert isinstance(cut, Stream)
            parts, rows = 2 if gated else 1, groups(cut, inputs)
            shares = [(part + 1) * -(-inputs // cut.block) // cut.split for part in range(cut.split)]
            longest = max(b - a for a, b in zip([0, *shares], shares, strict=False))
            assert rows * 128 >= longest * cut.block
            kept = fitting(cut, parts, rows)
            assert 2 <= kept.stages <= cut.stages
            stages = (cut.rows * parts + cut.tokens) * cut.block * kept.stages
            assert stages + 4 * rows * parts * cut.tokens <= 232_448 - 8192
    assert not rounded_before(65, 4096)
    assert not rounded_before(8, 4096 + 64)


ROUNDED_CUTS = [
    Stream(128, 128, 128, 4),
    Stream(128, 16, 256, 5, 4),
    Stream(128, 64, 128, 5),
    Stream(64, 16, 256, 10, 2),
    Stream(64, 64, 256, 6),
]


@pytest.mark.gpu
@pytest.mark.parametrize("how", [BY_TOKEN, IN_BLOCKS], ids=["token", "block"])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("cut", ROUNDED_CUTS, ids=str)
def test_matrix_units_take_and_leave_numbers_rounded_by_128(cut: Stream, gate: str | None, how: Fp8Format) -> None:
    device = torch.device("cuda")
    if Platform.of(device).arch != "sm_90":
        pytest.skip("not a Hopper GPU")
    for seed, (tokens, inputs, outputs, bias) in enumerate(((1, 1024, 128, False), (61, 1152, 384, True))):
        rows = 2 * outputs if gate else outputs
        x_TI, weight, bias_O = Fp8Case(tokens, inputs, rows, how, bias).inputs(torch.bfloat16, device, seed)
        x = buffer(tokens, inputs, torch.bfloat16, device)
        round_into(x_TI, x)
        want_TO = x.wide().double() @ weight.dequantized().double().T
        want_TO = want_TO if bias_O is None else want_TO + bias_O.double()
        want_TO = gated_activation(want_TO, gate) if gate else want_TO
        for _ in range(2):  # the second time the counters must be where the first needed them
            got_TO = rounded_linear(x, eight(weight), bias_O, gate, cut)
            assert_close(got_TO, want_TO, inputs, 32 if gate else 4, 2.0**-9)
        given = buffer(tokens, outputs, torch.bfloat16, device)
        rounded_linear(x, eight(weight), bias_O, gate, cut, given)
        step_TO = want_TO.abs() / 16 + (given.scale.T * 2.0**-10).repeat_interleave(128, 1) + 2.0**-8
        assert ((given.wide() - want_TO).abs() <= 1.01 * step_TO).all()
        largest_CT = want_TO.unflatten(1, (-1, 128)).abs().amax(-1).T.float()
        torch.testing.assert_close(given.scale, largest_CT / 448, rtol=0.02, atol=1e-5)


def test_a_gated_product_rounds_its_results_only_where_a_program_has_all_outputs_of_a_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere a kernel more would round them, as it does with a scale for each token."""
    monkeypatch.setattr(products, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)

    def rounds(outputs: int, tokens: int, inputs: int = 4096) -> bool:
        number_OI = torch.empty(2 * outputs, inputs, dtype=torch.float8_e4m3fn, device="meta")
        return products.rounds_gated(
            Eight(number_OI, torch.empty(2 * outputs, 1, device="meta")), tokens, torch.bfloat16
        )

    assert rounds(14_336, 1)
    assert rounds(14_336, 64)
    assert rounds(14_336, 256)
    assert not rounds(8192, 8)  # tiles of 64
    assert not rounds(14_336 + 64, 8)
