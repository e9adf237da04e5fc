"""A trainer sends weights into a server that runs: the routes of vLLM's that TRL's client uses, over gloo.

What the server answers afterwards is compared with a model that was loaded with these weights. Both compute in float32
and calls of other shapes, so texts of greedy choices are compared and no bits.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.core.plan.transfer import Announced, Meeting
from ridgeline.parallel.broadcast import join
from ridgeline.training.weight_sender import NotObeyed, WeightSender
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import DTYPE, MODEL, PATIENCE, Server, StartServer, start_engine, stop_engine

KEY = "an-operators-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
HERE = "127.0.0.0/8"
PROMPT = list(range(5, 37))  # two blocks, which the prefix cache finds again
NAME = "model.layers.0.mlp.up_proj.weight"
BUFFER = 1 << 21  # so that an update comes in several packs


def others(seed: int) -> dict[str, Tensor]:
    """The embedded model with other numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for path in EMBEDDED_MODEL.glob("*.safetensors"):
        for name, each in load_file(path).items():
            drawn = torch.randn(each.shape, generator=generator)
            found[name] = (each.float() * (1 + 0.3 * drawn)).to(each.dtype)
    return found


def answered(model: Path, folder: Path, tensors: dict[str, Tensor] | None) -> str:
    """The text of a model that is loaded with these weights."""
    if tensors is not None:
        shutil.copytree(model, folder)
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with LLM(folder if tensors is not None else model, dtype=DTYPE, device="cpu", max_model_len=512) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return output.outputs[0].text


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the model answers with its own weights (0) and with those of `others`."""
    folder = tmp_path_factory.mktemp("models")
    found = {seed: answered(EMBEDDED_MODEL, folder / str(seed), others(seed) if seed else None) for seed in range(3)}
    assert len(set(found.values())) == 3
    return found


@pytest.fixture(scope="module")
def own(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("transfer") / "socket"
    process = start_engine(path, max_model_len=512)
    settings: dict[str, Any] = {"admin_key": (KEY,), "weight_transfer": (HERE,), "weight_transfer_timeout": 20.0}
    with start_server(engine=path, **settings) as server:
        yield server
    stop_engine(process)


def ask(server: Server, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_weight_versions": True}
    return httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=PATIENCE)


def told(answer: httpx.Response) -> tuple[str, str]:
    """The text of an answer, and the version that it names."""
    [choice] = answer.json()["choices"]
    return choice["text"], answer.headers["x-weight-version"]


def order(server: Server, path: str, body: object = None, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=HEADERS, timeout=PATIENCE, **options)


def sender(server: Server) -> WeightSender:
    return WeightSender(server.url, KEY, limit=20.0, buffer_bytes=BUFFER)


def restore(server: Server) -> None:
    """Let the server have the weights of the files again."""
    tensors = {name: each for path in EMBEDDED_MODEL.glob("*.safetensors") for name, each in load_file(path).items()}
    trainer = sender(server)
    trainer.send(tensors, "files")
    trainer.close()


def test_sent_weights_answer_as_loaded_ones_do_and_nothing_older_is_found(own: Server, texts: dict[int, str]) -> None:
    assert told(ask(own)) == (texts[0], "0")
    trainer = sender(own)
    assert trainer.send(others(1)) == "1"
    after = ask(own)  # of a prompt that the prefix cache had
    assert told(after) == (texts[1], "1")
    assert after.json()["choices"][0]["weight_versions"] == [{"version": "1", "start": 0, "end": 12}]
    assert after.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = ask(own)
    assert (told(again), again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == ((texts[1], "1"), True)
    assert trainer.send(others(2), "step-2") == "step-2"
    assert told(ask(own)) == (texts[2], "step-2")
    assert httpx.get(f"{own.url}/weight_info", headers=HEADERS).json() == {"weight_version": "step-2"}
    trainer.close()
    restore(own)
    assert told(ask(own)) == (texts[0], "files")


@pytest.mark.dealt
def test_requests_that_are_kept_continue_with_the_new_weights(own: Server) -> None:
    trainer = sender(own)
    with ThreadPoolExecutor(2) as threads:
        going = threads.submit(ask, own, max_tokens=400)
        stream = threads.submit(_streamed, own)
        for _ in range(int(PATIENCE / 0.02)):
            stats = own.api.client.stats
            if stats is not None and stats.running == 2:
                break
            time.sleep(0.02)
        assert order(own, "/pause?mode=keep").json()["is_paused"]
        version = trainer.send(others(1))
        assert not going.done()
        assert httpx.get(f"{own.url}/is_paused", headers=HEADERS).json() == {"is_paused": True}  # as before
        order(own, "/resume")
        spans = going.result().json()["choices"][0]["weight_versions"]
        streamed = stream.result()
    for found in (spans, streamed):
        assert [each["version"] for each in found] == ["files", version]
        assert found[0]["start"] == 0 < found[0]["end"] == found[1]["start"] < found[1]["end"] == 400
    trainer.close()
    restore(own)


def _streamed(server: Server) -> list[dict[str, Any]]:
    body = {"prompt": PROMPT[::-1], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"return_weight_versions": True}, timeout=PATIENCE
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    found: list[dict[str, Any]] = json.loads(lines[-1])["choices"][0]["weight_versions"]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {"model.layers.99.mlp.up_proj.weight": t[NAME]}, "no weights called model.layers.99"),
        (lambda t: {NAME: t[NAME][:-1]}, "up_proj.weight has the shape"),
        (lambda t: {NAME: t[NAME].to(torch.int8)}, "is 'int8', and weights are"),
        (lambda t: {NAME: torch.full_like(t[NAME], float("nan"))}, "numbers that are not finite; the old weights stay"),
    ],
)
def test_tensors_of_another_model_change_nothing(own: Server, texts: dict[int, str], change: Any, words: str) -> None:
    trainer, before = sender(own), told(ask(own))
    with pytest.raises((NotObeyed, ValueError), match=words):
        trainer.send(change(others(1)))
    assert told(ask(own)) == before
    assert before[0] == texts[0]


def test_orders_out_of_turn_are_refused_in_a_sentence(own: Server) -> None:
    trainer = sender(own)
    info = {"names": [NAME], "dtype_names": ["float32"], "shapes": [[4, 4]]}
    for path, body, words in (
        ("/update_weights", {"update_info": info}, "no update of the weights was begun"),
        ("/finish_weight_update", None, "no update of the weights is under way"),
    ):
        answer = order(own, path, body)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (409, True), answer.text
    assert order(own, "/start_weight_update", {}).status_code == 200
    for path, words in (
        ("/start_weight_update", "finish it before another begins"),
        ("/init_weight_transfer_engine", "are being replaced"),
        ("/resume", "are being replaced"),
        ("/sleep", "are being replaced"),
        ("/reload_weights", "are being replaced"),
    ):
        body = {"init_info": _info()} if "init" in path else None
        answer = order(own, path, body)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (409, True), answer.text
    unlike = order(own, "/update_weights", {"update_info": info | {"shapes": []}})
    assert "1 names, 1 dtype_names and 0 shapes" in unlike.json()["error"]["message"]
    with ThreadPoolExecutor(1) as threads:  # a request meanwhile waits
        waits = threads.submit(ask, own)
        time.sleep(0.3)
        assert not waits.done()
        done = order(own, "/finish_weight_update")
        assert done.json()["weight_version"] == ask(own).headers["x-weight-version"]  # nothing was written
        assert waits.result().status_code == 200
    trainer.close()


def _info(**fields: Any) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2} | fields


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"master_address": "10.1.2.3"}, 403, "in none of the ranges"),
        ({"master_address": "::ffff:10.1.2.3"}, 403, "in none of the ranges"),
        ({"master_address": "localhost"}, 400, "send the number of the trainer's machine"),
        ({"world_size": 4097}, 400, "world_size"),
        ({"rank_offset": 2}, 400, "must be rank_offset 2 and 1 workers or more"),
        ({"master_port": 0}, 400, "master_port"),
        ({"unknown": 1}, 400, "unknown"),
    ],
)
def test_trainers_elsewhere_are_not_met(own: Server, fields: dict[str, Any], status: int, words: str) -> None:
    answer = order(own, "/init_weight_transfer_engine", {"init_info": _info(**fields)})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


def test_the_routes_are_closed_without_the_option_and_without_the_key(own: Server, start_server: StartServer) -> None:
    routes = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
    for path in routes:
        assert httpx.post(own.url + path, json={}).status_code == 401
    assert httpx.get(f"{own.url}/get_world_size").status_code == 401
    with start_server(admin_key=(KEY,)) as server:
        for path in routes:
            answer = order(server, path, {})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "weight_transfer_needed")
        assert "x-weight-version" not in ask(server).headers
    with start_server() as server:
        assert httpx.post(f"{server.url}/update_weights", json={}).status_code == 403


@pytest.mark.dealt
def test_an_update_that_nobody_continues_is_given_up(start_server: StartServer, tmp_path: Path) -> None:
    process = start_engine(tmp_path / "s", max_model_len=512)
    settings: dict[str, Any] = {"admin_key": (KEY,), "weight_transfer": (HERE,), "weight_transfer_timeout": 2.0}
    with start_server(engine=tmp_path / "s", **settings) as server:
        before = told(ask(server))
        late = order(server, "/init_weight_transfer_engine", {"init_info": _info(master_port=_closed_port())})
        assert (late.status_code, "could not be met" in late.text) == (409, True), late.text
        never = order(server, "/start_weight_update")
        assert (never.status_code, "no trainer was met" in never.text) == (409, True)
        trainer = WeightSender(server.url, KEY, limit=20.0)
        assert order(server, "/start_weight_update").status_code == 200
        assert told(ask(server)) == before  # it waits, until the update is given up
        gone = order(server, "/finish_weight_update")
        assert gone.status_code == 409
        trainer.close()
    stop_engine(process)


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_trainer_that_dies_midway_ends_the_engine_and_not_with_a_mixture(
    start_server: StartServer, tmp_path: Path
) -> None:
    process = start_engine(tmp_path / "s", max_model_len=512)
    settings: dict[str, Any] = {"admin_key": (KEY,), "weight_transfer": (HERE,), "weight_transfer_timeout": 20.0}
    with start_server(engine=tmp_path / "s", **settings) as server:
        tensors = others(1)
        meeting = Meeting("127.0.0.1", _closed_port(), 1, 2, 20.0)
        info = _info(master_port=meeting.port, packed=True, packed_buffer_size_bytes=BUFFER)
        with ThreadPoolExecutor(3) as threads:
            met = threads.submit(join, meeting, 0, torch.device("cpu"))
            assert order(server, "/init_weight_transfer_engine", {"init_info": info}).status_code == 200
            peers = met.result()
            going = threads.submit(ask, server, max_tokens=400)
            time.sleep(0.3)
            assert order(server, "/start_weight_update").status_code == 200
            names = [str(each.dtype).removeprefix("torch.") for each in tensors.values()]
            shapes = [list(each.shape) for each in tensors.values()]
            announced = Announced.of(list(tensors), names, shapes, BUFFER)
            update = {"names": list(tensors), "dtype_names": names, "shapes": shapes}
            torn = threads.submit(order, server, "/update_weights", {"update_info": update})
            packs = list(announced.packs())
            for pack in packs[: len(packs) // 2]:
                parts = [tensors[each.name].contiguous().view(-1).view(torch.uint8) for each in pack]
                peers.send(torch.cat(parts)).wait()
            peers.close()
            del peers
            answer = torn.result()
            assert answer.status_code in (409, 503), answer.text
            assert process.wait(PATIENCE) == 3  # what its supervisor starts again
            assert going.result().status_code == 503
    stop_engine(process)


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_take_their_shares(
    start_server: StartServer, tmp_path: Path, texts: dict[int, str], tp: int, pp: int
) -> None:
    process = start_engine(tmp_path / "s", max_model_len=512, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    settings: dict[str, Any] = {"admin_key": (KEY,), "weight_transfer": (HERE,), "weight_transfer_timeout": 20.0}
    with start_server(engine=tmp_path / "s", **settings) as server:
        assert httpx.get(f"{server.url}/get_world_size", headers=HEADERS).json() == {"world_size": 2}
        trainer = sender(server)
        trainer.send(others(1))
        assert told(ask(server)) == (texts[1], "1")
        with pytest.raises(NotObeyed, match="no weights called x"):
            trainer.send({"x": torch.zeros(2)})
        assert told(ask(server)) == (texts[1], "1")
        trainer.close()
    stop_engine(process)


def test_what_trl_reads_of_the_servers_settings(own: Server) -> None:
    found = httpx.get(f"{own.url}/server_info", params={"config_format": "json"}, headers=HEADERS).json()["vllm_config"]
    assert found["weight_transfer_config"] == {"backend": "gloo"}
    assert found["model_config"] == {"model": MODEL, "dtype": "torch.float32", "max_model_len": 512}


def test_threads_end(own: Server) -> None:
    """What a refused trainer began does not stay."""
    for _ in range(int(PATIENCE / 0.1)):
        if not any(thread.name == "weights" for thread in threading.enumerate()):
            return
        time.sleep(0.1)
    pytest.fail("a trainer's thread runs on")
