"""The loss of a step of reinforcement learning: answers are drawn, rewarded and compared, and packed for the policy.

Legend:
    P  prompts
    G  answers of a prompt
    N  tokens of some answers, one behind the other
    R  answers
    M  model width
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ridgeline.training.advantages import (
    ClipRange,
    Scale,
    clipped_losses,
    divergence,
    generalized,
    group_advantages,
    leave_one_out,
    summed,
    value_losses,
    whitened,
)
from ridgeline.training.learnt import Learnt
from ridgeline.training.policy import TrainedPolicy
from ridgeline.training.progress import Row
from ridgeline.training.prompts import PromptLine
from ridgeline.training.rewards import DrawnAnswer, Rewards
from ridgeline.training.rollouts import Rollout, RolloutBatch, Rollouts, prompts_of

HELD_OUT = -1  # the step of answers that nothing is trained on
Kind = Literal["grpo", "rloo", "ppo"]
LossType = Literal["grpo", "bnpo", "dr_grpo"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss of answers.

    beta: the weight of the divergence from the model as training found it. 0: there is no such term.
    clip: the range of ratios in which they have gradients.
    iterations: updates of a batch of answers.
    staleness: how many updates older than the policy's the weights are that draw answers.
    importance_cap: the largest weight of a token whose policy has moved since it was drawn.
    scale, loss_type: of GRPO. grpo: each answer counts the same. bnpo: each token. dr_grpo: each token, over the most
        tokens of an answer.
    gamma, lam, value_coef, value_clip: of PPO.
    """

    kind: Kind
    clip: ClipRange
    beta: float = 0.0
    iterations: int = 1
    staleness: int = 0
    importance_cap: float = 2.0
    scale: Scale = "group"
    loss_type: LossType = "bnpo"
    gamma: float = 1.0
    lam: float = 0.95
    value_coef: float = 0.1
    value_clip: float = 0.2


@dataclass
class Drawn:
    """The answers of a step, and what their loss compares with: numbers of tokens, for each answer.

    old: log-probabilities by the policy as the step began. importance: the weights of tokens drawn by older weights.
    advantage: of tokens, or one for the whole answer. reference, value, returned: what beta and PPO need.
    """

    sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
    drawn: list[Tensor]
    old: list[Tensor]
    advantage: list[Tensor]
    importance: list[Tensor]
    reference: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)
    returned: list[Tensor] = field(default_factory=list)


class Course:
    """The order of drawing and training. With a staleness of s the answers of step k are drawn by the weights behind
    step k - s, while the policy trains on those of earlier steps. So they are the same however long either takes.

    steps: those of the whole run, for which answers are drawn.
    """

    def __init__(
        self, engine: Rollouts, prompts: Sequence[PromptLine], policy: TrainedPolicy, *, staleness: int, steps: int
    ) -> None:
        self.engine, self.prompts, self.policy, self.staleness, self.steps = engine, prompts, policy, staleness, steps
        self.pending: deque[RolloutBatch] = deque()
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._under_way: Future[RolloutBatch] | None = None
        self.push_seconds = self.wait_seconds = 0.0

    def next(self, step: int) -> RolloutBatch:
        """Return the answers of a step, and begin those of a later one."""
        self.settle(step)
        started = time.monotonic()
        while len(self.pending) < min(max(1, self.staleness), self.steps - step):
            self.pending.append(self._draw(step + len(self.pending)))
        self.wait_seconds += time.monotonic() - started
        if self.staleness and step + self.staleness < self.steps:
            self._under_way = self._thread.submit(self._draw, step + self.staleness)
        return self.pending.popleft()

    def settle(self, step: int) -> None:
        """Wait for what is drawn, then give the engine the policy's weights, which are those behind `step` updates."""
        started = time.monotonic()
        if self._under_way is not None:
            self.pending.append(self._under_way.result())
            self._under_way = None
        self.wait_seconds += time.monotonic() - started
        if self.engine.version != step:
            self.push_seconds += self.engine.push(self.policy.decoder, step)

    def _draw(self, step: int) -> RolloutBatch:
        config = self.engine.config
        chosen = prompts_of(step, config.prompts, len(self.prompts), config.seed)
        return self.engine.draw(step, chosen, [self.prompts[place].tokens for place in chosen])

    def close(self) -> None:
        """End the engine."""
        self._thread.shutdown(wait=True)
        self.engine.close()


