"""TRL's clients against the server: rollouts, log-probabilities, and weights that move; and what verl's rollouts send.

TRL takes the trainer's end of a transfer from vLLM, which needs a GPU, so it runs over gloo (`vllm_half.py`). What TRL
sent is kept in `sent/trl.json`, and sent again here where TRL is not installed. The record is TRL's 1.16.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.clients import vllm_half
from tests.serving.clients.asked import needing
from tests.serving.clients.bodies import BODIES
from tests.serving.conftest import PATIENCE, Server, StartServer, start_engine, stop_engine

KEY = "an-operators-key"
RECORD = BODIES / "trl.json"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CONVERSATION = [{"role": "user", "content": "def add(a, b):"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def trained(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server to which weights may be sent."""
    path = tmp_path_factory.mktemp("trl") / "socket"
    process = start_engine(path, max_model_len=512, max_logprobs=-1)
    settings: dict[str, Any] = {"admin_key": (KEY,), "weight_transfer": ("127.0.0.0/8",)}
    with start_server(engine=path, weight_transfer_timeout=60.0, **settings) as server:
        yield server
    stop_engine(process)


def weights() -> dict[str, Tensor]:
    return {name: each for path in EMBEDDED_MODEL.glob("*.safetensors") for name, each in load_file(path).items()}


class Policy(nn.Module):
    """What TRL asks of the model that it trains: parameters under the checkpoint's names, which have dots."""

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, each in weights().items():
            yield name, nn.Parameter(each * 1.25)


@needing("trl")
def test_trls_client(trained: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_half.install(tmp_path)
    import requests
    from trl.generation.vllm_client import VLLMClient

    sent: list[dict[str, Any]] = []
    send = requests.Session.send

    def noting(self: Any, request: Any, **options: Any) -> Any:
        answer = send(self, request, **options)
        body = json.loads(request.body) if request.body else None
        sent.append({"method": request.method, "path": request.path_url, "body": body, "status": answer.status_code})
        return answer

    monkeypatch.setattr(requests.Session, "send", noting)
    url = trained.url.replace("http://", f"http://trl:{KEY}@")  # a key where TRL has no option for one
    client = VLLMClient(base_url=url, group_port=vllm_half.get_open_port())
    drawn = client.generate(["import os\n", "x = "], n=2, max_tokens=4)
    assert (len(drawn["prompt_ids"]), [len(each) for each in drawn["completion_ids"]]) == (2, [4] * 4)
    assert all(len(step) == 1 and step[0] <= 0 for row in drawn["logprobs"] for step in row)
    drawn = client.generate([[5, 6, 7], [8, 9]], max_tokens=4, top_k=5, min_p=0.1, repetition_penalty=1.1, logprobs=3)
    assert drawn["prompt_ids"] == [[5, 6, 7], [8, 9]]
    assert all(len(step) >= 3 for row in drawn["logprobs"] for step in row)
    drawn = client.generate(["x = "], max_tokens=6, structured_outputs_regex="[0-9]{2}", generation_kwargs={"seed": 1})
    assert len(drawn["completion_ids"][0]) == 3
    assert client.generate(["x = "], max_tokens=2, logprobs=None)["logprobs"] is None
    drawn = client.chat([CONVERSATION, CONVERSATION], n=2, max_tokens=3, tools=[TOOL])
    assert [len(each) for each in drawn["completion_ids"]] == [3] * 4
    scored = client.get_sequence_logprobs([[5, 6, 7, 8], [9, 10, 11]], [2, 1], top_logprobs=5)
    assert [[len(step) for step in row] for row in scored["logprobs"]] == [[5, 5], [5, 5]]
    assert scored["actual_token_ids"] == [[[7], [8]], [[10], [11]]]
    client.init_communicator(device="cuda")
    client.update_model_params(Policy())
    assert _version(trained) == "1"
    with client.weight_update():
        for name, each in list(weights().items())[:3]:
            client.update_named_param(name, each)
    client.reset_prefix_cache()
    assert (_version(trained), client.generate([[5, 6]], max_tokens=1)["prompt_ids"]) == ("2", [[5, 6]])
    client.close_communicator()
    assert all(each["status"] == 200 for each in sent), [each for each in sent if each["status"] != 200]
    if os.environ.get("RIDGELINE_RECORD"):
        RECORD.write_text(json.dumps([each for each in sent if each.pop("status")], indent=1) + "\n")


@needing("trl")
def test_trls_asynchronous_client(trained: Server, tmp_path: Path) -> None:
    vllm_half.install(tmp_path)
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    PartialState(cpu=True)  # without which TRL's log refuses to speak
    client = VLLMClient(trained.url.replace("http://", f"http://trl:{KEY}@"))
    named = {name: each * 0.75 for name, each in weights().items()}
    info = {
        "names": list(named),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in named.values()],
        "shapes": [list(each.shape) for each in named.values()],
    }
    before, transfer = _version(trained), WeightTransferClient(client, info, weight_sync_timeout=60)
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(named.items()))
    assert httpx.get(f"{trained.url}/is_paused", headers=HEADERS).json() == {"is_paused": True}
    transfer.resume()
    assert _version(trained) != before
    assert (client.get_max_model_len(), client.get_dtype()) == (512, "torch.float32")
    transfer.destroy()


