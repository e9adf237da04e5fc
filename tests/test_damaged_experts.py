"""An expert whose weights are not numbers ends the requests that are routed to it, and no other request is affected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.plan.request import Request
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts
from tests.driving import ask, rig
from tests.weights.loading import dense_logits, load

FAMILY, LAYER, EXPERT = "qwen3_moe", 0, 2
PROMPTS = [tuple(range(start, start + length)) for start in (5, 60, 130, 200, 280) for length in (2, 3, 5)]
TOKENS = 3
PARTS = ["gate_proj", "down_proj"]


@pytest.fixture(params=PARTS)
def damaged(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the model, in which one matrix of one expert is NaN."""
    (tmp_path / "config.json").symlink_to(tiny_model(FAMILY) / "config.json")
    tensors = load_file(tiny_model(FAMILY) / "model.safetensors")
    tensors[f"model.layers.{LAYER}.mlp.experts.{EXPERT}.{request.param}.weight"].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def taken(decoder: Decoder) -> int:
    """How many tokens the expert has got."""
    experts = decoder.layers[LAYER].feed_forward
    assert isinstance(experts, Experts)
    return int(experts.tally_E[EXPERT])


@torch.no_grad()
def test_other_sequences_of_the_batch_are_the_same_to_the_last_bit(
    damaged: Path, tiny_model: Callable[[str], Path]
) -> None:
    whole, ids_BS = load(tiny_model(FAMILY)), torch.arange(3, 300)[:, None]
    expected, got = dense_logits(whole, ids_BS), dense_logits(load(damaged), ids_BS)
    reached = []
    for row in ids_BS:
        before = taken(whole)
        dense_logits(whole, row[None])
        reached.append(taken(whole) > before)
    hit = torch.tensor(reached)
    assert 20 < hit.sum() < len(hit) - 20
    assert got[hit].isnan().all()
    assert torch.equal(got[~hit], expected[~hit])


def requests() -> list[Request]:
    return [ask(str(number), prompt, max_tokens=TOKENS, logprobs=0) for number, prompt in enumerate(PROMPTS)]


def test_only_requests_that_reach_the_expert_end(damaged: Path, tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model(FAMILY)) as own:
        expected = own.run(*requests())
    with rig(damaged) as own:
        outcomes = own.run(*requests())
        assert not own.errors
    whole, ended = load(tiny_model(FAMILY)), 0
    for (name, outcome), prompt in zip(outcomes.items(), PROMPTS, strict=True):
        before, run = taken(whole), [*prompt, *expected[name].tokens[: TOKENS - 1]]
        dense_logits(whole, torch.tensor([run]))
        if taken(whole) > before:
            ended += 1
            assert outcome.finish_reason == "error"
            assert "not numbers (NaN)" in str(outcome.error)
        else:
            assert outcome.tokens == expected[name].tokens
            for (_, ours), (_, wanted) in zip(outcome.scored, expected[name].scored, strict=True):
                assert ours == pytest.approx(wanted, abs=1e-5)  # steps are smaller when others have ended
    assert 3 < ended < len(PROMPTS) - 3