class RolloutObjective:
    """An `Objective` whose packs are answers. It stands for the packs of a run as well."""

    def __init__(
        self,
        config: LossConfig,
        course: Course,
        rewards: Rewards,
        learnt: Learnt,
        *,
        value: nn.Linear | None,
        text: Callable[[Sequence[int]], str],
        pack_tokens: int,
    ) -> None:
        self.config, self.course, self.rewards, self.learnt = config, course, rewards, learnt
        self.policy, self.value, self._text, self._room = course.policy, value, text, pack_tokens
        self.batch: Drawn | None = None
        self.first = True  # of the updates of a batch
        self._figures: Row = {}
        self._seen = _Seen()

    # ---- what a tuner calls -----------------------------------------------------------------------------------

    def of_step(self, step: int) -> list[list[int]]:
        """Return the packs of an update. Every `iterations` updates new answers are drawn."""
        self.first = step % self.config.iterations == 0
        if self.first:
            self._seen = _Seen()
            self.batch = self._begun(self.course.next(step // self.config.iterations))
        assert self.batch is not None
        packs, room = list[list[int]](), 0
        for index, (prompt, answer) in enumerate(self.batch.sequences):
            length = len(prompt) + len(answer)
            if not packs or room < length:
                packs.append([])
                room = self._room
            packs[-1].append(index)
            room -= length
        return packs

    def weight(self, pack: Sequence[int]) -> int:
        if self.config.kind == "rloo" or (self.config.kind == "grpo" and self.config.loss_type == "grpo"):
            return len(pack)
        if self.config.kind == "grpo" and self.config.loss_type == "dr_grpo":
            return len(pack) * self.course.engine.config.max_tokens
        return self.tokens(pack)

    def tokens(self, pack: Sequence[int]) -> int:
        assert self.batch is not None
        return sum(len(self.batch.sequences[index][1]) for index in pack)

    def sum(self, pack: Sequence[int]) -> Tensor:
        batch, config = self.batch, self.config
        assert batch is not None
        counts = [len(batch.sequences[index][1]) for index in pack]
        scored = self.policy.score([batch.sequences[index] for index in pack])
        if self.first:
            self._seen.take(_joined(batch.drawn, pack), scored.plain_N.detach(), scored.entropy_N)
        logprob_N, old_N = scored.logprob_N, _joined(batch.old, pack)
        advantage_N, importance_N = _joined(batch.advantage, pack), _joined(batch.importance, pack)
        if config.kind == "rloo":
            loss_R, cut_R = clipped_losses(summed(logprob_N, counts), summed(old_N, counts), advantage_N, config.clip)
            self._seen.clip(cut_R)
            return (loss_R * importance_N).sum()
        loss_N, cut_N = clipped_losses(logprob_N, old_N, advantage_N, config.clip)
        self._seen.clip(cut_N)
        loss_N = loss_N * importance_N
        if config.kind == "ppo":
            assert self.value is not None
            value_N = self.value(scored.x_NM.float())[:, 0]
            olds = _joined(batch.value, pack), _joined(batch.returned, pack)
            return (loss_N + config.value_coef * value_losses(value_N, *olds, config.value_clip)).sum()
        if config.beta:
            loss_N = loss_N + config.beta * divergence(logprob_N, _joined(batch.reference, pack))
        if config.loss_type == "grpo":
            return torch.stack([part.mean() for part in loss_N.split(counts)]).sum()
        return loss_N.sum()

    def reward_of(self, prompts: Sequence[PromptLine], step: int) -> float:
        """Return the mean reward of answers to prompts that are not trained on, by the weights behind `step` updates.
        They are drawn with the same seeds at every call."""
        course = self.course
        course.settle(step)
        batch = course.engine.draw(HELD_OUT, range(len(prompts)), [each.tokens for each in prompts])
        answers = [
            DrawnAnswer(self._text(one.tokens), len(one.tokens), one.ended, prompts[place].record)
            for place, each in zip(batch.prompts, batch.answers, strict=True)
            for one in each
        ]
        return sum(self.rewards.of(answers)) / len(answers)

    def figures(self) -> Row:
        """Return the figures of the newest batch."""
        return {**self._figures, **self._seen.figures()}

    # ---- the beginning of a batch -----------------------------------------------------------------------------

    def _begun(self, batch: RolloutBatch) -> Drawn:
        started = time.monotonic()
        flat = [(place, one) for place, each in zip(batch.prompts, batch.answers, strict=True) for one in each]
        rewards = self.rewards.of([self._answer(place, one) for place, one in flat])
        reward_seconds, device = time.monotonic() - started, self.policy.device
        sequences = [(self.course.prompts[place].tokens, one.tokens) for place, one in flat]
        drawn = [torch.tensor(one.logprobs, dtype=torch.float32, device=device) for _, one in flat]
        found = Drawn(sequences, drawn, drawn, [], [torch.ones_like(each) for each in drawn])
        started = time.monotonic()
        stale = batch.version != self.course.engine.version or not self.course.engine.config.exact
        if stale or self.value is not None or self.policy.temperature != 1:  # what was reported is in front of that
            found.old, found.value = self._scored(sequences, self.value)
            pairs = zip(found.old, drawn, strict=True)
            if stale:
                found.importance = [self._importance(*pair) for pair in pairs]
        if self.config.beta:
            with self.learnt.reference():
                found.reference = self._scored(sequences, None)[0]
        if device.type == "cuda" and (found.old is not drawn or found.reference):
            torch.cuda.synchronize(device)  # so that the time is that of scoring
        scoring_seconds = time.monotonic() - started
        reward_PG = torch.tensor(rewards).view(len(batch.prompts), -1)
        self._compare(found, reward_PG)
        lengths = [len(one.tokens) for _, one in flat]
        course = self.course
        self._figures = {
            "reward": float(reward_PG.mean()),
            "reward_std": float(reward_PG.std(1).mean()) if reward_PG.shape[1] > 1 else 0.0,
            "answer_tokens": sum(lengths) / len(lengths),
            "ended": sum(one.ended for _, one in flat) / len(flat),
            "staleness": course.engine.version - batch.version,
            "drawing_s": round(batch.seconds, 4),
            "waiting_s": round(course.wait_seconds, 4),
            "push_s": round(course.push_seconds, 6),
            "reward_s": round(reward_seconds, 4),
            "scoring_s": round(scoring_seconds, 4),
        }
        if self.config.beta:
            apart = [float((old - ref).sum()) for old, ref in zip(found.old, found.reference, strict=True)]
            self._figures["kl_reference"] = sum(apart) / sum(lengths)
        course.wait_seconds = course.push_seconds = 0.0
        return found

    def _answer(self, place: int, one: Rollout) -> DrawnAnswer:
        return DrawnAnswer(self._text(one.tokens), len(one.tokens), one.ended, self.course.prompts[place].record)

    def _importance(self, old_N: Tensor, drawn_N: Tensor) -> Tensor:
        if self.config.kind == "rloo":
            return torch.exp((old_N - drawn_N).sum()).clamp(max=self.config.importance_cap)[None]
        return torch.exp(old_N - drawn_N).clamp(max=self.config.importance_cap)

    @torch.no_grad()
    def _scored(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], value: nn.Linear | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the log-probabilities of all answers by the policy as it is, and their values if there is a head."""
        logprobs, values, at = list[Tensor](), list[Tensor](), 0
        while at < len(sequences):
            some, room = list[tuple[Sequence[int], Sequence[int]]](), self._room
            while at < len(sequences) and (not some or room >= len(sequences[at][0]) + len(sequences[at][1])):
                some.append(sequences[at])
                room -= len(sequences[at][0]) + len(sequences[at][1])
                at += 1
            scored, counts = self.policy.score(some), [len(answer) for _, answer in some]
            logprobs += scored.logprob_N.split(counts)
            if value is not None:
                values += value(scored.x_NM.float())[:, 0].split(counts)
        return logprobs, values

    def _compare(self, found: Drawn, reward_PG: Tensor) -> None:
        """Set the advantages."""
        config, device = self.config, self.policy.device
        if config.kind == "grpo":
            advantages = group_advantages(reward_PG, config.scale).flatten().tolist()
            found.advantage = [torch.full_like(old, each) for old, each in zip(found.old, advantages, strict=True)]
            return
        apart = [torch.zeros_like(old) for old in found.old]
        if config.beta:  # the divergence is a part of the reward
            apart = [config.beta * (old - ref) for old, ref in zip(found.old, found.reference, strict=True)]
        if config.kind == "rloo":
            taken_PG = torch.stack([each.sum() for each in apart]).view_as(reward_PG).cpu()
            found.advantage = list(leave_one_out(reward_PG - taken_PG).to(device).flatten().split(1))
            if not any(len(each) != 1 for each in found.importance):
                return
            found.importance = [torch.ones(1, device=device) for _ in found.old]
            return
        reward_N, counts = -torch.cat(apart).cpu(), [len(each) for each in found.old]
        reward_N[torch.tensor(counts).cumsum(0) - 1] += reward_PG.flatten()
        value_N = torch.cat(found.value).cpu()
        advantage_N, return_N = generalized(reward_N, value_N, counts, gamma=config.gamma, lam=config.lam)
        found.advantage = list(whitened(advantage_N).to(device).split(counts))
        found.returned = list(return_N.to(device).split(counts))


class _Seen:
    """The figures that the first update of a batch finds."""

    def __init__(self) -> None:
        self.tokens, self.differing, self.kl, self.entropy = 0, 0, 0.0, 0.0
        self._cut, self._counted = 0.0, 0

    def take(self, drawn_N: Tensor, now_N: Tensor, entropy_N: Tensor) -> None:
        """Compare the log-probabilities of the rollout with the trainer's."""
        self.tokens += len(drawn_N)
        self.differing += int((drawn_N != now_N).sum())
        self.kl += float(divergence(drawn_N, now_N).sum())
        self.entropy += float(entropy_N.sum())

    def clip(self, cut: Tensor) -> None:
        self._cut += float(cut.sum())
        self._counted += len(cut)

    def figures(self) -> Row:
        """kl: the mean divergence of the rollout from the trainer. differing: tokens whose log-probability has other
        bits there."""
        count = max(1, self.tokens)
        return {
            "kl": self.kl / count,
            "differing": self.differing,
            "entropy": self.entropy / count,
            "clipped": self._cut / max(1, self._counted),
        }


def _joined(parts: Sequence[Tensor], pack: Sequence[int]) -> Tensor:
    return torch.cat([parts[index] for index in pack])


def restored(kept: Sequence[Mapping[str, Any]]) -> deque[RolloutBatch]:
    """Return batches that were kept."""
    return deque(RolloutBatch.of(dict(each)) for each in kept)
