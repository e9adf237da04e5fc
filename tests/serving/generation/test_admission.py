"""No owner can fill the queue so that another finds no place in it."""

from __future__ import annotations

import dataclasses
from copy import copy
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from msgspec import ValidationError
from msgspec.structs import replace

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.octets import SharedOctets
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import BACKGROUND, SamplingParams
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.core.shared import SharedMemory
from ridgeline.kernels.pictures.views import Box, Patching, View
from ridgeline.serving import owner
from ridgeline.serving.errors import BadRequest, Overloaded
from ridgeline.serving.generation import admission as admission_module
from ridgeline.serving.generation.admission import Admission
from ridgeline.serving.processes.engine_host import _request
from ridgeline.transport.messages import EngineFacts, Submit, decode_from_face, encode
from tests.driving import ask

SUBMIT = Submit(
    id=1, name="n", index=0, prompt_token_ids=[1], params=SamplingParams(), seed=0, max_total_tokens=4,
    stop_ids=[], eos_ids=[], cache_salt="", priority=0, arrival=0.0, owner="key",
)  # fmt: skip
FACTS: Any = type("Facts", (), {"max_model_len": 64, "cache_tokens": 640})


def test_who_has_little_open_finds_a_place_in_a_full_queue() -> None:
    facts: EngineFacts = FACTS
    admission = Admission(max_requests=16, max_tokens=0)
    requests = [ask(str(number), [1, 2], max_tokens=4) for number in range(20)]
    for request in requests[:16]:
        admission.admit([request], facts, "a")
    with pytest.raises(Overloaded, match="16 requests are open"):
        admission.admit([requests[16]], facts, "a")
    admission.admit([requests[16]], facts, "b")
    admission.admit([requests[17]], facts, "b")
    with pytest.raises(Overloaded):
        admission.admit([requests[18]], facts, "b")  # it has its eighth
    with pytest.raises(Overloaded):
        admission.admit([requests[18]], facts, "c")  # there is no more than an eighth beyond the bound
    for who, count in (("a", 16), ("b", 2)):
        for _ in range(count):
            admission.leave(1, requests[0].cache_tokens, owner=who)
    assert (admission.open_requests, admission.open_tokens) == (0, 0)
    assert not admission.requests_of
    assert not admission.tokens_of


def test_bytes_of_a_client_keep_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And pixels in shared memory, which has bounds of its own, count nowhere else."""
    monkeypatch.setattr(admission_module, "MOST_EMBEDDED", 800)
    admission, sound = Admission(), HeardSound(samples=SharedOctets(bytes(400)), frames=1, vectors=1)
    memory = np.frombuffer(SharedMemory.made(3 << 20), np.uint8)
    how = Patching("bicubic", 1.0, (0.0,) * 3, (1.0,) * 3, 1024, 1024)  # type: ignore[arg-type]
    view = View(1024, 1024, Box(0, 0, 1024, 1024))
    shown = ShownPictures((Pixels(1024, 1024, memory),), (view,), how)
    heard, pictured = (
        dataclasses.replace(ask("r", [1, 2], max_tokens=4), inserted=(Inserted(start=0, count=1, **made),))
        for made in ({"heard": sound}, {"shown": shown})
    )
    for request in (heard, heard, pictured):
        admission.admit([request], FACTS, "a")
    with pytest.raises(Overloaded, match="800 bytes of vectors, pictures and sounds"):
        admission.admit([heard], FACTS, "a")
    admission.admit([pictured], FACTS, "b")
    short = Inserted(start=0, count=1, heard=dataclasses.replace(sound, samples=SharedOctets(bytes(100))))
    small = dataclasses.replace(heard, inserted=(short,))
    admission.admit([small], FACTS, "b")
    with pytest.raises(Overloaded):
        admission.admit([small], FACTS, "a")


def test_no_request_is_more_urgent_than_its_key_allows() -> None:
    """However it came: also a level of a queue, or a request to pool. Background work is never too urgent."""
    admission, urgent = Admission(priority_floor=0), dataclasses.replace(ask("r", [1, 2], max_tokens=4), priority=-1)
    owner.take("plain", None, trusted=("trusted",))
    with pytest.raises(BadRequest, match="priority is -1, and this key may ask for 0"):
        admission.admit([dataclasses.replace(urgent, priority=0), urgent], FACTS, "a")
    assert admission.open_requests == 0
    admission.admit([dataclasses.replace(urgent, priority=BACKGROUND)], FACTS, "a")
    owner.take("trusted", None, trusted=("trusted",))
    admission.admit([urgent], FACTS, "a")
    owner.take(None, None)


def test_an_owner_is_a_key_a_name_or_a_short_address() -> None:
    try:
        owner.take("k", "10.0.0.1", trusted=("t",), name="acme")
        assert owner.current() == owner.tenant() == sha256(b"k").hexdigest()[:16]
        owner.take("t", "10.0.0.1", trusted=("t",), name="acme")
        assert (owner.current(), owner.trusted()) == ("acme", True)
        for wrong in ("", "a" * 65, "a" * (1 << 20), "@10.0.0.1", "a b", "a\n", "ä", "\x00"):
            with pytest.raises(BadRequest, match="X-Ridgeline-Tenant"):
                owner.take("t", None, trusted=("t",), name=wrong)
        owner.take(None, "unix:" + "x" * 1000, trusted=("t",), name="acme")
        assert (len(owner.current()), owner.tenant(), owner.trusted()) == (65, "", False)
    finally:
        owner.take(None, None)


def test_tokens_have_such_places_too() -> None:
    facts: EngineFacts = FACTS
    request = ask("r", [1, 2], max_tokens=8)  # ten tokens
    admission = Admission(max_requests=0, max_tokens=100)
    for _ in range(10):
        admission.admit([request], facts, "a")
    with pytest.raises(Overloaded, match="100 tokens"):
        admission.admit([request], facts, "a")
    admission.admit([request], facts, "b")
    with pytest.raises(Overloaded):
        admission.admit([request], facts, "b")


def test_the_engine_knows_whose_a_request_is() -> None:
    assert _request("n", SUBMIT, None).owner == "key"


def test_the_engine_takes_parameters_as_they_were_checked() -> None:
    params = SamplingParams(n=2, logit_bias={3: 1.5}, repetition_detection={"max_pattern_size": 2, "min_count": 2})  # type: ignore[arg-type]
    submit = replace(SUBMIT, params=params)
    assert decode_from_face(encode(submit)) == submit
    unchecked = copy(params)
    object.__setattr__(unchecked, "temperature", -1.0)  # no API server lets that pass
    assert decode_from_face(encode(replace(SUBMIT, params=unchecked))).params.temperature == -1.0
    object.__setattr__(unchecked, "temperature", "hot")
    with pytest.raises(ValidationError, match="temperature"):
        decode_from_face(encode(replace(SUBMIT, params=unchecked)))
