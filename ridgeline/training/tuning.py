"""The loop of fine-tuning: packs are run one after the other, their gradients are added up, AdamW steps.

A step's loss is the sum over its packs divided by the weight of all of them, so it does not depend on how examples were
packed. A run that was ended goes on from its checkpoint, on a CPU with the same bits.

With a fused optimizer, as GPUs have it, the host begins a step before it knows how the one before ended, so the device
never waits for it. The device leaves out a step whose loss or gradients are not finite, and all steps behind it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.checkpoint import CheckpointWriter, load_checkpoint
from ridgeline.training.lora import Lora
from ridgeline.training.loss_scale import gradient_norm
from ridgeline.training.optimizer import adamw, learning_rate
from ridgeline.training.packs import Packs
from ridgeline.training.pretrain import peak_flops
from ridgeline.training.progress import Row, TrainingLog
from ridgeline.training.replicas import TrainingReplicas
from ridgeline.training.tuned import Objective


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """The settings of a run.

    steps: of the optimizer. lr: the peak learning rate. warmup: the share of the run during which it rises.
    clip: the largest gradient norm. checkpoint_every: in steps (0: none but the last).
    paged: the optimizer's moments lie in the host's memory between steps.
    """

    steps: int
    lr: float
    warmup: float = 0.05
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    log_every: int = 1
    checkpoint_every: int = 50
    paged: bool = False


class BegunStep(NamedTuple):
    """A step whose end the host does not know yet. tokens: of all steps up to this one, whose own are `own`. needed:
    FLOPs. numbers_2: its loss and the norm of its gradients, in the host's memory once the event `there` has passed
    (None: now)."""

    step: int
    tokens: int
    own: int
    lr: float
    needed: float
    numbers_2: Tensor
    there: torch.cuda.Event | None


class EndedStep(NamedTuple):
    """A step, its loss, and the norm of its gradients before clipping."""

    begun: BegunStep
    loss: float
    norm: float


class Tuner:
    """A tuner that trains the parameters of `learnt` and continues from `folder`/checkpoint if there is one. It writes
    `folder`/log.jsonl: step, tokens, seconds, loss (mean since the last row), lr, grad_norm, tokens_per_s, mfu.

    identity: what a run must share with the one that it continues. flops: returns those that a pack needs, from which
    the share of the device's peak follows. replicas: the processes that train together, of which the first one writes.
    Raise InvalidConfig if the checkpoint there is of another run, or if other processes find another one.
    """

    runs_ahead = True  # a step needs nothing of the host that follows from the one before

    def __init__(
        self,
        learnt: nn.Module,
        objective: Objective,
        packs: Packs,
        config: TuningConfig,
        folder: Path,
        *,
        identity: Mapping[str, Any],
        console: Console,
        tracker: Tracker = UNTRACKED,
        flops: Callable[[list[int]], float] | None = None,
        replicas: TrainingReplicas = TrainingReplicas(),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.learnt, self.objective, self.packs, self.config, self.folder = learnt, objective, packs, config, folder
        self.console, self.tracker, self.flops, self.replicas = console, tracker, flops, replicas
        self.parameters = [each for each in learnt.parameters() if each.requires_grad]
        device = self.parameters[0].device
        self.optimizer = adamw(
            learnt, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, device=device,
            paged=config.paged,
        )  # fmt: skip
        self.fused = bool(self.optimizer.defaults["fused"])
        self.ahead = 1 if self.fused and self.runs_ahead else 0
        self._begun = list[BegunStep]()
        self._broken_1 = torch.zeros((), device=device)  # 1 behind a step that was not finite
        peak = peak_flops(device)
        self.peak = peak and peak * replicas.size
        # The learning rate may change where numbers overflowed before, and how often a run is saved changes nothing
        free = ("lr", "log_every", "checkpoint_every", "paged")
        settings = {k: v for k, v in asdict(config).items() if k not in free}
        self.identity = {**identity, **settings, "betas": list(config.betas)}
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self._writer, self._saved = CheckpointWriter(), 0
        self._resume()
        at_1 = torch.tensor([float(self.step)], device=device)
        replicas.add_up([at_1])
        if at_1.item() != self.step * replicas.size:
            raise InvalidConfig(
                f"process {replicas.rank} goes on behind step {self.step}, and others do not; give all of them an "
                f"--out with the same checkpoint: {folder} is of a disk that they do not share."
            )

    def run(self) -> None:
        """Train until the steps are done. Raise InvalidConfig if numbers are not finite, or if there is no room for a
        checkpoint; the last one then stays."""
        path = Path(os.devnull) if self.replicas.rank else self.folder / "log.jsonl"
        log = TrainingLog(path, self.console, self.folder.name, self.step, self.tracker)
        with log, closing(self._writer):
            before, started = self.elapsed, time.monotonic()
            since, of_rows, losses, needed = started, self.tokens, list[float](), 0.0
            while self.step < self.config.steps:
                self.begin()
                saves = self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0
                last = self.step == self.config.steps
                for begun, loss, norm in self.settle(0 if saves or last else self.ahead):
                    losses.append(loss)
                    needed += begun.needed
                    self.elapsed = before + time.monotonic() - started
                    if begun.step % self.config.log_every and begun.step != self.config.steps:
                        continue
                    now = time.monotonic()
                    row = {
                        "step": begun.step,
                        "tokens": begun.tokens,
                        "seconds": round(self.elapsed, 3),
                        "loss": sum(losses) / len(losses),
                        "lr": begun.lr,
                        "grad_norm": norm,
                        "tokens_per_s": (begun.tokens - of_rows) / max(now - since, 1e-9),
                        "mfu": needed / (now - since) / self.peak if self.peak and needed else None,
                    }
                    log.write({**row, **self.figures()}, begun.step / self.config.steps)
                    since, of_rows, losses, needed = now, begun.tokens, [], 0.0
                with self._writing():
                    self._writer.check()
                if saves:
                    self.save()
            self.save()
            with self._writing():
                self._writer.wait()

    def update(self) -> tuple[float, float]:
        """Make one step, and wait for it. Return its loss, and the norm of its gradients before clipping."""
        self.begin()
        _, loss, norm = self.settle()[-1]
        return loss, norm

    def begin(self) -> None:
        """Begin a step. Its weights are there for all that the device does behind it."""
        rate = learning_rate(self.step / self.config.steps, peak=self.config.lr, warmup=self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        packs = self.packs.of_step(self.step)
        needed = sum(map(self.flops, packs)) if self.flops else 0.0
        loss_1 = self.backward(packs)
        numbers_2, there = self._stepped(loss_1, gradient_norm(self.parameters))
        self.optimizer.zero_grad()
        own = sum(self.objective.tokens(pack) for pack in packs)
        self.step, self.tokens = self.step + 1, self.tokens + own
        self._begun.append(BegunStep(self.step, self.tokens, own, rate, needed, numbers_2, there))

    def settle(self, ahead: int = 0) -> list[EndedStep]:
        """Wait until no more than so many steps are under way, and return those that ended. Raise InvalidConfig for one
        whose numbers are not finite: all is then as it was in front of it."""
        ended = []
        while len(self._begun) > ahead:
            begun = self._begun.pop(0)
            if begun.there is not None:
                begun.there.synchronize()
            loss, norm = begun.numbers_2.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._begun.clear()
                self.step, self.tokens = begun.step - 1, begun.tokens - begun.own
                self.save()
                with self._writing():
                    self._writer.wait()
                raise InvalidConfig(
                    f"step {begun.step} has loss {loss:g} and a gradient of norm {norm:g}; run the same command "
                    f"with a smaller --lr: it goes on behind step {self.step}."
                )
            ended.append(EndedStep(begun, loss, norm))
        return ended

    def _stepped(self, loss_1: Tensor, norm_1: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Let the optimizer step by clipped gradients, unless loss or norm are not finite. Return both, and the event
        behind which they are there. A fused optimizer clips and decides itself, so the host waits for nothing."""
        clip, numbers_2 = self.config.clip, torch.stack([loss_1, norm_1.to(loss_1)])
        if self.fused:
            fused: Any = self.optimizer
            self._broken_1 = torch.maximum(self._broken_1, (~numbers_2.isfinite().all()).float())
            fused.grad_scale = ((norm_1 + 1e-6) / clip).clamp(min=1)  # it divides by this
            fused.found_inf = self._broken_1
            fused.step()
            if not numbers_2.is_cuda:
                return numbers_2, None
            kept_2 = torch.empty(2, dtype=numbers_2.dtype, pin_memory=True).copy_(numbers_2, non_blocking=True)
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(numbers_2.device))
            return kept_2, there
        loss, norm = numbers_2.tolist()
        if math.isfinite(loss) and math.isfinite(norm):
            if clip / (norm + 1e-6) < 1:  # else torch multiplies by 1
                torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm_1)
            self.optimizer.step()
        return numbers_2, None

    def backward(self, packs: list[list[int]]) -> Tensor:
        """Add the gradients of the mean loss of some packs to the parameters', and return that loss: of all packs, of
        which each process runs its own."""
        weight, parts, (rank, size) = sum(self.objective.weight(pack) for pack in packs), [], astuple(self.replicas)
        with self.learnt.dropout.of_step(self.step * size + rank) if isinstance(self.learnt, Lora) else nullcontext():
            for pack in self.replicas.own(packs):
                part = self.objective.sum(pack) / weight
                part.backward()
                parts.append(part.detach())
        if self.step == 0 and (still := [name for name, p in self.learnt.named_parameters() if _unmoved(p)]):
            raise InvalidConfig(f"{still[0].replace('/', '.')} has no gradient in this model; leave it out.")
        loss_1 = torch.stack(parts).sum()
        self.replicas.add_up([loss_1])
        self.replicas.add_up([each.grad for each in self.parameters if each.grad is not None])
        return loss_1

    def save(self) -> None:
        """Begin to write a checkpoint from which training continues exactly. Raise InvalidConfig if there was no room
        for the one before."""
        if self.step == 0 or self.replicas.rank:
            return  # there is nothing to lose, or the first process writes
        with self._writing():
            self._writer.wait()
            self._saved = self.step
            self._writer.save(self.folder / "checkpoint", self.learnt, self.optimizer, self.state())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise InvalidConfig(
                f"the checkpoint of step {self._saved} cannot be written to {self.folder} ({error}); the one before it "
                "is kept: make room and run the same command again."
            ) from error

    def _resume(self) -> None:
        state = load_checkpoint(self.folder / "checkpoint", self.learnt, self.optimizer)
        if state is None:
            return
        if different := sorted(k for k, v in self.identity.items() if state["run"].get(k) != v):
            raise InvalidConfig(
                f"{self.folder / 'checkpoint'} belongs to a run with other {', '.join(different)}; give the same "
                "settings, or another --out."
            )
        self.step, self.tokens, self.elapsed = state["step"], state["tokens"], state["elapsed"]
        self.restore(state)

    def figures(self) -> Row:
        """Return further figures of a row of the log."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is no tensor."""
        return {"step": self.step, "tokens": self.tokens, "elapsed": self.elapsed, "run": self.identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""


def _unmoved(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.grad is None
