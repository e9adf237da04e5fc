"""Heads that draft learn, and their right drafts are counted as decoding would, step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer
from torch.nn import functional as F

from ridgeline.layers.decoder import Decoder
from ridgeline.training.block_heads import BlockHead, BlockShape
from ridgeline.training.drafted import acceptances, walk
from ridgeline.training.head_loop import HeadTraining, train_head
from ridgeline.training.head_recipe import Head, Kind
from ridgeline.training.heads import EagleHead, EagleShape, MedusaHeads
from ridgeline.training.learners import Block, DraftModel, Eagle, Learner, Medusa, right
from ridgeline.training.target import continued, read_target, traced
from ridgeline.training.traces import Traces
from tests import head_oracle
from tests.training.conftest import TEXTS, VOCAB

PASSES = 3
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 96,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "taps": (0, 1),
    "eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab": VOCAB,
    "positions": 64,
}
SHAPE = EagleShape(**SIZES)
BLOCK = BlockShape(**SIZES, layers=2, block=PASSES + 1, mask=7, target_layers=2)


@pytest.fixture
def target(folder: Path) -> Decoder:
    return read_target(folder, CPU)


@pytest.fixture
def text(tokenizer: Tokenizer) -> torch.Tensor:
    return torch.tensor([tokenizer.encode("".join(TEXTS[i : i + 3])).ids[:40] for i in range(8)])


class RawTarget(head_oracle.Target):
    """What transformers returns of the last layer is behind the final norm, so it is taken in front of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    def states(self, tokens: Sequence[int]) -> Any:
        found: list[torch.Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(
            lambda _module, _inputs, output: found.append(output[0] if isinstance(output, tuple) else output)
        )
        self._known.clear()  # so that the model runs under the hook
        states = super().states(tokens)
        hook.remove()
        return [*states[:-1], found[0].reshape(states[-1].shape)]


class Tapped(head_oracle.Eagle3):
    """The oracle's head, with the numbers of one of ours."""

    def __init__(self, folder: Path, head: EagleHead) -> None:
        super().__init__(RawTarget(folder), taps=SHAPE.taps)
        assert {name: t.shape for name, t in self.tensors.items()} == {n: t.shape for n, t in head.state_dict().items()}
        self.tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}

    @torch.no_grad()
    def chain(self, tokens: list[int], start: int, passes: int) -> list[torch.Tensor]:
        """Return the scores of every pass of the chain that begins with pair `start`, over a text's own tokens."""
        features, found = self.features(self.target.states(tokens[: start + 1])), []
        for index in range(passes):
            known = tokens[1 : start + 2 + index]
            output = self.output(self.target.embedding[known], features)
            found.append(self.scores(output)[-1])
            features = torch.cat((features, output[-1:]))
        return found


class Blocked(head_oracle.DFlash):
    """The oracle's head, with the numbers of one of ours and what it learnt to read at masks."""

    layers, places, mask = BLOCK.layers, PASSES + 1, BLOCK.mask

    def __init__(self, folder: Path, head: BlockHead) -> None:
        super().__init__(RawTarget(folder), taps=BLOCK.taps)
        self.tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}

    def embedded(self, tokens: list[int]) -> torch.Tensor:
        masked = (torch.tensor(tokens) == self.mask)[:, None]
        return torch.where(masked, self.tensors["mask_embedding"], super().embedded(tokens))


def shaken(head: Head) -> Head:
    """Return the head with other numbers than it begins with."""
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return head


def test_blocks_over_a_whole_text_are_those_of_one_after_the_other(
    folder: Path, target: Decoder, text: torch.Tensor
) -> None:
    head, starts = shaken(BlockHead(BLOCK)), torch.tensor([0, 5, 6, 20])
    text[0, 7] = BLOCK.mask  # the token that stands for masks may be a text's own
    oracle = Blocked(folder, head)
    with torch.no_grad():
        ours = torch.stack(list(Block(head, target).scores(traced(target, text[:2], BLOCK.taps), starts, PASSES)))
        for row in range(2):
            for place, start in enumerate(starts.tolist()):
                theirs = oracle.scores(oracle.outputs(text[row, : start + 2].tolist()))
                torch.testing.assert_close(ours[:, row, place], theirs, rtol=1e-3, atol=1e-3)  # float32, five layers


def test_passes_over_a_whole_text_are_those_of_one_chain_after_the_other(
    folder: Path, target: Decoder, text: torch.Tensor
) -> None:
    head = shaken(EagleHead(SHAPE))
    oracle, starts = Tapped(folder, head), torch.tensor([0, 5, 6, 20])
    with torch.no_grad():
        ours = torch.stack(list(Eagle(head, target).scores(traced(target, text[:2], SHAPE.taps), starts, PASSES)))
    for row in range(2):
        for place, start in enumerate(starts.tolist()):
            theirs = torch.stack(oracle.chain(text[row].tolist(), start, PASSES))
            torch.testing.assert_close(ours[:, row, place], theirs, rtol=1e-3, atol=1e-3)  # float32, five layers


