"""The planning of context parallelism: balance against counting one by one, the choice of a form, and when it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.context import (
    FORMS,
    LINKS,
    MOST,
    Attended,
    Link,
    cheapest,
    imbalance,
    link_between,
    moved,
    pairs_of,
    pays_from,
    seconds_between,
    waited,
)
from ridgeline.perf.links import Line, Links
from tests.perf.models import spec

LAYER = Attended(1024, 1024, 0, 32, 8, 128, 2)


@pytest.mark.parametrize("deal", ["striped", "zigzag", "contiguous"])
@pytest.mark.parametrize(("ranks", "start", "end"), [(1, 0, 12), (2, 0, 16), (2, 8, 24), (4, 16, 48)])
def test_pairs_are_those_of_the_positions_dealt(deal: str, ranks: int, start: int, end: int) -> None:
    size = (end - start) // (2 * ranks)  # of a half of a rank's part
    owners = {
        "striped": [position % ranks for position in range(start, end)],
        "zigzag": [rank for rank in (*range(ranks), *reversed(range(ranks))) for _ in range(size)],
        "contiguous": [rank for rank in range(ranks) for _ in range(2 * size)],
    }[deal]
    want = [0] * ranks
    for position, rank in zip(range(start, end), owners, strict=True):
        want[rank] += len(range(position + 1))
    assert pairs_of(deal, ranks, start, end).tolist() == want


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_rank_has_more_than_its_part(ranks: int) -> None:
    """Of a whole prompt dealt out in one piece each, the last rank has almost twice its part."""
    assert imbalance(pairs_of("striped", ranks, 0, 1 << 15)) < 1.001
    assert imbalance(pairs_of("zigzag", ranks, 0, 1 << 15)) < 1.001
    assert imbalance(pairs_of("contiguous", ranks, 0, 1 << 15)) == pytest.approx(2 - 1 / ranks, rel=1e-3)


def test_few_tokens_travel_to_many_keys_and_not_the_other_way() -> None:
    assert cheapest(2, LAYER, "cuda") == "keys"
    assert cheapest(2, LAYER._replace(keys=100 * 1024), "cuda") == "queries"
    both = LAYER._replace(keys=4 * 1024)
    assert cheapest(4, both, "cuda") == "heads"
    assert cheapest(3, both, "cuda", ["heads", "queries"]) == "queries", "8 key heads are not divided by 3"
    assert [moved("heads", ranks, both) > moved("heads", 2 * ranks, both) for ranks in (2, 4)] == [True, True]
    assert all(moved(form, 2, both) < moved(form, 4, both) for form in FORMS[1:])


def test_the_ring_is_taken_where_its_bytes_travel_beside_attention() -> None:
    chunk = Attended(8192, 1 << 17, 8192 << 17, 32, 8, 128, 2)
    assert cheapest(8, chunk, "cuda") == "keys"
    assert cheapest(8, chunk, "cpu") == "heads", "nothing travels beside anything"
    assert waited("keys", 8, chunk, "cuda") == 0
    assert waited("keys", 8, chunk._replace(pairs=0), "cuda") == moved("keys", 8, chunk)


def test_a_prompt_is_divided_where_that_is_sooner() -> None:
    model, link = spec("llama-8b"), Link(1e-4, 1e11)

    def step(shape: StepShape) -> float:
        return 1e-3 + 2e-5 * float(shape.num_tokens_R[0])

    least = pays_from(model, 2, step, "cpu", 2, link)
    for tokens, pays in ((least - 2, False), (least, True), (4 * least, True)):
        sooner = step(StepShape([tokens], [tokens], 1)) - step(StepShape([-(-tokens // 2)], [tokens], 1))
        assert (sooner > seconds_between(model, 2, tokens, "cpu", link, 2)) == pays
    assert pays_from(model, 2, step, "cpu", 2, Link(1e-4, 1e7)) == MOST, "a slow link never pays"


def test_messages_that_were_measured_say_how_fast_the_link_is() -> None:
    def kept(*lines: Line) -> Links:
        return Links(device="test", lines=lines, source="")

    slow, fast = (Line("send", backend, 2, 2e-5, 1 / rate) for backend, rate in (("nccl", 1e11), ("gloo", 3e11)))
    other = Line("send", "symmetric-put", 2, 1e-6, 1e-12)  # the engine's messages do not go this way
    assert link_between(kept(slow, other), 4, "cpu") == pytest.approx(Link(2e-5, 1e11))
    assert link_between(kept(slow, fast), 2, "cuda") == pytest.approx(Link(LINKS["cuda"].latency, 3e11))
    for nothing in (None, kept(other), kept(slow._replace(op="all_reduce"))):
        assert link_between(nothing, 2, "cuda") == LINKS["cuda"]


def test_a_hybrid_waits_for_states_and_for_tokens_that_change_hands() -> None:
    """The more ranks there are, the more states; a longer prompt has no more of them, only more of the rest."""
    model, link = spec("qwen3.5-9b"), Link(0.0, 1e9)
    attention = [layer for layer in model.layers if not layer.mixer.states[0].exact]
    told = sum(s.unit_bytes(1, "float32") for layer in model.layers for s in layer.mixer.states if s.exact)
    for ranks in (2, 8):
        tokens = 1 << 15
        alone = replace(model, layers=tuple(attention))
        heads = alone.layers[0].attention
        moved_bytes = 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim * 2 * tokens * (ranks - 1) / ranks**2
        want = 2 * (ranks - 1) * told / 1e9 + len(attention) * moved_bytes / 1e9
        whole, of_attention = (seconds_between(each, ranks, tokens, "cuda", link, 2) for each in (model, alone))
        more = whole - of_attention
        assert more == pytest.approx(want)
