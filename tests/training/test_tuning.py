"""A fused optimizer, as GPUs have it, clips and leaves steps out as the loop does for others; checkpoints are written
while training goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.training import checkpoint, tuning
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


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing of the first one waits for a step behind it, and yet has the numbers of its own step."""
    torch.manual_seed(0)
    learnt = nn.Linear(3, 2)
    packs = Packs([1] * 6, room=1, per_step=1, seed=0)
    config = TuningConfig(steps=5, lr=0.1, checkpoint_every=2)
    tuner = Tuner(
        learnt, Squares(learnt, None), packs, config, tmp_path, identity={}, console=Console(quiet=True)
    )  # fmt: skip
    begin, write = tuner.begin, checkpoint.save_file
    later, weights, written = threading.Event(), dict[int, Tensor](), list[Tensor]()

    def noting() -> None:
        begin()
        weights[tuner.step] = learnt.weight.detach().clone()
        if tuner.step == 3:
            later.set()

    def waiting(tensors: dict[str, Tensor], path: Path) -> None:
        assert later.wait(60)
        written.append(next(iter(tensors.values())).clone())
        write(tensors, path)

    monkeypatch.setattr(tuner, "begin", noting)
    monkeypatch.setattr(checkpoint, "save_file", waiting)
    tuner.run()
    for place, step in enumerate((2, 4, 5)):
        assert torch.equal(written[2 * place], weights[step])
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["step"] == 5


def test_a_checkpoint_without_room_for_a_copy_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "host_memory", lambda: 10)
    learnt = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(learnt.parameters())
    writer = checkpoint.CheckpointWriter()
    writer.save(tmp_path / "kept", learnt, optimizer, {"step": 1})
    kept = load_file(tmp_path / "kept" / "model.safetensors")
    writer.close()
    assert torch.equal(kept["weight"], learnt.weight)
    assert json.loads((tmp_path / "kept" / "state.json").read_text()) == {"step": 1}
