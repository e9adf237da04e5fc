"""A decoder divided over two processes makes the steps of a whole one, with half of the weights on each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.models import model_config
from ridgeline.parallel.processes import ProcessAxis
from ridgeline.training.conversations import Example
from ridgeline.training.embedded import llama_config
from ridgeline.training.objective import training_decoder
from ridgeline.training.offload import OffloadedActivations
from ridgeline.training.optimizer import initialize
from ridgeline.training.sharded import LossPack, PackLoss, sharded_loss
from ridgeline_bench.scripts.training_stages import on_processes

CONFIG: dict[str, Any] = llama_config(hidden=64, intermediate=96, layers=3, heads=2, kv_heads=1)
SPEC = model_config(CONFIG | {"vocab_size": 128, "head_dim": 32}).spec
STEPS = 3


def examples(rank: int) -> list[Example]:
    rows = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(rank)).tolist()
    return [Example(tuple(row), (False, *(True,) * 16), 0) for row in rows]


def trained(loss: PackLoss, ranks: list[int]) -> list[float]:
    """Make steps by the mean gradient of these ranks' examples, and return the mean loss of each."""
    optimizer, found = torch.optim.AdamW(loss.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        losses = [loss(LossPack(examples(rank))) for rank in ranks]
        (torch.stack(losses).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(torch.stack(losses).detach().mean()))
    return found


def divided(share: float, axis: ProcessAxis) -> tuple[list[float], int, dict[str, Tensor]]:
    """As one of the processes: the losses, numbers that it holds, and the whole weights at the end."""
    decoder = training_decoder(SPEC, torch.float32, torch.device("cpu"))
    initialize(decoder, 3, seed=0)
    OffloadedActivations(decoder, share, least=1)
    loss = sharded_loss(decoder, 16, torch.float32)
    found = trained(loss, [axis.rank])
    parameters: dict[str, Any] = dict(loss.named_parameters())
    held = sum(each.to_local().numel() for each in parameters.values())
    whole = {name: each.full_tensor().detach() for name, each in parameters.items()}
    dist.barrier()
    return found, held, whole


@pytest.mark.dealt
@pytest.mark.parametrize("share", [0.0, pytest.param(0.7, marks=pytest.mark.thorough)])
def test_two_processes_make_the_steps_of_one(share: float) -> None:
    decoder = training_decoder(SPEC, torch.float32, torch.device("cpu"))
    initialize(decoder, 3, seed=0)
    loss = PackLoss(decoder, 16)
    expected = trained(loss, [0, 1])
    (first, held, weights), (second, other, _) = on_processes(2, partial(divided, share))
    for mine, theirs, plain in zip(first, second, expected, strict=True):
        assert (mine + theirs) / 2 == pytest.approx(plain, rel=1e-5)
    numbers = sum(each.numel() for each in decoder.parameters())
    assert held + other == numbers
    assert held < 0.6 * numbers
    for name, parameter in loss.named_parameters():
        # AdamW divides by the root of a square: rounding turns the sign of a gradient of almost 0
        torch.testing.assert_close(weights[name], parameter.detach(), atol=2e-3, rtol=1e-3)
