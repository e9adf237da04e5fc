"""Examples to learn from, read from JSON lines: conversations, prompts with completions, and pairs of answers.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}                        texts, or lists of messages
    {"prompt": "…", "chosen": "…", "rejected": "…"}           likewise; for preferences
    {"prompt": "…", "completion": "…", "label": true}         likewise; good and bad answers
    {"prompt": "…", "completions": ["…"], "labels": [true]}   a solution's steps, right and wrong ones

Conversations go through the chat template that the model brings. The whole text is tokenized at once, and a token
counts in the loss if it begins within what the model is to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer

Counted = Literal["assistant", "all"]
Record = Mapping[str, Any]
SHOWN = 10  # lines in a sentence
MOST_MARGIN = 1e6


class Example(NamedTuple):
    """The tokens of an example, and which of them the loss counts. line: from 1."""

    tokens: tuple[int, ...]
    counted: tuple[bool, ...]
    line: int


class AnswerPair(NamedTuple):
    """A better and a worse answer to one prompt. margin: by how much better, for reward models."""

    chosen: Example
    rejected: Example
    margin: float = 0.0


class JudgedAnswer(NamedTuple):
    """An answer that is good or bad, and the answer of another line to the same prompt."""

    answer: Example
    other: Example
    good: bool


class Steps(NamedTuple):
    """A solution in steps. ends: the place of each step's last token. right: whether the step is."""

    solution: Example
    ends: tuple[int, ...]
    right: tuple[bool, ...]


Item = Example | AnswerPair | JudgedAnswer | Steps
T = TypeVar("T", bound=Item)


def examples_of(item: Item) -> list[Example]:
    """Return the examples that an item consists of."""
    match item:
        case Example():
            return [item]
        case AnswerPair():
            return [item.chosen, item.rejected]
        case JudgedAnswer():
            return [item.answer, item.other]
    return [item.solution]


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

    def answered(self, record: Record, answer: str) -> tuple[int, ...]:
        """Return the tokens of a line's prompt with an answer to it, as those of examples. Raise InvalidConfig."""
        prompt, tools = record.get("prompt"), record.get("tools")
        if isinstance(prompt, list):
            return self._conversation([*prompt, {"role": "assistant", "content": answer}], 0, tools, 0).tokens
        if isinstance(prompt, str) and not answer:
            return self._encoded(prompt, [(0, len(prompt))], 0, special=True).tokens
        return self._answer(prompt, answer, tools, 0).tokens

    def judged(self, path: Path) -> list[JudgedAnswer]:
        """Return the good and bad answers of a file, at least two. Raise InvalidConfig, with the line's number, for a
        bad line."""
        lines = [(line, record) for line, record in records(path)]
        if len(lines) < 2:
            raise InvalidConfig(
                f"{path} must hold at least two answers, since each is compared with another's; add some."
            )
        following = [record for _, record in (*lines[1:], lines[0])]
        return [
            self._read(path, line, (record, after), self._judgement)
            for (line, record), after in zip(lines, following, strict=True)
        ]

    def steps(self, path: Path, separator: str) -> list[Steps]:
        """Return the solutions of a file, whose steps `separator` ends. Raise InvalidConfig, with the line's number,
        for a bad line."""
        return [self._read(path, line, (record, separator), self._steps) for line, record in records(path)]

    def _read(self, path: Path, line: int, record: Any, how: Any) -> Any:
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
        margin = record.get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not abs(margin) < MOST_MARGIN:
            raise InvalidConfig(f"margin must be a number, got {str(margin)[:80]}.")
        better, worse = (self._answer(prompt, answer, tools, line) for answer in (chosen, rejected))
        return AnswerPair(better, worse, float(margin))

    def _judgement(self, both: tuple[Record, Record], line: int) -> JudgedAnswer:
        (prompt, answer), (_, other) = (_prompt_and_answer(record) for record in both)
        good, tools = both[0].get("label"), both[0].get("tools")
        if not isinstance(good, bool):
            raise InvalidConfig(f"label must be true or false, got {str(good)[:80]}.")
        if type(answer) is not type(other):
            raise InvalidConfig("all answers must be texts, or all of them lists of messages.")
        return JudgedAnswer(self._answer(prompt, answer, tools, line), self._answer(prompt, other, tools, line), good)

    def _steps(self, both: tuple[Record, str], line: int) -> Steps:
        record, separator = both
        prompt: Any
        steps: Any
        labels: Any
        prompt, steps, labels = (record.get(name) for name in ("prompt", "completions", "labels"))
        lists = isinstance(prompt, str) and isinstance(steps, list) and isinstance(labels, list)
        if not lists or not _all(steps, str) or not _all(labels, bool) or not 0 < len(steps) == len(labels):
            raise InvalidConfig(
                "a solution has a prompt, completions (its steps, texts) and labels (true or false for each step)."
            )
        ends, text = [], prompt
        for step in steps:
            text += step + separator
            ends.append(len(text))
        encoding = self.tokenizer.backend.encode(text, add_special_tokens=True)
        starts = [start if stop > start else -1 for start, stop in encoding.offsets]
        places = tuple(max(at for at, start in enumerate(starts) if start < end) for end in ends)
        if len(set(places)) < len(places):
            raise InvalidConfig("a step has no token of its own; give steps of at least one word.")
        solution = Example(tuple(encoding.ids[: places[-1] + 1]), (True,) * (places[-1] + 1), line)
        return Steps(solution, places, tuple(labels))

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


def _all(values: Any, kind: type) -> bool:
    return all(isinstance(each, kind) for each in values)


def _prompt_and_answer(record: Record) -> tuple[Any, Any]:
    """Return the prompt of a judged answer, and the answer."""
    if "prompt" in record and "completion" in record:
        return record["prompt"], record["completion"]
    messages = record.get("messages")
    if isinstance(messages, list) and messages:
        return messages[:-1], messages[-1:]
    raise InvalidConfig(
        f"an answer has prompt, completion and label, or messages and label; this has {_names(record)}."
    )


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


def fitting_items(items: Sequence[T], room: int, most: int, path: Path) -> tuple[list[T], str]:
    """Return the items of at most `room` tokens together and `most` tokens an example, and a sentence about the others
    ("": none). Raise InvalidConfig if none is left."""
    sizes = [[len(one.tokens) for one in examples_of(item)] for item in items]
    long = [sum(each) > room or max(each) > most for each in sizes]
    kept = [each for each, out in zip(items, long, strict=True) if not out]
    lines = [examples_of(each)[0].line for each, out in zip(items, long, strict=True) if out]
    return kept, _left_out(lines, len(kept), min(room, most), path)


def _left_out(lines: Sequence[int], kept: int, room: int, path: Path) -> str:
    if not kept:
        raise InvalidConfig(f"{path} holds no example of at most {room:,} tokens; add some, or raise --pack-tokens.")
    if not lines:
        return ""
    shown = ", ".join(map(str, lines[:SHOWN])) + (", …" if len(lines) > SHOWN else "")
    return f"{path}: {len(lines)} of {kept + len(lines)} lines are longer than {room:,} tokens and left out: {shown}"


def digest(examples: Iterable[Example], beside: object = None) -> str:
    """Return a name of the content, for checkpoints. beside: what else it is."""
    found = sha256(b"" if beside is None else repr(beside).encode())
    for each in examples:
        found.update(repr((each.tokens, each.counted)).encode())
    return found.hexdigest()
