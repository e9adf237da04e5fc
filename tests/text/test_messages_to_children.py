"""Messages to confined children: any JSON arrives as it is, and no part of one keeps other threads waiting for long."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core import confined
from ridgeline.core.confined import HEADER, encode

TEXTS = st.text(st.characters(), max_size=6) | st.sampled_from(["\ud800", '"\\\u2028\0', "é" * 5000])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS | st.integers() | st.none() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=15,
)


def sent(value: Any) -> Any:
    message = encode(value)
    assert int.from_bytes(message[:HEADER]) == len(message) - HEADER
    return json.loads(message[HEADER:])


@given(VALUES)
def test_a_value_arrives_as_json_has_it(value: Any) -> None:
    assert sent(value) == json.loads(json.dumps(value))


def test_mappings_arrive_as_objects_and_other_values_are_refused() -> None:
    assert sent(MappingProxyType({"a": [MappingProxyType({})]})) == {"a": [{}]}
    with pytest.raises(TypeError):
        encode({"a": [b"bytes"]})


def test_large_values_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_one, sizes = confined._ENCODE, list[int]()

    def noted(value: Any) -> str:
        text = encode_one(value)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(confined, "_ENCODE", noted)
    value = {"text": '\n"é' * 1_000_000, "numbers": list(range(300_000)), "texts": [["x" * 4000] * 64] * 40}
    assert sent(value) == value
    assert max(sizes) <= 600_000
