"""Training in float16 leaves out steps that overflow and adapts its factor; a fixed factor lets them through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.training import loss_scale
from ridgeline.training.data import PackedTokens
from ridgeline.training.loss_scale import LossScale
from ridgeline.training.optimizer import initialize
from ridgeline.training.pretrain import TrainConfig, Trainer


def stepped(scale: LossScale, gradient: float) -> tuple[float, float]:
    """Return (the weight after a step of plain descent, the norm of the gradient) for a loss with this gradient."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = (weight.half() * 16 * gradient).float().sum() / 16  # so that the loss itself is far from overflowing
    scale.scaled(loss).backward()
    norm = float(scale.step(optimizer, [weight], 1e9))
    return float(weight.detach()), norm


def test_an_overflow_is_left_out_and_halves_the_factor() -> None:
    scale = LossScale(None)
    assert stepped(scale, 2.0)[0] == 1.0  # 2 * 65,536 is beyond float16
    assert (scale.factor, scale.skipped) == (32_768.0, 1)
    assert stepped(scale, 1.5) == (-0.5, 1.5)  # 1.5 * 32,768 is not
    assert (scale.factor, scale.skipped) == (32_768.0, 1)


def test_a_small_gradient_is_lost_without_a_factor() -> None:
    tiny = 2.0**-24  # the least number of float16, a quarter of which it has not
    for factor, kept in ((1.0, False), (None, True)):
        weight = nn.Parameter(torch.zeros(1))
        scale = LossScale(factor)
        scale.scaled((weight.half() * tiny).float().sum() / 4).backward()
        norm = float(scale.step(torch.optim.SGD([weight], lr=1.0), [weight], 1.0))
        assert norm == (2.0**-26 if kept else 0.0)


def test_the_factor_doubles_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "STEPS_TO_GROW", 3)
    scale = LossScale(None)
    for _ in range(3):
        stepped(scale, 0.25)
    assert scale.factor == 2 * loss_scale.FIRST
    other = LossScale(None)
    other.resume(json.loads(json.dumps(scale.state())))
    assert other.state() == scale.state()


def test_a_fixed_factor_lets_an_overflow_through() -> None:
    scale = LossScale(65_536.0)
    weight, norm = stepped(scale, 2.0)
    assert not torch.tensor([weight, norm]).isfinite().any()
    assert (scale.factor, scale.skipped) == (65_536.0, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_learns_in_every_type_and_says_what_float16_left_out(
    decoder: Decoder, token_file: Path, tmp_path: Path, dtype: str
) -> None:
    initialize(decoder, 2, seed=0)
    data = PackedTokens(token_file, seq_len=32, batch_size=4, seed=0)
    config = TrainConfig(lr=1e-2, steps=24, dtype=dtype, log_every=1)
    trainer = Trainer(decoder, data, config, tmp_path, Console(quiet=True))
    trainer.scale.factor *= 2.0**12  # so that the first steps overflow
    trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    if dtype == "float16":
        assert 0 < rows[-1]["skipped"] < 24
        assert rows[-1]["loss_scale"] == 2.0 ** (28 - rows[-1]["skipped"])
    else:
        assert "loss_scale" not in rows[-1]


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 2.0), ("float16", 0.0), ("float64", None)])
def test_impossible_settings_are_refused(dtype: str, factor: float | None) -> None:
    with pytest.raises(InvalidConfig, match=r"loss scale|products run in"):
        TrainConfig(lr=1e-3, steps=1, dtype=dtype, loss_scale=factor)


def test_gradients_that_are_never_finite_end_the_run() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    scale, optimizer = LossScale(None), torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.full((2,), torch.nan)
    for _ in range(40):  # from 2^16 to 2^-24
        scale.step(optimizer, [parameter], 1.0)
    with pytest.raises(InvalidConfig, match="not finite in 41 steps"):
        scale.step(optimizer, [parameter], 1.0)
    assert parameter.tolist() == [1.0, 1.0]
