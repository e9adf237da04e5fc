"""Positions on three axes, beside transformers' `get_rope_index`."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.plan import embeds
from ridgeline.core.plan.embeds import Inserted, positions_between, shift_of
from tests.vision import tiny
from tests.vision.families.family import IMAGE

GRIDS = {
    "one": [(4, (1, 2, 3))],
    "first": [(0, (1, 5, 2))],
    "two, side by side": [(3, (1, 1, 1)), (4, (1, 6, 7))],
    "three": [(2, (1, 3, 3)), (30, (1, 1, 9)), (60, (1, 8, 2))],
    "a video": [(5, (3, 4, 6)), (80, (1, 2, 2))],
}


@pytest.mark.parametrize("case", GRIDS)
def test_positions_are_those_of_transformers(case: str) -> None:
    inserted, tokens = list[Inserted](), 95
    ids = torch.full((1, tokens), 5)
    kinds = torch.zeros(1, tokens, dtype=torch.int32)
    for start, grid in GRIDS[case]:
        count = grid[0] * grid[1] * grid[2]
        inserted.append(Inserted(start=start, count=count, key=b"k" * 16, name=str(start), grid=grid))
        ids[0, start : start + count] = IMAGE
        kinds[0, start : start + count] = 2 if grid[0] > 1 else 1
    pictures = torch.tensor([[t, 2 * h, 2 * w] for _, (t, h, w) in GRIDS[case] if t == 1])
    videos = torch.tensor([[t, 2 * h, 2 * w] for _, (t, h, w) in GRIDS[case] if t > 1])
    if case == "two, side by side":  # which transformers takes for one: its positions by hand
        wanted = torch.arange(tokens).repeat(3, 1)
        box = torch.stack(torch.meshgrid(torch.arange(1), torch.arange(6), torch.arange(7), indexing="ij"))
        wanted[:, 4:46] = box.reshape(3, -1) + 4
        wanted[:, 46:] -= 35
        delta = -35
    else:
        given = {"image_grid_thw": pictures if len(pictures) else None}
        given |= {"video_grid_thw": videos if len(videos) else None}
        found, deltas = tiny.build("qwen2_vl").model.get_rope_index(ids, kinds, **given)
        wanted, delta = found[:, 0], int(deltas[0, 0])
    assert shift_of(inserted) == delta
    end = inserted[-1].end
    for size in (1, 7, tokens):
        for start in range(0, tokens, size):
            stop = min(tokens, start + size)
            own = positions_between(inserted, start, stop)
            assert (own is None) == (start >= end)
            if own is not None:
                assert own.tolist() == wanted[:, start:stop].tolist(), start
            else:
                assert wanted[:, start:stop].tolist() == [list(range(start + delta, stop + delta))] * 3


def test_frames_may_lie_further_apart() -> None:
    """Qwen2.5 has so many positions a second. What follows a video begins behind its last frame."""
    video = Inserted(start=2, count=12, key=b"k" * 16, name="v", grid=(3, 2, 2), interval=2.5)
    found = positions_between([video], 0, 14)
    assert found is not None
    assert found[0].tolist() == [0, 1, *[2] * 4, *[4] * 4, *[7] * 4]
    assert found[1].tolist() == [0, 1, *[2, 2, 3, 3] * 3]
    assert shift_of([video]) == 8 - 14


def test_a_chunk_of_a_long_video_makes_few_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them for each of its chunks took a fifth of a second, in which nobody's token was written."""
    pairs = tuple(Inserted(start=20 * n + 10, count=6, key=bytes(16), grid=(1, 2, 3)) for n in range(500))
    whole_3T = positions_between(pairs, 0, 10_000)
    made, boxes = embeds._box, list[Inserted]()
    monkeypatch.setattr(embeds, "_box", lambda each: (boxes.append(each), made(each))[1])
    found_3T = positions_between(pairs, 5_000, 5_064)
    assert found_3T is not None
    assert whole_3T is not None
    assert (found_3T == whole_3T[:, 5_000:5_064]).all()
    assert 3 <= len(boxes) <= 4
    assert shift_of(pairs) == whole_3T[0, -1] - 9_999
