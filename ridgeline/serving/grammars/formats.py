"""Patterns for values of JSON schema's `format` that llguidance does not know, or takes too widely.

Each pattern is within its format: what it matches is valid, and some unusual values are left out (an IPv6 address in a
URI reference, a leap second).
"""

from __future__ import annotations

_HEX = "%[0-9A-Fa-f]{2}"
_WIDE = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"  # RFC 3987, section 2.2, without its private and astral ranges
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _reference(wide: str, *, scheme: str) -> str:
    """Return the pattern of a URI reference, or of a URI if it must begin with a scheme (RFC 3986, section 4.1)."""
    plain = f"[A-Za-z0-9._~!$&'()*+,;={wide}-]|{_HEX}"
    char, first = f"(?:{plain}|[:@])", f"(?:{plain}|@)"
    rest = f"(?:/{char}*)*"
    path = f"(?://(?:{plain})*(?::[0-9]{{0,5}})?{rest}|/(?:{char}+{rest})?|{first}+{rest})?"
    query = f"(?:{char}|[/?])*"
    return rf"{scheme}{path}(?:\?{query})?(?:#{query})?"


_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:"
_LOCAL = r"[\p{L}\p{N}!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[\p{L}\p{N}](?:[\p{L}\p{N}-]{0,61}[\p{L}\p{N}])?"
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,3}|\*)?"

PATTERNS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "time": _TIME,
        "idn-email": rf"{_LOCAL}(?:\.{_LOCAL})*@{_LABEL}(?:\.{_LABEL})*",
        "iri": _reference(_WIDE, scheme=_SCHEME),
        "iri-reference": _reference(_WIDE, scheme=f"(?:{_SCHEME})?"),
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "uri-reference": _reference("", scheme=f"(?:{_SCHEME})?"),
        "uri-template": rf"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=\[\]-]|{_HEX}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*",
    }.items()
}  # fmt: skip
