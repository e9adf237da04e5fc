"""The persistent step's task graph, run by its slow twin in random orders, beside the engine's own network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.persistent.build import build
from ridgeline.kernels.step.persistent.reference import SlowStep
from ridgeline.kernels.step.persistent.tensors import RowInputs, StepBuffers
from ridgeline.kernels.step.persistent.validate import validate
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.layers.persistent import shape_of, weights_of
from ridgeline.weights.loader import load_weights, read_model_config
from tests import tiny_models

CPU, PAGE, LENGTH, ROWS = torch.device("cpu"), 4, 11, 2
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    ("qwen3", {}),
    ("qwen2", {"use_sliding_window": False}),
]


def decoder_of(family: str, folder: Path, **changes: Any) -> Decoder:
    config = read_model_config(tiny_models.save(family, folder, **changes))
    decoder = Decoder(config.spec, Ops(Platform.of(CPU)), dtype=torch.float32, device=CPU)
    load_weights(decoder, folder, config.weights)
    return decoder


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
@torch.inference_mode()
def test_any_order_of_blocks_gives_the_networks_scores(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    decoder = decoder_of(family, tmp_path, **changes)
    ids_RS = torch.randint(tiny_models.VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    positions_T = torch.arange(LENGTH).repeat(ROWS)
    hidden = decoder(ids_RS.flatten(), positions_T, DenseCausal(ROWS))
    wanted_RSV = decoder.logits(hidden).unflatten(0, (ROWS, LENGTH))

    shape, weights = shape_of(decoder.spec), weights_of(decoder)
    pages = -(-LENGTH // PAGE)
    units = torch.full((shape.layers, 1 + ROWS * pages, 2, shape.kv_heads, PAGE, shape.head_dim), torch.nan)
    table_SC = 1 + torch.randperm(ROWS * pages).view(ROWS, pages)
    for position in range(LENGTH):
        splits = 1 + position % 3
        joins, marked = position > LENGTH // 2, position % 2 == 1
        schedule = build(shape, ROWS, 1 + 2 * position, splits, joins=joins, marked=marked)
        validate(schedule, 132)
        inputs = RowInputs(
            tokens_R=ids_RS[:, position],
            positions_R=torch.full((ROWS,), position),
            live_R=torch.ones(ROWS, dtype=torch.bool),
            slots_R=torch.arange(ROWS, dtype=torch.int32),
            table_SC=table_SC.int(),
            caches=[(each[:, 0], each[:, 1]) for each in units],
        )
        buffers = StepBuffers.poisoned(shape, ROWS, splits, weights.norm_M)
        step = SlowStep(shape=shape, weights=weights, inputs=inputs, buffers=buffers, splits=splits)
        torch.testing.assert_close(step.run(schedule, seed=position), wanted_RSV[:, position], rtol=0, atol=2e-4)


REFUSED = {
    "gemma2": "embedding_multiplier",
    "mixtral": "attention and a gated",
    "olmo2": "does not know norms",
    "gpt2": "learned_positions",
}


@pytest.mark.parametrize(("family", "told"), REFUSED.items())
def test_networks_of_another_kind_are_refused(family: str, told: str, tmp_path: Path) -> None:
    spec = read_model_config(tiny_models.save(family, tmp_path)).spec
    with pytest.raises(InvalidConfig, match=told):
        shape_of(spec)
