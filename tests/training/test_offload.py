"""Activations that wait in the host's memory: the same losses and gradients, and as many layers as were asked for."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.training import fine_tune
from ridgeline.training.embedded import llama_config
from ridgeline.training.fine_tune import FineTuneConfig
from ridgeline.training.objective import NextTokenLoss, training_decoder
from ridgeline.training.offload import LayerRun, OffloadedActivations
from ridgeline.training.optimizer import initialize
from ridgeline.training.tuned import recompute

LAYERS = 5
CONFIG: dict[str, Any] = llama_config(hidden=64, intermediate=96, layers=LAYERS, heads=2, kv_heads=1)
CPU = torch.device("cpu")


@pytest.fixture
def five_layers() -> Decoder:
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
def test_losses_and_gradients_are_those_of_tensors_that_stay(five_layers: Decoder, share: float) -> None:
    loss, gradients = step(five_layers)
    offloaded = OffloadedActivations(five_layers, share, least=1)
    for _ in range(2):
        again, others = step(five_layers)
        assert torch.equal(loss, again)
        for mine, plain in zip(others, gradients, strict=True):
            assert torch.equal(mine, plain)
    assert (offloaded.num_bytes > 0) == (share > 0)


def test_a_larger_share_sends_more_and_small_tensors_stay(five_layers: Decoder) -> None:
    sent = []
    for share in (0.2, 0.4, 0.8):
        offloaded = OffloadedActivations(five_layers, share, least=1)
        step(five_layers)
        sent.append(offloaded.num_bytes)
        offloaded.close()
    assert sent[0] < sent[1]
    assert 2 * (sent[1] - sent[0]) == sent[2] - sent[1], "layers are alike, but for the first"
    offloaded = OffloadedActivations(five_layers, 1.0, least=1 << 30)
    step(five_layers)
    assert offloaded.num_bytes == 0


def test_weights_never_travel(five_layers: Decoder) -> None:
    """Of one token a layer saves little beside its weights."""
    offloaded = OffloadedActivations(five_layers, 1.0, least=1)
    NextTokenLoss(five_layers, batch_size=1, chunk=16, autocast=None)(torch.zeros(1, 2, dtype=torch.int64))
    assert offloaded.num_bytes < sum(each.nbytes for each in five_layers.layers[0].parameters())


def test_two_passes_may_be_forward_before_the_first_is_backward(five_layers: Decoder) -> None:
    def loss(seed: int) -> Tensor:
        tokens_BS1 = torch.randint(128, (3, 17), generator=torch.Generator().manual_seed(seed))
        found: Tensor = NextTokenLoss(five_layers, batch_size=3, chunk=16, autocast=None)(tokens_BS1)
        return found

    def gradients() -> list[Tensor]:
        five_layers.zero_grad()
        (loss(0) * 0.5 + loss(1)).backward()
        return [each.grad.clone() for each in five_layers.parameters() if each.grad is not None]

    plain = gradients()
    OffloadedActivations(five_layers, 0.6, least=1)
    for mine, kept in zip(gradients(), plain, strict=True):
        assert torch.equal(mine, kept)


def test_nothing_is_held_behind_a_backward_pass(five_layers: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[weakref.ref[LayerRun]]()
    plain = LayerRun.__init__

    def seen(run: LayerRun, *given: Any) -> None:
        plain(run, *given)
        runs.append(weakref.ref(run))

    monkeypatch.setattr(LayerRun, "__init__", seen)
    OffloadedActivations(five_layers, 0.6, least=1)
    gc.disable()  # which would come too late on a GPU: it counts objects, and these hold gigabytes
    try:
        step(five_layers)
        assert len(runs) == LAYERS
        assert not any(run() for run in runs)
    finally:
        gc.enable()


def test_activations_are_offloaded_once_and_layers_are_then_as_before(five_layers: Decoder) -> None:
    recompute(five_layers)
    before = [each.forward for each in five_layers.layers]
    first = OffloadedActivations(five_layers, 0.4, least=1)
    with pytest.raises(InvalidConfig, match="offloaded already"):
        OffloadedActivations(five_layers, 0.4, least=1)
    first.close()
    assert [each.forward for each in five_layers.layers] == before
    OffloadedActivations(five_layers, 0.4, least=1).close()


def test_nothing_is_held_behind_a_forward_pass_that_fails(
    five_layers: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(five_layers.layers[2], "forward", fail)
    offloaded = OffloadedActivations(five_layers, 0.6, least=1)
    with pytest.raises(RuntimeError, match="no memory"):
        step(five_layers)
    assert not offloaded._runs


def test_a_graph_that_is_kept_gives_the_same_gradients_twice(five_layers: Decoder) -> None:
    tokens_BS1 = torch.randint(128, (3, 17), generator=torch.Generator().manual_seed(0))
    _, once = step(five_layers)
    OffloadedActivations(five_layers, 0.6, least=1)
    five_layers.zero_grad()
    loss = NextTokenLoss(five_layers, batch_size=3, chunk=16, autocast=None)(tokens_BS1)
    loss.backward(retain_graph=True)
    loss.backward()
    found = [each.grad for each in five_layers.parameters() if each.grad is not None]
    for mine, plain in zip(found, once, strict=True):
        torch.testing.assert_close(mine, 2 * plain)


def test_a_step_that_fails_in_its_backward_pass_leaves_nothing(
    five_layers: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain = step(five_layers)
    OffloadedActivations(five_layers, 0.6, least=1)

    def fail(self: OffloadedActivations, kept: Any) -> Tensor:
        raise RuntimeError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(OffloadedActivations, "_fetch", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            step(five_layers)
    for mine, kept in zip(step(five_layers)[1], plain, strict=True):
        assert torch.equal(mine, kept)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_other_shares_are_refused(five_layers: Decoder, share: float) -> None:
    with pytest.raises(InvalidConfig, match="from 0 to 1"):
        OffloadedActivations(five_layers, share)


def test_fine_tuning_makes_the_same_steps(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter, whose rows have room behind them."""
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "print(a)"}]
    data.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    sent, found = list[int](), []
    for share in (0.0, 0.5):

        def begun(decoder: Decoder, given: float) -> None:
            offloaded = OffloadedActivations(decoder, given, least=1)
            decoder.register_forward_hook(lambda *_: sent.append(offloaded.num_bytes))

        monkeypatch.setattr(fine_tune, "OffloadedActivations", begun)
        out = tmp_path / f"share-{share}"
        config = FineTuneConfig(
            kind="sft", model=folder, base="tiny", data=data, out=out, device=CPU, steps=2, pack_tokens=64, packs=2,
            offload=share,
        )  # fmt: skip
        fine_tune.run(config, Console(quiet=True))
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        found.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert found[0] == found[1]
    assert min(sent) > 0


def test_layers_that_run_again_keep_nothing_that_could_wait() -> None:
    with pytest.raises(InvalidConfig, match="--recompute or --offload"):
        FineTuneConfig(
            kind="sft", model=Path(), base="", data=Path(), out=Path(), device=CPU, recompute=True, offload=0.5
        )


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
