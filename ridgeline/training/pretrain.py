"""The pretraining loop: AdamW, a cosine over steps or over seconds, exact resume.

Legend:
    B  sequences
    S  tokens per sequence
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.aware import make_aware
from ridgeline.training.balance import NO_BALANCE, Balance, Balancer, load_figures
from ridgeline.training.checkpoint import State, load_checkpoint, save_checkpoint
from ridgeline.training.data import PackedTokens
from ridgeline.training.loss_scale import LossScale, gradient_norm
from ridgeline.training.objective import NextTokenLoss, training_flops_per_token
from ridgeline.training.optimizer import adamw, learning_rate
from ridgeline.training.pipeline import Pipeline, Stages
from ridgeline.training.progress import TrainingLog

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Dense bf16 FLOP/s by a part of the device's name, from NVIDIA's datasheets (half of their figures "with sparsity").
PEAK_BF16 = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run. Exactly one of `steps` and `seconds` ends it, and seconds include compilation.

    lr: the peak learning rate.
    warmup: the share of the run during which it rises.
    clip: the largest gradient norm.
    loss_chunk: the number of tokens whose logits exist at once.
    balance: how experts are kept equally busy, if there are any.
    scheme, group: the scheme by which weights are rounded in every step, and the weights that share a scale; None: they
        are not rounded.
    dtype: that of products: float32, bfloat16 or float16.
    loss_scale: the factor of the loss in float16 (see LossScale; 1: none); None adapts it.
    micro_batches, schedule: the parts of a batch, and the order of their passes, if stages of a pipeline train (see
        `training.pipeline`).
    log_every, checkpoint_every: in steps (0: no checkpoints but the last).
    """

    lr: float
    steps: int | None = None
    seconds: float | None = None
    warmup: float = 0.02
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    loss_chunk: int = 32768
    dtype: str = "bfloat16"
    loss_scale: float | None = None
    compile: bool = False
    balance: Balance = NO_BALANCE
    scheme: str | None = None
    group: int = 128
    micro_batches: int = 1
    schedule: str = "1f1b"
    log_every: int = 10
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidConfig("a training run needs either steps or seconds; give exactly one.")
        if (self.steps or self.seconds or 0) <= 0:
            raise InvalidConfig(f"steps or seconds must be above 0, got steps={self.steps}, seconds={self.seconds}.")
        if self.dtype not in DTYPES:
            raise InvalidConfig(f"products run in {', '.join(DTYPES)}, got {self.dtype!r}.")
        if self.loss_scale is not None and not (self.dtype == "float16" and 0 < self.loss_scale < float("inf")):
            raise InvalidConfig(
                f"a loss scale is a number above 0 for training in float16, got {self.loss_scale:g} for {self.dtype}."
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of autocast, if there is any."""
        return None if self.dtype == "float32" else DTYPES[self.dtype]


class Trainer:
    """A trainer that trains `decoder` in place and continues from `folder`/checkpoint if there is one.

    It writes `folder`/log.jsonl: step, tokens, seconds (training alone), loss (nats per token, mean since the last
    row), lr, grad_norm (before clipping), tokens_per_s, mfu (None if the peak is not known), and in float16 loss_scale
    and skipped, the steps that it left out. Raise InvalidConfig if the checkpoint there belongs to a run on other data
    or with other settings.

    stages: those of a pipeline, if `decoder` is one of them. Each trains in a process of its own, with a folder of its
        own.
    """

    def __init__(
        self,
        decoder: Decoder,
        data: PackedTokens,
        config: TrainConfig,
        folder: Path,
        console: Console,
        tracker: Tracker = UNTRACKED,
        stages: Stages | None = None,
    ) -> None:
        if config.micro_batches > 1:
            stages = stages or Stages()  # a pipeline of one stage adds gradients up
        if stages is not None and (config.seconds is not None or config.compile):
            raise InvalidConfig("stages and micro-batches train for steps, uncompiled; give steps, and no compile.")
        folder.mkdir(parents=True, exist_ok=True)
        self.decoder, self.data, self.config, self.folder, self.console = decoder, data, config, folder, console
        self.device, self.tracker = next(decoder.parameters()).device, tracker
        if config.scheme is not None:
            make_aware(decoder, config.scheme, config.group)
        self.balancer = Balancer(decoder, config.balance)
        self.pipeline = None if stages is None else self._pipeline(stages)
        self.optimizer = adamw(
            decoder, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, device=self.device
        )
        self.scale = LossScale(config.loss_scale if config.dtype == "float16" else 1.0)
        self.step, self.elapsed, self.budget = 0, 0.0, config.seconds or 0.0
        self.last_loss = float("nan")
        self._resume()

    def run(self) -> None:
        """Train until the steps or seconds are used up."""
        loss_of = self._prepare()
        losses: list[Tensor] = []
        path, title = self.folder / "log.jsonl", self.folder.name
        with TrainingLog(path, self.console, title, keep_to=self.step, tracker=self.tracker) as log:
            started = since = time.monotonic()
            resumed_at = self.elapsed
            while (fraction := self._fraction()) < 1.0:
                loss, norm = self._update(loss_of, fraction)
                losses.append(loss)
                self.step += 1
                self.elapsed = resumed_at + time.monotonic() - started
                if self.step % self.config.log_every == 0 or self._fraction() >= 1.0:
                    self._report(log, torch.stack(losses), norm, since)
                    losses, since = [], time.monotonic()
                if self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
                    self.save()
        self.save()

    def save(self) -> None:
        """Write a checkpoint from which training continues exactly."""
        state = {"step": self.step, "elapsed": self.elapsed, "budget": self.budget, "run": self._identity()}
        state["loss_scale"] = self.scale.state()
        save_checkpoint(self.folder / "checkpoint", self.decoder, self.optimizer, state)

    def _update(self, loss_of: Callable[[Tensor], Tensor], fraction: float) -> tuple[Tensor, Tensor]:
        lr = learning_rate(fraction, peak=self.config.lr, warmup=self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch, norm_of = self._batch(self.step), gradient_norm
        if self.pipeline is not None:
            loss, norm_of = self.pipeline.backward(batch, self.scale.scaled), self.pipeline.norm
        else:
            loss = loss_of(batch)
            self.scale.scaled(loss + self.balancer.loss()).backward()
        norm = self.scale.step(self.optimizer, list(self.decoder.parameters()), self.config.clip, norm_of)
        self.optimizer.zero_grad()
        self.balancer.step()
        return loss.detach(), norm

    def _fraction(self) -> float:
        """Return the share of the run that is done, 0..1."""
        if self.config.steps is not None:
            return self.step / self.config.steps
        return self.elapsed / self.budget

    def _batch(self, step: int) -> Tensor:
        batch = torch.from_numpy(self.data.batch(step))
        if self.device.type == "cuda":
            return batch.pin_memory().to(self.device, non_blocking=True)
        return batch.to(self.device)

    def _prepare(self) -> Callable[[Tensor], Tensor]:
        """Return the loss function, compiled if wanted and possible. The time for that comes off a budget of
        seconds."""
        started = time.monotonic()
        eager = NextTokenLoss(
            self.decoder,
            batch_size=self.data.batch_size,
            chunk=self.config.loss_chunk,
            autocast=self.config.autocast,
        )
        loss_of = self._compiled(eager) if self.config.compile else eager
        if self.step == 0:
            self.budget -= time.monotonic() - started
        return loss_of

    def _pipeline(self, stages: Stages) -> Pipeline:
        return Pipeline(
            self.decoder,
            stages,
            schedule=self.config.schedule,
            parts=self.config.micro_batches,
            rows=self.data.batch_size,
            chunk=self.config.loss_chunk,
            autocast=self.config.autocast,
        )

    def _compiled(self, eager: NextTokenLoss) -> Callable[[Tensor], Tensor]:
        """Return `eager` through torch.compile, tried once forward and backward, or `eager` itself if that fails."""
        started = time.monotonic()
        compiled: Callable[[Tensor], Tensor] = torch.compile(eager, dynamic=False)
        try:
            compiled(self._batch(self.step)).backward()
        except Exception as error:  # a compiler may raise anything, and training can do without it
            self.console.print(f"torch.compile failed, training goes on without: {error}", markup=False)
            return eager
        finally:
            self.optimizer.zero_grad()
        self.console.print(f"compiled in {time.monotonic() - started:.0f} s", highlight=False)
        return compiled

    def _report(self, log: TrainingLog, losses: Tensor, norm: Tensor, since: float) -> None:
        """Write one row about the steps since `since`. Reading the loss waits for the device, so the time is right."""
        self.last_loss = losses.mean().item()
        tokens_per_step = self.data.batch_size * self.data.seq_len
        rate = len(losses) * tokens_per_step / (time.monotonic() - since)
        flops = training_flops_per_token(self.decoder.whole, self.data.seq_len) / self.decoder.mesh.pp.size
        peak = peak_flops(self.device)
        row = {
            "step": self.step,
            "tokens": self.step * tokens_per_step,
            "seconds": round(self.elapsed, 3),
            "loss": self.last_loss,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm.item(),
            "tokens_per_s": rate,
            "mfu": rate * flops / peak if peak else None,
        }
        if self.config.dtype == "float16":
            row |= {"loss_scale": self.scale.factor, "skipped": self.scale.skipped}
        if self.balancer.layers:
            row |= load_figures(self.balancer.read().cpu())
        log.write(row, self._fraction())

    def _identity(self) -> State:
        """Return the facts that a resumed run must share with the run it resumes."""
        tokens = hashlib.sha256(self.data.tokens.data).hexdigest()
        shape = {"seq_len": self.data.seq_len, "batch_size": self.data.batch_size, "seed": self.data.seed}
        names = ("lr", "steps", "seconds", "warmup", "weight_decay", "clip", "dtype", "loss_scale")
        settings = {name: getattr(self.config, name) for name in names} | {"balance": asdict(self.config.balance)}
        rounding = None if self.config.scheme is None else f"{self.config.scheme}, groups of {self.config.group}"
        stage, parts = self.decoder.spec.stage, self.config.micro_batches
        cut = None if self.pipeline is None else f"{parts} micro-batches, from layer {stage.start if stage else 0}"
        return {"tokens": tokens, **shape, **settings, "scheme": rounding, "stage": cut}

    def _resume(self) -> None:
        state = load_checkpoint(self.folder / "checkpoint", self.decoder, self.optimizer)
        if state is None:
            return
        if different := sorted(k for k, v in self._identity().items() if state["run"].get(k) != v):
            raise InvalidConfig(
                f"{self.folder / 'checkpoint'} belongs to a run with other {', '.join(different)}; "
                "give the same settings, or another folder."
            )
        self.step, self.elapsed, self.budget = state["step"], state["elapsed"], state["budget"]
        self.scale.resume(state["loss_scale"])


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 FLOP/s of the device by its datasheet, or None if it is not in `PEAK_BF16`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_BF16.items() if part in name), None)
