"""The loop that trains a head on traces of its target: AdamW, a cosine over steps or over minutes.

Legend:
    C  positions that are scored
    K  passes
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.learners import Learner, losses, positions
from ridgeline.training.optimizer import adamw, learning_rate
from ridgeline.training.progress import TrainingLog
from ridgeline.training.target import Trace
from ridgeline.training.traces import Traces


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """The settings of a run. Exactly one of `steps` and `seconds` ends it.

    passes: the tokens that are guessed behind each position.
    decay: the weight of each pass's loss over that of the pass before.
    scored: the share of a sequence's positions that a step scores, one stretch of it.
    alone: the share of the run, at its beginning, that learns the first pass alone, at as many positions as cost the
        same. What a head learns there serves the other passes too.
    bf16: products run under autocast; weights, residuals and loss stay float32.
    """

    lr: float
    passes: int
    steps: int | None = None
    seconds: float | None = None
    decay: float = 0.8
    scored: float = 0.25
    alone: float = 0.0
    warmup: float = 0.03
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    bf16: bool = True
    log_every: int = 5

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidConfig("training a head needs either steps or seconds; give exactly one.")


@dataclass(frozen=True)
class Trained:
    """The course of a run. losses: of each pass, the mean of the last few steps, in nats.
    guesses: tokens that were scored."""

    steps: int
    seconds: float
    guesses: int
    losses: tuple[float, ...]


def train_head(
    learner: Learner,
    traces: Traces,
    config: HeadTraining,
    log: Path,
    console: Console,
    tracker: Tracker = UNTRACKED,
) -> Trained:
    """Train in place, and write a row of the log every few steps: step, tokens (that were guessed), seconds, loss (the
    mean over passes of the divergence from the target, in nats), that of each pass, lr, grad_norm, tokens_per_s."""
    module = learner.module
    device = next(module.parameters()).device
    optimizer = _optimizer(learner, config, device)
    weight_K = config.decay ** torch.arange(config.passes, device=device)
    step, guesses, last = 0, 0, [0.0]
    found: list[Tensor] = []
    log.unlink(missing_ok=True)
    started = time.monotonic()

    def share() -> float:
        return step / config.steps if config.steps else (time.monotonic() - started) / (config.seconds or 1)

    with TrainingLog(log, console, log.stem, keep_to=0, tracker=tracker) as rows:
        while (fraction := share()) < 1:
            for group in optimizer.param_groups:
                group["lr"] = group["share"] * learning_rate(fraction, peak=config.lr, warmup=config.warmup)
            passes = 1 if fraction < config.alone else config.passes
            scored = min(1.0, config.scored * config.passes / passes)
            trace, starts_C = _stretch(traces.batch(step), passes, scored, step)
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                loss_K = losses(learner, trace, starts_C, passes)
            ((loss_K * weight_K[:passes]).sum() / weight_K[:passes].sum()).backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            guesses += len(trace.tokens_BS) * len(starts_C) * passes
            found = [*(each for each in found if len(each) == passes), loss_K.detach()]
            if step % config.log_every == 0 or share() >= 1:
                last = torch.stack(found).mean(0).tolist()
                seconds = time.monotonic() - started
                each = {f"loss_{index + 1}": value for index, value in enumerate(last)}
                row = {"step": step, "tokens": guesses, "seconds": round(seconds, 3), "loss": sum(last) / len(last)}
                rate = {"lr": optimizer.param_groups[0]["lr"], "grad_norm": norm.item()}
                rows.write(row | each | rate | {"tokens_per_s": guesses / seconds, "mfu": None}, fraction)
                found = []
    return Trained(step, time.monotonic() - started, guesses, tuple(last))


def _optimizer(learner: Learner, config: HeadTraining, device: torch.device) -> torch.optim.AdamW:
    """Return the optimizer of all parts, whose groups say which share of the learning rate they have."""
    made = []
    for part, share in learner.parts:
        each = adamw(part, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, device=device)
        made += [{**group, "share": share} for group in each.param_groups if group["params"]]
    return torch.optim.AdamW(made, lr=config.lr, betas=config.betas, fused=device.type == "cuda")


def _stretch(trace: Trace, passes: int, share: float, step: int) -> tuple[Trace, Tensor]:
    """Return a stretch of positions, drawn by the step's number, and the part of the trace that matters for these."""
    possible = positions(trace, passes)
    if possible < 1:
        raise InvalidConfig(f"sequences are too short for {passes} passes; make them longer.")
    count = max(1, round(share * possible))
    first = int(torch.randint(possible - count + 1, (), generator=torch.Generator().manual_seed(step)))
    starts_C = torch.arange(first, first + count, device=trace.tokens_BS.device)
    return trace.upto(first + count + passes + 1), starts_C
