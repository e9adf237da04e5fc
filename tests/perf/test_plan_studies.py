"""The verbs that answer further questions about a deployment, and about training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from tests.perf.models import CONFIGS

MIXTRAL, DENSE = str(CONFIGS / "mixtral-8x7b.json"), str(CONFIGS / "llama-2-13b.json")


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def output(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_plan_answers_all_of_them_at_once() -> None:
    flags = ["--chunks", "256,1024", "--static", "--beside", DENSE, "--stack", "sparse:kept=0.5,points=2"]
    flags += ["--kv-kept", "0.5"]
    (record,) = json.loads(output("plan", MIXTRAL, "--gpu", "H200", "--json", *flags))
    assert [each["steps"] for each in record["chunks"]] == [4, 1]
    assert record["static"][0]["useful"] == 1
    assert [each["bits"] for each in record["stack"]] == [9, 9]
    assert record["beside"][1]["parameters"] == 13_015_864_320
    assert record["kv_bytes_per_request"] == 640 * 131_072, "half of 1,280 tokens"
    text = output("plan", MIXTRAL, "--gpu", "H200", *flags)
    for words in ("in chunks, beside", "answers of 1 to 511 tokens", "with each technique alone", "beside this model"):
        assert words in text


def test_training_has_a_table_by_stage() -> None:
    text = output("train", "sizes", DENSE, "--gpu", "A100", "--devices", "8")
    assert "13 billion parameters on 8 x A100-80GB" in text
    assert "3 (FSDP)" in text
    record = json.loads(output("train", "sizes", DENSE, "--gpu", "A100", "--devices", "8", "--json"))
    assert record["stages"][3]["memory"] == 2 * record["parameters"]  # 16 bytes over 8 devices
    assert record["stages"][3]["sent"] == 1.5 * record["stages"][0]["sent"]
    assert record["flops"] == pytest.approx(6 * 20 * record["parameters"] ** 2)


def test_mistakes_are_one_sentence() -> None:
    for flags, sentence in (
        (["--chunks", "a,b"], "write whole numbers"),
        (["--chunks", "0"], "chunk must be at least 1"),
        (["--stack", "x:y=1"], "has the key 'y'"),
        (["--gpus", "8", "--static"], "leave --chunks"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            app(["plan", MIXTRAL, "--gpu", "H200", *flags], standalone_mode=False)
