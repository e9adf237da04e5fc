"""The layer of short sequences in one kernel beside float64, and beside three launches on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.kernels.cuda.predict import CHIPS

short_layer = pytest.importorskip("ridgeline.kernels.attention.ladder.short_layer")
PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "attention-ladder.md"


def drawn(batch: int, tokens: int, heads: int, groups: int, model: int) -> list[torch.Tensor]:
    shapes = (batch, tokens, model), ((heads + 2 * groups) * 64, model), (model, heads * 64)
    return [torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]


def error(inputs: list[torch.Tensor], heads: int, causal: bool, dtype: torch.dtype, device: str = "cpu") -> float:
    """The largest error of two calls, over the norm in float64."""
    x, qkv, o = (each.to(device, dtype) for each in inputs)
    layer = short_layer.ShortLayer(qkv, o, heads, tuple(x.shape[:2]), causal)
    want = short_layer.three_launches(*inputs, heads, causal)
    found = [layer(x).cpu().double().clone() for _ in range(2)]
    assert torch.equal(*found)
    return float((found[0] - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "groups", "model", "causal"),
    [(2, 40, 3, 3, 192, True), (1, 128, 2, 1, 128, False), (3, 1, 2, 2, 64, True), (1, 16, 4, 2, 192, False)],
)
def test_one_kernel_is_three_launches(batch, tokens, heads, groups, model, causal) -> None:
    assert error(drawn(batch, tokens, heads, groups, model), heads, causal, torch.float32) <= 2e-6


def test_programs_fewer_than_heads_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    x, qkv, o = drawn(2, 20, 3, 3, 192)
    layer = short_layer.ShortLayer(qkv.float(), o.float(), 3, (2, 20))
    layer.programs = 4
    want = short_layer.three_launches(x, qkv, o, 3)
    assert torch.allclose(layer(x.float()).double(), want, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "qkv", "word"),
    [((1, 129), (576, 192), "1 to 128"), ((1, 8), (570, 192), "multiple of 64"), ((1, 8), (576, 100), "multiple")],
)
def test_shapes_that_do_not_fit_are_refused(shape, qkv, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        short_layer.ShortLayer(torch.zeros(qkv), torch.zeros(qkv[1], 192), 3, shape)


def test_the_page_has_the_predictions() -> None:
    assert "\n".join(short_layer.table(CHIPS[-1])) in PAGE.read_text()


def test_predicted_times_count_the_flops_of_the_layer() -> None:
    """With a head for each multiprocessor none is idle, so one kernel is as fast as its FLOPs, and the meeting."""
    chip, shape = CHIPS[-1], short_layer.ShortShape(11)
    one, three = short_layer.predicted(shape, chip)
    assert one == pytest.approx(shape.flops / chip.matrix + short_layer.MEETING)
    assert one < three
    one, three = short_layer.predicted(short_layer.ShortShape(1), chip)
    assert one > three


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu(tokens: int, causal: bool) -> None:
    for batch, heads, groups in ((1, 12, 12), (40, 12, 4)):  # 480 heads are more than multiprocessors
        assert error(drawn(batch, tokens, heads, groups, 768), heads, causal, torch.bfloat16, "cuda") <= 1.5e-2
