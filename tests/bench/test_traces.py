"""Trace files of others: what is read of them, and the sentence for a line that is none."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.serving import traces
from ridgeline_bench.serving.traces import asks

MOONCAKE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 2500, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 1235]},
    {"timestamp": 2500, "input_length": 512, "output_length": 1, "hash_ids": [7]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncakes_requests_share_the_blocks_that_they_name(tmp_path: Path) -> None:
    first, second, third = asks(written(tmp_path, "".join(json.dumps(row) + "\n" for row in MOONCAKE)))
    assert [ask.at for ask in (first, second, third)] == [0.0, 2.5, 2.5]
    assert [ask.length for ask in (first, second, third)] == [1300, 1100, 512]
    assert [piece.tokens for piece in first.prompt] == [512, 512, 276]
    assert first.prompt[:2] == second.prompt[:2]
    assert first.prompt[2].content != second.prompt[2].content
    assert (first.seen, second.seen, third.seen) == (0, 1024, 0)
    assert (first.answer.tokens, second.answer.tokens) == (52, 26)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in MOONCAKE)
    assert len(list(asks(written(tmp_path, "\ufeff" + text)))) == 3


def test_azures_requests_come_as_far_apart_as_they_did(tmp_path: Path) -> None:
    first, second = asks(written(tmp_path, AZURE), time_scale=10)
    assert (first.at, second.at) == (0.0, pytest.approx(0.52))
    assert (first.length, first.answer.tokens, second.length, second.answer.tokens) == (4808, 10, 110, 27)
    assert first.prompt[0].content != second.prompt[0].content


def test_our_own_traces_have_seconds(tmp_path: Path) -> None:
    rows = '{"timestamp": 1.5, "input_length": 10, "output_length": 3}\n\n' * 3
    assert [ask.at for ask in asks(written(tmp_path, rows), most=2)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no requests"),
        ("{", "trace:1 is not JSON"),
        ("[" * 200_000, "trace:1 is not JSON"),
        ("[]", "trace:1 must be a JSON object"),
        ('{"timestamp": 1}', "trace:1: input_length must be a number from 1 to 16777216, got None"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "trace:1: timestamp must be a number"),
        ('{"timestamp": 1e300, "input_length": 1, "output_length": 1}', "trace:1: timestamp must be a number"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "trace:1: input_length must be"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}', "must be 1 numbers from 0"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [-1]}', "must be 1 numbers from 0"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": 5}', "must be 1 numbers from 0"),
        (json.dumps(MOONCAKE[1]) + "\n" + json.dumps(MOONCAKE[0]), "trace:2: its time lies 2.5 s before"),
        ("x" * (traces.LONGEST_LINE + 2), "trace:1 has more than 1048576 characters"),
        ("TIMESTAMP,Tokens\n", "trace:1: the header must be TIMESTAMP,ContextTokens,GeneratedTokens"),
        (AZURE + "yesterday,1,2\n", "trace:4 must be a date with a time and two numbers"),
        (AZURE + "2023-11-16 18:18:00,1\n", "trace:4 must have the cells"),
        (AZURE + "2023-11-16 18:18:00,0,1\n", "trace:4: ContextTokens must be a number from 1"),
        (AZURE + "2022-11-16 18:18:00,5,1\n", "trace:4: its time lies"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        list(asks(written(tmp_path, text)))
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        with pytest.raises(InvalidConfig, match="cannot read the trace"):
            list(asks(tmp_path / name))


@settings(max_examples=200)
@given(text=st.text(max_size=200) | st.binary(max_size=100).map(lambda data: data.decode("latin-1")))
def test_whatever_a_file_holds_it_is_requests_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_text(text)
    try:
        found = list(asks(path))
    except InvalidConfig as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert found


def test_what_is_remembered_of_blocks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "KEPT_IDS", 2)
    rows = [
        {"timestamp": n, "input_length": 5, "output_length": 1, "hash_ids": [each]}
        for n, each in enumerate([1, 2, 3, 1])
    ]
    found = list(asks(written(tmp_path, "\n".join(map(json.dumps, rows)))))
    assert [ask.seen for ask in found] == [0, 0, 0, 0]
    assert all(a.at <= b.at for a, b in pairwise(found))
