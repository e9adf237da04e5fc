"""TLS between clients, the router and its servers."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import httpx
import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.routing import RouteConfig
from ridgeline.serving.router.run import run
from ridgeline.serving.router.workers import tls_of
from tests.serving.routing.running import FakeWorker, routing, wait_for

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Key and certificate of 127.0.0.1, which signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, file = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", file, "-days", "2"]
    subprocess.run(
        [*command, "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True
    )
    return key, file


def test_clients_and_servers_can_both_have_tls(pair: tuple[str, str]) -> None:
    key, file = pair
    worker = FakeWorker(pair=pair)
    try:
        with routing(worker, worker_ca_certs=file, ssl_keyfile=key, ssl_certfile=file) as router:
            with httpx.Client(verify=ssl.create_default_context(cafile=file)) as client:
                assert client.post(router.url + CHAT, json={}).json()["pid"] == worker.process.pid
                with client.stream("POST", router.url + CHAT, json={"stream": True, "pieces": 3}) as answer:
                    assert len([line for line in answer.iter_lines() if line]) == 4
            with pytest.raises(httpx.ConnectError, match="certificate"):
                httpx.get(router.url + "/health")
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{router.port}/health")
        with routing(worker, ready=False) as router:  # the system's certificates do not sign this one
            wait_for(lambda: "certificate" in router.app.workers.each[0].why)
            assert httpx.post(router.url + CHAT, json={}).status_code == 503
    finally:
        worker.close()


def test_files_that_are_no_certificates_are_named(tmp_path, pair: tuple[str, str]) -> None:
    key, file = pair
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    urls = ("https://127.0.0.1:1",)
    with pytest.raises(InvalidConfig, match=r"wrong\.pem cannot be used"):
        tls_of(RouteConfig(worker_urls=urls, worker_ca_certs=str(wrong)))
    with pytest.raises(InvalidConfig, match=r"none\.pem cannot be used"):
        tls_of(RouteConfig(worker_urls=urls, worker_ca_certs="none.pem"))
    with pytest.raises(InvalidConfig, match=r"wrong\.pem and .* cannot be used as certificate and key"):
        run(RouteConfig(worker_urls=urls, ssl_certfile=str(wrong), ssl_keyfile=key))
    with pytest.raises(InvalidConfig, match="ssl_keyfile and ssl_certfile belong together"):
        RouteConfig(worker_urls=urls, ssl_certfile=file)
    with pytest.raises(InvalidConfig, match="worker_ca_certs is for workers at https"):
        RouteConfig(worker_urls=("http://127.0.0.1:1",), worker_ca_certs=file)
