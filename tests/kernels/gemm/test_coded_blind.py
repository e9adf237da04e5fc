"""Kernels that only a Hopper GPU runs, executed in torch: their arithmetic, their addresses, and the order in which
they ask for memory, against the reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes.cases import CodedCase, random_codes
from ridgeline.kernels.gemm.codes.choose import Cut, Wide
from ridgeline.kernels.gemm.codes.fragments import arranged, span
from ridgeline.kernels.gemm.codes.op import CODED_NORM_LINEAR, MXFP4, NF4, NVFP4, Q4_K, Q6_K, W4, W4_ZEROS, W8, Coded
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand

pytest.importorskip("triton")
from ridgeline.kernels.gemm.codes import fragments_kernel, wide
from ridgeline.kernels.gemm.codes.places import in_places
from tests.kernels.gemm.blind import launch

FORMATS = {
    "W4": CodedCase(1, 0, 0, W4, scales=torch.bfloat16),
    "W4 zeros": CodedCase(1, 0, 0, W4_ZEROS),
    "W4 minima": CodedCase(1, 0, 0, CodedFormat(bits=4, group=32, zeros="minimum")),
    "W8": CodedCase(1, 0, 0, W8),
    "W2": CodedCase(1, 0, 0, CodedFormat(bits=2, group=128, zeros="levels")),
    "a row": CodedCase(1, 0, 0, CodedFormat(bits=4, group=0)),
    "MXFP4": CodedCase(1, 0, 0, MXFP4, scales=torch.uint8),
    "NVFP4": CodedCase(1, 0, 0, NVFP4, scales=torch.float8_e4m3fn),
    "NF4": CodedCase(1, 0, 0, NF4),
    "Q4_K": CodedCase(1, 0, 0, Q4_K),
    "Q6_K": CodedCase(1, 0, 0, Q6_K),
    "five bits": CodedCase(1, 0, 0, CodedFormat(bits=5, group=128, zeros="levels")),
}


def weight_of(name: str, inputs: int, outputs: int) -> Coded:
    case = replace(FORMATS[name], in_width=inputs, out_width=outputs)
    return random_codes(case, torch.device("cpu"), torch.Generator().manual_seed(3))


def close(got: Tensor, wanted: Tensor) -> None:
    bound = 8 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()
    assert (got.double() - wanted.double()).abs().max() <= bound


def some_of(weight: Coded, other: Tensor) -> dict[str, Tensor]:
    """Return the arguments for what a weight may have. Any pointer stands for what it has not."""
    numbers = {"zero": weight.zero_OG, "outer": weight.outer_OS, "outer_minimum": weight.outer_minimum_OS}
    return {f"{name}_ptr": other if x is None else x for name, x in (numbers | {"factor": weight.scale}).items()}


CUTS = {
    "solo": Cut(many=1, tokens=8, depth=3, warps=2, solo=True),
    "solo, many": Cut(many=2, tokens=8, depth=1, warps=2, solo=True),
    "few": Cut(many=1, tokens=8, depth=2, warps=1),
    "late": Cut(many=2, tokens=32, depth=1, warps=4),
}


THOROUGH = pytest.mark.thorough  # what gates do does not depend on the format
OTHERS = [name for name in FORMATS if name != "W4"]


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("name", "cut", "gate"),
    [("W4", cut, gate) for cut in CUTS for gate in (None, "silu")]
    + [(name, "solo", "silu") for name in OTHERS]
    + [pytest.param(name, "solo", None, marks=THOROUGH) for name in OTHERS],
)
def test_products_of_few_tokens(name: str, cut: str, gate: str | None) -> None:
    plan, inputs, outputs = (
        CUTS[cut],
        1536 if FORMATS[name].format.planes()[-1] < 4 else 768,
        128 if name == "W4" else 64,
    )
    tokens = 1 if plan.solo else plan.tokens - 3
    weight = weight_of(name, inputs, outputs)
    turned, generator = arranged(weight), torch.Generator().manual_seed(5)
    x_TI, residual_TI = torch.randn(2, tokens, inputs, generator=generator).to(torch.bfloat16)
    norm_I = torch.rand(inputs, generator=generator).to(torch.bfloat16)
    half = outputs // 2 if gate else outputs
    y_TO, s_TI = torch.full((tokens, half), torch.nan).to(torch.bfloat16), torch.zeros_like(x_TI)
    launch(
        fragments_kernel.fragments_kernel, half // (16 * plan.many), x_ptr=x_TI, residual_ptr=residual_TI,
        norm_ptr=norm_I, code_ptr=turned.code_OB.view(torch.int16), scale_ptr=turned.scale_OG,
        **some_of(turned, x_TI), bias_ptr=x_TI, y_ptr=y_TO, s_ptr=s_TI, x_stride=inputs, tokens=tokens, outputs=half,
        eps=1e-6, **fragments_kernel._constants(plan, weight.format, inputs, x_TI.dtype), NORM=plan.solo,
        RESIDUAL=plan.solo, FACTOR=turned.scale is not None, BIAS=False, GATE=gate or "", PDL=False,
    )  # fmt: skip
    if plan.solo:
        wanted, s = CODED_NORM_LINEAR.reference(Operand(x_TI, residual_TI, norm_I, 1e-6), weight, Epilogue(gate=gate))
        assert torch.equal(s, s_TI)
    else:
        wanted = x_TI.double() @ weight.dequantized().double().T
        wanted = torch.nn.functional.silu(wanted[:, :half]) * wanted[:, half:] if gate else wanted
    close(y_TO, wanted)


WIDE = {
    "one tile": (20, Wide(many=1, tokens=32, depth=3, stages=2)),
    "tiles of tokens": (40, Wide(many=1, tokens=16, depth=2, stages=3)),
    "many": (16, Wide(many=2, tokens=16, depth=2, stages=2)),
    "split": (17, Wide(many=1, tokens=32, depth=3, stages=2, split=2)),
}


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("name", "cut", "gate"),
    [("W4", cut, gate) for cut, (_, plan) in WIDE.items() for gate in (None, "silu") if plan.split == 1 or gate is None]
    + [(name, "one tile", "silu") for name in OTHERS]
    + [pytest.param(name, "one tile", None, marks=THOROUGH) for name in OTHERS],
)
def test_wide_products(name: str, cut: str, gate: str | None) -> None:
    (tokens, plan), inputs, outputs = WIDE[cut], 512, (256 if name == "W4" else 128) * WIDE[cut][1].many
    weight = weight_of(name, inputs, outputs)
    turned, generator = arranged(weight), torch.Generator().manual_seed(5)
    x_TI = torch.randn(tokens, inputs, generator=generator).to(torch.bfloat16)
    half = outputs // 2 if gate else outputs
    y_TO = torch.full((tokens, half), torch.nan).to(torch.bfloat16)
    tiles = -(-tokens // plan.tokens)
    items = half // (plan.many * (64 if gate else 128)) * tiles * plan.split
    some = some_of(turned, x_TI)
    boxes = SimpleNamespace(
        x=in_places(x_TI, span(weight.format)), block_shape=(min(plan.tokens, 32), 64), dtype=x_TI.dtype,
        layout=None,
    )  # fmt: skip
    launch(
        wide.wide_kernel, items if plan.split > 1 else min(items, 3), x_desc=boxes,
        code_ptr=turned.code_OB.view(torch.int16), scale_ptr=turned.scale_OG, **some,
        bias_ptr=x_TI, y_ptr=y_TO, sums_ptr=torch.full((items * 128 * plan.many * plan.tokens,), torch.nan),
        arrival_ptr=torch.zeros(64, dtype=torch.int32), tokens=tokens, outputs=half,
        **wide._constants(plan, weight.format, inputs, x_TI.dtype), TILES=tiles, FACTOR=turned.scale is not None,
        BIAS=False, GATE=gate or "", PDL=False,
    )  # fmt: skip
    wanted = x_TI.double() @ weight.dequantized().double().T
    close(y_TO, torch.nn.functional.silu(wanted[:, :half]) * wanted[:, half:] if gate else wanted)
