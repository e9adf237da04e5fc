"""Models with gated delta rules: what they take is what is planned, and a state moves whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.core.specs.delta import GatedDeltaSpec
from ridgeline.perf.footprint import active_parameters, kv_bytes, kv_bytes_per_token, parameters
from ridgeline.weights.loader import empty_decoder, read_model_config
from ridgeline.worker import memory
from ridgeline.worker.state.recurrent import RecurrentLayer
from tests import tiny_models
from tests.driving import ask, rig
from tests.perf.models import spec

FAMILIES = tiny_models.ZERO_CENTRED


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_counted(family: str, tiny_model: Callable[[str], Path]) -> None:
    model = read_model_config(tiny_model(family)).spec
    assert parameters(model).total == sum(each.numel() for each in tiny_models.build(family).parameters())
    tables = memory.weight_bytes(model, dtype_bytes=0, positions=1)
    assert memory.weight_bytes(model, dtype_bytes=4, positions=1) - tables == empty_decoder(model).weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_takes_the_bytes_that_are_planned(family: str, dtype: str, tiny_model: Callable[[str], Path]) -> None:
    """The tail of the convolution in the activations' dtype, then the state of every value head in float32."""
    with rig(tiny_model(family), dtype=dtype) as own:
        model, states = own.runner.decoder.spec, own.runner.segments.states
        group = next(group for group in model.cache_groups if group.spec.exact)
        assert len(group.layers) == 2
        for index in group.layers:
            mixer, state = model.layers[index].mixer, states[index]
            assert isinstance(mixer, GatedDeltaSpec)
            assert isinstance(state, RecurrentLayer)
            tails, kept = state.parts
            assert tails.shape[1:] == (3, 2 * 2 * 16 + 4 * 24)
            assert kept.shape[1:] == (4, 16, 24)
            assert (tails.dtype, kept.dtype) == (getattr(torch, dtype), torch.float32)
            assert group.spec.unit_bytes(4, dtype) == tails[0].nbytes + kept[0].nbytes
            assert kept.data_ptr() - tails.data_ptr() == tails[0].nbytes
        assert kv_bytes(model, 1000, dtype, block_size=4) == sum(
            state.unit_bytes(4, dtype) if state.exact else 1000 * state.token_bytes(dtype)
            for layer in model.layers
            for state in layer.mixer.states
        )


def test_published_shapes_take_what_their_cards_say() -> None:
    """35 billion parameters of which 3 are active (with the embedding's and the scores' tables); 32 value heads of
    128 x 128 in float32 and three inputs of 8,192 channels in bfloat16, in three of four layers."""
    small, mixture = spec("qwen3.5-9b"), spec("qwen3.5-35b-a3b")
    assert parameters(mixture).total == pytest.approx(34.7e9, rel=2e-3)
    assert active_parameters(mixture) == pytest.approx(3.45e9, rel=5e-3)
    assert parameters(small).total == pytest.approx(8.95e9, rel=2e-3)
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    for model, states, attending, kv_heads in ((small, 24, 8, 4), (mixture, 30, 10, 2)):
        assert kv_bytes_per_token(model, "bfloat16") == attending * 2 * kv_heads * 256 * 2
        grown = kv_bytes_per_token(model, "bfloat16") * 4096
        assert kv_bytes(model, 4096, "bfloat16", block_size=64) == states * state + grown


def test_a_request_of_random_weights_runs(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("qwen3_5_moe"), load_format="dummy") as own:
        assert len(own.run(ask("a", range(5, 40)))["a"].tokens) == 8
        assert not own.errors
