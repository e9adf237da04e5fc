"""A grammar within JSON's quotes takes the spelling of a text if and only if the grammar takes the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache

import pytest

pytest.importorskip("llguidance")
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.grammars.grammar import BYTES, check, matcher
from ridgeline.serving.grammars.quoted import quoted, string_of
from ridgeline.transport.messages import Grammar
from tests.engine.profiles import quick_settings
from tests.serving.clients.bodies import BODIES

PATTERNS = {
    name: f"start: /{name}/"
    for name in (
        *(
            "(.*)",
            "(.+)",
            r"[\s\S]+",
            "[^a]*",
            r"a?\n?b?",
            r'["\\]{2}',
            r"\\\/\\",
            r"(a|\n|é\t)*",
            r"[ \t]*\/\/[^\r\n]*",
        ),
        *(
            r"\w+\n\w+",
            r"\s",
            r"\S*",
            r"[^\n]{0,2}",
            r"(?:ab|\x01)+",
            r"a{1,2}|\"",
            r"[\x00-\x22]*",
            r"\D\n?",
            "[é-ü]+",
        ),
    )
}
RULES = {
    "texts": 'start: "a\\nb" | "\\"" "\\\\" | "x"i',
    "lines": 'start: line+ last?\nline: /(.*)/ LF -> named\nlast: "é"\n%import common.LF\n// a "remark" /with/ signs\n',
    "terminals": "start: FIRST REST?\nFIRST: /a+/ | NL\nNL: NEWLINE\nREST: /[^a\\n]/\n%import common (NEWLINE, WS)",
    "imported": "start: INT END WS_INLINE INT\n%import common.INT\n%import common.LF -> END\n%import common.WS_INLINE",
}
REFUSED = {
    "a name of a token": "start: <[5]>",
    "another grammar": "start: @other",
    "JSON": 'start: %json {"type": "string"}',
    "what is ignored": 'start: "a"\n%ignore / /',
    "a complement": "start: A\nA: /a/ & ~/b/",
    "a range of texts": 'start: "a".."z"',
    "a look ahead": "start: /a(?=b)/",
    "an anchor": r"start: /a\b/",
    "no case": 'start: "\\n"i',
    "flags": "start: /a/i",
    "an end that is not clear": "start: /.*end/",
    "such an end within": "start: /(b.*|a)end/",
    "such an end of plain characters": r"start: /a*[a\n]/",
    "another import": "start: X\n%import common.X",
    "no pattern": "start: /(/",
    "properties": r"start: /\p{L}/",
}
texts = st.text(st.sampled_from('ab\n\t\r\x01"\\/ é1ü.'), max_size=6)


def of_codex() -> Iterator[str]:
    for name in ("codex", "codex_code"):
        found = re.findall(r'"definition": ("(?:[^"\\]|\\.)*")', (BODIES / f"{name}.json").read_text())
        yield json.loads(found[0])


@cache
def made(text: str) -> object:
    return matcher(Grammar(kind="grammar", text=text), BYTES)


def takes(lark: str, text: str) -> bool:
    found = made(lark).deep_copy()  # type: ignore[attr-defined]
    ids = list(text.encode())
    return bool(found.try_consume_tokens(ids) == len(ids) and found.is_accepting())


@cache
def within(lark: str) -> str:
    return string_of(lark)


@given(texts)
@quick_settings(40)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_takes_the_spelling_of_what_it_matches(pattern: str, text: str) -> None:
    matches = re.fullmatch(pattern, text) is not None
    assert takes(within(PATTERNS[pattern]), json.dumps(text, ensure_ascii=False)) == matches


@given(texts)
@quick_settings(40)
@pytest.mark.parametrize("name", RULES)
def test_rules_take_the_spelling_of_what_they_took(name: str, text: str) -> None:
    assert takes(within(RULES[name]), json.dumps(text, ensure_ascii=False)) == takes(RULES[name], text)


def test_codexs_grammars_take_patches_and_code() -> None:
    patch, code = of_codex()
    good = '*** Begin Patch\n*** Update File: "a".txt\n@@ def f():\n-one\\\t\n+zwölf\n*** End Patch\n'
    for text in (good, good.replace("*** End Patch\n", ""), good.replace("-one", "one"), "", '// @exec: {"a": 1}\nx\n'):
        for lark in (patch, code):
            assert takes(within(lark), json.dumps(text, ensure_ascii=False)) == takes(lark, text)
    assert takes(within(patch), json.dumps(good, ensure_ascii=False))


def test_quotes_and_control_characters_do_not_stand_as_they_are() -> None:
    for text in ('"a"b"', '"a\nb"', '"a\\', '"\\x"', "a"):
        assert not takes(within(PATTERNS[r"[\s\S]+"]), text)


@pytest.mark.parametrize("name", REFUSED)
def test_what_leaves_a_doubt_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="within JSON"):
        quoted(REFUSED[name])


def test_what_is_taken_compiles() -> None:
    for lark in [*PATTERNS.values(), *RULES.values(), *of_codex()]:
        check(Grammar(kind="grammar", text=within(lark)))


@pytest.mark.parametrize("pattern", [r"[一-龥\n]+", r"(?:一|\n)*", r"[^a-z\u0430-\u044f\t]+"])
def test_characters_of_other_scripts_stand_beside_escapes(pattern: str) -> None:
    for text in ("一", "一\n一", "\n", "一a", "д", "Ж\n"):
        spelled = json.dumps(text, ensure_ascii=False)
        assert takes(within(f"start: /{pattern}/"), spelled) == bool(re.fullmatch(pattern, text)), text


def test_an_end_among_characters_of_another_script_is_not_clear() -> None:
    with pytest.raises(InvalidRequest, match="end is not clear"):
        quoted(r"start: /[一-龥]*[丁-七\n]/")
