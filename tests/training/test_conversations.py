"""Lines become tokens, of which those count that the model is to write; packs hold each example once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from ridgeline.core.errors import InvalidConfig
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.training.conversations import Example, ExampleReader, fitting_items
from ridgeline.training.packs import Packs, packed
from ridgeline.training.tokenizer import SEPARATOR, SEPARATOR_ID

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}" + SEPARATOR + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS = "{% for m in messages %}{{ m['content'] if loop.last or m['role'] != 'assistant' else '…' }};{% endfor %}"
TURNS = [
    {"role": "user", "content": "a é"},
    {"role": "assistant", "content": "b = 1"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d = 2"},
]


def reader_of(backend: Backend, template: str = CHATML, **options: Any) -> ExampleReader:
    tokenizer = Tokenizer(backend, {"eos_token": SEPARATOR})
    return ExampleReader(tokenizer, ChatTemplate(template, {}), **options)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in records))
    return path


def counted_text(reader: ExampleReader, example: Example) -> str:
    ids = [token for token, flag in zip(example.tokens, example.counted, strict=True) if flag]
    return reader.tokenizer.decode(ids, skip_special_tokens=False)


def test_the_assistants_turns_count_with_the_token_that_ends_them(tokenizer: Backend, tmp_path: Path) -> None:
    reader = reader_of(tokenizer)
    [example] = reader.examples(write(tmp_path / "data.jsonl", {"messages": TURNS}))
    assert counted_text(reader, example) == f"b = 1{SEPARATOR}d = 2{SEPARATOR}"
    text = reader.template.render(TURNS, False)
    assert list(example.tokens) == reader.tokenizer.encode(text, add_special_tokens=False)


def test_all_tokens_but_the_first_count_if_wanted(tokenizer: Backend, tmp_path: Path) -> None:
    [example] = reader_of(tokenizer, counted="all").examples(write(tmp_path / "data.jsonl", {"messages": TURNS}))
    assert example.counted == (False, *[True] * (len(example.tokens) - 1))


def test_a_completion_counts_and_ends(tokenizer: Backend, tmp_path: Path) -> None:
    reader = reader_of(tokenizer)
    as_messages = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    data = write(tmp_path / "data.jsonl", {"prompt": "x = ", "completion": "(3)\n"}, "\n", as_messages)
    text, messages = reader.examples(data)
    assert counted_text(reader, text) == f"(3)\n{SEPARATOR}"
    assert text.tokens[-1] == SEPARATOR_ID
    assert counted_text(reader, messages) == f"d = 2{SEPARATOR}"
    assert (text.line, messages.line) == (1, 3)


def test_pairs_share_their_prompt(tokenizer: Backend, tmp_path: Path) -> None:
    reader, worse = reader_of(tokenizer), [*TURNS[:3], {"role": "assistant", "content": "no"}]
    data = write(
        tmp_path / "data.jsonl", {"prompt": "x", "chosen": "1", "rejected": "2"}, {"chosen": TURNS, "rejected": worse}
    )
    texts, turns = reader.pairs(data)
    assert [counted_text(reader, each) for each in texts[:2]] == [f"1{SEPARATOR}", f"2{SEPARATOR}"]
    assert [counted_text(reader, each) for each in turns[:2]] == [f"d = 2{SEPARATOR}", f"no{SEPARATOR}"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{\n", "is no JSON"),
        ([1], "holds no object"),
        ({"text": "a"}, "this has text"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string"),
        ({"messages": TURNS[:1]}, "nothing can be learnt"),
        ({"prompt": "a", "completion": ["b"]}, "must be texts"),
        ({"prompt": "a", "completion": ""}, "the answer is empty"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: object, words: str, tokenizer: Backend, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", {"prompt": "a", "completion": "b"}, bad)
    with pytest.raises(InvalidConfig, match=f"line 2.*{words}"):
        reader_of(tokenizer).examples(data)


def test_a_template_that_forgets_earlier_answers_is_refused(tokenizer: Backend, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", {"messages": TURNS})
    with pytest.raises(InvalidConfig, match=r"line 1: the chat template writes messages\[1\] otherwise"):
        reader_of(tokenizer, FORGETS).examples(data)


def test_longer_examples_are_left_out_by_number(tmp_path: Path) -> None:
    examples = [Example((1,) * length, (True,) * length, line) for line, length in enumerate((3, 9, 4, 8), 1)]
    kept, sentence = fitting_items(examples, 7, 7, tmp_path / "f")
    assert [each.line for each in kept] == [1, 3]
    assert sentence.endswith("2 of 4 lines are longer than 7 tokens and left out: 2, 4")
    with pytest.raises(InvalidConfig, match="no example of at most 2 tokens"):
        fitting_items(examples, 2, 2, tmp_path / "f")


def test_packs_hold_each_example_once_an_epoch_within_their_room() -> None:
    lengths = [(37 * index) % 90 + 5 for index in range(200)]
    packs = packed(lengths, 100, seed=0)
    assert sorted(index for pack in packs for index in pack) == list(range(200))
    assert max(sum(lengths[index] for index in pack) for pack in packs) <= 100
    assert sum(lengths) / (100 * len(packs)) > 0.9
    steps = Packs(lengths, room=100, per_step=len(packs) // 2, seed=0)
    seen = Counter(index for step in range(4) for pack in steps.of_step(step) for index in pack)
    assert set(seen) <= set(range(200))
    assert max(seen.values()) <= 2
    assert steps.of_step(3) == Packs(lengths, room=100, per_step=len(packs) // 2, seed=0).of_step(3)
