"""What waits for a network that drafts is all that was added to a slot since it was taken, in its order."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Backlog

SLOTS, WIDTH = 5, 3
OPS = Ops(Platform(device_type="cpu"))


@pytest.mark.parametrize(
    ("padded", "features"), [(False, True), (True, True), (False, False)], ids=["exact", "padded", "without features"]
)
def test_tokens_wait_in_their_order_until_they_are_taken(padded: bool, features: bool) -> None:
    """Without features a CPU has a way of its own for steps of one token a row."""
    draw, slots = random.Random(0), Slots(SLOTS, 1, 16, 10, torch.device("cpu"))
    waiting = Backlog(slots, 16, OPS, torch.zeros(SLOTS + 1, WIDTH) if features else None)
    waiting.padded = padded
    known: dict[int, list[tuple[int, float]]] = {slot: [] for slot in range(SLOTS)}
    taken = dropped = 0
    for _ in range(600):
        rows = np.array(draw.sample(range(SLOTS), draw.randint(1, SLOTS)), np.int32)
        columns = draw.randint(1, 5)
        more_R = np.full(len(rows), columns)
        wanted = draw.random() > 0.85  # drafts: else the oldest tokens go
        if wanted and waiting.due(rows, more_R if draw.random() < 0.8 else None):
            found = waiting.take(rows)
            assert (found.before_TM is not None) == features
            taken += int(found.count_R.sum())
            assert len(found.token_T) in (waiting.sizes if padded else [sum(len(known[slot]) for slot in rows)])
            for row, slot in enumerate(rows.tolist()):
                begin, end = found.start_R1[row : row + 2].tolist()
                befores = [0.0] * (end - begin) if found.before_TM is None else found.before_TM[begin:end, -1].tolist()
                assert list(zip(found.token_T[begin:end].tolist(), befores, strict=True)) == known[slot]
                assert found.count_R[row] == end - begin
                known[slot].clear()
            assert not waiting.due(rows, None)
        waiting.expect(rows, more_R)
        token_RK = torch.randint(0, 100, (len(rows), columns))
        there_RK = torch.arange(columns) < torch.randint(0, columns + 1, (len(rows), 1))
        if draw.random() < 0.3:
            there_RK[:, 0] = False  # a pair whose feature is not known
        before_RKM = torch.randn(len(rows), columns, WIDTH) * features
        if columns == 1:
            before_RM = before_RKM[:, 0] if features else None
            drafts_SD = torch.zeros(SLOTS + 1, 3, dtype=torch.int32)
            waiting.add_one(torch.from_numpy(rows), token_RK[:, 0], there_RK[:, 0], drafts_SD, before_RM)
            assert drafts_SD.sum() == -3 * len(rows)
        else:
            waiting.add(torch.from_numpy(rows), token_RK, there_RK, before_RKM if features else None)
        for row, slot in enumerate(rows.tolist()):
            pairs = zip(token_RK[row].tolist(), before_RKM[row, :, WIDTH - 1].tolist(), strict=True)
            known[slot] += [pair for pair, there in zip(pairs, there_RK[row].tolist(), strict=True) if there]
            dropped += len(known[slot][:-16])
            known[slot] = known[slot][-16:]
    assert taken > 300
    assert dropped > 60


@pytest.mark.parametrize(("window", "slots", "waits"), [(None, 4, True), (7, 4, False), (None, 1024, False)])
def test_tokens_wait_if_nothing_that_they_see_goes_and_enough_of_them_find_room(
    window: int | None, slots: int, waits: bool
) -> None:
    mixer = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.25, window=window)
    layer = LayerSpec(mixer=mixer, feed_forward=MLPSpec(intermediate_size=8), norm=NormSpec(eps=1e-5))
    made = Backlog.of(Slots(slots, 1, 16, 10, torch.device("cpu")), [layer], OPS)
    assert (made is not None) == waits
