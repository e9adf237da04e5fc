"""The backward pass of the attention ladder beside float64, its predictions, and the check before its times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention.ladder.predict import WholeShape, backward_table, in_turns, predict_backward
from ridgeline.kernels.attention.ladder.rungs import BACKWARD_RUNGS
from ridgeline.kernels.cuda.predict import CHIPS
from ridgeline_bench.ladders.attention import GradientOperands

run = pytest.importorskip("ridgeline.kernels.attention.ladder.run")
HERE = [rung for rung in BACKWARD_RUNGS if not rung.hopper]
PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "attention-ladder.md"


def errors(rung, heads: int, groups: int, length: int, size: int, dtype: torch.dtype, device: str = "cpu"):
    """Errors of the gradients of q, k and v by the second call, over the largest of their norms in float64."""
    inputs = [torch.randn(2, h, length, size, dtype=torch.float64) for h in (heads, groups, groups, heads)]
    leaves = [x.to(dtype).double().requires_grad_() for x in inputs[:3]]
    scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).backward(inputs[3].to(dtype).double())
    *qkv, grad = (x.to(device, dtype) for x in inputs)
    call = run.loaded_backward(rung, tuple(qkv), grad)
    call()
    norm = max(float(x.grad.norm()) for x in leaves)
    return [float((x.cpu().double() - y.grad).norm()) / norm for x, y in zip(call(), leaves, strict=True)]


@pytest.mark.parametrize("length", [128, 77, 129, 1])
@pytest.mark.parametrize("rung", HERE, ids=lambda rung: rung.name)
def test_rungs_in_the_interpreter(rung, length: int) -> None:
    assert max(errors(rung, 4, 2, length, 64, torch.float32)) <= 2e-6


def test_tiles_of_wide_heads_in_the_interpreter() -> None:
    assert max(errors(BACKWARD_RUNGS[1], 1, 1, 200, 128, torch.float32)) <= 2e-6


def test_the_page_has_the_predictions() -> None:
    assert "\n".join(backward_table()) in PAGE.read_text()


def test_five_products_take_five_sevenths_of_seven() -> None:
    seven, five = (predict_backward(rung, CHIPS[-1], WholeShape()) for rung in HERE)
    assert five.seconds["tensor cores"] == pytest.approx(seven.seconds["tensor cores"] * 5 / 7)
    assert five.seconds["tensor cores"] == pytest.approx(2.5 * WholeShape().flops / CHIPS[-1].matrix)
    assert five.limiter == "tensor cores"
    assert in_turns(five) < in_turns(seven)


def test_the_check_of_gradients_takes_right_ones_alone() -> None:
    operands = GradientOperands(WholeShape(batch=2, heads=4, groups=2, length=70, size=64), "cpu")
    [call, *_] = operands.rung("gradients-5")
    assert operands.fault(call) == ""
    wrong = [x.clone() for x in call()]
    wrong[1][1, 1, 3].neg_()
    assert "wrong by" in operands.fault(lambda: wrong)
    wrong[2][0, 0, 0] = torch.nan
    assert "not finite" in operands.fault(lambda: wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("rung", BACKWARD_RUNGS, ids=lambda rung: rung.name)
def test_rungs_on_a_gpu(rung, size: int) -> None:
    for length in (16, 304, 1024, 1520):
        for heads, groups in ((4, 4), (6, 2)):
            assert max(errors(rung, heads, groups, length, size, torch.bfloat16, "cuda")) <= 1e-2
