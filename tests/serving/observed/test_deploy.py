"""What is shipped for Prometheus and Grafana: right by Prometheus' own tool, and about metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian's package prometheus)")

OURS = re.compile(r"\b(?:ridgeline|vllm):\w+")


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=DEPLOY, check=False
    )


def samples() -> dict[str, set[str]]:
    """Name of each sample of the metrics page → its labels."""
    found = {}
    for name, kind, labels in (line.split(" ") for line in GOLDEN.read_text().splitlines()):
        names = set(labels.strip("{}").split(",")) - {""}
        if kind == "histogram":
            found |= {f"{name}_bucket": names | {"le"}, f"{name}_sum": names, f"{name}_count": names}
        else:
            found[name] = names
    return found


def panel_queries() -> Iterator[tuple[str, str]]:
    board = json.loads((DEPLOY / "grafana" / "ridgeline.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_query_is_about_metrics_that_exist_with_labels_they_have() -> None:
    known = samples()
    queries = [*panel_queries(), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())]
    for where, query in queries:
        for found in OURS.finditer(query):
            assert found[0] in known, f"{where} asks for {found[0]}"
            selector = re.match(r"\{([^}]*)\}", query[found.end() :])
            labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector[1] if selector else ""))
            assert labels <= known[found[0]] | {"instance", "job"}, f"{where}: {found[0]} has no {labels}"
        for label in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r",\s*", label)) <= {"le", "instance", "job", "finished_reason", "model_name"}
    assert len({metric for _, query in queries for metric in OURS.findall(query)}) > 25


def test_every_kind_of_trouble_has_an_alert_with_a_history_that_raises_it() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    raised = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    silent = {case["alertname"] for test in tests for case in test["alert_rule_test"] if not case.get("exp_alerts")}
    assert alerts == raised
    assert alerts - silent <= {"RidgelineFirstTokenBudgetBurns"}, "that one's test has an instance that keeps quiet"
    assert len(alerts) == 8


@with_promtool
def test_promtool_accepts_configuration_and_rules_and_the_rules_do_as_they_say() -> None:
    for command in (
        ("check", "config", "prometheus/prometheus.yml"),
        ("check", "rules", "prometheus/rules.yml"),
        ("test", "rules", "prometheus/rules_test.yml"),
    ):
        done = promtool(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.mark.dealt
@with_promtool
def test_an_alert_that_never_fires_would_be_noticed(tmp_path: Path) -> None:
    written = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    alerts = [rule for group in written["groups"] for rule in group["rules"] if "alert" in rule]
    for rule in alerts:
        rule["expr"] = f"({rule['expr']}) and on () vector(0) > 1"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(written))
    shutil.copy(DEPLOY / "prometheus" / "rules_test.yml", tmp_path)
    done = promtool("test", "rules", tmp_path / "rules_test.yml")
    assert done.returncode != 0
    missed = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
    assert missed == {rule["alert"] for rule in alerts}


@with_promtool
def test_prometheus_can_read_the_queries_of_the_board(tmp_path: Path) -> None:
    """As rules, with Grafana's variables filled in."""

    def filled(query: str) -> str:
        return query.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")

    written = [{"record": f"q:{i}", "expr": filled(query)} for i, (_, query) in enumerate(panel_queries())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": written}]}))
    done = promtool("check", "rules", tmp_path / "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(written)} rules found" in done.stdout


def test_the_board_is_laid_out_without_overlap_or_gap_in_its_ids() -> None:
    panels = json.loads((DEPLOY / "grafana" / "ridgeline.json").read_text())["panels"]
    assert sorted(panel["id"] for panel in panels) == list(range(1, len(panels) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
