"""Ranks that are processes run a divided graph with kernels and with collectives that are begun and awaited."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ridgeline.compiler.sharding.collectives import KINDS
from ridgeline.compiler.sharding.layout import MeshShape
from ridgeline.compiler.sharding.overlap import overlapped
from ridgeline.compiler.sharding.passes import sharded
from ridgeline.compiler.sharding.run import parts, program_of
from ridgeline.compiler.sharding.trace import traced_module
from ridgeline.parallel.processes import join
from tests.parallel.forks import forked, needs_fork, run_apart

CPU = torch.device("cpu")
ANNOTATED = {"input 0": "-,tp,-", "up.weight": "tp,-", "down.weight": "-,tp", "input 1": "tp,-"}


class TwoPaths(nn.Module):
    """A feed-forward between divided tokens, and beside it a path that does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, False), nn.Linear(64, 16, False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.softmax(y, 0)
        return x + self.down(torch.tanh(self.up(x))), torch.exp(torch.sin(y)) * y, z


def rank(number: int, meeting: Path) -> None:
    axis = join(number, 2, meeting, CPU, 60)
    torch.manual_seed(0)
    module, inputs = TwoPaths(), [torch.randn(4, 8, 16), torch.randn(8, 16)]
    traced = traced_module(module, inputs)
    made = sharded(traced, MeshShape.parsed("tp=2"), ANNOTATED, ["-,tp,-", "tp,-", "-,tp"])
    kinds = [each.kind for _, each in made.collectives()]
    assert set(kinds) == set(KINDS), kinds
    assert overlapped(made.graph)
    program = program_of(made.graph, {"tp": axis})
    assert program.num_kernels > 0
    named = {**traced.constants, "input 0": inputs[0], "input 1": inputs[1]}
    given = parts(made, [named[name] for name in traced.names], number)
    for _ in range(2):  # a second run finds what the first one left as it was
        for got, want, dim in zip(program(*given), module(*inputs), (1, 0, 1), strict=True):
            torch.testing.assert_close(got, want.chunk(2, dim)[number], rtol=1e-5, atol=1e-6)


def forks(folder: Path) -> None:
    with torch.no_grad():
        forked(2, lambda number: rank(number, folder / "meeting"))


@pytest.mark.dealt
@needs_fork
def test_two_processes_run_their_parts_and_exchange_the_rest(tmp_path: Path) -> None:
    run_apart("tests.compiler.test_sharding_ranks", tmp_path, 240)
