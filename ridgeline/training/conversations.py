"""Examples to learn from, read from JSON lines: conversations, prompts with completions, and pairs of answers.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}                        texts, or lists of messages
    {"prompt": "…", "chosen": "…", "rejected": "…"}           likewise; for preferences

Conversations go through the chat template that the model brings. The whole text is tokenized at once, and a token
counts in the loss if it begins within what the model is to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer

Counted = Literal["assistant", "all"]
Record = Mapping[str, Any]
SHOWN = 10  # lines in a sentence


class Example(NamedTuple):
    """The tokens of an example, and which of them the loss counts. line: from 1."""

    tokens: tuple[int, ...]
    counted: tuple[bool, ...]
    line: int


class AnswerPair(NamedTuple):
    """A better and a worse answer to one prompt."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True)
class ExampleReader:
    """The tokenizer and the chat template that turn lines into tokens. counted: all tokens, or the
    assistant's."""

    tokenizer: Tokenizer
    template: ChatTemplate
    counted: Counted = "assistant"

    @classmethod
    def of_folder(cls, folder: Path, counted: Counted = "assistant") -> ExampleReader:
        """Return the reader of a model's folder. Raise ModelLoadError."""
        tokenizer = Tokenizer.from_folder(folder)
        return cls(tokenizer, ChatTemplate.from_folder(folder, tokenizer.special_tokens), counted)

    def examples(self, path: Path) -> list[Example]:
        """Return the examples of a file. Raise InvalidConfig, with the line's number, for a bad line."""
        return [self._read(path, line, record, self._example) for line, record in records(path)]

    def pairs(self, path: Path) -> list[AnswerPair]:
        """Return the pairs of a file. Raise InvalidConfig, with the line's number, for a bad line."""
        return [self._read(path, line, record, self._pair) for line, record in records(path)]

    def _read(self, path: Path, line: int, record: Record, how: Any) -> Any:
        try:
            return how(record, line)
        except (InvalidConfig, InvalidRequest) as error:
            raise InvalidConfig(f"{path}, line {line}: {error}") from error

    def _example(self, record: Record, line: int) -> Example:
        if "messages" in record:
            return self._conversation(record["messages"], 0, record.get("tools"), line)
        if "prompt" in record and "completion" in record:
            return self._answer(record["prompt"], record["completion"], record.get("tools"), line)
        raise InvalidConfig(f"an example has messages, or prompt and completion, and this has {_names(record)}.")

    def _pair(self, record: Record, line: int) -> AnswerPair:
        if "chosen" not in record or "rejected" not in record:
            raise InvalidConfig(f"a pair has chosen and rejected, and this has {_names(record)}.")
        chosen, rejected, tools = record["chosen"], record["rejected"], record.get("tools")
        if "prompt" in record:
            prompt = record["prompt"]
        elif isinstance(chosen, list) and isinstance(rejected, list):
            same = [one for one, other in zip(chosen, rejected, strict=False) if one == other]
            prompt = chosen[: len(same)]
            chosen, rejected = chosen[len(same) :], rejected[len(same) :]
        else:
            raise InvalidConfig("a pair of texts needs a prompt.")
        if chosen == rejected:
            raise InvalidConfig("chosen and rejected are the same.")
        return AnswerPair(*(self._answer(prompt, answer, tools, line) for answer in (chosen, rejected)))

    def _answer(self, prompt: Any, answer: Any, tools: Any, line: int) -> Example:
        if isinstance(prompt, list) and isinstance(answer, list):
            return self._conversation([*prompt, *answer], len(prompt), tools, line)
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise InvalidConfig("the prompt and its answers must be texts, or all of them lists of messages.")
        if not answer:
            raise InvalidConfig("the answer is empty.")
        start = 0 if self.counted == "all" else len(prompt)
        return self._encoded(prompt + answer, [(start, len(prompt) + len(answer))], line, special=True)

    def _conversation(self, messages: Any, first: int, tools: Any, line: int) -> Example:
        """Return the example of a conversation, of which the assistant's turns from the first-th message on count."""
        text = self.template.render(messages, False, tools)
        if self.counted == "all":
            return self._encoded(text, [(0, len(text))], line, special=False)
        spans = []
        for index in range(first, len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            before = self.template.render(messages[:index], True, tools) if index else ""
            until = text if index + 1 == len(messages) else self.template.render(messages[: index + 1], False, tools)
            if not (text.startswith(until) and until.startswith(before)):
                raise InvalidConfig(
                    f"the chat template writes messages[{index}] otherwise where it stands last; give conversations "
                    "with one answer, or let all tokens count."
                )
            spans.append((len(before), len(until)))
        if not spans:
            raise InvalidConfig("no message has the role assistant, so nothing can be learnt.")
        return self._encoded(text, spans, line, special=False)

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]], line: int, *, special: bool) -> Example:
        """Return the tokens of a text, of which those in the spans count, and a token that ends it unless the text has
        one."""
        self.tokenizer.encode(text)  # raises InvalidRequest with a sentence
        encoding = self.tokenizer.backend.encode(text, add_special_tokens=special)
        ids, places = list(encoding.ids), list(encoding.offsets)
        end = min(self.tokenizer.eos_ids, default=None)
        if special and ids and ids[-1] == end and places[-1] == (0, 0):  # added by the tokenizer
            ids.pop(), places.pop()
        counted = [any(start <= at < stop for start, stop in spans) for at, _ in places]
        if end is not None and not text.rstrip().endswith(tuple(self.tokenizer.added)):
            ids.append(end)
            counted.append(spans[-1][1] == len(text))
        counted[:1] = [False]  # nothing stands before it
        if not any(counted):
            raise InvalidConfig("no token of it counts in the loss; give a longer answer.")
        return Example(tuple(ids), tuple(counted), line)


