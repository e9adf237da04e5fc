"""The mixture of experts that ships with the package: the engine computes what was trained, and routing matters.

Its router has learnt, so these tests see what random weights cannot: which experts a token goes to has an effect.
"""

from __future__ import annotations

import asyncio.queues
import email.message
import inspect
import json.decoder
import logging.handlers
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.kernels.gemm.route import op
from ridgeline.layers.decoder import Decoder
from ridgeline.training.balance import experts_of, load_figures
from ridgeline.training.evaluate import bits_per_byte
from ridgeline.training.objective import training_decoder
from ridgeline.weights.folder import ASSETS
from ridgeline.weights.loader import load_weights, read_model_config

MODEL = ASSETS / "embedded-moe"
# Modules that were held out, cut to fit the context
TEXTS = [inspect.getsource(m)[:2400] for m in (json.decoder, email.message, logging.handlers, asyncio.queues)]


def trained() -> Decoder:
    """The decoder of the trainer, in float32."""
    config = read_model_config(MODEL)
    decoder = training_decoder(config.spec, torch.float32, torch.device("cpu"))
    load_weights(decoder, MODEL, config.weights)
    return decoder


def bits(decoder: Decoder) -> float:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return bits_per_byte(decoder, tokenizer, TEXTS, window=1024, stride=256).bits_per_byte


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded-moe", device="cpu", dtype="float32", enable_prefix_caching=False) as built:
        yield built


@pytest.fixture(scope="module")
def reference() -> float:
    return bits(trained())


def test_the_engine_scores_as_the_trainer_does(llm: LLM, reference: float) -> None:
    """All texts in one batch, prompts in chunks: float32 sums in other orders, and no token takes another expert."""
    outputs = llm.generate(TEXTS, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    nats = -sum(next(iter(at.values())).logprob for out in outputs for at in (out.prompt_logprobs or [])[1:])  # type: ignore[union-attr]
    got = nats / torch.log(torch.tensor(2.0)).item() / sum(len(text.encode()) for text in TEXTS)
    assert got == pytest.approx(reference, rel=1e-4)


def test_experts_are_as_busy_as_the_card_says(llm: LLM) -> None:
    """Within the difference that other text of the same kind makes."""
    decoder = llm.assembly.worker.runner.decoder
    for layer in experts_of(decoder):
        layer.tally_E.zero_()
    (output,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    counts_LE = torch.stack([layer.tally_E for layer in experts_of(decoder)])
    tokens = len(output.prompt_token_ids) + 8 - 1  # the last token is never run
    top_k = experts_of(decoder)[0].spec.routing.top_k
    assert counts_LE.sum(1).tolist() == [tokens * top_k] * len(counts_LE)
    llm.generate(TEXTS[1:], SamplingParams(max_tokens=1), use_tqdm=False)
    counts_LE = torch.stack([layer.tally_E for layer in experts_of(decoder)])
    stated = re.search(r"\*\*([\d.]+)\*\* bits of ([\d.]+)", (MODEL / "README.md").read_text())
    assert stated
    assert load_figures(counts_LE)["load_entropy"] == pytest.approx(float(stated[1]), abs=0.15)


def rerouted(change: Callable[[op.Routes], op.Routes]) -> Decoder:
    """The trainer's decoder, whose routes are changed before its experts see them."""
    decoder = trained()

    def route(*arguments: object) -> tuple[Tensor, Tensor, op.Routes]:
        n_TM, s_TM, routes = op.route(*arguments)  # type: ignore[arg-type]
        return n_TM, s_TM, change(routes)

    setattr(decoder.ops, "route", route)  # noqa: B010
    return decoder


def within(capacity: float) -> Callable[[op.Routes], op.Routes]:
    """Drop the tokens of an expert that come after `capacity` times the mean load: their weight is 0."""

    def change(routes: op.Routes) -> op.Routes:
        experts = len(routes.start_E1) - 1
        first_TK = routes.start_E1[routes.expert_TK.clamp(max=experts - 1).long()]
        kept_TK = routes.place_TK - first_TK < capacity * int(routes.start_E1[-1]) / experts
        return routes._replace(weight_TK=routes.weight_TK * kept_TK)

    return change


def to_neighbours(routes: op.Routes) -> op.Routes:
    """Send every token to the experts after its own."""
    experts = len(routes.start_E1) - 1
    moved_TK = torch.where(routes.expert_TK < experts, (routes.expert_TK + 1) % experts, experts)
    return op.in_order(moved_TK, routes.weight_TK, experts)


def test_a_capacity_that_drops_tokens_costs_bits(reference: float) -> None:
    assert bits(rerouted(within(100.0))) == pytest.approx(reference, rel=1e-6)
    tight, tighter = bits(rerouted(within(1.0))), bits(rerouted(within(0.5)))
    assert reference < tight < tighter
    assert tighter > 1.02 * reference


def test_experts_are_not_alike(reference: float) -> None:
    assert bits(rerouted(to_neighbours)) > 1.05 * reference
