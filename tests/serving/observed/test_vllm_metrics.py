"""Every metric of vLLM's has a state: it is on our page, or the list says why not (vllm_metrics.txt)."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
LIST = FOLDER / "vllm_metrics.txt"
GOLDEN = FOLDER / "golden" / "metrics.txt"  # what the page has, by a test of its own


def listed() -> list[list[str]]:
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return [line.split(" | ") for line in lines]


def test_the_page_has_the_metrics_that_the_list_says_it_has_and_no_others_of_that_name() -> None:
    page = set()
    for line in GOLDEN.read_text().splitlines():
        name, kind, *_ = line.split(" ")
        if name.startswith("vllm:"):
            page.add(name.removesuffix("_total") if kind == "counter" else name)
    assert {name for name, state, *_ in listed() if state == "have"} == page


def test_every_other_metric_has_a_reason() -> None:
    names = [name for name, *_ in listed()]
    assert len(names) == len(set(names)) > 150
    assert all(name.startswith("vllm:") for name in names)
    for name, state, *why in listed():
        assert state in ("have", "not here", "gone"), name
        assert len(why) == (state != "have"), name
        assert all(len(reason) > 10 for reason in why), name