def records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the objects of a file with their lines' numbers, from 1. Raise InvalidConfig for a line that holds none."""
    try:
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    yield line, _record(path, line, text)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the examples in {path} cannot be read ({error}); give a file of JSON lines.") from error


def _record(path: Path, line: int, text: str) -> Record:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path}, line {line} is no JSON ({error}); mend or remove it.") from error
    if not isinstance(found, dict):
        raise InvalidConfig(f"{path}, line {line} holds no object with names and values; mend or remove it.")
    return found


def _names(record: Record) -> str:
    return ", ".join(sorted(record)[:SHOWN])[:200] or "nothing"


def fitting(examples: Sequence[Example], room: int, path: Path) -> tuple[list[Example], str]:
    """Return the examples of at most `room` tokens, and a sentence about the others ("": none). Raise InvalidConfig if
    none is left."""
    kept = [each for each in examples if len(each.tokens) <= room]
    return kept, _left_out([each.line for each in examples if len(each.tokens) > room], len(kept), room, path)


def fitting_pairs(pairs: Sequence[AnswerPair], room: int, most: int, path: Path) -> tuple[list[AnswerPair], str]:
    """Return the pairs of at most `room` tokens together and `most` tokens an answer, as `fitting` does."""
    long = [pair_tokens(each) > room or max(len(one.tokens) for one in each) > most for each in pairs]
    kept = [each for each, out in zip(pairs, long, strict=True) if not out]
    lines = [each.chosen.line for each, out in zip(pairs, long, strict=True) if out]
    return kept, _left_out(lines, len(kept), min(room, 2 * most), path)


def pair_tokens(pair: AnswerPair) -> int:
    """Return the tokens of both answers, each behind its prompt."""
    return len(pair.chosen.tokens) + len(pair.rejected.tokens)


def _left_out(lines: Sequence[int], kept: int, room: int, path: Path) -> str:
    if not kept:
        raise InvalidConfig(f"{path} holds no example of at most {room:,} tokens; add some, or raise --pack-tokens.")
    if not lines:
        return ""
    shown = ", ".join(map(str, lines[:SHOWN])) + (", …" if len(lines) > SHOWN else "")
    return f"{path}: {len(lines)} of {kept + len(lines)} lines are longer than {room:,} tokens and left out: {shown}"


def digest(examples: Iterable[Example]) -> str:
    """Return a name of the content, for checkpoints."""
    found = sha256()
    for each in examples:
        found.update(repr((each.tokens, each.counted)).encode())
    return found.hexdigest()
