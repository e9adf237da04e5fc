"""Training by rewards whose answers a server draws: the same bits as with an engine of the trainer's own process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.core.errors import RidgelineError
from ridgeline.layers.decoder import Decoder
from ridgeline.training.rollouts import RolloutConfig
from ridgeline.training.served_rollouts import ServedRollouts
from tests.command import run_here
from tests.serving.conftest import MODEL, Server, StartServer, start_engine, stop_engine

pytestmark = pytest.mark.dealt

KEY = "an-operators-key"
SIZES = ("--prompts", "2", "--samples", "3", "--max-tokens", "10", "--steps", "3", "--lr", "5e-3", "--device", "cpu")
REWARD = ("--reward", "regex", "--pattern", "[aeiou].*[aeiou]")
ALIKE = ("reward", "kl", "differing", "loss", "answer_tokens", "staleness", "entropy")


@pytest.fixture(scope="module")
def drawing(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("rollouts") / "socket"
    process = start_engine(path, max_model_len=640, deterministic=True)
    settings: dict[str, Any] = {"admin_key": (KEY,), "weight_transfer": ("127.0.0.0/8",)}
    with start_server(engine=path, **settings) as server:
        yield server
    stop_engine(process)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def add_{i}(a, b):\n"}) + "\n" for i in range(5)))
    return path


def run(prompts: Path, out: Path, *more: str) -> Any:
    return run_here("train", "grpo", "--model", MODEL, "--data", prompts, "--out", out, *REWARD, *SIZES, *more)


def trained(prompts: Path, out: Path, *more: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    done = run(prompts, out, *more)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return rows, load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("staleness", ["1", pytest.param("0", marks=pytest.mark.thorough)])
def test_answers_of_a_server_are_those_of_an_engine_in_the_process(
    staleness: str, drawing: Server, prompts: Path, tmp_path: Path
) -> None:
    served = "--server", drawing.url, "--server-key", KEY
    here, matrices = trained(prompts, tmp_path / "here", "--staleness", staleness)
    there, learnt = trained(prompts, tmp_path / "there", "--staleness", staleness, *served)
    assert [[row[name] for name in ALIKE] for row in there] == [[row[name] for name in ALIKE] for row in here]
    assert all(torch.equal(learnt[name], matrices[name]) for name in matrices)
    if staleness == "0":
        assert {(row["kl"], row["differing"]) for row in there} == {(0.0, 0)}


@pytest.mark.parametrize(
    ("url", "words"), [("localhost:8000", "an address such as http"), ("http://127.0.0.1:1", "cannot be reached")]
)
def test_a_server_that_is_not_there_is_said_in_a_sentence(url: str, words: str, prompts: Path, tmp_path: Path) -> None:
    ended = run(prompts, tmp_path / "out", "--server", url, "--server-key", KEY)
    assert (ended.returncode != 0, len(ended.stderr.splitlines())) == (True, 1), ended.stderr
    assert words in ended.stderr


@pytest.mark.parametrize(
    ("flag", "given", "words"),
    [
        ("--server-key", KEY, "name it by --server"),
        ("--reward-weights", "much", "a number for each"),
        ("--reward-weights", "nan", "a number for each"),
    ],
)
def test_flags_without_sense_are_refused_in_a_sentence(
    flag: str, given: str, words: str, prompts: Path, tmp_path: Path
) -> None:
    ended = run(prompts, tmp_path / "out", flag, given)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert words in ended.stderr


def test_a_server_without_the_key_or_with_others_weights_ends_the_run_in_a_sentence(
    drawing: Server, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run(prompts, tmp_path / "refused", "--server", drawing.url, "--server-key", "wrong")
    assert (refused.returncode != 0, len(refused.stderr.splitlines())) == (True, 1), refused.stderr
    push = ServedRollouts.push

    def meddled(self: ServedRollouts, policy: Decoder, version: int) -> float:
        seconds = push(self, policy, version + 7)
        self.version = version
        return seconds

    monkeypatch.setattr(ServedRollouts, "push", meddled)
    ended = run(prompts, tmp_path / "ended", "--server", drawing.url, "--server-key", KEY)
    assert (ended.returncode != 0, "-7 and not by those that training sent" in ended.stderr) == (True, True), (
        ended.stderr
    )


def test_what_is_no_server_that_draws_is_said_in_a_sentence() -> None:
    """Another program's answers, one that ends in the middle, and addresses and keys that cannot be sent."""
    answers = [b"HTTP/1.0 200 OK\r\n\r\n" + text for text in (b"<html>", b"[]", b"{}", b'{"world_size": "1"}')]
    answers += [b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{}", b"no HTTP\r\n\r\n"]
    waiting = iter(answers)

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(next(waiting))

        def log_message(self, *_: object) -> None:
            pass

    config = RolloutConfig(prompts=1, samples=1, max_tokens=1, longest=2, seed=0)

    def refused(url: str, key: str = KEY) -> str:
        with pytest.raises(RidgelineError) as found:
            ServedRollouts(url, key, {}, torch.device("cpu"), config)
        return str(found.value)

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        other = f"http://127.0.0.1:{server.server_port}"
        assert all("takes weights" in refused(other) for _ in answers)
        for key in ("two\nlines", "schl\u00fcssel\u6771"):
            assert key[:3] not in refused(other, key)
        server.shutdown()
    for wrong in ("http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x", f"http://{'a' * 99}", "http://a:1\n"):
        assert "needs an address such as" in refused(wrong)
