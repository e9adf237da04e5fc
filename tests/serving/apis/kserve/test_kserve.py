"""KServe v2 over HTTP: what plain HTTP and Triton's own client get is what OpenAI's routes give; and repositories."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ridgeline.cli.serve import from_repository
from ridgeline.core.errors import InvalidConfig
from ridgeline.serving.repository.folder import read_repository
from ridgeline.serving.repository.pbtxt import read_pbtxt
from ridgeline.serving.repository.queue import Queue, read_queue
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.version import __version__
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.serving.figures import Slo
from ridgeline_bench.serving.session import Sending, Session
from ridgeline_bench.serving.work import Lengths, Work
from tests.serving.clients.asked import needing
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread

GREEDY = {"max_tokens": 12, "temperature": 0}
PROMPT = "The sum of 2 and 3 is"
JSON_CONTENT = {"content-type": "application/json"}


def post(server: Server, path: str, body: Any = None, **more: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v2{path}", timeout=PATIENCE, **({"json": body} if body is not None else {}), **more
    )


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}/v2{path}", timeout=PATIENCE)


def infer_body(*inputs: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    return {"inputs": list(inputs) or [text], "parameters": GREEDY | parameters}


@pytest.fixture(scope="module")
def want(server: Server) -> str:
    return server.client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY).choices[0].text  # type: ignore[call-overload]


def test_bench_serve_measures_its_streams(server: Server) -> None:
    """Over the route that Triton has too, where texts are words and streams end without a mark."""
    work = Work(count=3, text=True, input_len=Lengths.parse("6", ""), output_len=Lengths.parse("9", ""))
    fields = {"ignore_eos": True, "temperature": 0}
    sending = Sending(rates=[math.inf], slo=Slo.parse("ttft=60000"), fields=fields, timeout=PATIENCE)
    session = Session.begin(server.url, MODEL, work, sending)
    assert (session.server.engine, session.server.version) == ("ridgeline", __version__)
    [point] = session.measure()
    assert (point.num_completed, point.errors) == (3, {})
    assert 0 < round(point.output_rate * point.duration) <= 3 * 9, "pieces with text"
    assert not point.exact
    assert point.goodput is not None
    assert point.goodput > 0
    with pytest.raises(InvalidConfig, match="give --model"):
        Session.begin(server.url, "", work, sending)
    with pytest.raises(InvalidConfig, match="404"):
        Session.begin(server.url, "other", work, sending)


def test_the_server_and_its_model_describe_themselves(server: Server) -> None:
    told = get(server, "").json()
    assert (told["name"], told["version"]) == ("ridgeline", __version__)
    assert get(server, "/health/live").json() == {"live": True}
    assert get(server, "/health/ready").json() == {"ready": True}
    for path in (f"/models/{MODEL}", f"/models/{MODEL}/versions/1"):
        assert get(server, path).json() == {
            "name": MODEL,
            "versions": ["1"],
            "platform": "ridgeline",
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}],
            "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
        }
        assert get(server, f"{path}/ready").json() == {"name": MODEL, "ready": True}
    for path in (
        "/models/none",
        "/models/none/ready",
        f"/models/{MODEL}/versions/2",
        f"/models/{MODEL}/versions/2/ready",
    ):
        answer = get(server, path)
        assert (answer.status_code, type(answer.json()["error"])) == (404, str)


def test_infer_gives_the_text_of_a_completion(server: Server, want: str) -> None:
    for path in (f"/models/{MODEL}/infer", "/models/alias/versions/1/infer"):
        answer = post(server, path, {"id": "seven", **infer_body()}).json()
        assert answer["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [want]}]
        assert (answer["id"], answer["model_version"]) == ("seven", "1")
        assert answer["parameters"]["finish_reason"] in ("stop", "length")
        assert answer["parameters"]["completion_tokens"] == 12
    nested = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [[PROMPT]]}
    assert post(server, f"/models/{MODEL}/infer", infer_body(nested)).json()["outputs"][0]["data"] == [want]


def test_tensors_may_come_and_go_as_bytes(server: Server, want: str) -> None:
    element = struct.pack("<I", len(PROMPT)) + PROMPT.encode()
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(element)}}
    body = infer_body(tensor)
    body["outputs"] = [{"name": "text_output", "parameters": {"binary_data": True}}]
    head = json.dumps(body).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = post(server, f"/models/{MODEL}/infer", content=head + element, headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    told, data = json.loads(answer.content[:length]), answer.content[length:]
    assert told["outputs"][0]["parameters"] == {"binary_data_size": len(data)}
    assert data == struct.pack("<I", len(want.encode())) + want.encode()
    for length in (len(head) + len(element) + 1, len(head) - 1):
        wrong = post(
            server,
            f"/models/{MODEL}/infer",
            content=head + element,
            headers={"inference-header-content-length": str(length)},
        )
        assert wrong.status_code == 400


def test_generate_answers_whole_and_in_pieces(server: Server, want: str) -> None:
    for body in (
        {"text_input": PROMPT, **GREEDY, "bad_words": "", "stop_words": ""},
        {"text_input": PROMPT, "parameters": {**GREEDY, "stream": False}},
        {"text_input": [PROMPT], "id": "x", **GREEDY},
    ):
        answer = post(server, f"/models/{MODEL}/generate", body).json()
        assert (answer["model_name"], answer["model_version"], answer["text_output"]) == (MODEL, "1", want)
        assert answer.get("id") == body.get("id")
    body = {"text_input": PROMPT, **GREEDY, "stream": True}
    answered = post(server, f"/models/{MODEL}/generate_stream", body)
    assert answered.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answered.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == want
    assert len(events) > 3
    assert events[-1]["finish_reason"] in ("stop", "length")
    stopped = post(server, f"/models/{MODEL}/generate", {"text_input": PROMPT, **GREEDY, "stop_words": [want[3:5]]})
    assert stopped.json()["text_output"] == want[: want.index(want[3:5])]


def test_a_model_has_a_configuration_and_statistics(server: Server, want: str) -> None:
    for path in (f"/models/{MODEL}/config", f"/models/{MODEL}/versions/1/config"):
        told = get(server, path).json()
        assert told["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]
        assert told["model_transaction_policy"] == {"decoupled": True}

    def counted() -> dict[str, Any]:
        [told] = get(server, f"/models/{MODEL}/stats").json()["model_stats"]
        assert told == get(server, f"/models/{MODEL}/versions/1/stats").json()["model_stats"][0]
        assert told in get(server, "/models/stats").json()["model_stats"]
        return told

    before = counted()
    post(server, f"/models/{MODEL}/infer", infer_body())
    post(server, f"/models/{MODEL}/generate", {"text_input": PROMPT, **GREEDY})
    post(server, f"/models/{MODEL}/generate", {"text_input": PROMPT, "temperature": -1})
    after = counted()
    assert after["inference_count"] - before["inference_count"] == 2
    for name, count in (("success", 2), ("compute_infer", 2), ("fail", 1), ("cache_hit", 0)):
        spent, earlier = after["inference_stats"][name], before["inference_stats"][name]
        assert spent["count"] - earlier["count"] == count
        assert (spent["ns"] > earlier["ns"]) is (count > 0)
    for without_output in (True, False):
        body = {"text_input": PROMPT, **GREEDY, "triton_enable_empty_final_response": without_output}
        answered = post(server, f"/models/{MODEL}/generate_stream", body)
        *events, last = [json.loads(line.removeprefix("data: ")) for line in answered.text.split("\n\n") if line]
        assert "".join(event["text_output"] for event in events) == want
        assert ("text_output" in last) is not without_output
        assert last["finish_reason"] in ("stop", "length")
    streamed = counted()["response_stats"]
    assert streamed["0"]["success"]["count"] >= 2
    assert streamed[str(len(events))]["empty_response"]["count"] >= 2
    for path in ("/models/none/config", "/models/none/stats", f"/models/{MODEL}/versions/2/stats"):
        assert get(server, path).status_code == 404


TEXT = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("infer", {"inputs": []}, "one input, text_input"),
        ("infer", {"inputs": [TEXT, TEXT]}, "one input, text_input"),
        ("infer", {"inputs": [{**TEXT, "name": "text"}]}, "got text"),
        ("infer", {"inputs": [{**TEXT, "datatype": "FP32"}]}, "BYTES of shape"),
        ("infer", {"inputs": [{**TEXT, "shape": [2]}]}, "BYTES of shape"),
        ("infer", {"inputs": [{**TEXT, "data": ["x", "y"]}]}, "2 elements"),
        ("infer", {"inputs": [{**TEXT, "data": [3]}]}, "must hold a text"),
        ("infer", {"inputs": [{**TEXT, "data": None}]}, "no data"),
        ("infer", {"inputs": [{**TEXT, "parameters": {"binary_data_size": 5}}]}, "both data and"),
        ("infer", {"inputs": [TEXT], "outputs": [{"name": "logits"}]}, "no output 'logits'"),
        ("infer", {"inputs": [TEXT], "parameters": {"stream": True}}, "answers once"),
        ("infer", {"inputs": [TEXT], "parameters": {"temprature": 1}}, "did you mean temperature"),
        ("infer", {"inputs": [TEXT], "parameters": {"n": 2}}, "n must be 1"),
        ("infer", {"inputs": [TEXT], "parameters": {"timeout": -1}}, "microseconds"),
        ("infer", {"inputs": [TEXT], "parameters": {"timeout": 10**400}}, "microseconds"),
        ("infer", {"inputs": [TEXT], "sequence": 1}, "sequence"),
        ("infer", [1], "JSON object"),
        ("generate", {"text_input": 3}, "must be a text"),
        ("generate", {"text": "x"}, "must be a text"),
        ("generate", {"text_input": "x", "beam_width": 2}, "beam_width"),
        ("generate", {"text_input": "x", "stream": True}, "answers once"),
        ("generate", {"text_input": "x", "top_p": 1, "parameters": {"top_p": 0.5}}, "both in parameters"),
        ("generate", {"text_input": "x", "parameters": 3}, "must be an object"),
        ("generate_stream", {"text_input": "x", "temperature": -1}, "temperature"),
    ],
)
def test_what_is_wrong_is_said(server: Server, path: str, body: Any, said: str) -> None:
    answer = post(server, f"/models/{MODEL}/{path}", body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]


@needing("tritonclient")
def test_tritons_client_gets_the_same(server: Server, want: str) -> None:
    import tritonclient.http as triton

    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    assert client.get_model_config(MODEL)["model_transaction_policy"] == {"decoupled": True}
    assert client.get_inference_statistics(MODEL)["model_stats"][0]["name"] == MODEL
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_model_metadata(MODEL)["inputs"][0]["name"] == "text_input"
    for binary in (True, False):
        given = triton.InferInput("text_input", [1], "BYTES")
        given.set_data_from_numpy(np.array([PROMPT.encode()], object), binary_data=binary)
        asked = triton.InferRequestedOutput("text_output", binary_data=binary)
        found = client.infer(MODEL, [given], outputs=[asked], parameters=GREEDY, request_id="7")
        [element] = found.as_numpy("text_output")
        assert (element if isinstance(element, str) else element.decode()) == want
    with pytest.raises(triton.InferenceServerException if hasattr(triton, "InferenceServerException") else Exception):
        client.infer("none", [given])


# ---- repositories -------------------------------------------------------------------------------------------------

TOKENIZE = """
name: "tokenize"  # a comment
backend: "ridgeline"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output: [ { name: "IDS", data_type: TYPE_INT32, dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
GENERATE = """
backend: "ridgeline"
input { name: "ids" data_type: TYPE_INT32 dims: -1 }
output { name: "more" data_type: TYPE_INT32 dims: -1 }
model_transaction_policy < decoupled: true >
"""
DETOKENIZE = """
backend: "ridgeline"
input [ { name: "IDS" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "question" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "answer" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "detokenize" model_version: -1
      input_map { key: "IDS" value: "b" } output_map { key: "TEXT" value: "answer" } },
    { model_name: "tokenize" model_version: -1
      input_map { key: "TEXT" value: "question" } output_map { key: "IDS" value: "a" } },
    { model_name: "llm" model_version: -1
      input_map { key: "ids" value: "a" } output_map { key: "more" value: "b" } }
  ]
}
"""


def repository(folder: Path, **changed: str) -> Path:
    for name, text in {
        "tokenize": TOKENIZE,
        "llm": GENERATE,
        "detokenize": DETOKENIZE,
        "chat": ENSEMBLE,
        **changed,
    }.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text)
    model = {"model": str(EMBEDDED_MODEL), "max_model_len": 512, "disable_log_stats": True}
    (folder / "llm" / "1" / "model.json").write_text(json.dumps(model))
    return folder


@pytest.fixture(scope="module")
def ensemble(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = repository(tmp_path_factory.mktemp("repository"))
    with start_server(model_repository=str(folder)) as running:
        yield running


def through(server: Server, model: str, data: Any, **parameters: Any) -> Any:
    """The one output of a model, whose input is as it describes itself."""
    [spec] = get(server, f"/models/{model}").json()["inputs"]
    flat = data if isinstance(data, list) else [data]
    tensor = {"name": spec["name"], "datatype": spec["datatype"], "shape": [1] * (len(spec["shape"]) - 1), "data": flat}
    tensor["shape"].append(len(flat))
    answer = post(server, f"/models/{model}/infer", {"inputs": [tensor], "parameters": parameters}).json()
    assert "outputs" in answer, answer
    [output] = answer["outputs"]
    assert output["shape"] == [1] * (len(spec["shape"]) - 1) + [len(output["data"])]
    return output["data"]


def test_an_ensemble_is_its_steps_one_after_the_other(ensemble: Server, want: str) -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    ids = through(ensemble, "tokenize", PROMPT)
    assert ids == tokenizer.encode(PROMPT)
    more = through(ensemble, "llm", ids, **GREEDY)
    assert through(ensemble, "detokenize", more) == [want]
    assert through(ensemble, "chat", PROMPT, **GREEDY) == [want]
    body = {"question": PROMPT, **GREEDY, "stream": True}
    events = post(ensemble, "/models/chat/generate_stream", body).text.split("\n\n")
    pieces = [json.loads(event.removeprefix("data: "))["answer"] for event in events if event]
    assert "".join(pieces) == want
    assert len(pieces) > 3
    assert get(ensemble, "/models/chat").json()["platform"] == "ensemble"
    config = get(ensemble, "/models/chat/config").json()
    assert (config["platform"], config["backend"], config["max_batch_size"]) == ("ensemble", "", 1)
    assert config["input"] == [{"name": "question", "data_type": "TYPE_STRING", "dims": [1]}]
    assert config["ensemble_scheduling"]["step"][1] == {
        "model_name": "tokenize", "model_version": -1,
        "input_map": {"TEXT": "question"}, "output_map": {"IDS": "a"},
    }  # fmt: skip
    assert not get(ensemble, "/models/tokenize/config").json()["model_transaction_policy"]["decoupled"]
    stats = {each["name"]: each for each in get(ensemble, "/models/stats").json()["model_stats"]}
    assert {name: each["inference_count"] for name, each in stats.items()} == {
        "tokenize": 1, "llm": 1, "detokenize": 1, "chat": 2,
    }  # fmt: skip
    assert stats["tokenize"]["inference_stats"]["compute_infer"]["ns"] > 0
    for path, body, said in (
        ("tokenize/infer", infer_body({"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["x"]}), "no param"),
        ("detokenize/generate", {"IDS": [10**7]}, "outside the vocabulary"),
        ("llm/generate", {"ids": [-1]}, "whole numbers"),
        ("llm/generate", {"ids": [1, "x"]}, "whole numbers"),
        ("tokenize/generate_stream", {"TEXT": "x"}, "could be streamed"),
    ):
        answer = post(ensemble, f"/models/{path}", body)
        assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text


def test_a_repository_says_which_model_the_engine_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = repository(tmp_path)
    settings, names = from_repository({"model_repository": str(folder), "port": 1})
    assert settings == {"model": str(EMBEDDED_MODEL), "max_model_len": 512, "model_repository": str(folder), "port": 1}
    assert names == ("chat", "llm")
    said = capsys.readouterr().err
    assert "disable_log_stats" in said
    assert "instance_group" in said
    with pytest.raises(InvalidConfig, match="leave one out"):
        from_repository({"model_repository": str(folder), "model": "x"})
    (folder / "llm" / "1" / "model.json").write_text('{"model": "x", "bogus": 1}')
    with pytest.raises(InvalidConfig, match="bogus"):
        from_repository({"model_repository": str(folder)})
    own = tmp_path / "vllm"
    (own / "m" / "3").mkdir(parents=True)
    (own / "m" / "config.pbtxt").write_text('backend: "vllm"')
    (own / "m" / "3" / "model.json").write_text('{"model": "org/name"}')
    found = read_repository(own)
    assert (found.names, found.models["m"].version, found.engine) == (("m",), "3", {"model": "org/name"})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"llm": GENERATE.replace("ridgeline", "python")}, "backend 'python' is not supported: no code"),
        ({"llm": GENERATE + "sequence_batching { }"}, "sequence_batching is not supported"),
        ({"llm": GENERATE + 'name: "other"'}, "name is 'other'"),
        ({"llm": GENERATE + 'parameters { key: "tp" value { string_value: "2" } }'}, "parameters has 'tp'"),
        ({"llm": GENERATE + "version_policy { all { } }"}, "version_policy"),
        ({"llm": GENERATE.replace("TYPE_INT32", "TYPE_FP16", 1)}, "data_type TYPE_FP16"),
        ({"llm": GENERATE.replace("dims: -1", "dims: [ 2, 3 ]", 1)}, "dims [2, 3]"),
        ({"llm": GENERATE + 'input { name: "b" data_type: TYPE_INT32 dims: -1 }'}, "must be one tensor"),
        ({"llm": GENERATE + "max_batch_size: many"}, "max_batch_size must be one int"),
        ({"llm": 'backend: "ridgeline'}, "line 1: expected"),
        ({"llm": 'backend "ridgeline"'}, "line 1: expected a colon"),
        ({"llm": "{" * 99}, "name of a field"),
        ({"llm": "a {" * 99}, "32 levels"),
        ({"second": GENERATE}, "one model that generates; it has llm, second"),
        ({"chat": ENSEMBLE.replace('value: "a"', 'value: "c"', 1)}, "no step takes"),
        ({"chat": ENSEMBLE.replace('"llm"', '"gpt"')}, "runs 'gpt'"),
        ({"chat": ENSEMBLE.replace('key: "ids"', 'key: "id"')}, "must map ids and more"),
        ({"chat": ENSEMBLE.replace('value: "answer"', 'value: "text"')}, "up to 'text'"),
        ({"chat": ENSEMBLE.replace("model_version: -1", "model_version: 4", 1)}, "model_version 4"),
    ],
)
def test_what_a_repository_has_beyond_that_is_refused_by_name(
    tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        read_repository(repository(tmp_path, **changed))
    assert said in str(refused.value)


# ---- the queue ------------------------------------------------------------------------------------------------------

QUEUED = """
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 100
  priority_levels: 4
  default_priority_level: 3
  default_queue_policy { default_timeout_microseconds: 90000000 allow_timeout_override: true max_queue_size: 64 }
  priority_queue_policy [
    { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5 allow_timeout_override: true } },
    { key: 4 value { timeout_action: REJECT default_timeout_microseconds: 1 max_queue_size: 2 } }
  ]
}
"""


def test_a_queue_becomes_settings_and_what_has_no_effect_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(repository(tmp_path, llm=GENERATE + QUEUED, tokenize=TOKENIZE + "dynamic_batching { }"))
    settings, _ = from_repository({"model_repository": folder})
    want = {"scheduling_policy": "priority", "queue_timeout": 90.0, "max_queue_requests": 64}
    assert {name: settings[name] for name in want} == want
    said = capsys.readouterr().err.splitlines()
    for name, count in (
        ("dynamic_batching.preferred_batch_size", 1),
        ("dynamic_batching.max_queue_delay_microseconds", 1),
        ("dynamic_batching.timeout_action: DELAY", 1),
        ("dynamic_batching.allow_timeout_override", 1),
        ("dynamic_batching.priority_queue_policy.max_queue_size", 1),
        ("dynamic_batching.preserve_ordering", 0),
        ("dynamic_batching (only the engine's model", 1),
    ):
        assert sum(f"config.pbtxt: {name}" in line and line.endswith("has no effect") for line in said) == count, name
    queue = read_repository(Path(folder)).models["chat"].queue
    assert queue == Queue(4, 3, 90.0, 64, {1: 0.0, 4: 1e-6})
    assert [queue.level(asked) for asked in (0, 1, 4, 5)] == [3, 1, 4, 3]
    given, _ = from_repository({"model_repository": folder, "queue_timeout": 2.0})
    assert given["queue_timeout"] == 2.0, "a flag wins"


TRITONS_READER = """
import json, sys
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as triton
queue = text_format.Parse(sys.stdin.read(), triton.ModelConfig()).dynamic_batching
default, by_level = queue.default_queue_policy, dict(queue.priority_queue_policy)
rejects = triton.ModelQueuePolicy.REJECT
seconds = lambda policy: policy.default_timeout_microseconds / 1e6
waits = [(key, seconds(each) * (each.timeout_action == rejects)) for key, each in by_level.items()]
levels = queue.priority_levels, queue.default_priority_level
print(json.dumps([*levels, seconds(default), default.max_queue_size, waits]))
"""


@needing("tritonclient")
def test_tritons_own_reader_reads_the_same_queue() -> None:
    """In a process of its own: both of us describe messages of these names."""
    command = [sys.executable, "-c", TRITONS_READER]
    done = subprocess.run(
        command, input=GENERATE + QUEUED, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    given = dict(read_pbtxt(GENERATE + QUEUED, "x"))["dynamic_batching"]
    ours, _ = read_queue(given, InvalidConfig)
    waits = [list(each) for each in ours.timeouts.items()]
    assert json.loads(done.stdout) == [ours.levels, ours.default_level, ours.timeout, ours.size, waits]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("preserve_order: true", "dynamic_batching has preserve_order"),
        ("priority_levels: -1", "priority_levels must be a whole number from 0, got -1"),
        ("priority_levels: 2", "default_priority_level is 0; it must be from 1"),
        ("default_priority_level: 1", "which is 0"),
        ("priority_queue_policy { key: 1 value { } }", "has the key 1, and priority_levels is 0"),
        ("priority_levels: 2 default_priority_level: 1 priority_queue_policy: 1", "priority_queue_policy must be"),
        ("priority_queue_policy { key: 1 junk: 2 value { } }", "priority_queue_policy has junk"),
        ("default_queue_policy { timeout_action: WAIT }", "timeout_action is WAIT"),
        ("default_queue_policy { max_size: 2 }", "a queue policy has max_size"),
        ("default_queue_policy: 3", "a queue policy must be a message"),
        ("preserve_ordering: 1", "must be true or false, got 1"),
    ],
)
def test_a_wrong_queue_is_refused_by_its_field(tmp_path: Path, wrong: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        read_repository(repository(tmp_path, llm=GENERATE + f"dynamic_batching {{ {wrong} }}"))
    assert said in str(refused.value)


@pytest.mark.dealt
def test_requests_of_a_higher_level_start_first_and_a_levels_timeout_ends_those_that_wait(
    start_server: StartServer, tmp_path: Path
) -> None:
    """One request runs at a time. Level 3 is the default, also for OpenAI's clients."""
    folder = repository(tmp_path / "repository", llm=GENERATE + QUEUED)
    settings, _ = from_repository({"model_repository": str(folder)})
    policy = settings["scheduling_policy"]
    ended: list[str] = []

    with (
        engine_in_a_thread(tmp_path / "socket", scheduling_policy=policy, max_num_seqs=1, max_model_len=512),
        start_server(engine=tmp_path / "socket", model_repository=str(folder)) as server,
        ThreadPoolExecutor(4) as threads,
    ):

        def ask(name: str, tokens: int, **parameters: Any) -> httpx.Response:
            parameters |= {"max_tokens": tokens, "ignore_eos": True}
            if name == "openai":
                answer = httpx.post(
                    f"{server.url}/v1/completions", json={"prompt": "x", **parameters}, timeout=PATIENCE
                )
            else:
                answer = post(server, "/models/chat/generate", {"question": "x", "parameters": parameters})
            ended.append(name)
            return answer

        def after(count: int, *given: Any, **parameters: Any) -> Future[httpx.Response]:
            """Ask once so many requests are open."""
            until = time.monotonic() + PATIENCE
            while server.api.service.admission.open_requests < count:
                assert time.monotonic() < until
                time.sleep(0.005)
            return threads.submit(ask, *given, **parameters)

        asked = [
            after(0, "urgent", 250, priority=1),
            after(1, "openai", 4),
            after(2, "soon", 4, priority=2),
            after(3, "late", 4, priority=4),
        ]
        statuses = [each.result().status_code for each in asked]
        late = asked[-1].result().json()["error"]
    assert statuses == [200, 200, 200, 504]
    assert "no token came within 1e-06 s" in late
    assert ended == ["late", "urgent", "soon", "openai"]


def test_the_text_format_is_read_as_protobufs_own_reader_reads_it() -> None:
    from google.protobuf import struct_pb2, text_format

    text = r"""
      fields { key: "a\n\"b\x41" value { number_value: -1.5e3 } }
      fields < key: 'c' "d" value: { list_value { values [ { string_value: "x" }, { bool_value: true } ] } } >;
      fields { key: "e", value { struct_value { fields { key: "f" value { null_value: NULL_VALUE } } } } }
    """
    theirs = text_format.Parse(text, struct_pb2.Struct())
    ours = {dict(entry)["key"]: dict(entry)["value"] for _, entry in read_pbtxt(text, "x")}
    assert ours.keys() == theirs.fields.keys() == {'a\n"bA', "cd", "e"}
    assert ours['a\n"bA'] == [("number_value", theirs.fields['a\n"bA'].number_value)]
    assert ours["cd"] == [("list_value", [("values", [("string_value", "x")]), ("values", [("bool_value", "true")])])]
    assert ours["e"] == [("struct_value", [("fields", [("key", "f"), ("value", [("null_value", "NULL_VALUE")])])])]
