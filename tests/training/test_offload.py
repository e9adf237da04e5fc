"""Activations that wait in the host's memory: the same losses and gradients, and as many layers as were asked for."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.training.embedded import llama_config
from ridgeline.training.objective import NextTokenLoss, training_decoder
from ridgeline.training.offload import LayerRun, OffloadedActivations
from ridgeline.training.optimizer import initialize

LAYERS = 5
CONFIG: dict[str, Any] = llama_config(hidden=64, intermediate=96, layers=LAYERS, heads=2, kv_heads=1)
CPU = torch.device("cpu")


@pytest.fixture
def decoder() -> Decoder:
    made = training_decoder(model_config(CONFIG | {"vocab_size": 128, "head_dim": 32}).spec, torch.float32, CPU)
    initialize(made, LAYERS, seed=0)
    return made


def step(decoder: Decoder, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of random tokens, and all gradients."""
    tokens_BS1 = torch.randint(128, (3, 17), generator=torch.Generator().manual_seed(seed))
    decoder.zero_grad()
    loss = NextTokenLoss(decoder, batch_size=3, chunk=16, autocast=None)(tokens_BS1)
    loss.backward()
    return loss.detach(), [each.grad.clone() for each in decoder.parameters() if each.grad is not None]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_losses_and_gradients_are_those_of_tensors_that_stay(decoder: Decoder, share: float) -> None:
    loss, gradients = step(decoder)
    offloaded = OffloadedActivations(decoder, share, least=1)
    for _ in range(2):
        again, others = step(decoder)
        assert torch.equal(loss, again)
        for mine, plain in zip(others, gradients, strict=True):
            assert torch.equal(mine, plain)
    assert (offloaded.num_bytes > 0) == (share > 0)


def test_a_larger_share_sends_more_and_small_tensors_stay(decoder: Decoder) -> None:
    sent = []
    for share in (0.2, 0.4, 0.8):
        offloaded = OffloadedActivations(decoder, share, least=1)
        step(decoder)
        sent.append(offloaded.num_bytes)
        offloaded.close()
    assert sent[0] < sent[1]
    assert 2 * (sent[1] - sent[0]) == sent[2] - sent[1], "layers are alike, but for the first"
    offloaded = OffloadedActivations(decoder, 1.0, least=1 << 30)
    step(decoder)
    assert offloaded.num_bytes == 0


def test_weights_never_travel(decoder: Decoder) -> None:
    """Of one token a layer saves little beside its weights."""
    offloaded = OffloadedActivations(decoder, 1.0, least=1)
    NextTokenLoss(decoder, batch_size=1, chunk=16, autocast=None)(torch.zeros(1, 2, dtype=torch.int64))
    assert offloaded.num_bytes < sum(each.nbytes for each in decoder.layers[0].parameters())


def test_two_passes_may_be_forward_before_the_first_is_backward(decoder: Decoder) -> None:
    def loss(seed: int) -> Tensor:
        tokens_BS1 = torch.randint(128, (3, 17), generator=torch.Generator().manual_seed(seed))
        found: Tensor = NextTokenLoss(decoder, batch_size=3, chunk=16, autocast=None)(tokens_BS1)
        return found

    def gradients() -> list[Tensor]:
        decoder.zero_grad()
        (loss(0) * 0.5 + loss(1)).backward()
        return [each.grad.clone() for each in decoder.parameters() if each.grad is not None]

    plain = gradients()
    OffloadedActivations(decoder, 0.6, least=1)
    for mine, kept in zip(gradients(), plain, strict=True):
        assert torch.equal(mine, kept)


def test_nothing_is_held_behind_a_backward_pass(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[weakref.ref[LayerRun]]()
    plain = LayerRun.__init__

    def seen(run: LayerRun, *given: Any) -> None:
        plain(run, *given)
        runs.append(weakref.ref(run))

    monkeypatch.setattr(LayerRun, "__init__", seen)
    OffloadedActivations(decoder, 0.6, least=1)
    step(decoder)
    gc.collect()
    assert len(runs) == LAYERS
    assert not any(run() for run in runs)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_other_shares_are_refused(decoder: Decoder, share: float) -> None:
    with pytest.raises(InvalidConfig, match="from 0 to 1"):
        OffloadedActivations(decoder, share)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_on_a_gpu_the_peak_falls_and_the_gradients_stay(share: float) -> None:
    device = torch.device("cuda")
    made = training_decoder(model_config(CONFIG | {"vocab_size": 128, "head_dim": 32}).spec, torch.float32, device)
    initialize(made, LAYERS, seed=0)
    tokens_BS1 = torch.randint(128, (64, 257), device=device)
    loss_of, found = NextTokenLoss(made, batch_size=64, chunk=4096, autocast=None), []
    offloaded = None
    for again in (False, True):
        offloaded = OffloadedActivations(made, share) if again else None
        made.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss_of(tokens_BS1).backward()
        gradients = [each.grad.clone() for each in made.parameters() if each.grad is not None]
        found.append((torch.cuda.max_memory_allocated(), gradients))
    assert offloaded is not None
    assert offloaded.num_bytes
    assert found[1][0] < found[0][0]
    for mine, plain in zip(found[1][1], found[0][1], strict=True):
        assert torch.equal(mine, plain)
