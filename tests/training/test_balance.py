"""Experts are kept equally busy while they are trained, and what is trained comes back from its file."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.models import model_config
from ridgeline.training.balance import Balance, Balancer, auxiliary_loss, experts_of, load_figures
from ridgeline.training.data import PackedTokens
from ridgeline.training.evaluate import bits_per_byte
from ridgeline.training.export import read_model, write_model
from ridgeline.training.mixture import QWEN3
from ridgeline.training.objective import NextTokenLoss, active_parameters, training_decoder
from ridgeline.training.optimizer import initialize
from ridgeline.training.pretrain import TrainConfig, Trainer
from tests.training.conftest import VOCAB

CPU = torch.device("cpu")
SMALL = {"vocab_size": VOCAB, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
CONFIG: dict[str, Any] = QWEN3 | SMALL | {"num_attention_heads": 2, "head_dim": 32, "num_experts": 8}
SIGMOID = RoutingSpec(experts=8, top_k=2, score="sigmoid", renormalize=True, correction=True)


def spec_with(routing: RoutingSpec) -> ModelSpec:
    spec = model_config(CONFIG).spec
    layers = (replace(layer, feed_forward=replace(layer.feed_forward, routing=routing)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def mixture(routing: RoutingSpec | None = None, seed: int = 0) -> Decoder:
    spec = model_config(CONFIG).spec if routing is None else spec_with(routing)
    decoder = training_decoder(spec, torch.float32, CPU)
    initialize(decoder, 2, seed)
    return decoder


def batch() -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 33), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_auxiliary_loss_is_the_papers(score: str) -> None:
    """Equation 4 of arXiv 2101.03961 with its factor α at 1, over K choices a token, in plain loops."""
    how = RoutingSpec(experts=4, top_k=2, score=score)  # type: ignore[arg-type]
    logits = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    score_TE = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    want, counts = 0.0, [0] * 4
    for row in score_TE:
        for expert in sorted(range(4), key=lambda e: -row[e])[:2]:
            counts[expert] += 1
    for expert in range(4):
        probability = sum((row[expert] / row.sum()).item() for row in score_TE) / 10
        want += 4 * counts[expert] / 20 * probability
    assert auxiliary_loss(logits, torch.tensor(counts), how).item() == pytest.approx(want, rel=1e-5)


def test_its_gradient_spreads_a_router_that_prefers_one_expert() -> None:
    how = RoutingSpec(experts=4, top_k=1)
    logits = (torch.eye(4)[0] * 3).repeat(8, 1).requires_grad_()
    auxiliary_loss(logits, torch.tensor([8, 0, 0, 0]), how).backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all()  # going down the gradient lowers the first expert's logit
    assert (logits.grad[:, 1:] < 0).all()


def test_gradients_of_experts_are_those_of_a_dense_sum_over_all_of_them() -> None:
    """Every weight's gradient of the language loss, beside a forward pass that runs all experts on all tokens and
    weighs those that were not chosen with 0."""
    decoder = mixture()
    tokens = batch()
    loss_of = NextTokenLoss(decoder, batch_size=4, chunk=64, autocast=None)
    loss = loss_of(tokens)
    loss.backward()
    got = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    for layer in experts_of(decoder):
        layer.forward = lambda norm, x, residual, live, layer=layer: _dense(layer, norm, x, residual)  # type: ignore
    dense = loss_of(tokens)
    dense.backward()
    # float32 sums of some hundred terms in another order
    assert loss.item() == pytest.approx(dense.item(), rel=1e-5)
    for name, p in decoder.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(got[name], p.grad, rtol=1e-3, atol=1e-6, msg=name)


def _dense(layer: Any, norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    n, s = norm(x, residual)
    probability = (n @ layer.router.T).softmax(-1)
    chosen = probability.topk(2).indices
    weight = torch.zeros_like(probability).scatter(1, chosen, probability.gather(1, chosen))
    weight = weight / weight.sum(-1, keepdim=True)
    gate, up = (n @ layer.gate_up.weight.mT).chunk(2, dim=-1)  # [E, T, F] each
    return (weight.T[:, :, None] * ((F.silu(gate) * up) @ layer.down.weight.mT)).sum(0), s


def test_corrections_move_by_the_sign_of_the_error_and_nothing_else_does_it() -> None:
    decoder = mixture(SIGMOID)
    balancer = Balancer(decoder, Balance(method="correction", rate=0.25))
    NextTokenLoss(decoder, batch_size=4, chunk=64, autocast=None)(batch()).backward()
    counts_LE = torch.stack([layer.tally_E for layer in experts_of(decoder)])
    balancer.step()
    for layer, count_E in zip(experts_of(decoder), counts_LE, strict=True):
        assert layer.correction is not None
        assert layer.correction.grad is None
        assert torch.equal(layer.correction, 0.25 * torch.sign(4 * 32 * 2 / 8 - count_E))
    assert torch.equal(balancer.read(), counts_LE)
    assert not balancer.read().any()


def test_a_router_without_corrections_cannot_be_balanced_by_them() -> None:
    with pytest.raises(InvalidConfig, match="use balancing by loss"):
        Balancer(mixture(), Balance(method="correction"))


@pytest.mark.parametrize(("method", "routing"), [("loss", None), ("correction", SIGMOID)])
def test_balancing_spreads_a_lopsided_router(method: Any, routing: RoutingSpec | None) -> None:
    """All inputs share a direction, in which the router sends them to the first two experts. Counted are the last steps
    of a short training."""
    busiest = {}
    for how in ("none", method):
        decoder = mixture(routing)
        with torch.no_grad():
            decoder.embed.weight += 0.02
            for layer in experts_of(decoder):
                layer.router *= 5
                layer.router[:2] += 0.1
        balancer = Balancer(decoder, Balance(method=how, weight=0.3, rate=0.02))
        loss_of = NextTokenLoss(decoder, batch_size=4, chunk=256, autocast=None)
        optimizer = torch.optim.AdamW([p for p in decoder.parameters() if p.requires_grad], lr=2e-3)
        for step in range(30):
            (loss_of(batch()) + balancer.loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
            if step < 25:
                balancer.read()
        busiest[how] = load_figures(balancer.read())["max_over_mean"]
    assert busiest["none"] > 2
    assert busiest[method] < 1 + 0.6 * (busiest["none"] - 1), busiest


def test_load_figures_of_known_loads() -> None:
    even = load_figures(torch.tensor([[5, 5, 5, 5], [3, 3, 3, 3]]))
    assert even == {"load_entropy": pytest.approx(2), "max_over_mean": pytest.approx(1), "starved": 0}
    one = load_figures(torch.tensor([[0, 40, 0, 0]]))
    assert one == {"load_entropy": pytest.approx(0), "max_over_mean": pytest.approx(4), "starved": 3}


def test_a_resumed_run_repeats_the_uninterrupted_one_with_its_corrections(token_file: Path, tmp_path: Path) -> None:
    def trainer(folder: str, steps: int) -> Trainer:
        config = TrainConfig(lr=1e-2, steps=4, dtype="float32", log_every=1, balance=Balance(method="correction"))
        data = PackedTokens(token_file, seq_len=32, batch_size=2, seed=0)
        made = Trainer(mixture(SIGMOID), data, config, tmp_path / folder, Console(file=io.StringIO()))
        made._fraction = lambda: 1.0 if made.step >= steps else made.step / 4  # type: ignore[method-assign]
        made.run()
        return made

    whole = dict(trainer("whole", 4).decoder.named_parameters())
    trainer("parts", 2)
    resumed = trainer("parts", 4)
    assert any(layer.correction is not None and layer.correction.any() for layer in experts_of(resumed.decoder))
    assert all(torch.equal(p, whole[name]) for name, p in resumed.decoder.named_parameters())


def test_an_exported_mixture_comes_back_and_scores_alike(tokenizer: Any, tmp_path: Path) -> None:
    decoder = mixture()
    write_model(tmp_path, decoder, CONFIG, tokenizer)
    back = read_model(tmp_path, CPU)
    assert all(torch.equal(p.bfloat16(), q) for p, q in zip(decoder.parameters(), back.parameters(), strict=True))
    with torch.no_grad():
        for p, q in zip(decoder.parameters(), back.parameters(), strict=True):
            p.copy_(q)
    tokens, positions = batch()[0], torch.arange(33)
    with torch.inference_mode():
        exact = decoder.logits(decoder(tokens, positions, DenseCausal(1)))
        rounded = back.logits(back(tokens, positions, DenseCausal(1))).float()
    # bfloat16 through two layers against float32
    assert (exact - rounded).norm() < 0.05 * exact.norm()


def test_padding_of_an_evaluation_goes_to_no_expert(tokenizer: Any) -> None:
    decoder, texts = mixture(), ["a = 1\n", "def f(x):\n    return x\n"]
    bits_per_byte(decoder, tokenizer, texts, window=64, stride=16)
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    assert [int(layer.tally_E.sum()) for layer in experts_of(decoder)] == [2 * tokens] * 2


def test_only_the_experts_that_run_are_active() -> None:
    spec = model_config(CONFIG).spec
    expert, width = 3 * 64 * 32, 64
    attention = width * (64 + 2 * 32) + 64 * width
    want = 2 * (attention + 8 * width + 2 * expert) + VOCAB * width
    assert active_parameters(spec) == want
    assert isinstance(spec.layers[0].feed_forward, ExpertsSpec)
