"""A spot machine is announced to end: the notice of each cloud, and what a server's clients see of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from deploy.spot.watch import CLOUDS, METADATA, NOTICE, Drain
from ridgeline.serving.processes.supervisor import MARGIN

WATCH = Path(__file__).parents[2] / "deploy" / "spot" / "watch.py"
TOKENS = 200


class Metadata(BaseHTTPRequestHandler):
    """The metadata services of three clouds, as they document them."""

    notice = False

    def do_PUT(self) -> None:
        life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.say(200 if life and self.path == "/latest/api/token" else 400, "token-1")

    def do_GET(self) -> None:
        if self.path == "/latest/meta-data/spot/instance-action":
            allowed = self.headers.get("X-aws-ec2-metadata-token") == "token-1"
            told = json.dumps({"action": "terminate", "time": "2026-01-01T00:02:00Z"})
            self.say(401 if not allowed else 200 if self.notice else 404, told)
        elif self.path == "/computeMetadata/v1/instance/preempted":
            allowed = self.headers.get("Metadata-Flavor") == "Google"
            self.say(200 if allowed else 403, "TRUE" if self.notice else "FALSE")
        elif self.path.startswith("/metadata/scheduledevents?api-version="):
            kinds = ["Freeze", *(["Preempt"] if self.notice else [])]
            events = [{"EventId": str(place), "EventType": kind} for place, kind in enumerate(kinds)]
            self.say(200 if self.headers.get("Metadata") == "true" else 400, json.dumps({"Events": events}))
        else:
            self.say(500, "")

    def say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    Metadata.notice = False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_the_notice_of_each_cloud_is_seen_when_it_comes(metadata: str, cloud: str) -> None:
    assert not CLOUDS[cloud](metadata)
    Metadata.notice = True
    assert CLOUDS[cloud](metadata)
    assert not CLOUDS[cloud]("http://127.0.0.1:9"), "nobody answers there"
    assert NOTICE.keys() == METADATA.keys() == CLOUDS.keys()


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_the_metadata_service_is_asked_without_a_proxy(
    metadata: str, cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy of the environment would ask its own machine, if it let such an address through at all."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Metadata.notice = True
    program = f"from deploy.spot.watch import CLOUDS; raise SystemExit(not CLOUDS[{cloud!r}]({metadata!r}))"
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=WATCH.parents[2], timeout=60, check=False).returncode == 0
    )


def test_requests_finish_within_the_notice_and_new_ones_are_sent_away(metadata: str) -> None:
    (drain,) = re.findall(r"--shutdown-timeout (\d+)", WATCH.read_text())[:1]
    assert int(drain) + 2 * MARGIN < NOTICE["aws"]
    command = [sys.executable, "-m", "ridgeline", "serve", "--port", "0", "--shutdown-timeout", drain]
    watched = [sys.executable, str(WATCH), "aws", "--metadata", metadata, "--", *command]
    process = subprocess.Popen(watched, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = re.findall(r"http://\S+", process.stdout.readline())[0] + "/v1/completions"
        asked = {"prompt": "x =", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", url, json=asked, timeout=NOTICE["aws"]) as answer:
            lines = answer.iter_lines()
            events = [next(line for line in lines if line.startswith("data: "))]
            Metadata.notice, announced = True, time.monotonic()
            while (new := httpx.post(url, json={"prompt": "x", "max_tokens": 1}, timeout=NOTICE["aws"])).is_success:
                assert time.monotonic() - announced < NOTICE["aws"], "the notice was not seen"
                time.sleep(0.02)
            events += [line for line in lines if line.startswith("data: ")]
        assert (new.status_code, int(new.headers["retry-after"]) > 0) == (503, True)
        assert events.pop() == "data: [DONE]"
        choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
        assert sum(len(choice["token_ids"]) for choice in choices) == TOKENS
        assert process.wait(NOTICE["aws"]) == 0
        assert time.monotonic() - announced < NOTICE["aws"]
    finally:
        process.terminate()
        process.wait(NOTICE["aws"])


def test_signals_and_exit_codes_pass_through(metadata: str) -> None:
    def run(*command: str) -> subprocess.Popen[str]:
        watched = [sys.executable, str(WATCH), "gcp", "--metadata", metadata, "--", *command]
        return subprocess.Popen(watched, stdout=subprocess.PIPE, text=True)

    assert run("sh", "-c", "exit 3").wait(60) == 3
    stopped = run(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
    assert stopped.stdout is not None
    assert stopped.stdout.readline() == "up\n"
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 128 + signal.SIGTERM


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize(("folder", "cloud"), [("kubernetes-spot", "aws"), ("kubernetes-spot-short", "azure")])
def test_pods_on_spot_nodes_end_within_the_notice(folder: str, cloud: str) -> None:
    command = ["kubectl", "kustomize", str(WATCH.parents[1] / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    found = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    for document in found.values():
        kubernetes_validate.validate(document, "1.35", strict=True)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    grace, before = pod["terminationGracePeriodSeconds"], container["lifecycle"]["preStop"]["sleep"]["seconds"]
    (drain,) = (int(each.partition("=")[2]) for each in container["args"] if each.startswith("--shutdown-timeout="))
    assert before + drain + 2 * MARGIN < grace < NOTICE[cloud]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {each["key"] for each in pod["tolerations"]} >= {"nvidia.com/gpu", "cloud.google.com/gke-spot"}
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == found["Deployment"]["spec"]["selector"]["matchLabels"]


def test_a_notice_and_the_signal_behind_it_are_one() -> None:
    """A server that gets a second SIGTERM ends its requests at once."""
    sent: list[int] = []
    drain = Drain(SimpleNamespace(send_signal=sent.append))  # type: ignore[arg-type]
    drain.begin()
    drain.pass_on(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM]
    drain.pass_on(signal.SIGTERM, None)
    drain.pass_on(signal.SIGINT, None)
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
