"""The dashboard in a real Chromium: what it shows is what /metrics says and what was asked for, in light and dark."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright
from playwright.sync_api import Error as PlaywrightError
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.serving.observed import past
from ridgeline.serving.observed.histograms import BOUNDS
from ridgeline.serving.observed.past import PERIOD, Past
from tests.chromium import CHROMIUM, FLAGS
from tests.serving.conftest import Server, StartServer
from tests.serving.observed.figures import stats

pytestmark = [pytest.mark.dealt, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
WIDE, NARROW = 1366, 360  # pixels
TTFT, ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(url, scheme=, width=, answers=, forgets=)`; answers: what the page is told instead of the server's
    figures. forgets: it is told nothing of the time before. A test fails on any word on the console and on any request
    to another server."""
    complaints: list[str] = []

    def go(
        url: str,
        *,
        scheme: str = "light",
        width: int = WIDE,
        answers: list[dict[str, Any]] | None = None,
        forgets: bool = False,
        **more: Any,
    ) -> Page:
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900}, **more)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        origin = urlsplit(url).netloc
        page.on(
            "request",
            lambda request: (
                None if urlsplit(request.url).netloc in (origin, "") else complaints.append(f"asks {request.url}")
            ),
        )
        if answers is not None:
            left = list(answers)
            page.route(
                "**/dashboard/data*",
                lambda route: route.fulfill(json=left.pop(0) if len(left) > 1 else left[0]),
            )
        if forgets:
            page.route("**/dashboard/data*", without_past)
        answer = page.goto(url)
        assert answer is not None
        assert answer.status == 200
        return page

    yield go
    for context in browser.contexts:
        context.close()
    assert complaints == []


def without_past(route: Route) -> None:
    """Answer as the server does, without the time before. The page may be closed meanwhile."""
    answer = httpx.get(route.request.url, headers=route.request.headers).json()
    with suppress(PlaywrightError):
        route.fulfill(json=answer | {"past": None})


def tile(page: Page, name: str) -> tuple[str, str]:
    """What a tile shows, large and small."""
    large, small = page.locator(f"#tiles > div:has(dt:text-is('{name}')) dd").all_text_contents()
    return large, small


