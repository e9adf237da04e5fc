"""A class name of one word belongs to one class of the package, so that it can be looked up."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ridgeline"
MOST = 250  # classes that share a name of one word with another: a bound that may only get smaller


def test_classes_that_share_a_name_of_one_word_get_fewer() -> None:
    names = Counter(  # found as text: parsing takes 20 times as long
        name
        for file in PACKAGE.rglob("*.py")
        if "proto" not in file.parts
        for name in re.findall(r"^ *class (\w+)[(:\[]", file.read_text(), re.MULTILINE)
        if len(re.findall("[A-Z][a-z0-9]*", name)) == 1
    )
    shared = {name: number for name, number in sorted(names.items()) if number > 1}
    assert "Case" not in shared
    assert sum(shared.values()) <= MOST, f"give new classes names of two words; shared are {shared}"