def test_a_head_of_medusa_adds_one_product_to_what_the_final_norm_returns(target: Decoder, text: torch.Tensor) -> None:
    heads = MedusaHeads(PASSES, 64, VOCAB)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    trace, starts, named = traced(target, text[:2]), torch.tensor([3, 9]), heads.state_dict()
    assert torch.equal(trace.likely_BSL[..., 0], target.scored(trace.normed_BSM.flatten(0, 1)).argmax(-1).view(2, -1))
    x = trace.normed_BSM[:, starts]
    for index, scores in enumerate(Medusa(heads, target).scores(trace, starts, PASSES)):
        y = x + F.silu(F.linear(x, named[f"{index}.0.linear.weight"], named[f"{index}.0.linear.bias"]))
        torch.testing.assert_close(scores, y @ target.embed.weight.T, rtol=1e-4, atol=1e-4)


def test_the_target_continues_as_without_a_cache(target: Decoder, text: torch.Tensor) -> None:
    known = text[:3, :9]
    for _ in range(12):
        known = torch.cat((known, traced(target, known).likely_BSL[:, -1:, 0]), 1)
    assert torch.equal(continued(target, text[:3, :9], 12), known)
    warm = [continued(target, text[:3, :9], 12, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(warm[0], warm[1])
    assert not torch.equal(warm[0], warm[2])


def learners(target: Decoder, folder: Path) -> dict[Kind, Learner]:
    return {
        "eagle": Eagle(EagleHead(SHAPE), target),
        "dflash": Block(BlockHead(BLOCK), target),
        "medusa": Medusa(MedusaHeads(PASSES, 64, VOCAB), target),
        "draft": DraftModel(read_target(folder, CPU).requires_grad_(True)),
    }


@pytest.mark.parametrize("kind", ["eagle", "dflash", "medusa", "draft"])
def test_the_loss_falls_and_drafts_become_right(
    kind: Kind, target: Decoder, folder: Path, text: torch.Tensor, tmp_path: Path
) -> None:
    learner, passes = learners(target, folder)[kind], 1 if kind == "draft" else PASSES
    if kind == "draft":
        with torch.no_grad():
            for parameter in learner.module.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    trace = traced(target, continued(target, text[:, :8], 32, temperature=1.0), learner.taps).stored()
    before = right(learner, target, trace.restored().tokens_BS, 1).float().mean()
    config = HeadTraining(lr=1e-2, passes=passes, steps=60, bf16=False, scored=0.5, alone=0.2)
    done = train_head(learner, Traces([trace], batch_tokens=160, seed=0), config, tmp_path / "log", Console(quiet=True))
    rows = [json.loads(row) for row in (tmp_path / "log").read_text().splitlines()]
    assert rows[-1]["step"] == done.steps == 60
    assert rows[-1]["loss_1"] < 0.5 * rows[0]["loss_1"]
    assert len(done.losses) == passes
    assert right(learner, target, trace.restored().tokens_BS, 1).float().mean() > before + 0.1


def test_right_drafts_are_counted_as_decoding_would(
    folder: Path, target: Decoder, text: torch.Tensor, tmp_path: Path
) -> None:
    learner = Eagle(EagleHead(SHAPE), target)
    written = continued(target, text[:4, :8], 32)
    config = HeadTraining(lr=1e-2, passes=PASSES, steps=40, bf16=False, scored=0.5)
    stored = traced(target, written, SHAPE.taps).stored()
    train_head(learner, Traces([stored], batch_tokens=160, seed=0), config, tmp_path / "log", Console(quiet=True))
    oracle, steps = Tapped(folder, learner.module), []
    for row in written.tolist():
        end, known = row.index(0, 8) if 0 in row[8:] else len(row), 8
        while known + PASSES + 1 < end:
            chain = oracle.chain(row, known - 1, PASSES)
            drafts = [int(scores.argmax()) for scores in chain]
            hits = [draft == token for draft, token in zip(drafts, row[known + 1 :], strict=False)]
            steps.append(([*hits, False]).index(False))
            known += steps[-1] + 1
    [found] = acceptances(learner, target, written, 8, [PASSES])
    assert (found.steps, found.tokens) == (len(steps), len(steps) + sum(steps))
    assert found.accepted[0] == pytest.approx(sum(run > 0 for run in steps) / len(steps))
    assert 0 < found.accepted[0] < 1


def test_the_target_is_always_right_about_itself(target: Decoder, text: torch.Tensor) -> None:
    [found] = acceptances(DraftModel(target), target, continued(target, text[:4, :8], 32), 8, [4])
    assert found.tokens_per_step == 5
    assert found.accepted == (1, 1, 1, 1)


def test_a_walk_goes_on_behind_what_was_accepted() -> None:
    assert walk([9, 9, 2, 9, 9, 0, 1, 9, 9, 9, 9], end=12, prompt=3, most=3) == [2, 0, 1]
