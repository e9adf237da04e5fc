"""Public collections of JSON schemas: how many are accepted, and what their grammars let through.

    python -m ridgeline_bench.scripts.schema_suites --suite JSON-Schema-Test-Suite/tests/draft2020-12
    python -m ridgeline_bench.scripts.schema_suites --bench jsonschemabench/maskbench/data --sample 1500 --seconds 400

The first is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite, the second one of
github.com/guidance-ai/jsonschemabench. A schema is accepted or refused as the server does it, in a process with limits.
Of an accepted one two things are asked: does its grammar take an instance that the collection calls invalid, and is
what a random walk through the grammar writes valid, as the package `jsonschema` reads the schema? Both must never be.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from llguidance import LLMatcher

from ridgeline.core.confined import Confined, OverLimit
from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.grammars.grammar import BYTES, compiled, usable
from ridgeline.transport.messages import Grammar
from ridgeline_bench.scripts.asked import asked

SECONDS, MEMORY = 5.0, 256 << 20  # of one check, as the server's own limits
LONGEST = 1500  # bytes of a walk
CLOSERS = b'"}],'
USUAL = b"abcdefghijklmnopqrstuvwxyz0123456789:{[. -_/tn"


@dataclass
class Case:
    """A schema with instances and whether they are valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]] = field(default_factory=list)


@dataclass
class Counts:
    """wrong: what must not be, in words."""

    numbers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def suite(folder: Path) -> Iterator[Case]:
    for file in sorted(folder.glob("*.json")):
        yield from suite_file(file.stem, json.loads(file.read_text()))


def suite_file(name: str, groups: list[dict[str, Any]]) -> Iterator[Case]:
    for group in groups:
        instances = [(test["data"], test["valid"]) for test in group["tests"]]
        yield Case(f"{name}: {group['description']}", group["schema"], instances)


def bench(folder: Path) -> Iterator[Case]:
    for file in sorted(folder.glob("*.json")):
        read = json.loads(file.read_text())
        yield Case(file.stem, read["schema"], [(test["data"], test["valid"]) for test in read["tests"]])


def takes(grammar: Grammar, text: bytes) -> bool:
    matcher = LLMatcher(BYTES, compiled(grammar), log_level=0)
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def walk(grammar: Grammar, numbers: random.Random, longest: int = LONGEST) -> bytes | None:
    """Return a text of the grammar, byte by byte at random; the longer it is, the more it wants to end. None if it
    does not."""
    matcher = LLMatcher(BYTES, compiled(grammar), log_level=0)
    written = bytearray()
    while len(written) < longest:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return None
        if matcher.is_accepting() and (numbers.random() < 0.5 or not mask & ((1 << 256) - 1)):
            return bytes(written)
        open_to = [byte for byte in range(256) if mask >> byte & 1]
        if not open_to:
            return None
        hurry = numbers.random() < 0.3 + len(written) / longest
        liked = [byte for byte in open_to if byte in (CLOSERS if hurry else USUAL)] or open_to
        byte = numbers.choice(liked)
        written.append(byte)
        if not matcher.consume_token(byte):
            return None
    return None


def judged(schema: Any) -> Any:
    """Return the validator of a schema, by the draft that it names."""
    return validator_for(schema, default=jsonschema.Draft202012Validator)(schema)


def is_valid(validator: Any, value: Any) -> bool | None:
    """Return the validator's answer; None if it cannot read the schema."""
    try:
        return bool(validator.is_valid(value))
    except Exception:  # a reference that leads nowhere here, a pattern of another dialect, a number that is too large
        return None


def accepted(case: Case, check: Confined | None, counts: Counts) -> Grammar | None:
    """Return the grammar of an accepted schema, and count. Without `check` it is compiled in this process."""
    asked = Grammar(kind="json", text=json.dumps(case.schema))
    if not isinstance(case.schema, dict):
        return None
    counts.numbers["schemas"] += 1
    try:
        if check is None:
            made = usable(asked)
        else:
            told = check({"kind": "json", "text": asked.text, "named": {}, "size": 0})
            if told["reason"] is not None:
                raise InvalidRequest(told["reason"])
            made = Grammar(kind="json", text=told["text"])
    except InvalidRequest as refusal:
        counts.numbers["refused"] += 1
        counts.reasons[str(refusal).removeprefix("the grammar cannot be used: ")[:60]] += 1
        return None
    except OverLimit:
        counts.numbers["too complex"] += 1
        return None
    counts.numbers["accepted"] += 1
    return made


def examine(case: Case, grammar: Grammar, walks: int, counts: Counts) -> None:
    """Count what the grammar takes of the instances, and what walks through it write."""
    validator, numbers = judged(case.schema), random.Random(case.name)
    for instance, valid in case.instances:
        taken = takes(grammar, json.dumps(instance, ensure_ascii=False).encode())
        if taken and not valid and is_valid(validator, instance):
            counts.numbers["instances taken that only an annotation forbids"] += 1  # an unknown `format`
            continue
        counts.numbers[f"{'valid' if valid else 'invalid'} instances {'taken' if taken else 'not taken'}"] += 1
        if taken and not valid:
            counts.wrong.append(f"{case.name}: takes {json.dumps(instance)[:200]}")
    for _ in range(walks):
        text = walk(grammar, numbers)
        if text is None:
            counts.numbers["walks without an end"] += 1
            continue
        verdict = is_valid(validator, json.loads(text))
        counts.numbers[f"walks {'not judged' if verdict is None else 'valid' if verdict else 'invalid'}"] += 1
        if verdict is False:
            counts.wrong.append(f"{case.name}: writes {text.decode()[:200]}")


def run(cases: Iterable[Case], walks: int, seconds: float, check: Confined | None) -> Counts:
    """Count until the time is over."""
    counts, until = Counts(), time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > until:
            counts.numbers["schemas left out for want of time"] += 1
            continue
        grammar = accepted(case, check, counts)
        if grammar is not None:
            examine(case, grammar, walks, counts)
    return counts


def main() -> None:
    a = asked(
        __doc__, suite=(Path, "a draft's folder of JSON-Schema-Test-Suite"),
        bench=(Path, "maskbench/data of JSONSchemaBench"),
        sample=(int, "how many schemas, drawn at random; default: all"), walks=(3, "through each grammar"),
        seconds=(600.0, "after which no further schema is looked at"),
    )  # fmt: skip
    warnings.filterwarnings("ignore", category=FutureWarning)  # of patterns that another dialect reads otherwise
    check = Confined("ridgeline.serving.grammars.grammar:checker", seconds=SECONDS, memory=MEMORY)
    cases = [*(suite(a.suite) if a.suite else ()), *(bench(a.bench) if a.bench else ())]
    if a.sample:
        cases = random.Random(0).sample(cases, min(a.sample, len(cases)))
    counts = run(cases, a.walks, a.seconds, check)
    print(json.dumps(dict(sorted(counts.numbers.items())), indent=1))
    for reason, times in counts.reasons.most_common(25):
        print(f"refused {times:5} times: {reason}")
    for line in counts.wrong:
        print("WRONG", line)


if __name__ == "__main__":
    main()
