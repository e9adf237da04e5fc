"""Models of Mamba and Mamba-2: the sizes of published ones, and requests that give way."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import Preemption
from ridgeline.kernels.base.cost import StepShape
from ridgeline.models import model_config
from ridgeline.perf.division import Division
from ridgeline.perf.footprint import active_parameters, kv_bytes, kv_bytes_per_token, parameters
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline, step_limit, step_ops
from tests import tiny_models
from tests.models.selective_configs import SELECTIVE

# As the models' pages tell them, in billions; the second is what a token uses
PUBLISHED = {
    "mamba": (2.77, 2.77),
    "falcon_mamba": (7.27, 7.27),
    "mamba2": (2.70, 2.70),
    "bamba": (9.78, 9.78),
    "granite_hybrid": (3.19, 3.19),
    "granite_hybrid_moe": (6.94, 1.49),
    "granite_hybrid_small": (32.2, 8.8),
    "nemotron_h": (8.1, 8.1),
    "nemotron_h_moe": (31.6, 3.58),
}


@pytest.mark.parametrize("name", SELECTIVE)
def test_published_models_have_as_many_parameters_as_their_pages_say(name: str) -> None:
    spec = model_config(SELECTIVE[name]).spec
    total, active = PUBLISHED[name]
    assert parameters(spec).total / 1e9 == pytest.approx(total, rel=0.005)
    assert active_parameters(spec) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", SELECTIVE)
def test_a_steps_limit_is_the_same_in_its_fast_and_its_slow_form(name: str) -> None:
    spec, hardware = model_config(SELECTIVE[name]).spec, find("H200").attained()
    for new, length in (([1], [900]), ([1] * 64, [5000] * 64), ([700, 1, 0, 33], [700, 40, 8, 2000])):
        at = StepShape(new, length, len(new))
        slow = step_limit(step_ops(spec, at, dtype="bfloat16"), hardware, "bfloat16")
        assert Roofline(spec, hardware, "bfloat16").step_limit(at) == pytest.approx(slow, rel=1e-9)


def test_a_decode_step_reads_every_weight_once_and_every_state_twice() -> None:
    """The rest is activations."""
    spec = model_config(SELECTIVE["falcon_mamba"]).spec
    ops = step_ops(spec, StepShape([1] * 8, [9000] * 8, 8), dtype="bfloat16")
    states = 2 * 8 * 64 * (8192 * 16 * 4 + 3 * 8192 * 2)
    weights = 2 * (parameters(spec).total - parameters(spec).embed)
    moved = sum(op.count * op.cost.bytes for op in ops)
    assert weights + states < moved < 1.03 * (weights + states)


def test_a_model_without_attention_keeps_one_state_however_long_a_request_is() -> None:
    spec = model_config(SELECTIVE["mamba2"]).spec
    state = 64 * (80 * 64 * 128 * 4 + 3 * (5120 + 2 * 128) * 2)
    assert kv_bytes_per_token(spec, "bfloat16") == 0
    assert kv_bytes(spec, 10**6, "bfloat16", block_size=16) == kv_bytes(spec, 1000, "bfloat16", block_size=16)
    assert kv_bytes(spec, 1000, "bfloat16", block_size=16) in (state, 2 * state)


@pytest.mark.parametrize("name", SELECTIVE)
def test_ranks_divide_the_states_of_published_sizes(name: str) -> None:
    spec = model_config(SELECTIVE[name]).spec
    part = Division(tp=2).part_of(spec)
    assert Division(cp=2).part_of(spec) == Division(pp=2).part_of(spec) == spec
    whole, own = (
        [state.parts[-1].num_bytes("bfloat16") for layer in each.layers for state in layer.mixer.states if state.exact]
        for each in (spec, part)
    )
    assert sum(own) == sum(whole) / 2
    with pytest.raises(
        InvalidConfig, match=r"^tp 7 does not divide the model's \d+ [\w /-]+; choose another number\.$"
    ):
        Division(tp=7).part_of(spec)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2", "granite_hybrid_moe", "nemotron_h_moe"])
def test_requests_that_give_way_again_and_again_still_get_their_tokens(
    family: str, tiny_model: Callable[[str], Path]
) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 300) for _ in range(5 + 7 * n)] for n in range(5)]
    settings = {"max_num_batched_tokens": 16, "block_size": 4, "max_num_seqs": 4, "dtype": "float32", "device": "cpu"}
    with LLM(tiny_model(family), skip_tokenizer_init=True, debug_checks=True, **settings) as llm:
        scheduler, step = llm.engine.scheduler, llm.engine.step

        def unsteady() -> object:
            running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
            if running and draw.random() < 0.4:
                scheduler._preempt(draw.choice(running), Preemption.BLOCKS)
            return step()

        llm.engine.step = unsteady  # type: ignore[method-assign]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.generate(asked, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert scheduler.preemptions.total() > 5
    oracle = tiny_models.build(family)
    for prompt, result in zip(prompts, found, strict=True):
        tokens = [*prompt, *result.outputs[0].token_ids]
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = expected.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
        assert (chosen >= expected.amax(1) - 1e-4).all()
