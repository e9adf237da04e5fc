"""Models divided over several ranks give the logits of the undivided model, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.sharding import part_of
from ridgeline.kernels.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.parallel.mesh import Mesh
from ridgeline.weights.loader import load_weights, read_model_config
from tests import tiny_models
from tests.parallel.threads import ThreadAxis, on_ranks

OPS = Ops(Platform(device_type="cpu"))
CPU = torch.device("cpu")
TOKENS = torch.arange(5, 29)


def loaded(folder: Path, mesh: Mesh) -> Decoder:
    model = read_model_config(folder)
    decoder = Decoder(model.spec, OPS, dtype=torch.float32, device=CPU, max_positions=64, mesh=mesh)
    load_weights(decoder, folder, model.weights)
    decoder.prepare()
    return decoder


@torch.inference_mode()
def logits(folder: Path, mesh: Mesh) -> Tensor:
    decoder = loaded(folder, mesh)
    return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), DenseCausal(1)))


def divides(folder: Path, tp: int) -> bool:
    try:
        part_of(read_model_config(folder).spec, tp)
    except InvalidConfig:
        return False
    return True


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_ranks_together_score_as_one_device(family: str, tp: int, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    if not divides(folder, tp):
        pytest.skip(f"{tp} ranks do not divide this model's heads or columns")
    want = logits(folder, Mesh())

    def rank(axis: ThreadAxis) -> Tensor:
        return logits(folder, Mesh(tp=axis))

    for got in on_ranks(tp, rank):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
