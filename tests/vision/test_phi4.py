"""The tiles of Phi-4-multimodal's pictures beside transformers' rules, at the sizes of the published model."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.media.layout import NEWLINE, SEPARATOR
from ridgeline.media.processors import processor_of
from tests.media.test_processors import taken
from tests.vision.phi4 import OWNER, PATH

SIDE, EDGE, MOST = 14, 448, 36
DRAW = Random(7)
SIZES = [(448, 448), (449, 896), (1, 1), (895, 448), (2000, 1500), (4000, 300), (448 * 6, 448 * 6 + 1)] + [
    (DRAW.randrange(20, 3000), DRAW.randrange(20, 3000)) for _ in range(60)
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_are_those_of_transformers(size: tuple[int, int]) -> None:
    """Their masks say which patches a tile's useful ones are; one in two of them, per axis, becomes a vector."""
    resized = []
    tools = SimpleNamespace(resize=lambda image, to: resized.append(tuple(to)), pad=lambda *_, **__: None)
    closest = taken(PATH, "find_closest_aspect_ratio", owner=OWNER)
    own = SimpleNamespace(find_closest_aspect_ratio=lambda *given: closest(own, *given))
    cut = taken(PATH, "dynamic_preprocess", owner=OWNER, torch=torch, tvF=tools)
    _, mask = cut(own, torch.empty(1, 1, 1).expand(3, *size), EDGE, SIDE, EDGE // SIDE, max_num=MOST)
    processor = processor_of({"config.json": {"model_type": "phi4_multimodal"}}, lambda text: ())
    layout = processor.layout(*size)
    shown = ShownPictures((Pixels(1, 1, bytes(3)),), layout.views, processor.patching, layout.order)
    *tiles, whole = layout.views
    assert (whole.height, whole.width) == resized[0]
    assert whole.resampled == (EDGE, EDGE)
    assert (whole.window.rows // SIDE, whole.window.columns // SIDE) == mask.shape
    seen = torch.zeros_like(mask)
    for view, (rows, columns) in zip(tiles, shown.covered, strict=False):
        top, left = view.window.top // SIDE, view.window.left // SIDE
        seen[top : top + rows, left : left + columns] = 1
    assert torch.equal(seen, mask)
    squares = mask[::2, ::2]
    vectors = int(squares.sum() + squares[:, 0].sum()) + 1 + 16 * 17  # as `_preprocess` counts them
    assert shown.vectors == layout.placeholders == vectors
    order = shown.order
    assert order is not None
    assert order.count(SEPARATOR) == 1
    assert order.count(NEWLINE) == squares[:, 0].sum() + 16
    assert sorted(each for each in order if each >= 0) == list(range(shown.patches // 4))


def test_what_does_not_fit_is_refused() -> None:
    processor = processor_of({"config.json": {"model_type": "phi4_multimodal"}}, lambda text: ())
    with pytest.raises(InvalidRequest, match="no side may be below 10"):
        processor.layout(4, 3000)
    for settings in ({"size": {"height": 448, "width": 224}}, {"size": {"height": 434, "width": 434}}, {"resample": 2}):
        files = {"config.json": {"model_type": "phi4_multimodal"}, "preprocessor_config.json": settings}
        with pytest.raises(InvalidConfig, match="Phi-4"):
            processor_of(files, lambda text: ())
