"""Training for a scheme: products are those of the rounded model, and gradients those of its numbers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ridgeline.compression.walk import quantize_decoder
from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.models import model_config
from ridgeline.quantization.weight import weight_of
from ridgeline.training import embedded, recipe
from ridgeline.training.aware import config_of, make_aware, straight_through
from ridgeline.training.data import PackedTokens
from ridgeline.training.mixture import QWEN3
from ridgeline.training.objective import NextTokenLoss, training_decoder
from ridgeline.training.optimizer import initialize
from ridgeline.training.pretrain import TrainConfig, Trainer
from ridgeline.weights.folder import EMBEDDED_MODEL

GROUP = 32
TOKENS = torch.randint(384, (2, 25), generator=torch.Generator().manual_seed(0))
MIXTURE = QWEN3 | {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "head_dim": 32,
    "num_experts": 4,
    "moe_intermediate_size": 32,
}


def started(config: dict[str, Any]) -> Decoder:
    decoder = training_decoder(model_config(config).spec, torch.float32, torch.device("cpu"))
    initialize(decoder, config["num_hidden_layers"], seed=0)
    with torch.no_grad():  # as far apart as trained weights, so that rounding shows
        for parameter in decoder.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return decoder


def scores(decoder: Decoder) -> Tensor:
    positions = torch.arange(24).repeat(2)
    with torch.no_grad():
        return decoder.logits(decoder(TOKENS[:, :-1].flatten(), positions, DenseCausal(2)))


def served(decoder: Decoder, config: dict[str, Any], scheme: str) -> Decoder:
    """The decoder as `ridgeline quantize` makes it of this one: codes and levels instead of parameters."""
    made = copy.deepcopy(decoder).requires_grad_(False)
    for (_, ours), (_, theirs) in zip(decoder.named_modules(), made.named_modules(), strict=True):
        if hasattr(ours, "matrix"):
            theirs.matrix = weight_of(ours.ops, theirs.weight)
    quantize_decoder(
        made,
        model_config(config).weights,
        None,
        config_of(scheme, GROUP),
        dtype=torch.bfloat16,
        progress=lambda what, fraction: None,
    )
    return made


@pytest.mark.parametrize("scheme", ["w4a16", "w2a16", "nf4", "fp8", "fp8-block", "w8a8"])
def test_products_are_those_of_the_quantized_model(config: dict[str, Any], scheme: str) -> None:
    if scheme == "nf4":
        config = config | {"intermediate_size": 128}
    decoder = started(config)
    plain, wanted = scores(decoder), scores(served(decoder, config, scheme))
    make_aware(decoder, scheme, GROUP)
    found = scores(decoder)
    # A level of an activation next to a half may round to the other side, since sums come in another order.
    rounds_inputs = scheme in ("fp8", "fp8-block", "w8a8")
    off = float((found - wanted).square().mean().sqrt() / wanted.std())
    assert off < (2e-3 if rounds_inputs else 1e-5)
    assert float((found - plain).square().mean().sqrt() / wanted.std()) > 5 * off


def test_experts_are_rounded_too() -> None:
    decoder = started(MIXTURE)
    plain, wanted = scores(decoder), scores(served(decoder, MIXTURE, "w4a16"))
    make_aware(decoder, "w4a16", GROUP)
    torch.testing.assert_close(scores(decoder), wanted, rtol=1e-4, atol=1e-4)
    assert float((plain - wanted).abs().max()) > 1e-2


def test_the_gradient_is_that_of_the_rounded_weights(config: dict[str, Any]) -> None:
    aware, rounded = started(config), started(config)
    make_aware(aware, "w4a16", GROUP)
    names = [name for name, module in aware.named_modules() if name.startswith("layers.") and hasattr(module, "matrix")]
    with torch.no_grad():
        for name in names:
            weight = rounded.get_parameter(f"{name}.weight")
            aware_weight = aware.get_submodule(name).matrix
            identity = torch.eye(weight.shape[1])
            weight.copy_(aware_weight.linear(identity, None).T)  # type: ignore[operator]
            assert not torch.equal(weight, aware.get_parameter(f"{name}.weight"))
    for decoder in (aware, rounded):
        NextTokenLoss(decoder, batch_size=2, chunk=100, autocast=None)(TOKENS).backward()
    for (name, ours), (_, theirs) in zip(aware.named_parameters(), rounded.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_straight_through_rounds_forward_and_not_backward() -> None:
    x = torch.tensor([0.4, 1.6, -2.3], requires_grad=True)
    y = straight_through(x, torch.round)
    assert y.tolist() == [0.0, 2.0, -2.0]
    (y * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


def trainer(decoder: Decoder, tokens: Path, folder: Path, **options: Any) -> Trainer:
    data = PackedTokens(tokens, seq_len=32, batch_size=4, seed=0)
    settings = {"lr": 3e-3, "steps": 12, "warmup": 0.1, "dtype": "float32", "loss_chunk": 50, "log_every": 3}
    return Trainer(decoder, data, TrainConfig(**(settings | options)), folder, Console(file=io.StringIO()))


def test_training_lowers_the_loss_of_the_rounded_weights(
    config: dict[str, Any], token_file: Path, tmp_path: Path
) -> None:
    decoder = started(config)
    run = trainer(decoder, token_file, tmp_path / "run", scheme="w2a16", group=GROUP)
    loss_of = NextTokenLoss(decoder, batch_size=4, chunk=50, autocast=None)
    batch = torch.from_numpy(run.data.batch(0))
    before = loss_of(batch).item()
    run.run()
    assert loss_of(batch).item() < before - 0.5
    with pytest.raises(InvalidConfig, match="with other scheme"):
        trainer(started(config), token_file, tmp_path / "run", scheme="w4a16", group=GROUP)


def test_what_cannot_be_rounded_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"unknown scheme 'w5'.*w4a16"):
        make_aware(started(config), "w5", GROUP)
    with pytest.raises(InvalidConfig, match=r"groups of 128 do not divide; give a smaller --group"):
        make_aware(started(config), "w4a16", 128)


def test_a_model_is_trained_further_with_its_own_tokenizer_and_context(tmp_path: Path) -> None:
    made = recipe.quantized(recipe.continued(embedded.EMBEDDED, EMBEDDED_MODEL, 1e-4), "w3a16", 64)
    [model] = made.models
    assert (model.name, model.scheme, model.group) == ("embedded-w3a16", "w3a16", 64)
    assert (model.start, made.tokenizer, made.context) == (EMBEDDED_MODEL, EMBEDDED_MODEL, 2048)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InvalidConfig, match="'gpt2', which no recipe here makes"):
        recipe.continued(embedded.EMBEDDED, tmp_path, 1e-4)
