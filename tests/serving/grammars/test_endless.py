"""Schemas that no finite text fits are refused with the cycle, and all others are not."""

from __future__ import annotations

import json
import time
from itertools import islice, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.grammars.endless import check_finite

NODE = {"$ref": "#/$defs/n"}


def holding(part: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": part}, "required": ["k"], **more}


@pytest.mark.parametrize(
    ("schema", "cycle"),
    [
        ({**NODE, "$defs": {"n": NODE}}, "#/$defs/n needs #/$defs/n"),
        (holding({"$ref": "#"}), "# needs #"),
        (
            {**NODE, "$defs": {"n": holding({"$ref": "#/$defs/m"}), "m": holding(NODE)}},
            "#/$defs/n needs #/$defs/m needs #/$defs/n",
        ),
        ({**NODE, "$defs": {"n": {"type": "array", "items": NODE, "minItems": 1}}}, "#/$defs/n needs"),
        ({**NODE, "$defs": {"n": {"anyOf": [NODE, holding(NODE)]}}}, "#/$defs/n needs"),
        ({"allOf": [{"type": "object"}, NODE], "$defs": {"n": holding(NODE)}}, "#/$defs/n needs"),
        (holding({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}), "# needs #"),
    ],
)
def test_a_cycle_without_an_end_is_named(schema: dict[str, Any], cycle: str) -> None:
    with pytest.raises(BadRequest, match="no text that ends") as refusal:
        check_finite(schema, "x")
    assert cycle in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        {**NODE, "$defs": {"n": holding({"anyOf": [NODE, {"type": "null"}]})}},
        {**NODE, "$defs": {"n": {"type": "object", "properties": {"k": NODE}}}},
        {**NODE, "$defs": {"n": {"type": "array", "items": NODE}}},
        {**NODE, "$defs": {"n": holding(NODE) | {"type": ["object", "null"]}}},
        {**NODE, "$defs": {"n": {"required": ["k"], "properties": {"k": NODE}}}},  # a number fits
        {**NODE, "$defs": {"n": {"enum": [1]}}},
        {"$ref": "https://elsewhere/x"},
        {"$ref": "#/nowhere"},
        {"$ref": 7},
        True,
        holding({"type": "string"}),
    ],
)
def test_what_has_an_end_is_taken(schema: Any) -> None:
    check_finite(schema, "x")


NAMES = ("a", "b", "c")
PARTS = st.recursive(
    st.one_of(st.just({"type": "null"}), st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])),
    lambda inner: st.one_of(
        st.builds(holding, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda one: {"type": "array", "items": one, "minItems": 1}, inner),
    ),
    max_leaves=4,
)


def fits(part: Any, defs: dict[str, Any], depth: int, known: dict[Any, bool]) -> bool:
    """True if a value of at most this depth fits: the plain definition, tried out."""
    key = json.dumps(part), depth
    if key not in known:
        known[key] = depth > 0 and _fits(part, defs, depth, known)
    return known[key]


def _fits(part: Any, defs: dict[str, Any], depth: int, known: dict[Any, bool]) -> bool:
    if "$ref" in part:
        return fits(defs[part["$ref"].rpartition("/")[2]], defs, depth - 1, known)
    if "anyOf" in part:
        return any(fits(each, defs, depth, known) for each in part["anyOf"])
    if part["type"] == "null":
        return True
    return fits(part["items"] if part["type"] == "array" else part["properties"]["k"], defs, depth - 1, known)


@given(parts=st.fixed_dictionaries(dict.fromkeys(NAMES, PARTS)))
def test_a_schema_is_refused_exactly_if_no_value_of_any_depth_fits(parts: dict[str, Any]) -> None:
    ends = fits({"$ref": "#/$defs/a"}, parts, 24, {})
    try:
        check_finite({"$ref": "#/$defs/a", "$defs": parts}, "x")
    except BadRequest:
        assert not ends
    else:
        assert ends


def test_the_time_of_a_check_is_bounded_and_so_is_its_sentence() -> None:
    """Whatever spells references: many names of one part, long chains, long names."""
    names = ["".join(each) for each in islice(product(("~", "~0"), repeat=12), 4000)]
    part = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    many = {"$defs": {"x": part, "~" * 12: {"anyOf": [{"$ref": "#/$defs/x"}] * 4000}}}
    many["anyOf"] = [{"$ref": f"#/$defs/{name}"} for name in names]
    chain = {f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(20_000)} | {"20000": {"$ref": "#/$defs/0"}}
    long = {"y" * 100_000: {"$ref": f"#/$defs/{'y' * 100_000}"}}
    for schema in (many, {"$defs": chain, "$ref": "#/$defs/0"}, {"$defs": long, "$ref": f"#/$defs/{'y' * 100_000}"}):
        start = time.process_time()
        with pytest.raises(BadRequest, match="no text that ends") as refusal:
            check_finite(schema, "x")
        assert time.process_time() - start < 5
        assert len(str(refusal.value)) < 1000
