"""Every rung of the attention ladder beside float64, its machine code, and the page's predictions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention.ladder.predict import WholeShape, computed, in_turns, predict, table
from ridgeline.kernels.attention.ladder.rungs import BY_NAME, FOLDER, RUNGS, AttentionRung
from ridgeline.kernels.cuda.predict import CHIPS

run = pytest.importorskip("ridgeline.kernels.attention.ladder.run")
PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "attention-ladder.md"
here = [rung for rung in RUNGS if not rung.hopper]


def drawn(heads: int, groups: int, length: int, size: int, dtype: torch.dtype, device: str = "cpu"):
    shapes = (2, heads, length, size), (2, groups, length, size), (2, groups, length, size)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def exact(inputs: list[torch.Tensor]) -> torch.Tensor:
    return scaled_dot_product_attention(*(x.double() for x in inputs), is_causal=True, enable_gqa=True)


def error(rung: AttentionRung, inputs: list[torch.Tensor]) -> float:
    found, want = run.loaded(rung, *inputs)().double(), exact(inputs)
    return float((found - want).norm() / want.norm())


@pytest.mark.parametrize("length", [128, 77, 1])
@pytest.mark.parametrize("rung", here, ids=lambda rung: rung.name)
def test_rungs_in_the_interpreter(rung: AttentionRung, length: int) -> None:
    """Aligned, ragged, and shorter than a tile; NaN where no result was written would be found."""
    assert error(rung, drawn(4, 2, length, 16, torch.float32)) <= 2e-6


@pytest.mark.parametrize("rung", here, ids=lambda rung: rung.name)
def test_channels_that_fill_no_power_of_two_in_half_precision(rung: AttentionRung) -> None:
    assert error(rung, drawn(2, 2, 70, 20, torch.float16)) <= 2e-3  # scores of the first rung are rounded, too


@pytest.mark.parametrize("rung", ["naive", "online", "tiled"])
def test_nothing_is_written_beside_the_result(rung: str) -> None:
    q, k, v = drawn(2, 1, 70, 20, torch.float32)
    memory = torch.full((q.numel() + 256,), 7.0)
    getattr(run, rung)(q, k, v, memory[128:-128].view(q.shape))
    assert (memory[:128] == 7).all()
    assert (memory[-128:] == 7).all()


def test_rungs_are_in_order_and_those_of_the_ladder_say_what_they_are() -> None:
    assert [rung.number for rung in RUNGS] == list(range(1, len(RUNGS) + 1))
    assert all(rung.file.is_file() and rung.name in run.LOADERS for rung in RUNGS)
    for rung in RUNGS:
        text = rung.file.read_text()
        if rung.file.parent == FOLDER / "ladder" and rung.number <= 6:
            assert text.startswith(f'"""{rung.number}. ')
            assert re.findall(r"^(Idea|FLOPs|Bytes|Limit|Next) ", text, re.M) == [
                "Idea",
                "FLOPs",
                "Bytes",
                "Limit",
                "Next",
            ]


def test_the_page_has_the_predictions() -> None:
    assert "\n".join(table()) in PAGE.read_text()


def test_pairs_are_counted_as_the_tiles_visit_them() -> None:
    shape = WholeShape(batch=1, heads=1, length=300, size=64)
    for rung in RUNGS:
        visited = sum(
            1
            for row in range(0, 300, rung.rows)
            for column in range(0, 300, rung.columns)
            if rung.whole or column < min(row + rung.rows, 300)
        )
        tile = rung.rows * rung.columns
        assert rung.whole or abs(computed(rung, shape) - visited * tile) <= tile * 3
    assert computed(BY_NAME["online"], shape) >= shape.pairs
    assert computed(BY_NAME["tiled"], shape) == 300**2


def test_a_prediction_is_the_sum_of_its_work_over_the_rates() -> None:
    chip, shape = CHIPS[-1], WholeShape(batch=1, heads=1, length=1 << 14, size=128)
    found = predict(BY_NAME["tiled"], chip, shape)
    assert found.seconds["tensor cores"] == 4 * 128 * 2.0**28 / chip.matrix
    assert found.seconds["exponentials"] == pytest.approx(2.0**28 / (16 * 132 * 1.98e9))
    assert found.seconds["L2"] == pytest.approx(4 * 128 / 64 * 2.0**28 / chip.l2)
    intervals = predict(BY_NAME["intervals"], chip, shape)
    assert intervals.limiter == "tensor cores"
    assert intervals.bound < in_turns(intervals) < 2 * intervals.bound
    assert predict(BY_NAME["naive"], chip, shape).limiter == "memory"
    assert predict(BY_NAME["online"], chip, shape).limiter == "L2"


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_rungs_on_a_gpu(rung: AttentionRung, size: int) -> None:
    if not run.runs_here(rung, torch.device("cuda")):
        pytest.skip("it is for Hopper")
    for length in (16, 304, 1024, 1520):
        for heads, groups in ((4, 4), (6, 2)):
            within = 8e-2 if rung.bits == 8 else 1e-2
            assert error(rung, drawn(heads, groups, length, size, torch.bfloat16, "cuda")) <= within