def number(text: str) -> float:
    """The first in a text."""
    found = re.search(r"[\d,.]+", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def wait_for(page: Page, condition: str) -> None:
    """In small steps from here: the page's policy forbids what Playwright would do for that inside of it."""
    deadline = time.monotonic() + 120
    while not page.evaluate(f"() => {{ ask(); return {condition}; }}"):
        assert time.monotonic() < deadline, f"never {condition}"
        page.wait_for_timeout(50)


def metrics(server: Server) -> dict[str, list[tuple[dict[str, str], float]]]:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def quantile(name: str, share: float, before: dict[str, Any], after: dict[str, Any]) -> float:
    """Prometheus' histogram_quantile over what came between two pages of metrics."""
    buckets = [
        (float(labels["le"]), now - then)
        for (labels, now), (_, then) in zip(after[f"vllm:{name}_bucket"], before[f"vllm:{name}_bucket"], strict=True)
    ]
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError("nothing was counted")


# ---- the real thing -------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@SCHEMES
def test_what_it_shows_is_what_happened(server: Server, open_page: OpenPage, scheme: str) -> None:
    before = metrics(server)
    page = open_page(f"{server.url}/dashboard", scheme=scheme, forgets=True)
    wait_for(page, "history.length >= 1")
    time.sleep(1.2)  # an answer of the engine that is as old as the page

    def ask(index: int) -> dict[str, Any]:
        body = {"prompt": [index + 5] * 40, "max_tokens": 30, "ignore_eos": True, "cache_salt": scheme}
        headers = {"x-request-id": f"shown-{scheme}-{index}"}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120).json()

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [30] * 6
    after = metrics(server)
    ended = sum(value for _, value in after["vllm:request_success_total"])
    wait_for(page, f"tiles.get('Ended')[1].textContent === '{ended:g}'")

    assert page.locator("#state").text_content() == "up"
    assert f"embedded · cpu · {server.api.client.facts.dtype}" in (page.locator("#about").text_content() or "")
    [(labels, _)] = after["vllm:cache_config_info"]
    _, blocks = tile(page, "KV cache")
    assert blocks.replace(",", "") == f"{labels['num_gpu_blocks']} blocks of {labels['block_size']}"
    assert tile(page, "Running") == ("0", "requests, 0 waiting")
    assert number(tile(page, "Preemptions")[0]) == sum(value for _, value in after["vllm:num_preemptions_total"])
    for name, histogram in (("First token", TTFT), ("Between tokens", ITL)):
        middle, tail = tile(page, name)
        assert number(middle) == pytest.approx(1000 * quantile(histogram, 0.5, before, after), rel=0.01), name
        assert number(tail[3:]) == pytest.approx(1000 * quantile(histogram, 0.99, before, after), rel=0.01), name

    told = {entry["id"]: entry for entry in httpx.get(f"{server.url}/v1/requests").json()["data"]}
    text = "document.getElementById('requests').textContent"
    wait_for(page, f"{text}.split('shown-{scheme}').length === 7 && !{text}.includes('running')")
    rows = page.evaluate(  # at once: they are replaced every second
        "[...document.querySelectorAll('#requests tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    mine = [row for row in rows if row[0].startswith(f"shown-{scheme}")]
    assert len(mine) == 6
    for row in mine:
        [part] = told[row[0]]["completions"]
        assert [row[1], row[2], row[3], row[9]] == ["40", str(part["cached_tokens"]), "30", "length"]
        times = [1000 * part[name] for name in ("queue", "prefill", "decode", "host_gaps", "total")]
        assert [number(cell) for cell in row[4:9]] == pytest.approx(times, rel=0.006, abs=0.51)


def test_behind_a_proxy_and_an_admin_key(start_server: StartServer, open_page: OpenPage, browser: Browser) -> None:
    with start_server(root_path="/llm", api_key=("c",), admin_key=("secret",)) as server, proxy(server) as url:
        for auth in (None, ("x", "c")):
            assert httpx.get(f"{url}/dashboard", auth=auth).status_code in (401, 403)
        page = open_page(f"{url}/dashboard", http_credentials={"username": "any", "password": "secret"})
        wait_for(page, "tiles.has('Running')")
        assert page.locator("#state").text_content() == "up"
        loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => new URL(entry.name).pathname)")
        assert {"/llm/dashboard/page.js", "/llm/dashboard/page.css", "/llm/dashboard/data"} <= set(loaded)
        page.close()  # before its server is gone, which it would complain of


