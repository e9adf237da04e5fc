"""`ridgeline train grpo`, `rloo` and `ppo`: a model learns from rewards of its own answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ridgeline.cli.options import with_records
from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.cli.train_tuned import Recipe
from ridgeline.cli.training_options import (
    Adapter,
    Alpha,
    CheckpointEvery,
    ClipNorm,
    Device,
    Out,
    Rank,
    Rooted,
    Targets,
    Trained,
    Warmup,
    WeightDecay,
    device_of,
    dtype_of,
    imported,
    listed,
    lora_of,
)
from ridgeline.core.errors import InvalidConfig
from ridgeline.weights.folder import resolve_model


@dataclass(frozen=True)
class PromptFlags:
    """The model, its prompts, and the folder of results."""

    data: Annotated[Path, typer.Option(help="Prompts, as JSON lines.")]
    out: Out
    model: Trained = "embedded"
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.", min=1)] = 512


@dataclass(frozen=True)
class RewardFlags:
    """The rewards."""

    reward: Annotated[str, typer.Option(help="length, regex, arithmetic, code, solved, model; several with commas.")]
    reward_weights: Annotated[str, typer.Option(help="Their weights, with commas; default: 1 each.")] = ""
    length_target: Annotated[int, typer.Option(help="Tokens that an answer should have.", min=0)] = 0
    pattern: Annotated[str, typer.Option(help="Expression that an answer should match.")] = ""
    reward_model: Annotated[str, typer.Option(help="Folder or hub id of the model whose score is a reward.")] = ""
    unsafe_local_rewards: Annotated[
        bool, typer.Option("--unsafe-local-rewards", help="Run the model's code without isolation, as this user.")
    ] = False


@dataclass(frozen=True)
class WeightFlags:
    """The numbers that learn."""

    method: Annotated[
        Literal["lora", "full"], typer.Option(help="lora: an adapter in PEFT's form. full: all weights.")
    ] = "lora"
    rank: Rank = 8
    alpha: Alpha = 16.0
    targets: Targets = "all-linear"
    rslora: Rooted = False
    adapter: Adapter = None


@dataclass(frozen=True)
class RunFlags:
    """The run: how long, and in which steps."""

    prompts: Annotated[int, typer.Option(help="Prompts of a step.", min=1)] = 4
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 128
    temperature: Annotated[
        float, typer.Option(help="At which answers are drawn, and by which the policy's scores are divided.")
    ] = 1.0
    held_out: Annotated[Path | None, typer.Option(help="Prompts whose answers are rewarded and not trained on.")] = None
    eval_every: Annotated[int, typer.Option(help="Steps between such measurements.", min=1)] = 10
    steps: Annotated[int, typer.Option(help="Batches of answers that are drawn and trained on.", min=1)] = 100
    warmup: Warmup = 0.0
    weight_decay: WeightDecay = 0.0
    clip: ClipNorm = 1.0
    pack_tokens: Annotated[int, typer.Option(help="Tokens that the trainer runs at once.", min=1)] = 4096
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="Rollouts have the trainer's bits, by slower kernels.")
    ] = True
    checkpoint_every: CheckpointEvery = 20
    server: Annotated[
        str,
        typer.Option(
            help="Address of `ridgeline serve --weight-transfer`, which draws the answers; empty: this process does."
        ),
    ] = ""
    server_key: Annotated[str, typer.Option(help="That server's --admin-key.")] = ""
    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Type of weights and products; auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto"
    seed: Annotated[int, typer.Option(help="Decides the order of prompts, the answers and an adapter's numbers.")] = 0


@dataclass(frozen=True)
class PolicyFlags:
    """The loss."""

    clip_low: Annotated[float, typer.Option(help="Ratios below 1 minus this have no gradient.", min=0)] = 0.2
    clip_high: Annotated[float, typer.Option(help="Ratios above 1 plus this have no gradient.", min=0)] = 0.2
    iterations: Annotated[int, typer.Option(help="Updates of a batch of answers.", min=1)] = 1
    staleness: Annotated[
        int, typer.Option(help="Answers are drawn by weights so many updates old, while others are trained.", min=0)
    ] = 0
    importance_cap: Annotated[
        float, typer.Option(help="Largest weight of a token that older weights have drawn.", min=1)
    ] = 2.0


Samples = Annotated[int, typer.Option(help="Answers of a prompt.", min=1)]
Beta = Annotated[float, typer.Option(help="Weight of the divergence from the model before training.", min=0)]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate; some 1e-6 suits --method full.", min=0)]


@with_records
def grpo(
    *,
    recipe: Recipe = None,
    data: PromptFlags,
    reward: RewardFlags,
    method: WeightFlags,
    step: RunFlags,
    policy: PolicyFlags,
    samples: Samples = 8,
    lr: LearningRate = 1e-4,
    beta: Beta = 0.0,
    scale: Annotated[
        Literal["group", "batch", "none"], typer.Option(help="Advantages are divided by whose standard deviation.")
    ] = "group",
    loss_type: Annotated[
        Literal["grpo", "bnpo", "dr_grpo"],
        typer.Option(help="Answers count alike (grpo), tokens do (bnpo), or tokens over --max-tokens (dr_grpo)."),
    ] = "bnpo",
    track: TrackFlags,
) -> None:
    """Train a model by rewards of groups of its answers (GRPO)."""
    own = {"beta": beta, "scale": scale, "loss_type": loss_type}
    _run("grpo", (data, reward, method, step, policy), track, {"samples": samples, "lr": lr}, own)


@with_records
def rloo(
    *,
    recipe: Recipe = None,
    data: PromptFlags,
    reward: RewardFlags,
    method: WeightFlags,
    step: RunFlags,
    policy: PolicyFlags,
    samples: Samples = 8,
    lr: LearningRate = 1e-4,
    beta: Beta = 0.05,
    track: TrackFlags,
) -> None:
    """Train a model by rewards of its answers, each beside the mean of the others to its prompt (RLOO)."""
    _run("rloo", (data, reward, method, step, policy), track, {"samples": samples, "lr": lr}, {"beta": beta})


@with_records
def ppo(
    *,
    recipe: Recipe = None,
    data: PromptFlags,
    reward: RewardFlags,
    method: WeightFlags,
    step: RunFlags,
    policy: PolicyFlags,
    samples: Samples = 4,
    lr: LearningRate = 1e-4,
    beta: Beta = 0.05,
    gamma: Annotated[float, typer.Option(help="A later reward counts so much less a token.", min=0, max=1)] = 1.0,
    lam: Annotated[float, typer.Option(help="GAE's lambda.", min=0, max=1)] = 0.95,
    value_coef: Annotated[float, typer.Option(help="Weight of the value head's loss.", min=0)] = 0.1,
    value_clip: Annotated[float, typer.Option(help="Values move at most so far in a batch.", min=0)] = 0.2,
    track: TrackFlags,
) -> None:
    """Train a model by rewards of its answers with a value head and GAE (PPO)."""
    own = {"beta": beta, "gamma": gamma, "lam": lam, "value_coef": value_coef, "value_clip": value_clip}
    _run("ppo", (data, reward, method, step, policy), track, {"samples": samples, "lr": lr}, own)


def _run(kind: str, flags: Any, track: TrackFlags, sizes: dict[str, Any], own: dict[str, Any]) -> None:
    from ridgeline.llm import LLM

    data, reward, method, step, policy = flags
    if step.server_key and not step.server:
        raise InvalidConfig(
            "--server-key is that of a server that draws answers; name it by --server, or leave it out."
        )
    where, folder = device_of(step.device), resolve_model(data.model)
    modules = imported("reinforce", "rewards", "rollout_objective", "advantages", "recipe")
    rewards = modules["rewards"].RewardConfig(
        names=listed(reward.reward),
        weights=_numbers(reward.reward_weights),
        target=reward.length_target,
        pattern=reward.pattern,
        model=str(resolve_model(reward.reward_model)) if reward.reward_model else "",
        unsafe=reward.unsafe_local_rewards,
    )
    others = {k: v for k, v in asdict(policy).items() if not k.startswith("clip")}
    clip = modules["advantages"].ClipRange(policy.clip_low, policy.clip_high)
    loss = modules["rollout_objective"].LossConfig(kind=kind, clip=clip, **others, **own)
    config = modules["reinforce"].ReinforceConfig(
        loss=loss,
        rewards=rewards,
        model=folder,
        base=data.model,
        data=data.data,
        out=data.out,
        max_prompt_tokens=data.max_prompt_tokens,
        lora=lora_of(method) if method.method == "lora" or method.adapter else None,
        **{**asdict(step), "device": where, "dtype": dtype_of(step.dtype, where)},
        **sizes,
        command=f"ridgeline train {kind} --model {data.model} --data {data.data.name} --reward {reward.reward} "
        f"--method {method.method} --prompts {step.prompts} --samples {sizes['samples']} --steps {step.steps} "
        f"--lr {sizes['lr']:g} --seed {step.seed}",
        commit=modules["recipe"].git_commit(),
    )
    kept = {name: value for name, value in asdict(step).items() if name != "server_key"}
    parameters = (asdict(data), asdict(reward), asdict(method), kept, asdict(policy), sizes, own)
    with tracked(track, f"train {kind}", *parameters) as tracker:
        modules["reinforce"].run(replace(config, tracker=tracker), Console(), LLM)


def _numbers(weights: str) -> tuple[float, ...]:
    try:
        found = tuple(map(float, listed(weights)))
    except ValueError:
        found = (float("nan"),)
    if not all(map(isfinite, found)):
        raise InvalidConfig(f"--reward-weights is {weights!r:.80}; give a number for each reward, such as 1,0.5.")
    return found
