"""Vectors and positions in the memory that graphs read do what they do where a step brings them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.layers.given import GivenPlaces, GivenRows
from ridgeline.worker.given import GivenInputs

WIDTH, TOKENS = 4, 8


def memory(parts: int = 3) -> GivenInputs:
    model: Any = SimpleNamespace(
        hidden_size=WIDTH, embeds=True, listener=None, tower=SimpleNamespace(outputs=parts * WIDTH)
    )
    return GivenInputs(model, TOKENS, torch.float32, torch.device("cpu"), axes=True)


def rows(places: list[int], parts: int) -> GivenRows:
    first, *deep = torch.randn(parts, len(places), WIDTH)
    return GivenRows(torch.tensor(places), first, deep)


@pytest.mark.parametrize("tokens", [TOKENS, 6])
def test_a_graph_reads_what_was_loaded_last(tokens: int) -> None:
    own = memory()
    given, places = own.of(tokens)
    assert given is not None
    assert places is not None
    x_TM, ids_T, positions_T = torch.randn(tokens, WIDTH), torch.arange(tokens), torch.arange(tokens) + 7
    for brought in (rows([0, 1, 4], 3), rows([2, 4, 5], 1), None, rows([3], 3)):
        at = GivenPlaces(torch.tensor([1, 5]), torch.randint(90, (3, 2))) if brought is not None else None
        own.load(brought, at)
        for blank in (False, True):
            want = x_TM if brought is None else brought.placed(x_TM, blank=blank)
            assert torch.equal(given.placed(x_TM, blank=blank), want)
        for index in (0, 1):
            deep = brought is not None and index < len(brought.deep)
            assert torch.equal(given.added(x_TM, index), brought.added(x_TM, index) if deep and brought else x_TM)
        assert torch.equal(given.marked(ids_T, -3), ids_T if brought is None else brought.marked(ids_T, -3))
        want = positions_T.expand(3, -1) if at is None else at.placed(positions_T)
        assert torch.equal(places.placed(positions_T), want)


def test_a_model_without_pictures_takes_none() -> None:
    model: Any = SimpleNamespace(hidden_size=WIDTH, embeds=True, listener=None, tower=None)
    own = GivenInputs(model, TOKENS, torch.float32, torch.device("cpu"), axes=False)
    assert own.of(TOKENS) == (None, None)
    assert own.holds(None, None)
    assert not own.holds(rows([0], 1), None)
    assert not own.holds(None, GivenPlaces(torch.tensor([1]), torch.zeros(3, 1)))
