"""Grammars in EBNF, as llama.cpp (GBNF) and xgrammar take them, put into Lark's syntax by llguidance."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from ridgeline.core.errors import InvalidRequest

LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:))", re.MULTILINE)


def is_ebnf(text: str) -> bool:
    """Return True for a grammar with rules such as `root ::= "a" | "b"`."""
    return "::=" in text and LARK.search(text) is None


def to_lark(text: str) -> str:
    """Return the grammar in Lark's syntax. Raise InvalidRequest if it is not EBNF."""
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise InvalidRequest("the grammar is nested too deep.", param="structured_outputs") from None
    except Exception as error:  # the library raises plain exceptions
        reason = " ".join(str(error).split())[:400].rstrip(".")
        raise InvalidRequest(f"the grammar is not EBNF: {reason}.", param="structured_outputs") from None
