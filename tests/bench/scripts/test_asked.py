"""The command line of a script, from the defaults of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline_bench.scripts.asked import OneOf, asked

WORDS = OneOf(("fast", "slow", "both"))


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("sys.argv", ["script"])
    return monkeypatch


def test_without_options_the_defaults_count(line: pytest.MonkeyPatch) -> None:
    found = asked("", count=3, way=WORDS, ways=[WORDS], sizes=[1, 2], output=Path, names=[str], quick=False)
    assert vars(found) == {
        "count": 3, "way": "fast", "ways": ["fast", "slow", "both"], "sizes": [1, 2], "output": None, "names": None,
        "quick": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--count", "5"], "count", 5),
        (["--way", "slow"], "way", "slow"),
        (["--ways", "both", "slow"], "ways", ["both", "slow"]),
        (["--sizes", "7"], "sizes", [7]),
        (["--max-sizes", "7", "8"], "max_sizes", [7, 8]),
        (["--output", "a/b"], "output", Path("a/b")),
        (["--quick"], "quick", True),
    ],
)
def test_an_option_has_the_type_of_its_default(
    words: list[str], name: str, value: object, line: pytest.MonkeyPatch
) -> None:
    line.setattr("sys.argv", ["script", *words])
    found = asked("", count=3, way=WORDS, ways=[WORDS], sizes=[1, 2], max_sizes=[int], output=Path, quick=False)
    assert getattr(found, name) == value


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--count", "x"], "invalid int value: 'x'"),
        (["--way", "x"], "invalid choice: 'x'"),
        (["--ways", "fast", "x"], "invalid choice: 'x'"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_a_wrong_word_ends_the_script_with_2(
    words: list[str], told: str, line: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line.setattr("sys.argv", ["script", *words])
    with pytest.raises(SystemExit) as ended:
        asked("", count=3, way=WORDS, ways=[WORDS])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_places_come_in_order(line: pytest.MonkeyPatch) -> None:
    line.setattr("sys.argv", ["script", "b", "x", "y"])
    assert vars(asked("", "way=a|b", "files...")) == {"way": "b", "files": ["x", "y"]}
