"""Stages of a pipeline train as one process does, in both orders of their passes, and hold what each order must."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load_file

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.stages import deal, of_stage, stage_of
from ridgeline.core.specs.model import ModelSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.parallel.processes import ProcessAxis
from ridgeline.training.data import PackedTokens, write_tokens
from ridgeline.training.embedded import llama_config
from ridgeline.training.loss_scale import gradient_norm
from ridgeline.training.objective import NextTokenLoss
from ridgeline.training.pipeline import BACKWARD, FORWARD, SCHEDULES, Pipeline, Stages, stage_decoder, stages_of
from ridgeline.training.pretrain import TrainConfig, Trainer
from ridgeline_bench.scripts.training_stages import LIMIT, Kept, on_processes, trained

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
CPU, ROWS, LENGTH, PARTS, VOCAB = torch.device("cpu"), 6, 16, 6, 160
TINY = llama_config(hidden=32, intermediate=48, layers=5, heads=2, kv_heads=1) | {"vocab_size": VOCAB, "head_dim": 16}
CASES = [(tied, schedule) for tied in (False, True) for schedule in SCHEDULES]  # whether embeddings are tied
TOKENS = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))


# ---- the orders of passes -------------------------------------------------------------------------------------------


def simulated(schedule: str, stages: int, parts: int, forward: int = 1, backward: int = 2) -> tuple[int, list[int]]:
    """Return when the last pass ends if messages take no time, and the most parts that wait in each stage."""
    orders = [list(SCHEDULES[schedule](stage, stages, parts)) for stage in range(stages)]
    ends: dict[tuple[str, int, int], int] = {}
    now, done, most = [0] * stages, [{FORWARD: 0, BACKWARD: 0} for _ in orders], [0] * stages
    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, part = order[0], done[stage][order[0]]
            needed = [(kind, stage - 1, part)] if kind == FORWARD else [(FORWARD, stage, part), (kind, stage + 1, part)]
            needed = [each for each in needed if 0 <= each[1] < stages]
            if any(each not in ends for each in needed):
                continue
            begin = max([now[stage], *(ends[each] for each in needed)])
            ends[kind, stage, part] = now[stage] = begin + (forward if kind == FORWARD else backward)
            done[stage][kind] += 1
            most[stage] = max(most[stage], done[stage][FORWARD] - done[stage][BACKWARD])
            order.pop(0)
            moved = True
        assert moved, "stages wait for each other"
    return max(now), most


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 12))
def test_both_orders_end_at_the_same_time_and_hold_what_is_said(schedule: str, stages: int, parts: int) -> None:
    end, most = simulated(schedule, stages, parts)
    assert end == (parts + stages - 1) * 3  # a forward pass of 1 and a backward pass of 2
    held = [parts if schedule == "gpipe" else min(parts, stages - stage) for stage in range(stages)]
    assert most == held


# ---- real stages ----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The result of a batch at a stage. waiting, kept: the most parts that waited, and the bytes kept for them."""

    loss: float
    norm: float
    gradients: dict[str, NDArray[Any]]
    waiting: int
    kept: int


def spec_of(tied: bool) -> ModelSpec:
    return model_config(TINY | {"tie_word_embeddings": tied}).spec


def backward(decoder: Decoder, stages: Stages, schedule: str) -> Found:
    pipeline = Pipeline(decoder, stages, schedule=schedule, parts=PARTS, rows=ROWS, chunk=1000, autocast=None)
    with Kept(decoder.parameters()) as kept:
        loss = pipeline.backward(TOKENS, lambda loss: loss)
    assert kept.now == 0, "activations were kept behind their backward pass"
    gradients = {name: p.grad.numpy() for name, p in decoder.named_parameters() if p.grad is not None}
    norm = pipeline.norm(list(decoder.parameters()))
    return Found(loss.item(), norm.item(), gradients, pipeline.most_waiting, kept.most)


def train(stages: Stages, tokens: Path, folder: Path, micro_batches: int) -> None:
    """Train for some steps, and leave a log and a checkpoint."""
    data, schedule = PackedTokens(tokens, seq_len=LENGTH, batch_size=ROWS, seed=0), "1f1b"
    config = TrainConfig(
        lr=1e-2, steps=3, dtype="float32", clip=0.5, log_every=1, micro_batches=micro_batches, schedule=schedule
    )
    decoder = stage_decoder(spec_of(True), stages, 0, CPU)
    given = stages if stages.ahead.size > 1 else None
    Trainer(decoder, data, config, folder, Console(quiet=True), stages=given).run()


