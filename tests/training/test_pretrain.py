"""Training learns, and stops and resumes without leaving a trace."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.training.data import PackedTokens
from ridgeline.training.objective import NextTokenLoss, training_flops_per_token
from ridgeline.training.optimizer import adamw, initialize, learning_rate
from ridgeline.training.pretrain import TrainConfig, Trainer

STEPS = 12


def trainer(decoder: Decoder, tokens: Path, folder: Path, **changes: object) -> Trainer:
    initialize(decoder, 2, seed=0)
    config = TrainConfig(**{"lr": 1e-2, "steps": STEPS, "dtype": "float32", "log_every": 1, **changes})  # type: ignore[arg-type]
    data = PackedTokens(tokens, seq_len=32, batch_size=4, seed=0)
    return Trainer(decoder, data, config, folder, Console(quiet=True))


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def test_loss_falls(decoder: Decoder, token_file: Path, tmp_path: Path) -> None:
    trainer(decoder, token_file, tmp_path / "run", steps=60).run()
    loss = losses(tmp_path / "run")
    assert loss[0] == pytest.approx(torch.log(torch.tensor(384.0)).item(), abs=0.2)
    assert loss[-1] < 0.3 * loss[0]


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    decoder: Decoder, token_file: Path, tmp_path: Path
) -> None:
    trainer(decoder, token_file, tmp_path / "whole").run()
    whole = {name: p.clone() for name, p in decoder.named_parameters()}

    stopped = trainer(decoder, token_file, tmp_path / "parts", checkpoint_every=5)
    update = stopped._update

    def interrupted(*args: object) -> object:
        if stopped.step == 7:  # two steps after the checkpoint
            raise KeyboardInterrupt
        return update(*args)  # type: ignore[arg-type]

    stopped._update = interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    resumed = trainer(decoder, token_file, tmp_path / "parts", checkpoint_every=5)
    assert resumed.step == 5
    resumed.run()

    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert all(torch.equal(p, whole[name]) for name, p in decoder.named_parameters())


def test_a_checkpoint_of_another_run_is_refused(decoder: Decoder, token_file: Path, tmp_path: Path) -> None:
    trainer(decoder, token_file, tmp_path / "run").run()
    with pytest.raises(InvalidConfig, match="with other lr, steps"):
        trainer(decoder, token_file, tmp_path / "run", lr=1e-3, steps=50)


def test_checkpoints_hold_no_pickle(decoder: Decoder, token_file: Path, tmp_path: Path) -> None:
    trainer(decoder, token_file, tmp_path / "run", steps=2).run()
    names = {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()}
    assert names == {"model.safetensors", "optimizer.safetensors", "state.json"}


def test_a_time_budget_ends_the_run(decoder: Decoder, token_file: Path, tmp_path: Path) -> None:
    run = trainer(decoder, token_file, tmp_path / "run", steps=None, seconds=0.5)
    run.run()
    assert 0.4 < run.elapsed < 60  # a step may take long on a busy machine
    assert run.step > 1


def test_training_goes_on_where_compilation_fails(
    decoder: Decoder, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*args: object, **kwargs: object) -> object:
        def fail(tokens: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no C compiler")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)
    run = trainer(decoder, token_file, tmp_path / "run", steps=2, compile=True)
    run.console = Console(file=io.StringIO())
    run.run()
    assert "no C compiler" in run.console.file.getvalue()  # type: ignore[attr-defined]
    assert len(losses(tmp_path / "run")) == 2


def test_steps_or_seconds_but_not_both() -> None:
    with pytest.raises(InvalidConfig, match="either steps or seconds"):
        TrainConfig(lr=1e-3)
    with pytest.raises(InvalidConfig, match="either steps or seconds"):
        TrainConfig(lr=1e-3, steps=1, seconds=1.0)


def test_the_loss_does_not_depend_on_how_logits_are_chunked(decoder: Decoder) -> None:
    tokens = torch.randint(384, (3, 33), generator=torch.Generator().manual_seed(0))
    gradients = []
    for chunk in (7, 1000):
        decoder.zero_grad()
        loss = NextTokenLoss(decoder, batch_size=3, chunk=chunk, autocast=None)(tokens)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in decoder.parameters())])
    # Sums of about 100 float32 terms in another order.
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_learning_rate_rises_then_falls_to_zero() -> None:
    at = [learning_rate(f, peak=1.0, warmup=0.1) for f in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert at == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_weight_decay_spares_norms_and_embeddings(decoder: Decoder) -> None:
    optimizer = adamw(decoder, lr=1.0, weight_decay=0.1, betas=(0.9, 0.95), device=torch.device("cpu"))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    spared = {name for name, p in decoder.named_parameters() if id(p) not in decayed}
    assert spared == {name for name, _ in decoder.named_parameters() if "norm" in name or "embed" in name}


def test_flops_are_six_per_matrix_weight_and_token_plus_attention(decoder: Decoder) -> None:
    matrices = sum(p.numel() for p in decoder.parameters() if p.ndim == 2)  # the tied embedding is the output layer
    attention = 3 * 2 * (4 * 64 * 32 / 2)  # training, layers, (two products of width 64 over half of 32 positions)
    assert training_flops_per_token(decoder.spec, 32) == 6 * matrices + attention
