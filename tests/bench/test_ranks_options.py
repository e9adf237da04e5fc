"""Commands that run engines take the settings that divide a model over devices, by one mechanism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ridgeline.cli import app
from ridgeline.cli.options import ENGINE_HELP, RANKS
from ridgeline.cli.profile import waits_of
from ridgeline.core.plan.rank_waits import RankWaits
from ridgeline.core.plan.sharding import part_of
from ridgeline.core.settings.config import LLMConfig
from ridgeline_bench.runner import Job, Outcome, Where
from ridgeline_bench.setup import Setup
from tests.command import run_here
from tests.perf.models import CONFIGS, spec

VERBS = (
    "generate", "chat", "serve", "profile", "bench throughput", "bench latency", "bench startup", "bench compare",
    "eval perplexity", "eval harness", "eval compare", "eval capacity",
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_with_an_engine_divides_it(verb: str) -> None:
    command: Any = typer.main.get_command(app)
    for name in verb.split():
        command = command.commands[name]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {f"--{name.replace('_', '-')}" for name in RANKS} <= flags
    assert "-tp" in flags
    assert {"tensor_parallel_size", "enable_expert_parallel"} <= set(RANKS) <= set(ENGINE_HELP)


def test_engines_get_what_was_given_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[Job] = []

    def run(job: Job, where: Where, **_: Any) -> Outcome:
        jobs.append(job)
        return Outcome()

    monkeypatch.setattr("ridgeline_bench.setup.run", run)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((CONFIGS / "llama-8b.json").read_bytes())
    common = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "r")]
    extra = json.dumps({"deterministic": True})
    assert run_here("bench", "latency", *common, "-tp", 2, "--extra", extra).returncode == 0
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").touch()  # whether a peer can be imported is looked at first
    peers = ["--peer", "vllm", "--peer-path", tmp_path / "site"]
    assert run_here("bench", "compare", *common, *peers, "-tp", 2, "--enable-expert-parallel").returncode == 0
    assert run_here("bench", "startup", *common, "--repeats", 1).returncode == 0
    latency, ours, peer, startup = (dict(job.options.extra) for job in jobs)
    assert latency == {"tensor_parallel_size": 2, "deterministic": True}
    assert ours == peer == {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert startup == {}
    for arguments in (["latency", "--engine", "sglang"], ["compare", "--peer", "transformers"]):
        done = run_here("bench", *arguments, *common, "-tp", 2)
        assert done.returncode == 2
        assert "has other names for --tensor-parallel-size" in done.stderr


def test_limits_are_those_of_a_devices_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CONFIGS / "llama-8b.json").read_bytes())
    assert Setup(model=str(tmp_path), extra={"tensor_parallel_size": 4})._part == part_of(spec("llama-8b"), 4)
    assert Setup(model=str(tmp_path))._part == spec("llama-8b")


def test_a_profile_of_ranks_names_the_one_that_others_wait_for() -> None:
    text = waits_of([RankWaits(0, 1.0, 0.5, 0.125, 0.5), RankWaits(1, 1.0, 0.125, 0.5, 0.1)])
    assert "rank 1 was waited for the longest" in text
    assert "50.0%" in text
    assert LLMConfig(tensor_parallel_size=2).divided_by == ["tensor_parallel_size"]
    assert LLMConfig().divided_by == []