def on_stage(tokens: Path, folder: Path, everybody: ProcessAxis) -> list[Found]:
    """Run a batch of each case, then train, as one of the stages."""
    stages = stages_of(everybody, LIMIT)
    found = [backward(stage_decoder(spec_of(tied), stages, 0, CPU), stages, schedule) for tied, schedule in CASES]
    train(stages, tokens, folder / f"{everybody.rank}", PARTS)
    everybody.all_reduce(torch.zeros(1))  # nobody leaves while messages are under way
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_stages_train_as_one_process_does(size: int, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    write_tokens(tokens, [np.arange(2000, dtype=np.uint16) * 7 % VOCAB], 0)
    by_stage = on_processes(size, partial(on_stage, tokens, tmp_path))
    for number, (tied, schedule) in enumerate(CASES):
        alone = backward(stage_decoder(spec_of(tied), Stages(), 0, CPU), Stages(), schedule)
        found = [stage[number] for stage in by_stage]
        check_gradients(found, alone, spec_of(tied))
        held = [PARTS if schedule == "gpipe" else min(PARTS, size - stage) for stage in range(size)]
        assert [each.waiting for each in found] == held
    for stage, found in enumerate(by_stage):
        gpipe, in_turn = (found[CASES.index((True, schedule))].kept for schedule in ("gpipe", "1f1b"))
        assert in_turn / gpipe == pytest.approx((size - stage) / PARTS, rel=0.05)

    train(Stages(), tokens, tmp_path / "whole", 1)
    assert losses(tmp_path / "0") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    whole = load_file(tmp_path / "whole" / "checkpoint" / "model.safetensors")
    for stage in range(size):
        part = load_file(tmp_path / f"{stage}" / "checkpoint" / "model.safetensors")
        torch.testing.assert_close(part, named(whole, spec_of(True), stage, size), rtol=1e-3, atol=1e-4)


def check_gradients(found: list[Found], alone: Found, spec: ModelSpec) -> None:
    """Compare stages with one process that runs the same parts, to the bit where both add up in the same order."""
    for stage, each in enumerate(found):
        assert each.loss == alone.loss
        assert each.norm == pytest.approx(alone.norm, rel=1e-6)
        expected = named(alone.gradients, spec, stage, len(found))
        assert expected.keys() == each.gradients.keys()
        for name, gradient in each.gradients.items():
            if spec.tie_word_embeddings and "embed" in name:  # one process adds both uses up part by part
                np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-7)
            else:
                assert (gradient == expected[name]).all(), name


def named(whole: Mapping[str, T], spec: ModelSpec, stage: int, size: int) -> dict[str, T]:
    """Return what a stage has of a whole model's tensors, by its own names."""
    tied = {"unembed.weight": whole["embed.weight"]} if spec.tie_word_embeddings else {}
    return of_stage({**whole, **tied}, stage_of(spec, stage, deal(spec, size)))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_parts_add_up_to_the_loss_and_the_gradients_of_the_batch() -> None:
    decoder = stage_decoder(spec_of(True), Stages(), 0, CPU)
    found = backward(decoder, Stages(), "1f1b")
    in_parts = {name: p.grad for name, p in decoder.named_parameters()}
    decoder.zero_grad()
    loss = NextTokenLoss(decoder, batch_size=ROWS, chunk=1000, autocast=None)(TOKENS)
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    # Sums of about 200 float32 terms in another order
    torch.testing.assert_close({name: p.grad for name, p in decoder.named_parameters()}, in_parts, rtol=1e-4, atol=1e-6)
    assert found.norm == pytest.approx(gradient_norm(list(decoder.parameters())).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batches": 4}, "6 sequences has no 4 equal parts"),
        ({"micro_batches": 2, "schedule": "zigzag"}, "unknown schedule 'zigzag'.*gpipe, 1f1b"),
        ({"micro_batches": 2, "steps": None, "seconds": 1.0}, "give steps"),
        ({"micro_batches": 2, "compile": True}, "no compile"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.bin", [np.arange(500, dtype=np.uint16) % VOCAB], 0)
    data = PackedTokens(tmp_path / "tokens.bin", seq_len=LENGTH, batch_size=ROWS, seed=0)
    config = TrainConfig(**{"lr": 1e-2, "steps": 1, "dtype": "float32"} | changes)
    with pytest.raises(InvalidConfig, match=message):
        Trainer(stage_decoder(spec_of(True), Stages(), 0, CPU), data, config, tmp_path, Console(quiet=True))


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_the_first_stage_of_a_measured_batch_holds_what_its_order_must() -> None:
    shares = trained(2, [("gpipe", 4), ("1f1b", 4)], seconds=0.01)
    assert [share.formula for share in shares] == [4 / 5, 4 / 5]
    assert [share.waiting for share in shares] == [4, 2]
    assert shares[1].kept / shares[0].kept == pytest.approx(2 / 4, rel=0.05)
    assert all(0 < share.measured < 1.04 * share.formula for share in shares)


def test_the_page_shows_the_stored_shares() -> None:
    page, rows = (ROOT / "docs" / "training.md").read_text(), 0
    for line in map(json.loads, (ROOT / "benchmarks" / "results" / "pipeline.jsonl").read_text().splitlines()):
        if line["case"] in SCHEDULES:
            name = {"gpipe": "GPipe", "1f1b": "1F1B"}[line["case"]]
            figures = f"{line['formula']:.3f} | {line['measured']:.3f} | {line['waiting']} | {line['kept']:,}"
            assert f"| {name} | {line['stages']} | {line['parts']} | {figures} |" in page
            assert 0.95 * line["formula"] < line["measured"] <= line["formula"]
            rows += 1
    assert rows == 12