@contextmanager
def proxy(server: Server) -> Iterator[str]:
    """Serves the server's routes below /llm, as a proxy does that cuts the prefix off."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith("/llm/"), f"{self.path} would not have come here"
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
            connection.request("GET", self.path.removeprefix("/llm"), headers=dict(self.headers))
            answer = connection.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            connection.close()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/llm"
    serving.shutdown()
    serving.server_close()
    thread.join()


# ---- figures known by heart -----------------------------------------------------------------------------------------


def answer(at: float, **changes: Any) -> dict[str, Any]:
    """As /dashboard/data tells it, of an engine that has done nothing."""
    figures: dict[str, Any] = {
        "at": at,
        "started": 1.7e9,
        "running": 0,
        "waiting": 0,
        "pages_used": 0,
        "num_pages": 400,
        "step_seconds": 0,
        "limit_seconds": 0,
        "counters": dict.fromkeys(
            ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions"), 0
        ),
        "finished": {},
        "bounds": {name: list(BOUNDS[name]) for name in (TTFT, ITL)},
        "histograms": {name: [0] * (len(BOUNDS[name]) + 1) for name in (TTFT, ITL)},
        "steps": [],
        "gpus": [],
        "experts": None,
    }
    outer = {"up": True, "healthy": True, "draining": False, "requests": []} | {
        name: changes.pop(name) for name in ("up", "healthy", "draining", "requests") if name in changes
    }
    fixed = {"version": "1.2.3", "model": "m", "device": "cuda:0", "dtype": "bfloat16", "block_size": 16}
    return fixed | outer | {"figures": figures | changes}


def histogram(name: str, *values: float) -> list[int]:
    bounds = BOUNDS[name]
    return [
        sum(low < value <= high for value in values)
        for low, high in zip((float("-inf"), *bounds), (*bounds, float("inf")), strict=True)
    ]


BUSY = {
    "running": 3,
    "waiting": 2,
    "pages_used": 100,
    "step_seconds": 1.5,
    "limit_seconds": 0.75,
    "counters": {
        "prompt_tokens": 90,
        "generation_tokens": 600,
        "prefix_cache_queries": 100,
        "prefix_cache_hits": 25,
        "preemptions": 4,
    },
    "finished": {"length": 5, "stop": 1, "abort": 2, "error": 1},
    "histograms": {
        TTFT: histogram(TTFT, *[0.015] * 9, 0.7),  # nine from 10 to 20 ms, one from 500 to 750
        ITL: histogram(ITL, *[0.03] * 100),  # from 20 to 30 ms
    },
    # at, seconds, limit, decode rows, prefill rows, tokens; twice as long as it had to take
    "steps": [[100.5 + 0.1 * i, 0.1, 0.05, 2, 1 if i == 5 else 0, 3] for i in range(15)],
    "gpus": [
        {
            "index": 0,
            "utilization": 0.5,
            "memory_used": 70 * 2**30,
            "memory_total": 140 * 2**30,
            "power": 612.3,
            "temperature": 61.0,
        }
    ],
}


def test_figures_follow_from_what_it_is_told(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/dashboard", answers=[answer(100.0), answer(102.0, **BUSY)])
    wait_for(page, "history.length === 2")
    shown = {name: tile(page, name) for name in page.locator("#tiles dt").all_text_contents()}
    assert shown == {
        "Generated": ("300", "tokens/s"),
        "Prompts": ("45", "tokens/s"),
        "Running": ("3", "requests, 2 waiting"),
        "KV cache": ("25 %", "400 blocks of 16"),
        "First token": ("15.6 ms", "p99 725 ms"),  # 10 + 10 · 5/9, and 500 + 250 · 0.9
        "Between tokens": ("25 ms", "p99 29.9 ms"),
        "Headroom": ("50 %", "of the hardware limit"),
        "Prefix hits": ("25 %", "of prompt, last minute"),
        "Preemptions": ("4", "times since the start"),
        "Ended": ("9", "requests, 2 aborted, 1 failed"),
        "GPU 0": ("50 %", "70.0 of 140 GiB, 612 W, 61 °C"),
    }
    labels = page.locator("figure [role=img]").evaluate_all("boxes => boxes.map(box => box.getAttribute('aria-label'))")
    assert "Requests. Now: running 3 requests, waiting 2 requests." in labels
    assert "Throughput. Now: generated 300 tokens/s, prompt 45 tokens/s." in labels
    assert "Headroom. Now: of the limit 50 %." in labels
    assert "Step time. Now: step 100 ms, limit 50 ms." in labels


@SCHEMES
def test_the_running_batch_is_drawn_in_its_colours(server: Server, open_page: OpenPage, scheme: str) -> None:
    page = open_page(f"{server.url}/dashboard", scheme=scheme, answers=[answer(100.0), answer(102.0, **BUSY)])
    wait_for(page, "history.length === 2")
    decode, prefill = page.evaluate(PAINTED)
    # 15 steps of 2 decode rows without a gap; one of them has a prefill row as well, half as high.
    assert decode == pytest.approx(30 * prefill, rel=0.1)
    assert prefill > 100


PAINTED = """() => {
  const canvas = charts.steps.plot.ctx.canvas;
  const {left, top, width, height} = charts.steps.plot.bbox;
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(left, top, width, height).data;
  const wanted = ["--one", "--two"].map(name => [1, 3, 5].map(i => parseInt(color(name).slice(i, i + 2), 16)));
  const count = [0, 0];
  for (let i = 0; i < data.length; i += 4) {
    wanted.forEach((rgb, which) => { if (rgb.every((part, k) => data[i + k] === part)) count[which]++; });
  }
  return count;
}"""


def experts(tokens: list[list[int]], each: int = 1) -> dict[str, Any]:
    """Three mixtures of four experts (or groups of them) behind a layer without any."""
    return {
        "layers": [1, 2, 3],
        "each": each,
        "experts": [4 * each] * 3,
        "tokens": tokens,
        "imbalance": [1.0, 3.25, 2.0],
        "reached": [4, 2, 3],
    }


# In the two seconds between them the first layer was balanced, of the second one expert got all, the third had nothing.
LOADS = experts([[9, 1, 1, 1], [0, 0, 0, 0], [8, 4, 4, 0]]), experts([[10, 2, 2, 2], [0, 8, 0, 0], [8, 4, 4, 0]])
HEAT = """() => {
  const canvas = document.getElementById("heat");
  const context = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const [wide, high] = [canvas.width / 4, canvas.height / 3];
  const at = (i, e) => [...context.getImageData((e + 0.5) * wide, (i + 0.5) * high, 1, 1).data].slice(0, 3);
  return [[0, 1, 2].map(i => [0, 1, 2, 3].map(e => at(i, e))), rgb("--card"), rgb("--one")];
}"""


@SCHEMES
def test_a_mixtures_experts_are_a_map_of_heat(server: Server, open_page: OpenPage, scheme: str) -> None:
    """A cell's colour goes from the card's to the first line's, which it has at 4 times the mean of the layer."""
    told = [answer(100.0, experts=LOADS[0]), answer(102.0, **BUSY, experts=LOADS[1])]
    page = open_page(f"{server.url}/dashboard", scheme=scheme, answers=told)
    wait_for(page, "history.length === 2 && heat !== null")
    assert page.locator("#experts").is_visible()
    cells, cold, hot = page.evaluate(HEAT)
    times = [[1, 1, 1, 1], [0, 4, 0, 0], [2, 1, 1, 0]]  # of the third since the start
    expected = [[[a + (b - a) * n / 4 for a, b in zip(cold, hot, strict=True)] for n in row] for row in times]
    for row, wanted in zip(cells, expected, strict=True):
        for cell, colour in zip(row, wanted, strict=True):
            assert cell == pytest.approx(colour, abs=1)
    assert page.locator("#heat").get_attribute("aria-label") == (
        "Tokens by layer and expert. Busiest: expert 1 of layer 2, 4 times the mean. Without tokens: 4 of 12."
    )
    assert tile(page, "Experts") == ("3.25", "busiest ÷ mean, worst layer")
    assert tile(page, "Reached") == ("3", "of 4 experts a layer in one step, 0 tokens dropped")
    page.locator("#heat").scroll_into_view_if_needed()
    box = page.locator("#heat").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.5)
    assert page.locator("#heat-at").text_content() == "layer 2, expert 1: 4"
    page.mouse.move(0, 0)
    assert page.locator("#heat-at").text_content() == ""


