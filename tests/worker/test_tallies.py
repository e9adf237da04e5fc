"""What each expert got, as the engine tells it, against the choices of transformers' own routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import DeviceLost, InvalidRequest
from ridgeline.core.plan.token_bits import packed
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.roofline import Roofline
from ridgeline.worker import local
from ridgeline.worker.tallies import reach
from tests import tiny_models
from tests.driving import Rig, ask, rig

EXPERTS, USED = 8, 2


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3_moe")


def chosen(folder: Path, texts: list[list[int]]) -> np.ndarray:
    """How many tokens of these texts transformers sends to each expert: [layers, experts]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0
    for text in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([text]), output_router_logits=True).router_logits
        total += np.stack([np.bincount(one.topk(USED).indices.flatten(), minlength=EXPERTS) for one in logits])
    return total


def everything(own: Rig) -> list[list[int]]:
    """The tokens that ran: all but the last output token of each request, which the model never read."""
    return [[*PROMPTS[name], *outcome.tokens[:-1]] for name, outcome in own.outcomes.items()]


PROMPTS = {"a": range(5, 45), "b": range(60, 71), "c": [9] * 20}


@pytest.mark.parametrize("every", [0.0, 1000.0])
def test_every_token_is_counted_once_for_each_of_its_experts(
    folder: Path, every: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of at most 32 tokens, and requests that end at different times."""
    monkeypatch.setattr(local, "TALLIES_PERIOD", every)
    with rig(folder) as own:
        own.run(*(ask(name, list(prompt), max_tokens=4 + len(name)) for name, prompt in PROMPTS.items()))
        load = own.worker.figures().experts
        expected = chosen(folder, everything(own))
        assert load is not None
        assert load.total_LE.tolist() == expected.tolist()
        assert (load.layers, load.experts) == ((0, 1), (EXPERTS, EXPERTS))
        looks = [result.experts for result in own.results if result.experts is not None]
        assert len(looks) == (len(own.results) if every == 0 else 1)
        if every == 0:
            assert sum(look.step_LE for look in looks).tolist() == expected.tolist()
            assert looks[-1].total_LE.tolist() == expected.tolist()
            assert load.step_LE.tolist() == looks[-1].step_LE.tolist()
        for look in looks:
            assert look.step_LE.sum(1).tolist() == [USED * look.step_tokens] * 2


def test_looks_also_come_with_steps_that_wait_for_masks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TALLIES_PERIOD", 0.0)
    with rig(folder) as own:
        own.run(ask("a", list(PROMPTS["a"]), mask=_EveryToken()))
        load = own.worker.figures().experts
        assert load is not None
        assert load.total_LE.tolist() == chosen(folder, everything(own)).tolist()
        assert all(result.experts is not None for result in own.results)


def test_reading_the_tallies_of_a_lost_device_says_that_it_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's process ends itself at once then. It reads them every second, also while nothing runs."""

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    with rig(folder) as own:
        monkeypatch.setattr(own.worker.runner.tallies, "copy", fail)
        with pytest.raises(DeviceLost, match=r"no work any more \(CUDA error: unspecified launch failure\); start"):
            own.worker.figures()


class _EveryToken:
    def allowed(self) -> np.ndarray:
        return packed(np.ones(tiny_models.VOCAB, bool))

    def accept(self, token_id: int) -> None: ...


def test_while_plans_are_under_way_nobody_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TALLIES_PERIOD", 1000.0)
    with rig(folder) as own:
        own.add(ask("a", list(PROMPTS["a"]), max_tokens=30))
        own.step()
        own.step()
        monkeypatch.setattr(own.worker, "_read_tallies", lambda: pytest.fail("it was waited for"))
        first = own.worker.figures().experts
        assert first is not None
        assert first.step_tokens == 32
        while own.engine.has_work:
            own.step()


def test_a_rehearsal_is_not_counted(folder: Path) -> None:
    with rig(folder) as own:
        own.engine.rehearse()
        own.worker.forget_expert_load()
        load = own.worker.figures().experts
        assert load is not None
        assert not load.total_LE.any()
        assert not load.step_LE.any()
        assert load.reach == 1.0
        own.run(ask("a", list(PROMPTS["a"])))
        again = own.worker.figures().experts
        assert again is not None
        assert again.total_LE.tolist() == chosen(folder, everything(own)).tolist()


def test_a_model_without_experts_has_no_load(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("llama")) as own:
        own.run(ask("a", [5, 6, 7]))
        assert own.worker.figures().experts is None
        assert all(result.experts is None for result in own.results)


def test_the_live_limit_counts_the_experts_that_had_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of the same token over and over reaches two experts a layer, and uniform routing would reach all."""
    monkeypatch.setattr(local, "TALLIES_PERIOD", 0.0)
    asked: list[StepShape] = []

    class Listening(Roofline):
        def step_limit(self, shape: StepShape) -> float:
            asked.append(shape)
            return 1.0

    with rig(folder, max_num_batched_tokens=24) as own:
        own.engine._cost_model = object.__new__(Listening)
        own.run(ask("a", [9] * 96, max_tokens=2))
        before, looks = asked[0], [result.experts for result in own.results]
        assert before.reach == 1.0
        assert looks[0] is not None
        specs = own.runner.tallies.specs
        assert looks[0].reach == reach(specs, looks[0].step_LE)[1] < 1
        assert asked[3].reach in {look.reach for look in looks if look is not None and look.step_tokens == 24}


def test_the_offline_api_tells_the_load(folder: Path, tiny_model: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(folder, **options) as llm:
        assert llm.expert_load().tolist() == [[0] * EXPERTS] * 2
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS.values()], params, use_tqdm=False)
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] for output in outputs]
        assert llm.expert_load().tolist() == chosen(folder, texts).tolist()
    with LLM(tiny_model("llama"), **options) as llm:
        assert llm.expert_load().shape == (0, 0)
    with pytest.raises(InvalidRequest, match="shut down"):
        llm.expert_load()


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_on_a_gpu_every_step_is_looked_at_in_its_own_stream(
    folder: Path, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plans are under way at once, padded where they are captured: no token is counted twice, and no padding."""
    monkeypatch.setattr(local, "TALLIES_PERIOD", 0.0)
    with rig(folder, device="cuda", dtype="bfloat16", block_size=16, enforce_eager=eager, debug_checks=False) as own:
        before = own.worker.figures().experts
        assert before is not None
        assert not before.total_LE.any(), "rehearsals count for nothing"
        own.run(*(ask(name, list(prompt), max_tokens=4 + len(name)) for name, prompt in PROMPTS.items()))
        load = own.worker.figures().experts
        assert load is not None
        looks = [result.experts for result in own.results if result.experts is not None]
        assert len(looks) == len(own.results)
        ran = sum(map(len, everything(own)))
        assert load.total_LE.sum(1).tolist() == [USED * ran] * 2
        assert sum(look.step_LE for look in looks).tolist() == load.total_LE.tolist()
