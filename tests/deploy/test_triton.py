"""The back end for Triton Inference Server, on a real engine: in this process, where a small stand-in takes the place
of the module that Triton's own process brings, and inside a real `tritonserver` if RIDGELINE_TEST_TRITON names a Python
with `nvidia-pytriton` and this project's packages (docs/kserve.md says how to make one)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.serving.repository.folder import read_repository
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.triton_backend import Triton
from tests.forks import forking

TRITON = Path(__file__).parents[2] / "deploy" / "triton-backend"
PATIENCE = 120.0
PROMPTS = [f"def {name}(" for name in ("f", "add", "read", "main", "sort", "parse", "close", "fibonacci")]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
FINAL = 1
SETTINGS = {"model": str(EMBEDDED_MODEL), "max_model_len": 512, "dtype": "float32", "device": "cpu"}


# ---- what Triton's process brings ------------------------------------------------------------------------------------


class Tensor:
    def __init__(self, name: str, value: np.ndarray) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._value


class TritonError(Exception):
    INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, CANCELLED = range(5)

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] = [], error: TritonError | None = None) -> None:  # noqa: B006
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Request:
    """A request, and what was answered: `pieces` so far, and all once `done`."""

    def __init__(self, text: Any = None, parameters: dict[str, Any] | None = None, **inputs: Any) -> None:
        self.tensors = {} if text is None else {"text_input": np.array(text if isinstance(text, list) else [text])}
        for name, value in inputs.items():
            self.tensors[name] = np.array([value.encode() if isinstance(value, str) else value])
        for name in self.tensors.keys() & {"text_input", "sampling_parameters"}:
            self.tensors[name] = self.tensors[name].astype(object)
        self._parameters = json.dumps(parameters or {})
        self.pieces: list[InferenceResponse] = []
        self.done, self.cancelled = threading.Event(), False

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        assert not self.done.is_set(), "Triton has forgotten the request"
        return self.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.done.is_set(), "nothing may follow the last response"
        if response is not None:
            self.pieces.append(response)
        if flags & FINAL:
            self.done.set()

    @property
    def text(self) -> str:
        return "".join(piece.outputs["text_output"][0].decode() for piece in self.pieces)

    @property
    def error(self) -> TritonError:
        assert self.done.wait(PATIENCE)
        error = self.pieces[-1].error
        assert error is not None
        return error


class Config(dict[str, Any]):
    """A model's configuration, as Triton lets a back end complete it."""

    def as_dict(self) -> dict[str, Any]:
        return self

    def add_input(self, given: dict[str, Any]) -> None:
        self["input"].append(given)

    def add_output(self, given: dict[str, Any]) -> None:
        self["output"].append(given)

    def set_max_batch_size(self, size: int) -> None:
        self["max_batch_size"] = size

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self["model_transaction_policy"] = policy


