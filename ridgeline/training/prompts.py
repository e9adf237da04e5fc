"""Prompts whose answers are rewarded, read from JSON lines: a text or a list of messages as `prompt`, and what the
rewards compare with."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.training.conversations import ExampleReader, records
from ridgeline.training.rewards import Rewards


class PromptLine(NamedTuple):
    """The tokens of a prompt, and its line."""

    tokens: tuple[int, ...]
    record: Mapping[str, Any]


def read_prompts(path: Path, reader: ExampleReader, rewards: Rewards, longest: int) -> tuple[list[PromptLine], str]:
    """Return the prompts of a file that have at most `longest` tokens, and a sentence on those that have more. Raise
    InvalidConfig, with the line's number, for a bad line."""
    found, left_out = list[PromptLine](), list[int]()
    for line, record in records(path):
        try:
            rewards.check(record)
            tokens = _tokens(record, reader)
        except (InvalidConfig, InvalidRequest) as error:
            raise InvalidConfig(f"{path}, line {line}: {error}") from error
        if len(tokens) > longest:
            left_out.append(line)
        else:
            found.append(PromptLine(tokens, record))
    if not found:
        raise InvalidConfig(f"{path} has no prompt of at most {longest:,} tokens.")
    shown = ", ".join(map(str, left_out[:10])) + (", …" if len(left_out) > 10 else "")
    return found, f"{path}: prompts longer than {longest:,} tokens are left out: lines {shown}" if left_out else ""


def _tokens(record: Mapping[str, Any], reader: ExampleReader) -> tuple[int, ...]:
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        return tuple(reader.tokenizer.encode(reader.template.render(prompt, True, record.get("tools")), False))
    if not isinstance(prompt, str) or not prompt:
        raise InvalidConfig("a line has a prompt, which is a text or a list of messages.")
    tokens = list(reader.tokenizer.encode(prompt))
    if len(tokens) > 1 and tokens[-1] in reader.tokenizer.eos_ids:  # added by the tokenizer
        tokens.pop()
    return tuple(tokens)


def digest(prompts: list[PromptLine]) -> str:
    """Return a name of the content, for checkpoints."""
    return sha256(repr([(each.tokens, sorted(each.record.items(), key=str)) for each in prompts]).encode()).hexdigest()
