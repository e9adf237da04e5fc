"""Logprobs held as numbers: they are what a list of dicts would be, without its objects."""

from __future__ import annotations

import copy
import gc
import pickle
import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.request import PromptLogprobs, TokenEvent, TokenLogprobs
from ridgeline.text.completion import Completion
from ridgeline.text.outputs import CompletionOutput, Logprob, RequestOutput, ScoredTokens, TokenIdLogprobs
from ridgeline.transport.messages import Event, Progress, decode_from_engine, encode
from tests.driving import ask

PLACES, TOP = 2000, 20
LOGPROBS = st.floats(-50, 0, width=32)
IDS = st.integers(0, 9)


@st.composite
def places(draw: st.DrawFn) -> tuple[int, TokenLogprobs]:
    """A token, and what is told of its place."""
    top = draw(st.lists(IDS, unique=True, max_size=4))
    values = [draw(LOGPROBS) for _ in top]
    return draw(IDS), TokenLogprobs(draw(LOGPROBS), draw(st.integers(1, 99)), top, values)


def entry_of(token_id: int, told: TokenLogprobs, *, named: bool) -> TokenIdLogprobs:
    chosen = Logprob(told.logprob, told.rank, str(token_id))
    if named:
        found = {token_id: chosen}
        for other, value in zip(told.top_ids, told.top_logprobs, strict=True):
            found.setdefault(other, Logprob(value, None, str(other)))
        return found
    found = {}
    for place, (other, value) in enumerate(zip(told.top_ids, told.top_logprobs, strict=True)):
        found[other] = Logprob(value, place + 1, str(other))
    found.setdefault(token_id, chosen)
    return found


def packed(told: list[TokenLogprobs]) -> PromptLogprobs:
    def floats(values: list[float]) -> bytes:
        return struct.pack(f"{len(values)}f", *values)

    def integers(values: list[int]) -> bytes:
        return struct.pack(f"{len(values)}i", *values)

    return PromptLogprobs(
        floats([each.logprob for each in told]),
        integers([each.rank for each in told]),
        integers([i for each in told for i in each.top_ids]),
        floats([value for each in told for value in each.top_logprobs]),
    )


@given(st.lists(places()), st.integers(0, 3), st.booleans())
def test_scored_tokens_are_the_list_of_their_entries(
    told: list[tuple[int, TokenLogprobs]], unscored: int, named: bool
) -> None:
    scored = ScoredTokens(str, unscored=unscored, named=named)
    for token_id, each in told:
        scored.add(token_id, each)
    want = [None] * unscored + [entry_of(token_id, each, named=named) for token_id, each in told]
    assert len(scored) == len(want)
    assert list(scored) == want == scored
    assert [list(entry or ()) for entry in scored] == [list(entry or ()) for entry in want]  # in the same order
    assert scored[1:] == want[1:]
    assert scored[::-2] == want[::-2]
    assert [scored[-i] for i in range(1, len(want) + 1)] == want[::-1]
    assert scored != [*want, None]
    for same in (copy.deepcopy(scored), pickle.loads(pickle.dumps(scored))):  # for processes of the caller's own
        assert type(same) is list
        assert same == want


@given(st.data(), st.integers(0, 3))
def test_prompt_logprobs_are_the_same_in_one_message_and_in_many(data: st.DataObject, width: int) -> None:
    ids = data.draw(st.lists(IDS, min_size=1, max_size=8))
    tops = [data.draw(st.lists(IDS, unique=True, min_size=width, max_size=width)) for _ in ids]
    told = [TokenLogprobs(data.draw(LOGPROBS), 3, top, [data.draw(LOGPROBS) for _ in top]) for top in tops]
    cut = data.draw(st.integers(0, len(ids)))
    scored, one_by_one = ScoredTokens(str), ScoredTokens(str)
    for part in (told[:cut], told[cut:]):
        message = Progress(
            ids=[], token_ids=[], events=[Event(id=1, token_id=-1, prompt_logprobs=packed(part))], ended=[]
        )
        arrived = decode_from_engine(encode(message))
        assert arrived == message
        scores = arrived.events[0].prompt_logprobs
        assert list(scores) == part
        scored.extend(ids[len(scored) :], scores)
    for token_id, each in zip(ids, told, strict=True):
        one_by_one.add(token_id, each)
    assert scored == one_by_one


def test_the_logprobs_of_a_long_prompt_leave_the_garbage_collector_nothing_to_visit() -> None:
    """Otherwise it holds the server up for seconds where a request has millions of them."""
    told = TokenLogprobs(-1.0, 1, list(range(TOP)), [-1.0] * TOP)
    scores = packed([told] * PLACES)
    request = ask("r", (5,) * (PLACES + 1), prompt_logprobs=TOP)
    parent = RequestOutput("r", None, list(request.prompt_token_ids), [CompletionOutput(0)])
    completion = Completion(request, parent.outputs[0], parent, None)
    data = encode(Event(id=1, token_id=-1, prompt_logprobs=scores))
    gc.collect()
    before = len(gc.get_objects())
    event = msgspec.msgpack.decode(data, type=Event)
    completion.take(TokenEvent("r", -1, prompt_logprobs=event.prompt_logprobs))
    assert len(gc.get_objects()) - before < 20
    assert parent.prompt_logprobs is not None
    assert len(parent.prompt_logprobs) == PLACES + 1
    assert parent.prompt_logprobs[PLACES] == {i: Logprob(-1.0, i + 1) for i in range(TOP)}
