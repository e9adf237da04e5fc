"""Literals are read as Python's own `ast.literal_eval` reads them, as far as JSON can hold them."""

from __future__ import annotations

import ast
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.text.parsers.literals import python_literal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.none(), inner)
    ),
    max_leaves=20,
)
NUMBERS = "1 0 007 - + 1.5 1e3 .5 5. 1_0 1__0 0x1f 0o7 0b1 1j 1if ٣ 1.e5 0_ E"
STRINGS = """'a' "b" '''c''' '\\n' '\\x41' '\\x4' '\\q' r'\\n' b'a' f'{1}' u'x' ur'a' '\\N{BULLET}' '\\N{no}' '\\400'"""
OTHERS = """'\\u00e9' '\\U00110000' ' " \\ [ ] ( ) { } , : [] () {} {1:2} {'a': {1} ... * set() # True False None é x"""
WORDS = [word for line in (NUMBERS, STRINGS, OTHERS) for word in line.split()]
PARTS = st.sampled_from([*WORDS, " ", "\t", "\f", "\r\n", "\n", "# c\n", '"""d\n"""', "\\\n", "\xa0"])


def of(read: object, text: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return json.dumps(read(text), allow_nan=False)  # type: ignore[operator]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


@given(VALUES)
def test_what_python_writes_is_read_back(value: object) -> None:
    text = repr(value)
    assert repr(python_literal(text)) == text


@settings(max_examples=600)
@given(st.lists(PARTS, min_size=1, max_size=9).map(lambda parts: "".join(parts).strip()))
def test_other_texts_are_read_as_python_reads_them(text: str) -> None:
    if text.startswith(("#", "\\")) or "\f\\" in text or "\n\\" in text:
        return  # Python looks at how far the line behind a comment is indented; here white space is white space
    assert of(python_literal, text) == of(ast.literal_eval, text)


@pytest.mark.parametrize(
    "text", ["[" * 200 + "]" * 200, "[" * 201 + "]" * 201, "(" * 10**6, "{1:" * 10**5, "-" * 10**6]
)
def test_brackets_may_be_as_deep_as_in_python(text: str) -> None:
    assert of(python_literal, text) == of(ast.literal_eval, text)


def test_keys_that_anybody_can_make_collide_are_few() -> None:
    assert python_literal("{" + "".join(f"{n}: 0, " for n in range(1024)) + "}") == dict.fromkeys(range(1024), 0)
    with pytest.raises(ValueError, match="keys"):
        python_literal("{" + "".join(f"{n}: 0, " for n in range(1025)) + "}")
