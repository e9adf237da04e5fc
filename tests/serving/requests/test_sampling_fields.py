"""What the offline API can be asked for, HTTP, gRPC and KServe can: with the same answers."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody
from tests.serving.apis.grpc.grpc_server import GrpcServer, serve_grpc
from tests.serving.apis.grpc.test_grpc import fails, infer_request, inferred, trailing
from tests.serving.conftest import DTYPE, MODEL, Server, StartServer

PROMPT = "def fibonacci(n):"
DRAWN = {"temperature": 1.2, "seed": 11, "max_tokens": 16}
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype=DTYPE) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(engine_socket: Path) -> Iterator[GrpcServer]:
    with serve_grpc(engine_socket) as running:
        yield running


def offline(llm: LLM, **params: Any) -> Any:
    return llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0]


def complete(server: Server, **body: Any) -> Any:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT} | body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def generate(served: GrpcServer, **sampling: Any) -> list[pb.GenerateResponse]:
    ids = [pb.TokenIds(ids=word) for word in sampling.get("bad_words", ()) if isinstance(word, list)]
    if "bad_words" in sampling:
        texts = [word for word in sampling["bad_words"] if isinstance(word, str)]
        sampling = sampling | {"bad_words": texts, "bad_word_ids": ids}
    return list(served.stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=pb.Sampling(**sampling)), timeout=120))


def infer(served: GrpcServer, **parameters: Any) -> Any:
    plain = {name: json.dumps(v) if isinstance(v, list) else v for name, v in parameters.items()}
    return served.kserve.ModelInfer(infer_request(PROMPT, **plain))


def test_every_parameter_of_the_offline_api_is_a_field_of_each_protocol() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    for model in (CompletionBody, ChatBody):
        assert names <= model.model_fields.keys(), names - model.model_fields.keys()
    assert names <= set(pb.Sampling.DESCRIPTOR.fields_by_name)


@pytest.mark.dealt
@pytest.mark.few(4)
@pytest.mark.parametrize(
    "params",
    [
        GREEDY | {"bad_words": ["Fibonacci", [300], [7, 8, 9]]},
        GREEDY | {"bad_words": ["Returns", "\n"]},
        GREEDY | {"allowed_token_ids": list(range(40, 400))},
        GREEDY | {"allowed_token_ids": list(range(40, 400)), "bad_words": ["x"]},
        DRAWN | {"typical_p": 0.3},
        DRAWN | {"typical_p": 1e-6},
        GREEDY | {"guidance_scale": 3.0, "negative_prompt": "import os"},
        GREEDY | {"guidance_scale": 2.0},
    ],
    ids=lambda params: "-".join(name for name in params if name not in DRAWN),
)
def test_each_protocol_answers_as_the_offline_api(
    server: Server, served: GrpcServer, llm: LLM, params: dict[str, Any]
) -> None:
    want = offline(llm, **params).outputs[0]
    free = offline(llm, **{name: params[name] for name in params.keys() & {*DRAWN}}).outputs[0]
    assert want.text != free.text, "the field changes nothing"
    assert complete(server, **params, return_token_ids=True)["choices"][0]["token_ids"] == want.token_ids
    ids = [i for each in generate(served, **params) for i in each.piece.token_ids]
    assert ids == want.token_ids
    assert inferred(infer(served, **params)) == want.text
    chat = llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    answer = server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], extra_body=params
    )
    assert answer.choices[0].message.content == chat.text


@pytest.mark.dealt
def test_the_best_are_the_offline_ones_and_all_that_was_drawn_is_counted(
    server: Server, served: GrpcServer, llm: LLM
) -> None:
    """A chat and KServe, too, which take one text of several."""
    every, best = offline(llm, **DRAWN, n=6), offline(llm, **DRAWN, n=2, best_of=6)
    drawn = sum(len(output.token_ids) for output in every.outputs)
    kept = [output.text for output in best.outputs]
    assert kept != [output.text for output in every.outputs[:2]]

    answer = complete(server, **DRAWN, n=2, best_of=6, include_breakdown=True)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(kept))
    assert answer["usage"]["completion_tokens"] == drawn
    assert all(choice["logprobs"] is None for choice in answer["choices"]), "nobody asked for them"
    told = answer["ridgeline"]["completions"]
    assert [(each["index"], each["output_tokens"]) for each in told] == [
        (output.index, len(output.token_ids)) for output in every.outputs
    ]
    with_logprobs = complete(server, **DRAWN, n=2, best_of=6, logprobs=0)["choices"]
    assert [sum(choice["logprobs"]["token_logprobs"]) for choice in with_logprobs] == pytest.approx(
        [output.cumulative_logprob for output in best.outputs], abs=1e-2
    )

    responses = generate(served, **DRAWN, n=2, best_of=6)
    pieces = [each.piece for each in responses if each.HasField("piece")]
    assert [(piece.index, piece.text) for piece in pieces] == list(enumerate(kept))
    usages = [each.finish.usage for each in responses if each.HasField("finish")]
    assert [usage.completion_tokens for usage in usages] == [len(output.token_ids) for output in best.outputs]
    assert sum(usage.completion_tokens + usage.discarded_tokens for usage in usages) == drawn

    for response in (infer(served, **DRAWN, best_of=6), *_streamed(served, best_of=6)):
        assert inferred(response) == kept[0]
        assert response.parameters["completion_tokens"].int64_param == drawn

    messages: Any = [{"role": "user", "content": PROMPT}]
    [chat] = llm.chat(messages, SamplingParams(**DRAWN, best_of=4), use_tqdm=False)
    found = server.client.chat.completions.create(model=MODEL, messages=messages, extra_body=DRAWN | {"best_of": 4})
    assert [choice.message.content for choice in found.choices] == [chat.outputs[0].text]
    assert server.wait_idle()
    assert served.wait_idle()


def _streamed(served: GrpcServer, **parameters: Any) -> list[Any]:
    responses = served.kserve.ModelStreamInfer(iter([infer_request(PROMPT, **DRAWN, **parameters)]), timeout=120)
    return [response.infer_response for response in responses]


def test_as_many_as_n_may_be_streamed(server: Server) -> None:
    body = DRAWN | {"n": 2, "best_of": 2}
    want = [choice["text"] for choice in complete(server, **body)["choices"]]
    texts = ["", ""]
    for chunk in server.client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **body):  # type: ignore[call-overload]
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == want


def test_what_is_drawn_counts_against_the_queue(start_server: StartServer) -> None:
    with start_server(max_queue_requests=4) as small:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
        assert len(complete(small, **body, best_of=4)["choices"]) == 1
        for prompt, path in ((PROMPT, "completions"), ([PROMPT] * 3, "completions"), (None, "chat/completions")):
            asked = body | {"prompt": prompt, "best_of": 5 if prompt != [PROMPT] * 3 else 2}
            if prompt is None:
                asked = {"messages": [{"role": "user", "content": PROMPT}], "best_of": 5}
            error = httpx.post(f"{small.url}/v1/{path}", json=asked, timeout=120).json()["error"]
            assert error["param"] in ("best_of", "prompt"), error
            assert "of at most 4" in error["message"] or "at most 4 completions" in error["message"]
        assert small.wait_idle()


def test_a_negative_prompt_may_be_ids_and_has_bounds(server: Server, served: GrpcServer, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("import os")
    want = offline(llm, **GREEDY, guidance_scale=3.0, negative_prompt=ids).outputs[0]
    found = complete(server, **GREEDY, guidance_scale=3.0, negative_prompt=ids)["choices"][0]
    assert found["text"] == want.text
    asked = GREEDY | {"guidance_scale": 3.0, "negative_prompt_ids": pb.TokenIds(ids=ids)}
    assert [i for each in generate(served, **asked) for i in each.piece.token_ids] == want.token_ids
    for negative, scale in (([], 2), ("x", 1), ("x", 1000), ([10**6], 2), ([5] * 9000, 2), ("x " * 10**6, 2)):
        body = {"prompt": PROMPT, "guidance_scale": scale, "negative_prompt": negative}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        named = "guidance_scale" if scale == 1000 else "negative_prompt"
        assert (response.status_code, response.json()["error"]["param"]) == (400, named), (negative, response.text)
    assert server.wait_idle()


def test_a_guided_request_holds_two_sequences(start_server: StartServer) -> None:
    """Of 10 and 10 tokens here, each with an output of up to 30."""
    body = {"prompt": list(range(5, 15)), "max_tokens": 30, "guidance_scale": 2.0, "negative_prompt": [7] * 10}
    with start_server(max_queue_tokens=79) as small:
        error = httpx.post(f"{small.url}/v1/completions", json=body, timeout=120).json()["error"]
        assert "80 tokens" in error["message"], error
        assert error["param"] == "max_tokens"
        assert httpx.post(f"{small.url}/v1/completions", json=body | {"max_tokens": 29}, timeout=120).status_code == 200
        assert small.wait_idle()


def test_an_aborted_choice_ends_as_aborted(served: GrpcServer) -> None:
    sampling = pb.Sampling(n=2, best_of=4, max_tokens=1500, ignore_eos=True)
    request = pb.GenerateRequest(text="x", sampling=sampling, request_id="best")
    call = served.stub.Generate(request, timeout=120)
    deadline = time.monotonic() + 120
    while not served.stub.Abort(pb.AbortRequest(request_id="best")).found and time.monotonic() < deadline:
        time.sleep(0.01)
    finishes = [each.finish for each in call if each.HasField("finish")]
    assert [(finish.index, finish.reason) for finish in finishes] == [(0, "abort"), (1, "abort")]
    assert served.wait_idle()


def test_prompt_logprobs_may_begin_later(server: Server, served: GrpcServer, llm: LLM) -> None:
    want = offline(llm, max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=3)
    body = {"max_tokens": 1, "prompt_logprobs": 1, "prompt_logprobs_start": 3}
    told = complete(server, **body)["choices"][0]["prompt_logprobs"]
    assert [entry is None for entry in told] == [entry is None for entry in want.prompt_logprobs]
    assert told[:3] == [None] * 3
    positions = generate(served, **body)[0].prompt_logprobs.positions
    assert [position.chosen.token_id for position in positions] == want.prompt_token_ids[3:]
    assert [position.chosen.logprob for position in positions] == pytest.approx(
        [entry[i].logprob for i, entry in zip(want.prompt_token_ids[3:], want.prompt_logprobs[3:], strict=True)],
        abs=1e-3,
    )
    past = {"max_tokens": 1, "logprobs": 0, "echo": True, "prompt_logprobs_start": 10**6}
    assert complete(server, **past)["choices"][0]["logprobs"]["token_logprobs"][:-1] == [None] * len(told)


def test_without_detokenizing_there_are_ids_alone(server: Server, served: GrpcServer, llm: LLM) -> None:
    want = offline(llm, **GREEDY).outputs[0].token_ids
    [choice] = complete(server, **GREEDY, detokenize=False, return_token_ids=True)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", want)
    pieces = [each.piece for each in generate(served, **GREEDY, detokenize=False)]
    assert "".join(piece.text for piece in pieces) == ""
    assert [i for piece in pieces for i in piece.token_ids] == want


def test_an_infer_requests_timeout_is_in_microseconds(served: GrpcServer) -> None:
    long = {"max_tokens": 1500, "ignore_eos": True}
    error = fails(lambda: served.kserve.ModelInfer(infer_request("x", timeout=200_000, **long), timeout=120))
    assert (error.code(), trailing(error)["code"]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "timeout")
    assert "0.2 s" in error.details()
    stream = served.kserve.ModelStreamInfer(iter([infer_request("x", timeout=200_000, **long)]), timeout=120)
    assert "0.2 s" in list(stream)[-1].error_message
    for none in ({}, {"timeout": 0}, {"timeout": 60_000_000}):
        assert served.kserve.ModelInfer(infer_request("x", max_tokens=2, **none)).outputs
    for wrong in (-1, "soon", 0.5, True):
        error = fails(lambda value=wrong: served.kserve.ModelInfer(infer_request("x", timeout=value)))
        assert (error.code(), trailing(error)["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "timeout")
    assert served.wait_idle()
