"""Scales of eight bits by hand, and a short training with each way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline_bench.scripts.float8_scaling import E4M3, E5M2, WAYS, Product, Scale, Scales, corpus, train


def test_a_current_scale_puts_the_largest_number_at_the_format_s_end() -> None:
    scale = Scale(E4M3, 0)
    for largest in (1.0, 1000.0, 1e-6):
        x = torch.tensor([largest, -largest / 2, 0.0])
        assert torch.allclose(scale.rounded(x), x)  # powers of two apart, so nothing is rounded away
    assert scale.saturated == 0
    assert scale.numbers == 9


@pytest.mark.parametrize(("steps", "limits"), [(1, [8.0, 8.0, 2.0, 1.0]), (2, [8.0, 8.0, 8.0, 2.0])])
def test_a_delayed_scale_is_that_of_the_steps_before(steps: int, limits: list[float]) -> None:
    """Of magnitudes 8, 2, 1 and 16 the first has no step before it, and the last saturates."""
    scale = Scale(E5M2, steps)
    for magnitude, limit in zip([8.0, 2.0, 1.0, 16.0], limits, strict=True):
        assert float(scale.rounded(torch.tensor([magnitude]))) == pytest.approx(min(magnitude, limit), rel=0.07)
    assert scale.saturated == 1
    assert scale.seen.maxlen == steps


def test_gradients_are_those_of_the_rounded_numbers() -> None:
    """Both formats hold 7, 3.5 and 1.75 if 7 is the largest number, so both passes are exact."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([0.0, 1.75, -1.75, 3.5, -3.5, 7.0, -7.0])
    x, weight, grad = (exact[torch.randint(7, shape, generator=generator)] for shape in ((3, 6, 8), (5, 8), (3, 6, 5)))
    x.requires_grad_()
    weight.requires_grad_()
    y = Product.apply(x, weight, Scales(0))
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.allclose(y, x @ weight.T)
    assert torch.allclose(x.grad, grad @ weight)
    assert torch.allclose(weight.grad, grad.flatten(0, 1).T @ x.flatten(0, 1))


def test_training_learns_in_every_way_and_a_jump_saturates_delayed_gradients_alone(tmp_path: Path) -> None:
    data = corpus(tmp_path, 32, 2, most=2)
    plain, current, delayed = (train(data, 1, 6, history, 64.0, "cpu") for history in (None, 0, 4))
    assert current.loss == pytest.approx(plain.loss, rel=0.02)
    assert current.saturated == (0.0, 0.0)
    assert delayed.saturated[1] > 0.01
    assert delayed.loss == pytest.approx(plain.loss, rel=0.05)


def test_the_page_shows_the_stored_lines_and_says_what_they_say() -> None:
    root = Path(__file__).parents[2]
    lines = [json.loads(line) for line in (root / "benchmarks/results/float8-scaling.jsonl").read_text().splitlines()]
    page = (root / "docs/training.md").read_text()
    assert {(line["scales"], line["jump"]) for line in lines} == {(way, jump) for way in WAYS for jump in (1.0, 64.0)}
    plain = {line["jump"]: line["loss"] for line in lines if line["scales"] == "float32"}
    for line in lines:
        forward, gradients = line["saturated"]
        cells = [line["scales"], f"{line['jump']:g}", f"{line['loss']:.4f}", f"{line['worst']:.4f}"]
        assert f"| {' | '.join([*cells, f'{forward:.4%}', f'{gradients:.4%}'])} |" in page
        assert line["loss"] == pytest.approx(plain[line["jump"]], rel=3e-3)
        assert (forward > 0 or gradients > 0) == line["scales"].startswith("delayed")
    by_history = [line for jump in plain for line in lines if line["jump"] == jump and sum(line["saturated"])]
    for longer, shorter in zip(by_history[::2], by_history[1::2], strict=True):
        assert longer["saturated"][0] < shorter["saturated"][0]
        assert longer["saturated"][1] < shorter["saturated"][1]