class MetricFamily:
    GAUGE, COUNTER = "gauge", "counter"
    shown: ClassVar[dict[tuple[str, ...], float]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def Metric(self, labels: dict[str, str]) -> SimpleNamespace:
        place = (self._name, *labels.values())

        def set_to(value: float) -> None:
            assert self._kind == self.GAUGE
            self.shown[place] = value

        def increment(value: float) -> None:
            assert value >= 0
            self.shown[place] = self.shown.get(place, 0) + value

        return SimpleNamespace(set=set_to, increment=increment)


def stand_in() -> ModuleType:
    module = ModuleType("triton_python_backend_utils")
    module.__dict__.update(
        Tensor=Tensor,
        TritonError=TritonError,
        MetricFamily=MetricFamily,
        InferenceResponse=InferenceResponse,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        using_decoupled_model_transaction_policy=lambda config: config["model_transaction_policy"]["decoupled"],
        get_input_tensor_by_name=lambda request, name: (
            Tensor(name, request.tensors[name]) if name in request.tensors else None
        ),
    )
    return module


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """The back end's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", stand_in())
        patch.syspath_prepend(TRITON / "ridgeline")  # as Triton has it
        spec = importlib.util.spec_from_file_location("triton_backend", TRITON / "ridgeline" / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def arguments(folder: Path, settings: Any = SETTINGS, *, decoupled: bool = True, **changed: str) -> dict[str, str]:
    """What Triton tells of an instance of a model in this folder."""
    (folder / "1").mkdir(exist_ok=True)
    (folder / "1" / "model.json").write_text(json.dumps(settings))
    config = {"parameters": {}, "model_transaction_policy": {"decoupled": decoupled}}
    instance = {"model_instance_kind": "MODEL", "model_instance_device_id": "0"}
    model = {
        "model_name": "llm",
        "model_repository": str(folder),
        "model_version": "1",
        "model_config": json.dumps(config),
    }
    return {**model, **instance, **changed}


@pytest.fixture(scope="module")
def model(backend: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An instance of the embedded model."""
    made = backend.TritonPythonModel()
    with forking():
        made.initialize(arguments(tmp_path_factory.mktemp("llm")))
    yield made
    made.finalize()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as made:
        yield made


def answered(model: Any, *requests: Request) -> list[Request]:
    model.execute(list(requests))
    for request in requests:
        assert request.done.wait(PATIENCE)
    return list(requests)


def params(llm: LLM, **more: Any) -> SamplingParams:
    """As a request with GREEDY has them: what it does not say comes from the model's generation_config.json."""
    return replace(llm.get_default_sampling_params(), **GREEDY, **more)


def running(model: Any) -> int:
    asked = asyncio.run_coroutine_threadsafe(model._server.api.client.ask(PATIENCE), model._loop)
    stats = asked.result(PATIENCE)
    return stats.running + stats.waiting


# ---- in this process -------------------------------------------------------------------------------------------------


def test_many_requests_at_once_get_the_tokens_of_the_library(model: Any, llm: LLM) -> None:
    """Each in a stream, and all begin before one has ended: they run in one batch."""
    requests = [Request(prompt, GREEDY, stream=True, return_num_output_tokens=True) for prompt in PROMPTS]
    order: list[tuple[str, int]] = []
    for number, request in enumerate(requests):
        request.send = noted(request.send, order, number)  # type: ignore[method-assign]
    answered(model, *requests)
    expected = llm.generate(PROMPTS, params(llm), use_tqdm=False)
    assert [request.text for request in requests] == [each.outputs[0].text for each in expected]
    for request in requests:
        assert sum(int(piece.outputs["num_output_tokens"][0]) for piece in request.pieces) == GREEDY["max_tokens"]
        assert len(request.pieces) > 4
    begun = max(order.index(("piece", number)) for number in range(len(requests)))
    assert begun < min(order.index(("last", number)) for number in range(len(requests)))


def noted(send: Callable[..., None], order: list[tuple[str, int]], number: int) -> Callable[..., None]:
    def sends(response: Any = None, flags: int = 0) -> None:
        order.append(("last" if flags & FINAL else "piece", number))
        send(response, flags)

    return sends


def test_an_answer_at_once_begins_with_the_prompt_as_in_tritons_vllm_back_end(model: Any, llm: LLM) -> None:
    [expected] = llm.generate(PROMPTS[0], params(llm, logprobs=2), use_tqdm=False)
    [output] = expected.outputs
    told = {f"return_{name}": True for name in ("finish_reason", "logprobs", "cumulative_logprob")}
    parameters = json.dumps({**GREEDY, "logprobs": 2})
    whole, bare = answered(
        model,
        Request(PROMPTS[0], {"temperature": 9}, sampling_parameters=parameters, return_num_input_tokens=True, **told),
        Request(PROMPTS[0].encode(), GREEDY, exclude_input_in_output=True),
    )
    assert (whole.text, bare.text) == (PROMPTS[0] + output.text, output.text)
    [piece], [only] = whole.pieces, bare.pieces
    assert only.outputs.keys() == {"text_output"}
    assert piece.outputs["finish_reason"].tolist() == [b"length"]
    assert piece.outputs["num_input_tokens"].tolist() == [len(expected.prompt_token_ids)]
    assert piece.outputs["cumulative_logprob"] == pytest.approx([output.cumulative_logprob], abs=1e-3)
    places = json.loads(piece.outputs["logprobs"][0])
    assert output.logprobs is not None
    for ident, place, entry in zip(output.token_ids, places, output.logprobs, strict=True):
        assert place.keys() == {str(each) for each in entry}
        assert place[str(ident)]["logprob"] == pytest.approx(entry[ident].logprob, abs=1e-3)
        assert place[str(ident)]["decoded_token"] == entry[ident].decoded_token


def test_several_completions_are_elements_of_one_answer(model: Any) -> None:
    [request] = answered(model, Request("x =", {"n": 3, "seed": 1, "temperature": 1.0, "max_tokens": 8}))
    [piece] = request.pieces
    texts = piece.outputs["text_output"].tolist()
    assert len(set(texts)) == 3
    assert all(text.startswith(b"x =") for text in texts)


def test_a_cancelled_request_frees_its_place(model: Any) -> None:
    request = Request("x =", {**GREEDY, "max_tokens": 480}, stream=True)
    model.execute([request])
    until = time.monotonic() + PATIENCE
    while not request.pieces:
        assert time.monotonic() < until
        time.sleep(0.01)
    request.cancelled = True
    assert request.error.code == TritonError.CANCELLED
    assert len(request.pieces) < 480
    while running(model):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert MetricFamily.shown["vllm:num_requests_running", "llm", "1"] == 0
    while not MetricFamily.shown.get(("vllm:request_success_total", "llm", "1", "abort")):
        assert time.monotonic() < until, MetricFamily.shown
        answered(model, Request("x", {**GREEDY, "max_tokens": 100}))
    assert MetricFamily.shown["vllm:generation_tokens_total", "llm", "1"] >= len(request.pieces)


def test_nothing_is_said_to_triton_while_no_request_is_open(
    backend: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends instances that have none, and a call that meets the end would never return."""
    open_now: list[bool] = []
    monkeypatch.setattr(backend, "SHOWN_EVERY", 0.05)
    monkeypatch.setattr(model._sender.figures, "show", lambda stats: open_now.append(bool(model._sender._open)))
    answered(model, Request("x =", {**GREEDY, "max_tokens": 100}, stream=True))
    count = len(open_now)
    time.sleep(1.5)  # in which the engine tells its figures many times
    assert len(open_now) == count > 0
    assert all(open_now)


@pytest.mark.parametrize(
    ("request_", "code", "told"),
    [
        (Request("x", {"temperature": -1}), TritonError.INVALID_ARG, "temperature must be at least 0"),
        (Request("x", {"temprature": 1}), TritonError.INVALID_ARG, "temprature"),
        (Request("x", {"echo": True}), TritonError.INVALID_ARG, "use the input exclude_input_in_output"),
        (Request("x", {"n": 2}, stream=True), TritonError.INVALID_ARG, "a stream has one completion"),
        (Request("x", stream=True, exclude_input_in_output=False), TritonError.INVALID_ARG, "exclude_input_in_output"),
        (Request("x", sampling_parameters="[]"), TritonError.INVALID_ARG, "must be a JSON object"),
        (Request("x", sampling_parameters="{"), TritonError.INVALID_ARG, "JSON"),
        (Request(), TritonError.INVALID_ARG, "text_input is missing"),
        (Request(["a", "b"]), TritonError.INVALID_ARG, "text_input has 2 elements"),
        (Request(b"\xff"), TritonError.INVALID_ARG, "text_input is not UTF-8"),
        (Request("x " * 600), TritonError.INVALID_ARG, "maximum context length is 512"),
        (Request("x", {"timeout": 1, "max_tokens": 400}), TritonError.UNAVAILABLE, "took longer than"),
    ],
)
def test_a_mistake_is_an_error_of_triton_with_a_sentence(model: Any, request_: Request, code: int, told: str) -> None:
    answered(model, request_)
    assert told in str(request_.error)
    assert request_.error.code == code
    assert len(request_.pieces) == 1


def test_a_model_that_answers_once_refuses_streams(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_streams", False)
    refused, whole = answered(model, Request("x", stream=True), Request("x", GREEDY))
    assert "decoupled: true" in str(refused.error)
    assert len(whole.pieces) == 1


@pytest.mark.parametrize(
    ("settings", "changed", "told"),
    [
        ({**SETTINGS, "max_modl_len": 1}, {}, "model.json sets 'max_modl_len'"),
        ({**SETTINGS, "max_model_len": 0}, {}, "max_model_len"),
        ({"max_model_len": 512}, {}, "there is no model"),
        ({**SETTINGS, "tensor_parallel_size": 2}, {"model_instance_kind": "GPU"}, "use KIND_MODEL"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    backend: Any, tmp_path: Path, settings: dict[str, Any], changed: dict[str, str], told: str
) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidConfig, match=told):
        backend.TritonPythonModel().initialize(arguments(tmp_path, settings, **changed))
    assert threading.active_count() == before


def test_an_instance_on_a_gpu_has_that_one_of_those_that_triton_sees(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert backend.seeing("1")["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert [backend.seeing(gpu)["CUDA_VISIBLE_DEVICES"] for gpu in "01"] == ["4", "GPU-7"]


def test_counters_go_on_where_another_engine_counts_from_zero(backend: Any) -> None:
    figures = backend.Figures(model="counted", version="1")
    for started, tokens in ((1.0, 5), (1.0, 7), (2.0, 3), (2.0, 3)):
        counters = {"prompt_tokens": 0, "generation_tokens": tokens}
        figures.show(
            SimpleNamespace(started=started, running=tokens, waiting=0, counters=counters, finished={"stop": 1})
        )
    assert MetricFamily.shown["vllm:generation_tokens_total", "counted", "1"] == 7 + 3
    assert MetricFamily.shown["vllm:request_success_total", "counted", "1", "stop"] == 1 + 1
    assert MetricFamily.shown["vllm:num_requests_running", "counted", "1"] == 3


def test_the_configuration_is_completed(backend: Any) -> None:
    """With the names and types of Triton's vLLM back end. What a file says already stays."""
    own = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    config = backend.TritonPythonModel.auto_complete_config(Config(input=[own], output=[]))
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    types = {each["name"]: each["data_type"] for each in config["input"] + config["output"]}
    assert types == {
        "text_input": "TYPE_STRING",
        "stream": "TYPE_BOOL",
        "sampling_parameters": "TYPE_STRING",
        "exclude_input_in_output": "TYPE_BOOL",
        "return_finish_reason": "TYPE_BOOL",
        "return_cumulative_logprob": "TYPE_BOOL",
        "return_logprobs": "TYPE_BOOL",
        "return_num_input_tokens": "TYPE_BOOL",
        "return_num_output_tokens": "TYPE_BOOL",
        "text_output": "TYPE_STRING",
        "finish_reason": "TYPE_STRING",
        "cumulative_logprob": "TYPE_FP32",
        "logprobs": "TYPE_STRING",
        "num_input_tokens": "TYPE_UINT32",
        "num_output_tokens": "TYPE_UINT32",
    }
    assert len(config["input"]) == 9
    assert [each["name"] for each in config["input"] if not each.get("optional")] == ["text_input"]
    once = Config(input=[own], output=[], model_transaction_policy={"decoupled": False})
    assert backend.TritonPythonModel.auto_complete_config(once)["model_transaction_policy"] == {"decoupled": False}


def test_our_own_server_reads_the_same_folder() -> None:
    found = read_repository(TRITON / "models")
    assert list(found.models) == ["llm"]
    assert found.engine == json.loads((TRITON / "models" / "llm" / "1" / "model.json").read_text())


def test_an_engine_that_dies_ends_its_requests_and_another_takes_its_place(model: Any, llm: LLM) -> None:
    [engine] = model._server.api.client.engines
    request = Request("x =", {**GREEDY, "max_tokens": 480}, stream=True)
    with forking():
        model.execute([request])
        until = time.monotonic() + PATIENCE
        while not request.pieces:
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(engine.facts.process_id, signal.SIGKILL)
        assert request.error.code == TritonError.UNAVAILABLE
        while (again := answered(model, Request(PROMPTS[0], GREEDY))[0]).pieces[-1].error is not None:
            assert again.error.code == TritonError.UNAVAILABLE
            assert time.monotonic() < until
            time.sleep(0.1)
    [expected] = llm.generate(PROMPTS[0], params(llm), use_tqdm=False)
    assert again.text == PROMPTS[0] + expected.outputs[0].text


# ---- inside a real tritonserver --------------------------------------------------------------------------------------


@pytest.mark.skipif("RIDGELINE_TEST_TRITON" not in os.environ, reason="RIDGELINE_TEST_TRITON names no Python")
def test_nvidias_client_gets_the_librarys_tokens_from_a_real_tritonserver(tmp_path: Path, llm: LLM) -> None:
    python = os.environ["RIDGELINE_TEST_TRITON"]
    config = (TRITON / "models" / "llm" / "config.pbtxt").read_text().replace('backend: "ridgeline"', "")
    models = {"llm": (SETTINGS, config), "once": (SETTINGS, "model_transaction_policy { decoupled: false }")}
    with Triton(python, models, tmp_path).up() as triton:
        asked = json.dumps({"prompts": PROMPTS, "parameters": GREEDY})
        command = [python, str(Path(__file__).with_name("triton_client.py")), triton.url, triton.grpc, asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        aborted = 'vllm:request_success_total{finished_reason="abort",model="llm",version="1"} 1'
        body = {"text_input": PROMPTS[1], "stream": True, **GREEDY}
        until = time.monotonic() + PATIENCE
        while aborted not in (page := httpx.get(f"http://{triton.metrics}/metrics").text):
            assert time.monotonic() < until, page
            plain = httpx.post(f"http://{triton.url}/v2/models/llm/generate_stream", json=body, timeout=PATIENCE)
        assert 'vllm:num_requests_running{model="llm",version="1"} 0' in page
    expected = [each.outputs[0].text for each in llm.generate(PROMPTS, params(llm), use_tqdm=False)]
    assert told["texts"] == expected
    assert told["once"] == expected[:1]
    events = [json.loads(line.removeprefix("data: ")) for line in plain.text.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == expected[1]
    ended = [each[0] for each in told["order"]].index("-")
    assert ended == len(PROMPTS), "all began before one ended"
    assert told["refused"][1].startswith("temperature must be at least 0")
    assert told["cancelled"] < 480
    assert told["config"]["backend"] == "ridgeline"
    assert told["config"]["model_transaction_policy"] == {"decoupled": True}
