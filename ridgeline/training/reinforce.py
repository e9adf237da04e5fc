"""`ridgeline train grpo`, `rloo` and `ppo`: from a model, prompts and rewards to an adapter, or a model's folder.

The engine that draws answers is in the same process. What is written lies in `out`, as `fine_tune` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.models.config import ModelConfig
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.conversations import ExampleReader
from ridgeline.training.judge import RewardJudge
from ridgeline.training.learnt import FullWeights, Learnt, MergedLora
from ridgeline.training.lora import LoraConfig
from ridgeline.training.policy import TrainedPolicy
from ridgeline.training.pretrain import DTYPES
from ridgeline.training.progress import Row
from ridgeline.training.prompts import PromptLine, digest, read_prompts
from ridgeline.training.reinforce_card import PLOT, plot_rewards, reinforce_card
from ridgeline.training.replicas import alone
from ridgeline.training.rewards import RewardConfig, Rewards
from ridgeline.training.rollout_objective import Course, LossConfig, RolloutObjective, restored
from ridgeline.training.rollouts import BuildsEngine, RolloutConfig, RolloutEngine, Rollouts
from ridgeline.training.served_rollouts import ServedRollouts
from ridgeline.training.tuning import EndedStep, Tuner, TuningConfig
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.loader import load_weights, read_model_config

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """The settings of a run.

    model, base: the folder of the model, and its name for the card and the adapter. data: prompts, as JSON lines.
    lora: None trains all weights. prompts, samples, max_tokens: as in `RolloutConfig`. pack_tokens: those that the
    policy runs at once. exact: rollouts have the trainer's bits, which takes kernels of fixed order.
    temperature: at which answers are drawn, and by which the policy's scores are divided.
    held_out: prompts whose answers are rewarded and not trained on, before training, every `eval_every` steps and at
        the end.
    server, server_key: the address of the server that draws answers, and its admin key; "": an engine of this process.
    """

    loss: LossConfig
    rewards: RewardConfig
    model: Path
    base: str
    data: Path
    out: Path
    device: torch.device
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    prompts: int = 4
    samples: int = 8
    max_tokens: int = 128
    max_prompt_tokens: int = 512
    steps: int = 100
    lr: float = 1e-4
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    pack_tokens: int = 4096
    exact: bool = True
    temperature: float = 1.0
    held_out: Path | None = None
    eval_every: int = 10
    dtype: str = "float32"
    checkpoint_every: int = 20
    server: str = ""
    server_key: str = ""
    seed: int = 0
    command: str = ""
    commit: str = "unknown"
    tracker: Tracker = UNTRACKED

    def __post_init__(self) -> None:
        least = {"prompts": 1, "samples": 1 if self.loss.kind == "ppo" else 2, "max_tokens": 1, "pack_tokens": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InvalidConfig(f"{name} must be at least {bound}, got {getattr(self, name)}.")
        if not 0.01 <= self.temperature <= 100:
            raise InvalidConfig(f"temperature is from 0.01 to 100, got {self.temperature:g}.")
        if self.temperature != 1 and (self.loss.staleness or not self.exact):
            raise InvalidConfig(
                "engines report log-probabilities in front of the temperature, so weights of tokens that others have "
                "drawn are not known at any but 1; leave out --temperature, or --staleness and --no-exact."
            )
        if self.eval_every < 1:
            raise InvalidConfig(f"eval_every must be at least 1, got {self.eval_every}.")
        if self.loss.staleness and self.loss.iterations > 1:
            raise InvalidConfig("several updates of a batch and stale answers do not go together; set one of them.")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidConfig(f"{name} must be a number above 0, got {getattr(self, name):g}.")


class ReinforceTuner(Tuner):
    """A tuner whose checkpoints hold answers that are drawn and not yet used."""

    objective: RolloutObjective
    runs_ahead = False  # the host draws answers with the weights of the step before
    held_out: Sequence[PromptLine] = ()
    eval_every = 1
    rewarded: float | None = None  # the mean reward of prompts that are not trained on, behind the last step

    def figures(self) -> Row:
        measured = {} if self.rewarded is None else {"held_out": self.rewarded}
        return {**self.objective.figures(), **measured}

    def settle(self, ahead: int = 0) -> list[EndedStep]:
        ended, self.rewarded = super().settle(ahead), None
        every = self.eval_every * self.objective.config.iterations
        if ended and (self.step % every == 0 or self.step == self.config.steps):
            self.rewarded = self.measured()
        return ended

    def measured(self) -> float | None:
        """Return the mean reward of prompts that are not trained on; None: there are none."""
        step = self.step // self.objective.config.iterations
        return self.objective.reward_of(self.held_out, step) if self.held_out else None

    def save(self) -> None:
        if self.step % self.objective.config.iterations == 0:
            self.objective.course.settle(self.step // self.objective.config.iterations)
            super().save()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pending": [each.kept() for each in self.objective.course.pending]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.objective.course.pending = restored(state["pending"])
        self.objective.learnt.write()


class _All(nn.Module):
    """All that an optimizer steps."""

    def __init__(self, learnt: Learnt, value: nn.Linear | None) -> None:
        super().__init__()
        self.learnt, self.value = learnt, value


def run(config: ReinforceConfig, console: Console, build: BuildsEngine) -> Report:
    """Train and write. Return what report.json holds. Raise InvalidConfig and ModelLoadError in one sentence.

    build: makes the engine that draws answers (`ridgeline.LLM`).
    """

    def say(what: str) -> None:
        if what:
            console.print(what, markup=False, highlight=False, soft_wrap=True)

    alone("answers are drawn and rewarded")
    rewards, model = Rewards(config.rewards), _read_config(config)
    config.out.mkdir(parents=True, exist_ok=True)
    reader = ExampleReader.of_folder(config.model)
    longest = min(config.max_prompt_tokens, model.spec.max_position_embeddings - config.max_tokens)
    prompts, left_out = read_prompts(config.data, reader, rewards, longest)
    say(left_out)
    held_out: Sequence[PromptLine] = ()
    if config.held_out is not None:
        held_out, left_out = read_prompts(config.held_out, reader, rewards, longest)
        say(left_out)
    torch.manual_seed(config.seed)
    dtype = DTYPES[config.dtype]
    policy = TrainedPolicy(model.spec, dtype, config.device)
    policy.temperature = config.temperature
    policy.check_loaded()
    load_weights(policy.decoder, config.model, model.weights)
    learnt: FullWeights | MergedLora
    if config.lora is None:
        learnt = FullWeights(policy.decoder)
        if config.loss.beta:
            learnt.keep_reference()
    else:
        learnt = MergedLora(policy.decoder, model, config.lora, config.seed)
    judge = None
    if config.rewards.model:
        most = longest + config.max_tokens
        judge = RewardJudge(build, Path(config.rewards.model), dtype, config.device, most)
        rewards.judge = judge
    value = None
    if config.loss.kind == "ppo":
        value = nn.Linear(model.spec.hidden_size, 1, device=config.device)
        nn.init.zeros_(value.weight)
    drawing = RolloutConfig(
        prompts=config.prompts, samples=config.samples, max_tokens=config.max_tokens, longest=longest,
        seed=config.seed, temperature=config.temperature, exact=config.exact,
    )  # fmt: skip
    engine: Rollouts
    if config.server:
        engine = ServedRollouts(config.server, config.server_key, model.weights, config.device, drawing)
    else:
        engine = RolloutEngine(build, config.model, dtype, config.device, drawing)
    course = Course(engine, prompts, policy, staleness=config.loss.staleness, steps=config.steps)
    try:
        objective = RolloutObjective(
            config.loss, course, rewards, learnt, value=value, pack_tokens=config.pack_tokens,
            text=reader.tokenizer.decode,
        )  # fmt: skip
        names = ("lr", "warmup", "weight_decay", "clip")
        tuning = TuningConfig(
            steps=config.steps * config.loss.iterations,
            checkpoint_every=config.checkpoint_every * config.loss.iterations,
            **{name: getattr(config, name) for name in names},
        )
        trained = sum(each.numel() for each in learnt.parameters() if each.requires_grad)
        say(
            f"{len(prompts):,} prompts; {config.steps:,} steps of {config.prompts} prompts with {config.samples} "
            f"answers each; {trained:,} numbers learn"
        )
        everything = _All(learnt, value)
        tuner = ReinforceTuner(
            everything, objective, objective, tuning, config.out,  # type: ignore[arg-type]
            identity=_identity(config, digest(prompts)), console=console, tracker=config.tracker,
        )  # fmt: skip
        tuner.optimizer.register_step_post_hook(lambda *_: learnt.write())
        tuner.held_out, tuner.eval_every = held_out, config.eval_every
        before = tuner.measured() if tuner.step == 0 else None
        if before is not None:
            say(f"answers to {len(held_out):,} prompts of {config.held_out} have a mean reward of {before:.4f}")
        tuner.run()
    finally:
        course.close()
        rewards.close()
        if judge is not None:
            judge.close()
    folder = config.out / ("model" if config.lora is None else "adapter")
    if isinstance(learnt, MergedLora):
        learnt.export(folder, config.base)
    else:
        learnt.export(folder, policy.decoder, model, config.model)
    return _reported(config, tuner, trained, folder, say, before)


def _reported(
    config: ReinforceConfig, tuner: Tuner, trained: int, folder: Path, say: Any, before: float | None
) -> Report:
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    measured = [before, *(row["held_out"] for row in rows if "held_out" in row)]
    tenth = max(1, len(rows) // 10)
    first, last = (sum(row["reward"] for row in part) / tenth for part in (rows[:tenth], rows[-tenth:]))
    report = {
        "kind": config.loss.kind,
        "base": config.base,
        "data": config.data.name,
        "rewards": list(config.rewards.names),
        "tokens": tuner.tokens,
        "trained": trained,
        "lora": None if config.lora is None else asdict(config.lora),
        "steps": len(rows),
        "seconds": tuner.elapsed,
        "reward": [first, last],
        "held_out": None if config.held_out is None else {"data": config.held_out.name, "reward": measured},
        "kl": max(row["kl"] for row in rows),
        "staleness": config.loss.staleness,
        "device": str(config.device),
        "dtype": config.dtype,
        "command": config.command,
        "commit": config.commit,
    }
    plot_rewards(rows, folder / PLOT, f"{config.base}, {config.loss.kind}")
    (folder / "README.md").write_text(reinforce_card(report) + "\n")
    (config.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for file in (config.out / "log.jsonl", folder / PLOT, folder / "README.md"):
        config.tracker.artifact(file)
    say(
        f"wrote {folder}; reward {first:.4f} at first, {last:.4f} at last; KL between rollout and trainer at most "
        f"{report['kl']:.3g}"
    )
    return report


def _read_config(config: ReinforceConfig) -> ModelConfig:
    if is_gguf(config.model) or "quantization_config" in read_json(config.model / "config.json"):
        raise InvalidConfig(f"{config.model} holds quantized weights; give the model as it was before.")
    model = read_model_config(config.model)
    if model.foreign is not None:
        raise InvalidConfig(f"{config.model} runs through transformers' modules, which are not trained here.")
    return model


def _identity(config: ReinforceConfig, prompts: str) -> dict[str, Any]:
    names = (
        *("base", "prompts", "samples", "max_tokens", "exact", "temperature", "dtype", "seed", "loss", "rewards"),
        "lora",
    )
    found = {name: value for name, value in asdict(replace(config, tracker=UNTRACKED)).items() if name in names}
    found["rewards"].pop("unsafe")
    return {**json.loads(json.dumps(found)), "data": prompts}
