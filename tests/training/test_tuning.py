"""A fused optimizer, as GPUs have it, clips and leaves steps out as the loop does for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.training import tuning
from ridgeline.training.packs import Packs
from ridgeline.training.tuning import Tuner, TuningConfig


class Squares:
    """The squared distance of a map's outputs from the numbers of a pack. bad: the pack whose loss is NaN."""

    def __init__(self, learnt: nn.Linear, bad: int | None) -> None:
        self.learnt, self.bad = learnt, bad

    def weight(self, pack: Sequence[int]) -> int:
        return len(pack)

    def tokens(self, pack: Sequence[int]) -> int:
        return len(pack)

    def sum(self, pack: Sequence[int]) -> Tensor:
        x = torch.tensor([[float(each), 1.0, 2.0] for each in pack])
        loss = 40 * (self.learnt(x) - 7).square().sum()
        return loss * (float("nan") if self.bad in pack else 1.0)


def trained(out: Path, monkeypatch: pytest.MonkeyPatch, *, fused: bool, bad: int | None = None) -> nn.Linear:
    """Return a map behind six steps, of which gradients are clipped, or behind those in front of the bad one."""

    def optimizer(learnt: nn.Module, *, lr: float, **_: object) -> torch.optim.AdamW:
        return torch.optim.AdamW(learnt.parameters(), lr=lr, fused=fused)

    monkeypatch.setattr(tuning, "adamw", optimizer)
    torch.manual_seed(0)
    learnt = nn.Linear(3, 2)
    packs = Packs([1] * 6, room=1, per_step=1, seed=0)
    tuner = Tuner(
        learnt, Squares(learnt, bad), packs, TuningConfig(steps=6, lr=0.1, clip=1e-8), out, identity={},
        console=Console(quiet=True),
    )  # fmt: skip
    assert tuner.fused == fused
    if bad is None:
        tuner.run()
    else:
        with pytest.raises(InvalidConfig, match=r"has loss nan and a gradient of norm nan; .*smaller --lr"):
            tuner.run()
        assert 0 < tuner.step < 6
    return learnt


@pytest.mark.parametrize("bad", [None, 1])
def test_a_fused_optimizer_steps_as_others_do(bad: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip is so small that AdamW's own epsilon matters, so clipped gradients make other steps."""
    fused, other = (trained(tmp_path / f"{f}", monkeypatch, fused=f, bad=bad) for f in (True, False))
    for one, two in zip(fused.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
