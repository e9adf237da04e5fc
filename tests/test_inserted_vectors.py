"""Vectors in the place of some tokens' embeddings, as an encoder of pictures leaves them, beside transformers'
`inputs_embeds`. The encoder is a table: a name and its vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.embeds import PLACEHOLDER, Inserted, parts_between
from ridgeline.core.plan.request import Request
from tests import tiny_models
from tests.driving import Rig, ask, disturbed, rig

TinyModel = Callable[[str], Path]
PICTURES = {"cat": 9, "dog": 5, "sun": 1}  # their vectors
TOKENS = 8


def vectors(name: str) -> Tensor:
    """Return an encoder's output, [L, M]."""
    width = tiny_models.build("llama").config.hidden_size
    return torch.randn(PICTURES[name], width, generator=torch.Generator().manual_seed(len(name) + PICTURES[name]))


def picture(name: str, start: int) -> Inserted:
    return Inserted(start=start, count=PICTURES[name], key=blake2b(name.encode(), digest_size=16).digest(), name=name)


def asked(request_id: str, *parts: list[int] | str, salt: str = "") -> Request:
    """A request whose prompt is made of tokens and pictures."""
    tokens, inserted = list[int](), list[Inserted]()
    for part in parts:
        if isinstance(part, str):
            inserted.append(picture(part, len(tokens)))
            tokens += [PLACEHOLDER] * PICTURES[part]
        else:
            tokens += part
    return replace(ask(request_id, tokens, max_tokens=TOKENS), inserted=tuple(inserted), cache_salt=salt)


def words(count: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 300) for _ in range(count)]


def by_transformers(request: Request) -> list[int]:
    oracle = tiny_models.build("llama")
    x_TM = oracle.get_input_embeddings()(torch.tensor(request.prompt_token_ids)).detach().clone()
    for each in request.inserted:
        x_TM[each.start : each.end] = vectors(each.name)
    with torch.inference_mode():
        return oracle.generate(
            inputs_embeds=x_TM[None],
            attention_mask=torch.ones(1, len(x_TM)),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()


def show_all(own: Rig) -> None:
    own.runner.inserted.stored = {name: vectors(name) for name in PICTURES}


REQUESTS = (
    asked("in the middle", words(7, 1), "cat", words(5, 2)),
    asked("first", "dog", words(3, 3)),
    asked("last", words(6, 4), "sun"),
    asked("two, side by side", words(2, 5), "cat", "dog", words(9, 6)),
    asked("long", words(40, 7), "cat", words(30, 8), "dog", words(3, 9)),
    asked("none", words(12, 10)),
)


@pytest.mark.parametrize("chunk", [8, 64])  # most pictures are cut by chunks of 8
def test_tokens_are_those_of_transformers(chunk: int, tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), max_num_batched_tokens=chunk) as own:
        show_all(own)
        outcomes = own.run(*REQUESTS)
        for request in REQUESTS:
            assert outcomes[request.id].tokens == by_transformers(request), request.id


def test_what_is_cached_of_a_picture_is_found_by_its_key_alone(tiny_model: TinyModel) -> None:
    """Blocks have 4 tokens. What continues a cached prompt finds all of it, and others what whole blocks they share."""
    before, behind = words(8, 1), words(6, 2)
    with rig(tiny_model("llama")) as own:
        show_all(own)

        def new(request: Request) -> int:
            before = own.engine.scheduler.cache.hit_tokens
            own.run(request)
            assert own.outcomes[request.id].tokens == by_transformers(request)
            return own.engine.scheduler.cache.hit_tokens - before

        length = len(before) + PICTURES["cat"] + len(behind)
        assert new(asked("first", before, "cat", behind)) == 0
        assert new(asked("again", before, "cat", behind)) == length - 1
        assert new(asked("other words behind", before, "cat", words(6, 3))) == 16
        assert new(asked("another picture", before, "dog", words(10, 4))) == len(before)
        assert new(asked("placeholders alone", before, [PLACEHOLDER] * 9, behind)) == len(before)
        assert new(asked("another tenant", before, "cat", behind, salt="b")) == 0
        unnamed = asked("without a key", before, "cat", behind)
        assert new(replace(unnamed, inserted=(replace(unnamed.inserted[0], key=b""),))) == 0
        assert new(replace(asked("other weights", before, "cat", behind), prefix_keys=("version 2",))) == 0
        again = replace(asked("other weights again", before, "cat", behind), prefix_keys=("version 2",))
        assert new(again) == length - 1


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_preemption_and_aborts_change_no_token(seed: int, tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), max_num_batched_tokens=16) as own:
        show_all(own)
        own.add(*REQUESTS, *(replace(each, id=f"{each.id} again") for each in REQUESTS))
        left = disturbed(own, Random(seed), gives_way=0.3, leaves=0.02)
        for request in REQUESTS:
            for name in {request.id, f"{request.id} again"} - left:
                assert own.outcomes[name].tokens == by_transformers(request), name


def test_parts_keep_their_vectors_and_places() -> None:
    cat = picture("cat", 10)
    assert parts_between([cat], 0, 10) == ()
    assert parts_between([cat], 19, 30) == ()
    [part] = parts_between([cat], 12, 15)
    assert (part.start, part.count, part.first, part.name) == (0, 3, 2, "cat")
    [part] = parts_between([cat], 4, 12)
    assert (part.start, part.count, part.first) == (6, 2, 0)
    identities = {cat.identity(position) for position in range(10, 19)} | {
        picture("dog", 10).identity(position) for position in range(10, 15)
    }
    assert len(identities) == 14
    assert min(identities) > 1 << 32


def test_vectors_outside_of_a_prompt_or_over_each_other_are_refused(tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama")) as own:
        for places in ((15,), (0, 8), (6, 0)):
            request = replace(ask("x", words(20, 1)), inserted=tuple(picture("cat", place) for place in places))
            with pytest.raises(ContractViolation, match="vectors are inserted"):
                own.engine.add(request)
