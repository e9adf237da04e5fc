"""Products of weights in codes: the order of fragments, what kernels make of it, and on a GPU every path against the
reference.

A GPU's path may round a dequantized weight to x's dtype, so its results may be off by a few units of the dtype's
epsilon times the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.gemm.codes.cases import CASES, CodedCase, random_codes
from ridgeline.kernels.gemm.codes.choose import SHARED, WIDE_TOKENS, choose, wide_cuts
from ridgeline.kernels.gemm.codes.fragments import Fragments, arranged, fits, rows, span, unit
from ridgeline.kernels.gemm.codes.op import CODED_LINEAR, CODED_NORM_LINEAR, MXFP4, Coded, CodedFormat
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand

pytest.importorskip("triton")
from ridgeline.kernels.gemm.codes import batch_invariant, triton
from ridgeline.kernels.gemm.codes.dequantize import dequantize
from ridgeline.kernels.gemm.codes.places import in_places, norm_in_places
from ridgeline.kernels.small.norm.triton import rms_norm

CPU = torch.device("cpu")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
FORMATS = list({case.format: case for case in CASES}.values())
WHOLE = [replace(case, in_width=768 if case.format.group == 0 else 512, out_width=256) for case in FORMATS]
MATRICES = ((6144, 4096, False), (4096, 4096, False), (28_672, 4096, True), (4096, 14_336, False), (768, 2048, True))


def weight_of(case: CodedCase, device: str = "cpu") -> Coded:
    return random_codes(case, torch.device(device), torch.Generator(device).manual_seed(3))


def with_edges(weight: Coded) -> Coded:
    """Return the weight with the smallest exponent of two and the one that stands for NaN, if it has such scales."""
    if weight.scale_OG.dtype == torch.uint8:
        weight.scale_OG[0, 0], weight.scale_OG[1, 0] = 0, 255
    return weight


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_fragments_hold_the_same_numbers(case: CodedCase) -> None:
    weight = weight_of(case)
    turned = arranged(weight)
    assert fits(weight)
    assert turned.nbytes == weight.nbytes
    assert torch.equal(turned.codes(), weight.codes())
    assert torch.equal(turned.dequantized(), weight.dequantized())
    assert torch.equal(rows(turned, 16, 48).dequantized(), weight.dequantized()[16:48])


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_cost_counts_the_bytes_that_are_stored(case: CodedCase) -> None:
    weight = weight_of(replace(case, ordered=True))
    least = replace(case, tokens=1, bias=False).cost(itemsize=2)
    stored = weight.nbytes - (0 if weight.scale is None else weight.scale.nbytes)
    assert least.bytes == stored + 2 * (case.in_width + case.out_width)


def test_fragments_of_stacked_experts_are_those_of_each() -> None:
    weight = weight_of(WHOLE[0])
    stacked = Coded(*(x.unflatten(0, (4, -1)) if isinstance(x, Tensor) and x.ndim == 2 else x for x in weight))
    assert torch.equal(arranged(stacked).code_OB.flatten(0, 1), arranged(weight).code_OB)
    assert torch.equal(arranged(stacked).dequantized().flatten(0, 1), weight.dequantized())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_dequantized_as_the_reference_does(case: CodedCase, turned: bool, device: str) -> None:
    case = replace(case, out_width=32, in_width=768 if case.format.group == 0 else 256)
    weight = with_edges(weight_of(case, device))._replace(order_I=None)
    got = dequantize(arranged(weight) if turned else weight, torch.float32)
    torch.testing.assert_close(got, weight.dequantized(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [CASES[0].format, CASES[5].format], ids=str)
def test_places_of_x_meet_those_of_the_codes(how: object, device: str) -> None:
    """Each place of a slice, in the order in which a warpgroup reads x, is the input that its code multiplies."""
    case = next(c for c in CASES if c.format == how)
    weight, inputs = weight_of(replace(case, in_width=256, out_width=16)), 256
    # a weight whose code is its column's number, one half of the digits at a time
    x = torch.arange(inputs, dtype=torch.int16).repeat(3, 1).to(device)
    placed = in_places(x.view(torch.float16), span(weight.format)).view(torch.int16).cpu()
    found = torch.zeros(inputs, dtype=torch.int64)
    for shift in (0, 4):
        code_OI = (torch.arange(inputs) >> shift & 15).to(torch.uint8).repeat(16, 1)
        found |= in_order_of_places(code_OI, weight) << shift
    assert torch.equal(placed.long(), found.repeat(3, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("span", [16, 32])
def test_a_norm_in_places_is_the_norm_then_places(span: int, with_residual: bool, device: str) -> None:
    x_TI, residual_TI = torch.randn(2, 3, 448, device=device).to(torch.bfloat16)
    weight_I = torch.rand(448, device=device).to(torch.bfloat16)
    arguments = (x_TI, residual_TI if with_residual else None, weight_I, 1e-6)
    (got, got_s), (n_TI, s_TI) = norm_in_places(*arguments, span), rms_norm(*arguments)
    torch.testing.assert_close(got, in_places(n_TI, span), rtol=0.01, atol=0)  # sums of squares are in another order
    assert torch.equal(got_s, s_TI)


def in_order_of_places(code_OI: Tensor, weight: Coded) -> Tensor:
    """Return the codes of row 0 slice by slice, from the words that the lanes of a warp load."""
    from ridgeline.kernels.gemm.codes.op import packed

    how, size = weight.format, unit(weight.format)
    turned = arranged(weight._replace(code_OB=packed(code_OI, 4)))
    words = turned.code_OB.contiguous().view(torch.int16).view(-1, size * 4).long() & 0xFFFF
    tiles = words.reshape(len(words), -1, 8, 4, 2, 2, 2).permute(0, 5, 2, 4, 3, 6, 1)  # as wide_products.py's `_words`
    words = tiles.reshape(len(words), 16, 16, -1)[:, 0]  # row 0: unit, place, word
    slices = []
    for i in range(size // 16):
        word, j = words[..., i // 4], i % 4
        slices.append((word >> 3 * j & 7 | (word >> 12 + j & 1) << 3) if how.values == "e2m1" else word >> 4 * j & 15)
    return torch.stack(slices, 1).flatten()


@pytest.mark.parametrize("processors", [132, 78])
def test_every_cut_fits_the_device(processors: int) -> None:
    for outputs, inputs, gated in MATRICES:
        for size, bits in ((128, 4), (128, 8), (256, 5), (256, 3)):
            units, parts = inputs // size, 2 if gated else 1
            for tokens in (1, 8, 16, 17, 64, 192):
                cut = choose(
                    tokens, outputs // 16 // parts, units, words=size * bits // 64, parts=parts, processors=processors
                )
                assert -(-units // cut.warps) % cut.depth == 0
                assert outputs // 16 // parts % cut.many == 0
            for tokens in (WIDE_TOKENS[0], 32, 100, 256, WIDE_TOKENS[-1]):
                shape = {"unit": size, "bits": bits, "gated": gated, "processors": processors}
                plans = wide_cuts(tokens, outputs // parts, units, **shape)
                assert plans
                for plan in plans:
                    items = outputs // parts // (plan.many * (64 if gated else 128)) * -(-tokens // plan.tokens)
                    assert plan.shared(size, bits, gated) <= SHARED
                    assert units % plan.split == 0
                    assert plan.split == 1 or (items * plan.split <= processors and 2 * items <= 512)


def test_sharing_of_inputs_is_the_same_for_all_tokens_where_it_must_be() -> None:
    for outputs, inputs, gated in MATRICES:
        parts = 2 if gated else 1
        cuts = [
            choose(t, outputs // 16 // parts, inputs // 128, words=8, parts=parts, processors=132, same=True)
            for t in (1, 2, 9, 17, 64)
        ]
        assert len({cut.warps for cut in cuts}) == 1


def close(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    bound = 16 * torch.finfo(got.dtype).eps * wanted.abs().max()
    assert (got.double() - wanted.double()).abs().max() <= bound


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[6], CASES[13]], ids=str)
def test_products_where_there_are_no_fragments(case: CodedCase) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled")
    case = replace(case, tokens=3, in_width=256, out_width=32)
    x_TI, weight, bias_O = case.inputs(torch.float16, CPU)
    close(triton.coded_linear(x_TI, weight, bias_O), CODED_LINEAR.reference(x_TI, weight, bias_O))


@pytest.fixture(scope="module")
def released() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 48, 64, 130, 300, 700])
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_products_on_a_gpu(case: CodedCase, tokens: int, released: None) -> None:
    device = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float16):
        x_TI, weight, bias_O = replace(case, tokens=tokens, bias=tokens % 2 == 0).inputs(dtype, device)
        turned = triton.prepared(weight, dtype)
        assert isinstance(turned, Fragments) == fits(weight)
        wanted = CODED_LINEAR.reference(x_TI.float(), weight, None if bias_O is None else bias_O.float())
        close(triton.coded_linear(x_TI, turned, bias_O), wanted.to(dtype))
        residual_TI, norm_I = torch.randn_like(x_TI), torch.rand(case.in_width, device=device).to(dtype)
        arguments = (Operand(x_TI, residual_TI, norm_I, 1e-5), turned, Epilogue(gate="silu"))
        y_TO, s_TI = triton.coded_norm_linear(*arguments)
        wanted, wanted_s = CODED_NORM_LINEAR.reference(*arguments)
        close(y_TO, wanted)
        close(s_TI, wanted_s)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 40])
@pytest.mark.parametrize("implementation", [triton, batch_invariant], ids=["triton", "batch invariant"])
def test_weights_without_fragments_follow_each_other(implementation: object, tokens: int, released: None) -> None:
    """Each is dequantized into the same memory, so a product that asked for its weight too early would get the last."""
    device = torch.device("cuda")
    cases = [CodedCase(tokens, 4096 - 64, 4096, CodedFormat(bits=3, group=32, zeros="levels")) for _ in range(3)]
    given = [case.inputs(torch.bfloat16, device) for case in cases]
    weights = [random_codes(case, device, torch.Generator("cuda").manual_seed(n)) for n, case in enumerate(cases)]
    assert not any(fits(weight) for weight in weights)
    x_TI = given[0][0]
    wanted = [CODED_LINEAR.reference(x_TI.float(), weight, None).bfloat16() for weight in weights]
    for _ in range(5):
        found = [implementation.coded_linear(x_TI, weight, None) for weight in weights]
        for got, want in zip(found, wanted, strict=True):
            close(got, want)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_those_beside_it(released: None) -> None:
    x_TI, weight, _ = CodedCase(200, 1024, 512, MXFP4, scales=torch.uint8).inputs(torch.bfloat16, torch.device("cuda"))
    turned = arranged(weight)
    together = batch_invariant.coded_linear(x_TI, turned, None)
    for tokens in (1, 9, 33):
        assert torch.equal(batch_invariant.coded_linear(x_TI[:tokens], turned, None), together[:tokens])