def _version(server: Server) -> str:
    version: str = httpx.get(f"{server.url}/weight_info", headers=HEADERS).json()["weight_version"]
    return version


def test_what_trl_sent_is_answered_as_it_was(trained: Server) -> None:
    """The orders about weights too, beside a trainer that sends them."""
    trainer: vllm_half.Communicator | None = None
    tensors, before = weights(), _version(trained)
    with ThreadPoolExecutor(1) as threads:
        for kept in json.loads(RECORD.read_text()):
            body, beside = kept["body"], None
            if kept["path"] == "/init_weight_transfer_engine":
                body["init_info"]["master_port"] = vllm_half.get_open_port()
                beside = threads.submit(vllm_half.trainer_init, body["init_info"])
            if kept["path"] == "/update_weights":
                assert trainer is not None
                named = [(name, tensors[name]) for name in body["update_info"]["names"]]
                beside = threads.submit(
                    vllm_half.packed_nccl_broadcast_producer, iter(named), trainer, 0, lambda item: item[1]
                )
            answer = httpx.request(kept["method"], trained.url + kept["path"], json=body, headers=HEADERS, timeout=60)
            assert answer.status_code == 200, (kept["path"], answer.text)
            if beside is not None:
                found = beside.result(PATIENCE)
                trainer = found if isinstance(found, vllm_half.Communicator) else trainer
            _check(kept["path"], body, answer)
    assert _version(trained) == str(int(before) + 2)


def _check(path: str, body: Any, answer: httpx.Response) -> None:
    """Check the parts of an answer that TRL reads."""
    if path == "/v1/completions" and "prompt_logprobs" in body:
        for choice, ids in zip(answer.json()["choices"], body["prompt"], strict=True):
            assert len(choice["prompt_logprobs"]) == len(ids)
            assert str(ids[-1]) in choice["prompt_logprobs"][-1]
            assert {"rank", "logprob"} <= choice["prompt_logprobs"][-1][str(ids[-1])].keys()
    elif path in ("/v1/completions", "/v1/chat/completions"):
        choices = answer.json()["choices"]
        prompts = body.get("prompt", [None])
        assert len(choices) == len(prompts) * body["n"]
        for choice in choices:
            logprobs = choice["logprobs"]
            if logprobs is not None:
                named = logprobs.get("tokens") or [each["token"] for each in logprobs["content"]]
                assert named == [f"token_id:{token}" for token in choice["token_ids"]]


def test_what_verls_rollouts_send(trained: Server) -> None:
    """Chats by plain HTTP, whose later turns find their server by the id that an answer has."""
    body = {"model": trained.api.names[0], "messages": CONVERSATION, "tools": [], "n": 1, "max_completion_tokens": 4}
    body |= {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "seed": 3}
    headers = {"x-request-id": "0123456789abcdef0123456789abcdef"}
    answer = httpx.post(f"{trained.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == f"chatcmpl-{headers['x-request-id']}"
    assert len(answer.json()["choices"][0]["logprobs"]["content"]) == 4
    assert "x-weight-version" in answer.headers
