"""The report: complete, self-contained, and a real browser opens it without a complaint."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.report import latest, render, write
from ridgeline_bench.results import Machine, Record
from ridgeline_bench.svg import si
from tests.chromium import CHROMIUM, FLAGS

GPU = Machine(gpu="NVIDIA H200", commit="abc123", torch="2.11")


def record(engine: str, value: float, day: int, **changes: object) -> Record:
    figure = {"workload": "W2", "metric": "tpot", "unit": "ms", "model": "llama", "dtype": "bfloat16", **changes}
    return Record(engine=engine, version="1.0", value=value, date=f"2026-01-{day:02}", machine=GPU, **figure)


def kernel(name: str, flops: float, moved: float, micros: float) -> Record:
    options = {"flops": flops, "bytes": moved, "bandwidth": 4.42e12, "peak": 750e12}
    return record("ridgeline", micros, 3, workload=f"kernel:{name}", metric=f"<{flops:g}>", unit="µs", options=options)


RECORDS = [
    record("ridgeline", 2.0, 1, limit=0.5),
    record("ridgeline", 1.0, 2, limit=0.5),
    record("vllm", 1.5, 2, limit=0.5),
    record("ridgeline", 900.0, 2, metric="output", unit="tokens/s", better="higher"),
    record("vllm", 1800.0, 2, metric="output", unit="tokens/s", better="higher"),
    kernel("linear", 2e9, 2e7, 9.0),
    kernel("linear", 1e12, 4e8, 1600.0),
    kernel("rms_norm", 1e6, 4e6, 2.0),
    kernel("embedding", 0.0, 4e6, 2.0),
]


class Checker(HTMLParser):
    """Every tag closed in order; tags and addresses collected."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_fetches_nothing(tmp_path: Path) -> None:
    write(RECORDS, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    checked = Checker(page)
    assert checked.open == []
    assert [a for a in checked.addresses if not a.startswith("data:")] == []
    assert "script" not in checked.tags
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_newest_figures_stand_beside_limit_and_peer() -> None:
    newest = {(r.engine, r.metric): r.value for r in latest(RECORDS[:5])}
    assert newest["ridgeline", "tpot"] == 1.0
    widths = [float(w) for w in re.findall(r'class="bar"><i style="width:([\d.]+)%', render(RECORDS[:5]))]
    assert widths == [50.0, 33.3, 50.0, 100.0], "shares of the limit; without one, of the best engine"


def test_every_kernel_with_arithmetic_is_a_dot_under_the_roof() -> None:
    body = render(RECORDS[5:])
    plot = body[body.index("<svg") : body.index("</svg>")]
    assert plot.count("<circle") == 3
    roof = [tuple(map(float, p.split(","))) for p in re.search(r'class="roof" points="([^"]+)"', plot)[1].split()]
    (_, low), (ridge, top), (_, end) = roof
    assert low > top == end, "pixels count downwards: the roof rises to the ridge and stays"
    dots = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', plot)]
    assert all(y > top for _, y in dots)
    assert [x > ridge for x, _ in dots] == [False, True, False]


def test_figures_measured_twice_have_a_history_and_names_are_escaped() -> None:
    body = render(RECORDS)
    assert body.count("<figcaption>") == 1, "only our tpot"
    assert re.findall(r">(2026-[\d-]+)</text>", body) == ["2026-01-01", "2026-01-02"]
    assert "&lt;2e+09&gt;" in body
    assert "<2e+09>" not in body


def test_one_run_is_no_history_even_if_it_measured_a_case_twice() -> None:
    assert "History" not in render([kernel("linear", 2e9, 2e7, 9.0), kernel("linear", 2e9, 2e7, 9.1)])


def test_workloads_stand_in_their_order_whatever_ran_first() -> None:
    names = ["startup", "W3-b64", "W3-b8", "W4-1x8192", "W4-1x30000", "W1"]
    body = render([record("ridgeline", 1.0, 1, workload=name) for name in names])
    rows = re.findall(r"<tr><td>([\w-]+)</td>", body[: body.index("All results")])
    assert rows == ["W1", "W3-b8", "W3-b64", "W4-1x8192", "W4-1x30000", "startup"]


def test_a_start_is_drawn_in_its_stages() -> None:
    stages = {"ready": 5.0, "stage: imports": 3.0, "stage: weights": 1.5}
    body = render([record("ridgeline", value, 1, workload="startup", metric=name) for name, value in stages.items()])
    drawn = body[body.index("<h2>Starts") : body.index("All results")]
    bars = [tuple(map(float, found)) for found in re.findall(r'x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)]
    assert re.findall(r">([\d.]+) s</text>", drawn) == ["3.00", "1.50", "0.50"]
    assert ">other</text>" in drawn
    for (begin, length), (later, _) in pairwise(bars):
        assert later == pytest.approx(begin + length, abs=0.2)
    assert "Starts" not in render([record("ridgeline", 5.0, 1, workload="startup", metric="ready")])


def test_no_results_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no results"):
        write([], tmp_path / "r.html")
    with pytest.raises(InvalidConfig, match="cannot write"):
        write(RECORDS, tmp_path / "no" / "r.html")


@pytest.mark.parametrize(("value", "text"), [(1e15, "1 P"), (1.5e9, "1.5 G"), (2.0, "2"), (3e-5, "30 µ"), (0.0, "0")])
def test_si(value: float, text: str) -> None:
    assert si(value) == text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_chromium_opens_it_without_a_console_message(tmp_path: Path) -> None:
    page, shot = tmp_path / "r.html", tmp_path / "r.png"
    write(RECORDS, page)
    command = [
        CHROMIUM,
        *FLAGS,
        *["--enable-logging=stderr", "--v=0", "--window-size=1100,1600"],
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={shot}",
        page.as_uri(),
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, check=False)
    assert shot.stat().st_size > 10_000, done.stderr[-500:]
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