def test_without_experts_there_is_no_map(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/dashboard", answers=[answer(100.0), answer(102.0, **BUSY)])
    wait_for(page, "history.length === 2")
    assert not page.locator("#experts").is_visible()
    assert page.locator("#tiles dt").filter(has_text="Experts").count() == 0


def test_another_engine_begins_anew(server: Server, open_page: OpenPage) -> None:
    new = answer(103.0, started=1.8e9, running=1)
    page = open_page(f"{server.url}/dashboard", answers=[answer(100.0), answer(102.0, **BUSY), new])
    wait_for(page, "history.length === 1 && history[0].at === 103")
    assert tile(page, "Generated")[0] == "\N{EN DASH}", "no rate is known yet, and no negative one"
    assert tile(page, "Ended")[0] == "0"
    assert tile(page, "Running")[0] == "1"


@pytest.mark.parametrize(
    ("told", "state", "sentence"),
    [
        ({"up": False, "requests": None}, "engine down", "last figures"),
        ({"healthy": False}, "stalled", "no step has finished"),
        ({"draining": True}, "draining", "shutting down"),
    ],
)
def test_what_is_wrong_is_said(
    server: Server, open_page: OpenPage, told: dict[str, Any], state: str, sentence: str
) -> None:
    page = open_page(f"{server.url}/dashboard", answers=[answer(100.0, **BUSY), answer(102.0, **BUSY, **told)])
    wait_for(page, f"document.getElementById('state').textContent === '{state}'")
    assert sentence in page.locator("#banner").inner_text()
    assert page.locator("#banner").is_visible()


def test_names_are_shown_and_never_run(server: Server, open_page: OpenPage) -> None:
    part = {"index": 0, "finish_reason": "stop", "output_tokens": 1, "cached_tokens": 0, "total": 1.0}
    request = {"id": "<img src=x onerror=alert(1)>", "created": 1.0, "prompt_tokens": 1, "completions": [part]}
    page = open_page(f"{server.url}/dashboard", answers=[answer(100.0, requests=[request])])
    wait_for(page, "document.querySelectorAll('#requests td').length === 10")
    assert page.locator("#requests td").first.inner_text() == request["id"]
    assert page.locator("#requests img").count() == 0


# ---- what was before it was opened ----------------------------------------------------------------------------------


def test_it_draws_the_hour_before_it_was_opened(server: Server, open_page: OpenPage, tmp_path: Path) -> None:
    """An engine wrote 50 tokens/s until it was replaced, 20 minutes ago; its successor writes 20."""
    book, end = Past(str(tmp_path / "engine")), 10_000.0
    for seconds in range(-3598, 0, 2):
        lives = seconds >= -1200
        tokens = 20 * (seconds + 1200) if lives else 50 * (seconds + 3600)
        book.note(stats(end + seconds, tokens, started=1.7e9 + lives, running=2 - lives, first=tokens))
    told = answer(end, counters=answer(end)["figures"]["counters"] | {"generation_tokens": 24_000}, started=1.7e9 + 1)
    page = open_page(f"{server.url}/dashboard", answers=[told | {"past": past.told([book.read()], 0.0)}])
    wait_for(page, "history.length > 0")
    at, generated = page.evaluate("[charts.tokens.plot.data[0], charts.tokens.plot.data[1]]")
    assert at[0] == pytest.approx(-3598)
    assert at[-1] == 0
    shown = {seconds: rate for seconds, rate in zip(at, generated, strict=True) if rate is not None}
    assert {rate for seconds, rate in shown.items() if seconds < -1201} == {50}
    assert {rate for seconds, rate in shown.items() if seconds > -1200} == {20}
    assert page.evaluate("charts.tokens.plot.data[1].includes(null)"), "no line from one life to the next"
    running = page.evaluate("charts.queue.plot.data[1]")
    assert (running[0], running[-2], running[-1]) == (2, 1, 0)
    assert set(page.evaluate("charts.ttft.plot.data[1].slice(2, 900)")) == {15}  # of 10 to 20 ms
    assert set(page.evaluate("charts.limit.plot.data[1].slice(2, 900)")) == {50}
    assert page.evaluate("charts.tokens.plot.scales.x.min") == -300
    page.select_option("#span", "3600")
    assert page.evaluate("charts.tokens.plot.scales.x.min") == pytest.approx(-3598)
    assert page.evaluate("charts.steps.plot.scales.x.min") >= -60, "steps are those of the last seconds"


def test_a_page_opened_late_shows_what_ran_before(server: Server, open_page: OpenPage) -> None:
    body = {"prompt": "late", "max_tokens": 40, "ignore_eos": True, "cache_salt": "late"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    time.sleep(2 * PERIOD)
    page = open_page(f"{server.url}/dashboard")
    wait_for(page, "history.length >= 1")
    assert page.evaluate("charts.tokens.rows.length") >= 2
    assert page.evaluate("Math.max(...charts.tokens.rows.map(row => row[1]))") > 0


# ---- for every reader -----------------------------------------------------------------------------------------------

CONTRASTS = """() => {
  const rgb = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const back = element => {
    for (let e = element; e; e = e.parentElement) {
      const found = rgb(getComputedStyle(e).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length) continue;
    found.push([element.textContent, ratio(light(rgb(getComputedStyle(element).color)), light(back(element)))]);
  }
  const hex = name => [1, 3, 5].map(i => parseInt(color(name).slice(i, i + 2), 16));
  for (const name of ["--soft"]) found.push([name, ratio(light(hex(name)), light(hex("--card")))]);
  const drawn = ["--one", "--two", "--three"].map(name => [name, ratio(light(hex(name)), light(hex("--card")))]);
  return [found, drawn];
}"""


@pytest.mark.few(2)
@SCHEMES
@pytest.mark.parametrize("told", [{}, {"healthy": False}])
def test_text_stands_out_from_what_is_behind_it(
    server: Server, open_page: OpenPage, scheme: str, told: dict[str, Any]
) -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for lines."""
    last = answer(102.0, **BUSY, **told, experts=LOADS[1])
    page = open_page(f"{server.url}/dashboard", scheme=scheme, answers=[answer(100.0, experts=LOADS[0]), last])
    wait_for(page, "history.length === 2")
    texts, drawn = page.evaluate(CONTRASTS)
    assert len(texts) > 60
    assert [(text, ratio) for text, ratio in texts if ratio < 4.5] == []
    assert [(name, ratio) for name, ratio in drawn if ratio < 3] == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c < 60)")
    assert dark == (scheme == "dark")


def test_it_follows_the_system_when_that_turns_dark(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/dashboard", answers=[answer(100.0), answer(102.0, **BUSY)])
    wait_for(page, "history.length === 2")
    light = page.evaluate(PAINTED)
    page.emulate_media(color_scheme="dark")
    wait_for(page, f"({PAINTED})()[0] > 0")
    assert page.evaluate(PAINTED) == pytest.approx(light, rel=0.05), "the same picture in the other colours"


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [WIDE, WIDE // 2, NARROW])
def test_nothing_is_cut_at_any_width_or_zoom(server: Server, open_page: OpenPage, width: int) -> None:
    """Zooming to 200 % halves the width that a page has."""
    told = [answer(100.0, experts=LOADS[0]), answer(102.0, **BUSY, experts=experts(LOADS[1]["tokens"], each=32))]
    page = open_page(f"{server.url}/dashboard", width=width, answers=told)
    wait_for(page, "history.length === 2 && heat !== null")
    assert "experts 32 to 63 of layer 2" in (page.locator("#heat").get_attribute("aria-label") or "")
    cut = page.evaluate("""() => [...document.querySelectorAll("body, header *, main *")]
        .filter(e => e.getClientRects().length && !e.closest(".scroll") && !e.closest(".u-wrap"))
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1 || e.scrollWidth > e.clientWidth + 1 &&
                     getComputedStyle(e).display !== "inline" && e.clientWidth > 0)
        .map(e => `${e.tagName}#${e.id} ${e.scrollWidth} > ${e.clientWidth}`)""")
    assert cut == []


def test_the_table_can_be_scrolled_with_the_keyboard(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/dashboard", width=NARROW, answers=[answer(100.0), answer(102.0, **BUSY)])
    wait_for(page, "history.length === 2")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "span"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "scroll"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    wait_for(page, "document.activeElement.scrollLeft > 0")


def test_a_page_asks_only_for_what_is_new(server: Server) -> None:
    """Steps that it has seen are not sent again."""
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 5, "ignore_eos": True})
    time.sleep(1.1)
    first = httpx.get(f"{server.url}/dashboard/data").json()["figures"]
    assert len(first["steps"]) >= 5
    params = {"started": json.dumps(first["started"]), "since": json.dumps(first["at"])}
    assert httpx.get(f"{server.url}/dashboard/data", params=params).json()["figures"]["steps"] == []
    params["started"] = "1.0"
    assert len(httpx.get(f"{server.url}/dashboard/data", params=params).json()["figures"]["steps"]) >= 5
