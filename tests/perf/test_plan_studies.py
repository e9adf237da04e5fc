"""The verbs that answer further questions about a deployment, and about training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from tests.perf.models import CONFIGS

LARGE = str(CONFIGS / "llama-3-70b.json")
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


def test_models_are_packed_onto_devices() -> None:
    """On H200s of 126.9 GB to use: the mixture needs 97, two of 13B 38 each, which fit together but not beside it."""
    arguments = ["plan", MIXTRAL, "--gpu", "H200", "--pack", f"{DENSE}*2"]
    (record,) = json.loads(output(*arguments, "--json"))
    (first, *others) = sorted(record["pack"], key=lambda each: each["device"])
    assert (first["model"], first["device"], first["share"]) == ("this model", 0, pytest.approx(0.9))
    assert [(each["device"], each["share"]) for each in others] == [(1, pytest.approx(0.45))] * 2
    assert others[0]["bytes"] == pytest.approx(2 * 13_015_864_320 + 8 * 1280 * 819_200, rel=0.06)
    assert "3 models with room for 8 requests each on 2 x H200; no packing needs fewer" in output(*arguments)


def test_spot_devices_stand_beside_those_on_demand() -> None:
    flags = ["--price-per-hour", "4", "--spot-price", "1.6", "--spot-interruptions", "0.1", "--spot-notice", "600"]
    (record,) = json.loads(output("plan", MIXTRAL, "--gpu", "A100", "--ep", "8", "--json", *flags))
    (spot,) = record["spot"]
    serving = 1 / (1 + 8 * 0.1 * 300 / 3600)
    assert spot["serving"] == pytest.approx(serving)
    assert spot["cost"] == pytest.approx(0.4 * record["best"]["cost_per_million"] / serving)
    assert spot["saving"] == pytest.approx(1 - 0.4 / serving)
    assert spot["pays_below"] == pytest.approx(1.5 * 3600 / (8 * 300))
    assert "it is cheaper below 2.25" in output("plan", MIXTRAL, "--gpu", "A100", "--ep", "8", *flags)


def test_training_has_a_table_by_stage() -> None:
    text = output("train", "sizes", DENSE, "--gpu", "A100", "--devices", "8")
    assert "13 billion parameters on 8 x A100-80GB" in text
    assert "3 (FSDP)" in text
    record = json.loads(output("train", "sizes", DENSE, "--gpu", "A100", "--devices", "8", "--json"))
    assert record["stages"][3]["memory"] == 2 * record["parameters"]  # 16 bytes over 8 devices
    assert record["stages"][3]["sent"] == 1.5 * record["stages"][0]["sent"]
    assert record["flops"] == pytest.approx(6 * 20 * record["parameters"] ** 2)


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, sentence in (
        (["--chunks", "a,b"], "write whole numbers"),
        (["--chunks", "0"], "chunk must be at least 1"),
        (["--stack", "x:y=1"], "has the key 'y'"),
        (["--gpus", "8", "--static"], "leave out what is computed for one"),
        (["--pack", "x*y"], "write MODEL or MODEL"),
        (["--pack", LARGE], "llama-3-70b.json cannot be packed: on 1 x H200 0.0 GB"),
        (["--spot-price", "1"], "give both"),
        (["--spot-price", "0", "--price-per-hour", "3"], "spot price must be above 0"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            app(["plan", MIXTRAL, "--gpu", "H200", *flags], standalone_mode=False)
        assert capsys.readouterr().out == "", "a mistake is found before anything is printed"
