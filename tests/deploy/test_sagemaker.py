"""SageMaker's contract with a container: the argument `serve`, GET /ping and POST /invocations on port 8080."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.sagemaker.create_endpoint import invocation, requests_for
from ridgeline.serving.processes.supervisor import MARGIN
from ridgeline.weights.folder import EMBEDDED_MODEL

FOLDER = Path(__file__).parents[2] / "deploy" / "sagemaker"
DOCKERFILE, SCRIPT = (FOLDER / "Dockerfile").read_text(), FOLDER / "serve"
KILLED_AFTER = 30  # seconds after SIGTERM, as SageMaker's documentation says
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
TEXT, CHAT = {"prompt": "def f(", **GREEDY}, {"messages": [{"role": "user", "content": "x ="}], **GREEDY}


@dataclass
class Container:
    process: subprocess.Popen[str]
    url: str
    said: str

    def invoke(self, body: dict[str, Any], path: str = "/invocations") -> httpx.Response:
        """The headers are those that SageMaker passes on."""
        headers = {"Content-Type": "application/json", "X-Amzn-SageMaker-Custom-Attributes": "trace=1"}
        return httpx.post(self.url + path, content=json.dumps(body), headers=headers, timeout=120)


def environment(folder: Path, port: int, model: Path) -> dict[str, str]:
    """`ridgeline` on the PATH is this tree's, as the image has it."""
    command = folder / "ridgeline"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ridgeline "$@"\n')
    command.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SAGEMAKER_BIND_TO_PORT": str(port), "SM_MODEL_DIR": str(model)}


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """The image's program with a model's archive unpacked, and settings beside its files."""
    folder = tmp_path_factory.mktemp("sagemaker")
    model = folder / "model"
    model.mkdir()
    for file in EMBEDDED_MODEL.iterdir():
        (model / file.name).symlink_to(file)
    (model / "ridgeline.yaml").write_text("served_model_name: mine\nmax_model_len: 256\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([SCRIPT], env=environment(folder, port, model), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("Ready"), said or "it ended; its standard error says why"
        yield Container(process, f"http://127.0.0.1:{port}", said)
    finally:
        process.kill()
        process.wait()


def test_the_image_runs_serve_on_the_port_of_the_contract() -> None:
    assert re.search(r"^COPY --chmod=755 serve /opt/ridgeline/bin/serve$", DOCKERFILE, re.M), "on the image's PATH"
    assert re.search(r"^ENTRYPOINT \[\]$", DOCKERFILE, re.M), "or `serve` would be a model's name"
    assert os.access(SCRIPT, os.X_OK)
    (port,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.M)
    assert f"SAGEMAKER_BIND_TO_PORT:-{port}" in SCRIPT.read_text()
    assert f"http://127.0.0.1:{port}/ping" in DOCKERFILE
    assert port == "8080"


def test_it_is_well_and_serves_the_archives_model_with_its_settings(container: Container) -> None:
    assert httpx.get(f"{container.url}/ping", timeout=2).status_code == 200  # SageMaker waits for two seconds
    assert container.said.startswith("Ready: mine at http://0.0.0.0:")
    (model,) = httpx.get(f"{container.url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("mine", 256)


@pytest.mark.parametrize(("body", "path"), [(TEXT, "/v1/completions"), (CHAT, "/v1/chat/completions")])
def test_invocations_answer_as_the_route_of_the_bodys_fields(
    container: Container, body: dict[str, Any], path: str
) -> None:
    here, there = container.invoke(body), container.invoke(body, path)
    assert here.status_code == there.status_code == 200, here.text
    assert [here.json()[name] for name in ("object", "choices")] == [there.json()[n] for n in ("object", "choices")]
    streams = [container.invoke({**body, "stream": True}, each) for each in ("/invocations", path)]
    assert {each.headers["content-type"].partition(";")[0] for each in streams} == {"text/event-stream"}
    own, other = (
        [line.removeprefix("data: ") for line in each.text.splitlines() if line.startswith("data: ")]
        for each in streams
    )
    assert own[-1] == other[-1] == "[DONE]"
    assert len(own) > 3
    assert texts(own) == texts(other) == text(here.json()["choices"][0])


def text(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or "")


def texts(events: list[str]) -> str:
    return "".join(text(choice) for event in events[:-1] for choice in json.loads(event)["choices"])


def test_a_wrong_body_is_refused_by_the_field_at_fault(container: Container) -> None:
    for body, field in (({**CHAT, "temperature": -1}, "temperature"), ({**TEXT, "top_p": 7}, "top_p")):
        refused = container.invoke(body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    refused = container.invoke({"inputs": "x", "parameters": {}})
    assert refused.status_code == 400
    assert container.invoke({**TEXT, "model": "other"}).status_code == 404


def test_boto3_would_send_these_calls() -> None:
    """By botocore's model of the services, which refuses unknown names, wrong types and values too short."""
    session = pytest.importorskip("botocore.session").get_session()
    from botocore.validate import validate_parameters

    services = {name: session.get_service_model(name) for name in ("sagemaker", "sagemaker-runtime")}
    operations = {"create_model": "CreateModel", "create_endpoint_config": "CreateEndpointConfig"}
    operations["create_endpoint"] = "CreateEndpoint"
    calls = requests_for("name", "1.dkr.ecr.eu-west-1.amazonaws.com/r:1", f"arn:aws:iam::{'1' * 12}:role/r", "s3://b/m")
    assert calls.keys() == operations.keys()
    for call, arguments in calls.items():
        validate_parameters(arguments, services["sagemaker"].operation_model(operations[call]).input_shape)
    for operation in ("InvokeEndpoint", "InvokeEndpointWithResponseStream"):
        shape = services["sagemaker-runtime"].operation_model(operation).input_shape
        validate_parameters(invocation("name", CHAT), shape)
    with pytest.raises(Exception, match="Missing required parameter"):
        validate_parameters({}, services["sagemaker"].operation_model("CreateModel").input_shape)


def test_a_model_that_is_not_there_ends_the_container_with_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPT], env=environment(tmp_path, 1, tmp_path / "model"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert str(tmp_path / "model") in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_ends_it_before_sagemaker_does(container: Container) -> None:  # the last one
    (drain,) = re.findall(r"--shutdown-timeout (\d+)", SCRIPT.read_text())
    assert int(drain) + 2 * MARGIN < KILLED_AFTER
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(KILLED_AFTER) == 0
