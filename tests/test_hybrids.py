"""Models whose layers mix in different ways: short convolutions, state spaces, attention, and several of them at once.

tests/models/test_decoder.py and tests/test_oracle.py compare all families with transformers; this file has what these
families alone can do wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.core.plan.request import Preemption
from ridgeline.core.specs.model import attention_of
from ridgeline.layers.linear import Linear
from ridgeline.models import model_config
from ridgeline.perf.footprint import parameters
from ridgeline.quantization.multiplied import MultipliedWeight
from ridgeline.weights.loader import empty_decoder, export_checkpoint, read_model_config
from tests import tiny_models
from tests.driving import ask, rig
from tests.models.test_configs import PUBLISHED
from tests.test_oracle import TOLERANCE, oracle_logprobs
from tests.weights.loading import dense_logits, load

HYBRIDS = ("lfm2", "lfm2_moe", "jamba", "falcon_h1", "zamba2")
TinyModel = Callable[[str], Path]


# tests/test_oracle.py and tests/models/test_selective.py do so with the other families
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "family",
    [
        *("lfm2_moe", "jamba", "falcon_h1", "zamba2", "bamba", "rwkv"),
        *(pytest.param(f, marks=pytest.mark.thorough) for f in ("lfm2", "granite_hybrid", "nemotron_h")),
    ],
)
def test_whoever_is_preempted_at_any_time_gets_the_tokens_of_transformers(family: str, tiny_model: TinyModel) -> None:
    draw, shared = random.Random(5), tuple(range(20, 41))
    prompts = [
        (*shared[: draw.choice((0, 9, 21))], *draw.choices(range(3, 300), k=draw.randint(1, 9))) for _ in range(6)
    ]
    with rig(tiny_model(family), max_num_batched_tokens=13, max_num_seqs=4) as own:
        requests = [ask(str(n), prompt, max_tokens=6) for n, prompt in enumerate(prompts)]
        own.add(*requests)
        scheduler = own.engine.scheduler
        for step in range(300):
            if not own.engine.has_work:
                break
            running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
            if step % 4 == 3 and running:
                scheduler._preempt(draw.choice(running), Preemption.BLOCKS)
            own.step()
        assert own.errors == []
        assert scheduler.preemptions.total() > 3
        for request in requests:
            prompt, tokens = list(request.prompt_token_ids), own.outcomes[request.id].tokens
            assert len(tokens) == 6
            expected = oracle_logprobs(family, [*prompt, *tokens[:-1]])[-6:]
            chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (chosen >= expected.amax(1) - TOLERANCE).all()


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_parameter_is_counted_once(family: str, tiny_model: TinyModel) -> None:
    for spec in (read_model_config(tiny_model(family)).spec, model_config(PUBLISHED[family]).spec):
        held = sum(parameter.numel() for parameter in empty_decoder(spec).parameters())
        assert parameters(spec).total == held


def test_published_sizes_are_those_that_their_makers_give() -> None:
    billions = {family: parameters(model_config(PUBLISHED[family]).spec).total / 1e9 for family in HYBRIDS}
    given = {"lfm2": 1.17, "lfm2_moe": 8.34, "jamba": 51.6, "falcon_h1": 7.59, "zamba2": 2.66}
    assert billions == pytest.approx(given, rel=5e-3)


def test_layers_with_two_states_have_keys_and_values_first(tiny_model: TinyModel) -> None:
    for family in ("falcon_h1", "zamba2"):
        spec = read_model_config(tiny_model(family)).spec
        for layer in spec.layers:
            attention = attention_of(layer.mixer)
            assert [state.kind for state in layer.mixer.states] == ["kv", "recurrent"][1 - bool(attention) :]
        wide = [group.spec for group in spec.cache_groups]
        assert [state.kind for state in wide] == ["kv", "recurrent"]


@torch.no_grad()
def test_multipliers_end_up_in_the_weights_and_checkpoints_keep_their_own(tiny_model: TinyModel) -> None:
    ids_BS = torch.arange(5, 29)[None]
    decoder, weights = load(tiny_model("falcon_h1")), read_model_config(tiny_model("falcon_h1")).weights
    before, exported = dense_logits(decoder, ids_BS), export_checkpoint(decoder, weights)
    stored = tiny_models.tensors(tiny_models.build("falcon_h1"))
    assert all(torch.equal(tensor, stored[name]) for name, tensor in exported.items())
    multiplied = [each for each in decoder.modules() if isinstance(each, Linear) and _is_multiplied(each)]
    assert len(multiplied) == 5 * 2
    decoder.prepare()
    assert not any(map(_is_multiplied, multiplied))
    torch.testing.assert_close(dense_logits(decoder, ids_BS), before, rtol=0, atol=1e-4)


def _is_multiplied(module: Linear) -> bool:
    return isinstance(module.matrix, MultipliedWeight)


@torch.no_grad()
def test_uses_of_a_shared_block_have_one_set_of_weights_and_adapters_of_their_own(tiny_model: TinyModel) -> None:
    decoder, ids_BS = load(tiny_model("zamba2")), torch.arange(5, 29)[None]
    names = [name for name, _ in decoder.named_parameters() if ".block." in name]
    assert {name.split(".")[1] for name in names} == {"1", "2"}  # the third use has the first one's
    before = dense_logits(decoder, ids_BS)
    for name in ("qkv_adapter.down", "mlp_adapter.up.0"):
        own = load(tiny_model("zamba2"))
        own.get_parameter(f"layers.3.mixer.{name}.weight").zero_()
        assert (dense_logits(own, ids_BS) - before).abs().max() > 1e-2
