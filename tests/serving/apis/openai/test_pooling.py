"""The routes of models that embed and classify, as clients see them, against the offline API's answers."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from ridgeline import LLM
from ridgeline.serving.http import answers
from ridgeline.serving.http.vectors import vector_bytes
from ridgeline.serving.requests import pooling
from ridgeline.serving.requests.pooling import VectorDtype
from ridgeline_bench.scripts.api_fields import APIS, BODIES, TITLES, state
from tests import late_models, pooled_models
from tests.serving.conftest import DTYPE, MODEL, PATIENCE, Server, StartServer, engine_in_a_thread
from tests.serving.http.test_schemathesis import CHECKS, SCHEMATHESIS

TEXTS = ["the quick brown fox", "paris", "what is the capital of france and then again"]
DOCUMENTS = ["paris is the capital", "the lazy dog jumps over", "a fox", "berlin berlin berlin is again"]
QUERY = "what is the capital of france"
NEAR = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pooled")
    prompts = {"query": "what is "}
    return {
        "embeds": pooled_models.sentence_folder("bert", place / "embeds", "mean_tokens", prompts=prompts),
        "ranks": pooled_models.save("bert_reranker", place / "ranks"),
    }


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path], start_server: StartServer) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        found = {}
        for name, folder in folders.items():
            socket = folder.parent / f"{name}.socket"
            stack.enter_context(engine_in_a_thread(socket, model=str(folder), max_num_seqs=8))
            found[name] = stack.enter_context(start_server(folder, socket))
        yield found


@pytest.fixture(scope="module")
def embeds(servers: dict[str, Server]) -> Server:
    return servers["embeds"]


@pytest.fixture(scope="module")
def ranks(servers: dict[str, Server]) -> Server:
    return servers["ranks"]


@pytest.fixture(scope="module")
def vectors(folders: dict[str, Path]) -> dict[str, list[float]]:
    with LLM(folders["embeds"], dtype=DTYPE, device="cpu") as llm:
        results = llm.embed([*TEXTS, QUERY, *DOCUMENTS], use_tqdm=False)
    return {text: r.outputs.embedding for text, r in zip([*TEXTS, QUERY, *DOCUMENTS], results, strict=True)}


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=PATIENCE, json=body)


def refused(response: httpx.Response, param: str | None, *words: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    for word in words:
        assert word in error["message"]


def test_embeddings_are_the_offline_ones(embeds: Server, vectors: dict[str, list[float]]) -> None:
    answer = embeds.client.embeddings.create(model=MODEL, input=TEXTS)  # it asks for base64
    assert [each.index for each in answer.data] == [0, 1, 2]
    for text, each in zip(TEXTS, answer.data, strict=True):
        assert each.embedding == pytest.approx(vectors[text], abs=NEAR)
    tokens = sum(len(text.split()) + 2 for text in TEXTS)
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == (MODEL, tokens, tokens)
    one = embeds.client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float", dimensions=8)
    want = np.array(vectors[TEXTS[0]][:8])
    assert one.data[0].embedding == pytest.approx(want / np.linalg.norm(want), abs=NEAR)


def test_answers_and_texts_have_bounds_in_all(
    embeds: Server, ranks: Server, vectors: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query counts in each of its pairs, and a vector of each token is more than one of each text."""
    monkeypatch.setattr(pooling, "AT_ONCE", 8)
    monkeypatch.setattr(pooling, "INLINE_CHARS", 0)
    data = post(embeds, "/v1/embeddings", input=TEXTS).json()["data"]  # encoded in several turns
    assert [each["embedding"] for each in data] == [pytest.approx(vectors[text], abs=NEAR) for text in TEXTS]
    width = len(vectors[TEXTS[0]])
    monkeypatch.setattr(pooling, "MOST_NUMBERS", 12 * width)
    assert post(embeds, "/pooling", input=TEXTS[:2], task="token_embed").status_code == 200
    refused(post(embeds, "/pooling", input=TEXTS, task="token_embed"), "input", "vector for each token")
    assert post(embeds, "/pooling", input=TEXTS, task="token_embed", dimensions=8).status_code == 200
    monkeypatch.setattr(pooling, "MOST_CHARACTERS", 100)
    assert post(ranks, "/rerank", query="a" * 20, documents=["b"] * 4).status_code == 200
    refused(post(ranks, "/rerank", query="a" * 20, documents=["b"] * 5), "input", "105 characters")
    refused(post(ranks, "/score", text_1="a" * 101, text_2="b", truncate_prompt_tokens=4), "input", "characters")


def test_inputs_may_be_token_ids(embeds: Server, vectors: dict[str, list[float]]) -> None:
    backend = pooled_models.tokenizer("bert")
    ids = [backend.encode(text).ids for text in TEXTS]
    for given in (ids, ids[0]):
        data = post(embeds, "/v1/embeddings", input=given).json()["data"]
        for text, each in zip(TEXTS, data, strict=False):
            assert each["embedding"] == pytest.approx(vectors[text], abs=NEAR)


def test_numbers_come_in_the_form_that_was_asked_for(embeds: Server, vectors: dict[str, list[float]]) -> None:
    for kind, order, dtype in (("float32", "big", ">f4"), ("float16", "little", "<f2"), (None, None, "<f4")):
        body = {"embed_dtype": kind, "endianness": order, "encoding_format": "base64", "input": TEXTS[0]}
        answer = post(embeds, "/v1/embeddings", **body).json()
        msgspec.convert(answer, type=answers.Embeddings)
        got = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype)
        assert got == pytest.approx(vectors[TEXTS[0]], abs=1e-3 if kind == "float16" else NEAR)


FORMATS: dict[VectorDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_are_rounded_as_torch_does(kind: VectorDtype) -> None:
    """Among them the numbers half way between two codes of eight bits."""
    halves = torch.arange(4096) / torch.tensor([[4.0], [64.0], [2.0**14], [2.0**20]])
    drawn = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-6], [1e-3], [1], [99]])
    numbers = torch.cat([halves, -halves, drawn]).flatten().clamp(-448, 448)
    want = numbers.to(FORMATS[kind])
    assert vector_bytes(numbers.numpy(), kind, "<") == bytes(want.view(torch.uint8).numpy())
    large = torch.frombuffer(bytearray(vector_bytes(np.float32([6e4, -7e4]), kind, "<")), dtype=FORMATS[kind]).tolist()
    assert large[0] == pytest.approx(448 if kind == "fp8_e4m3" else 6e4, rel=0.1)
    assert large[1] <= -448


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/invocations"])
def test_vectors_come_as_bytes_alone(embeds: Server, vectors: dict[str, list[float]], path: str) -> None:
    for kind, order in (("float32", "big"), ("bfloat16", "little"), ("fp8_e4m3", "native"), (None, None)):
        form = {"embed_dtype": kind, "endianness": order, "input": TEXTS}
        told = post(embeds, path, encoding_format="bytes", **form)
        assert told.headers["content-type"] == "application/octet-stream"
        said = json.loads(told.headers["metadata"])
        assert said["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in TEXTS)
        for text, place in zip(TEXTS, said["data"], strict=True):
            assert (place["shape"], place["embed_dtype"]) == ([32], kind or "float32")
            assert place["endianness"] == (order or "native")
            raw = np.frombuffer(told.content[place["start"] : place["end"]], np.uint8).reshape(32, -1)
            raw = raw[:, ::-1] if order == "big" else raw
            got = torch.from_numpy(raw.copy()).view(FORMATS[kind or "float32"]).flatten().float().tolist()
            assert got == pytest.approx(vectors[text], abs={"bfloat16": 2**-9, "fp8_e4m3": 2**-4}.get(kind or "", NEAR))
        bare = post(embeds, path, encoding_format="bytes_only", **form)
        assert "metadata" not in bare.headers
        assert len(bare.content) == len(told.content) == place["end"]
    many = {"input": ["paris"] * 401, "dimensions": 2}
    refused(post(embeds, path, encoding_format="bytes", **many), "encoding_format", "at most 400 inputs", "bytes_only")
    assert len(post(embeds, path, encoding_format="bytes_only", **many).content) == 401 * 8


POOLED: dict[str, Any] = {"request_id": "one", "truncate_prompt_tokens": 4, "truncation_side": "left", "user": "x"}
POOLED |= {"cache_salt": "x", "model": MODEL, "priority": 1, "use_activation": False, "padding": "do_not_pad"}
VECTORS = {"dimensions": 8, "embed_dtype": "float16", "encoding_format": "base64", "endianness": "big"}
COMPARED = {"max_tokens_per_doc": 3, "max_tokens_per_query": 3, "instruction": "", "chat_template_kwargs": {}}
IMPLEMENTED: dict[str, list[dict[str, Any]]] = {
    "embeddings": [{"input": "a", "add_special_tokens": False, **POOLED, **VECTORS}],
    "pooling": [{"input": [5], "task": "token_embed", "add_special_tokens": True, **POOLED, **VECTORS}],
    "score": [
        {first: QUERY, second: DOCUMENTS, **POOLED, **COMPARED}
        for first, second in (
            ("text_1", "text_2"),
            ("data_1", "data_2"),
            ("queries", "documents"),
            ("queries", "items"),
        )
    ],
    "rerank": [{"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": False, **POOLED, **COMPARED}],
    "tokenize": [
        {"prompt": "a", "add_special_tokens": False, "return_token_strs": True, "model": MODEL},
        {"content": "a", "add_special": False, "with_pieces": True, "model": MODEL},
    ],
    "detokenize": [{"tokens": [5], "model": MODEL}],
}
# What conversations take needs a chat template, and classifying a model with several labels.
CHATS = {
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
}


@pytest.mark.parametrize("route", IMPLEMENTED)
def test_every_field_of_other_servers_is_taken_or_named(embeds: Server, route: str) -> None:
    path, names = TITLES[route].partition(",")[0], frozenset[str]().union(*APIS[route].values())
    states = {name: state(BODIES[route], name)[0] for name in names}
    given = IMPLEMENTED[route]
    assert {name for name in names if states[name] == "implemented"} <= set[str]().union(*given) | CHATS
    harmless = sorted(name for name in names if states[name] == "harmless")
    for body in given:
        answer = post(embeds, path, **body, **dict.fromkeys(harmless, "x"))
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("ridgeline-ignored", "") == ", ".join(harmless)
        if "request_id" in body:
            assert answer.json()["id"].endswith("-one")
        refused = [name for name in names if states[name] == "refused"]
        for name in refused:
            error = post(embeds, path, **body | {name: "something"}).json()["error"]
            assert (error["param"], name in error["message"]) == (name, True)


def test_an_input_may_be_cut_at_its_beginning(embeds: Server, vectors: dict[str, list[float]]) -> None:
    """The special tokens at both ends stay, as the tokenizer's own truncation leaves them."""
    for side, words in (("left", "of france"), ("right", "what is"), (None, "what is")):
        cut = {"truncate_prompt_tokens": 4, "truncation_side": side}
        answers = [
            post(embeds, "/v1/embeddings", **each).json() for each in ({"input": QUERY, **cut}, {"input": words})
        ]
        assert answers[0]["data"][0]["embedding"] == pytest.approx(answers[1]["data"][0]["embedding"], abs=NEAR)
    ids = post(embeds, "/tokenize", prompt=QUERY).json()["tokens"]
    kept = post(embeds, "/pooling", input=ids, truncate_prompt_tokens=2, truncation_side="left").json()["data"]
    alone = post(embeds, "/pooling", input=ids[-2:]).json()["data"]
    assert [each["data"] for each in kept] == [pytest.approx(each["data"], abs=NEAR) for each in alone]


def test_texts_that_are_compared_may_be_cut_one_by_one(embeds: Server, ranks: Server) -> None:
    """The same as texts that were never longer."""
    for server in (embeds, ranks):
        limits = {"max_tokens_per_query": 3, "max_tokens_per_doc": 2}
        long = post(server, "/score", text_1=QUERY, text_2=DOCUMENTS, **limits).json()["data"]
        short = [" ".join(document.split()[:2]) for document in DOCUMENTS]
        alone = post(server, "/score", text_1="what is the", text_2=short).json()["data"]
        assert [each["score"] for each in long] == pytest.approx([each["score"] for each in alone], abs=NEAR)
    refused(post(ranks, "/score", text_1="a", text_2="b", chat_template_kwargs={"x": 1}), "chat_template_kwargs", "no")


def test_a_prompt_of_the_model_goes_before_the_input(embeds: Server, vectors: dict[str, list[float]]) -> None:
    answer = post(embeds, "/v1/embeddings", input=QUERY.removeprefix("what is "), prompt_name="query").json()
    assert answer["data"][0]["embedding"] == pytest.approx(vectors[QUERY], abs=NEAR)
    refused(post(embeds, "/v1/embeddings", input="a", prompt_name="other"), "prompt_name", "'query'")


def test_pooling_gives_vectors_of_tokens_too(embeds: Server, vectors: dict[str, list[float]]) -> None:
    answer = post(embeds, "/pooling", input=TEXTS).json()
    msgspec.convert(answer, type=answers.Pooled)
    assert answer["data"][2]["data"] == pytest.approx(vectors[TEXTS[2]], abs=NEAR)
    tokens = post(embeds, "/pooling", input=TEXTS[0], task="token_embed").json()["data"][0]["data"]
    assert np.shape(tokens) == (6, 32)
    refused(
        post(embeds, "/pooling", input=TEXTS[0], task="classify"), "task", "embed and token_embed, and not classify"
    )


def test_embeddings_are_compared_by_their_angle(embeds: Server, vectors: dict[str, list[float]]) -> None:
    want = [float(np.dot(vectors[QUERY], vectors[document])) for document in DOCUMENTS]
    answer = post(embeds, "/v1/score", queries=QUERY, documents=DOCUMENTS).json()
    msgspec.convert(answer, type=answers.ScoreList)
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=NEAR)


def test_pairs_are_scored_and_ranked(ranks: Server, folders: dict[str, Path]) -> None:
    with LLM(folders["ranks"], dtype=DTYPE, device="cpu") as llm:
        offline = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    want = [each.outputs.score for each in offline]
    answer = post(ranks, "/score", text_1=QUERY, text_2=DOCUMENTS).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=NEAR)
    assert answer["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in offline)
    order = sorted(range(4), key=lambda index: -want[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = post(
            ranks, path, query=QUERY, documents=[DOCUMENTS[0], *({"text": d} for d in DOCUMENTS[1:])], top_n=3
        )
        msgspec.convert(ranked.json(), type=answers.Reranked)
        results = ranked.json()["results"]
        assert [each["index"] for each in results] == order[:3]
        assert [each["document"]["text"] for each in results] == [DOCUMENTS[index] for index in order[:3]]
        assert [each["relevance_score"] for each in results] == pytest.approx([want[i] for i in order[:3]], abs=NEAR)
    bare = post(ranks, "/rerank", query=QUERY, documents=DOCUMENTS, return_documents=False).json()["results"]
    assert all("document" not in each for each in bare)


def test_inputs_are_classified(ranks: Server) -> None:
    answer = post(ranks, "/classify", input=TEXTS).json()
    msgspec.convert(answer, type=answers.Classifications)
    assert [(each["label"], each["num_classes"]) for each in answer["data"]] == [("LABEL_0", 1)] * 3
    raw = post(ranks, "/classify", input=TEXTS, use_activation=False).json()
    for one, other in zip(answer["data"], raw["data"], strict=True):
        assert one["probs"][0] == pytest.approx(1 / (1 + np.exp(-other["probs"][0])), abs=NEAR)


CONVERSATION = [{"role": "user", "content": "paris"}, {"role": "assistant", "content": "a fox"}]


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("embeds", "/v1/embeddings", {"input": TEXTS, "encoding_format": "float", "dimensions": 8}),
        ("embeds", "/v1/embeddings", {"messages": CONVERSATION, "chat_template": "{{ messages[0].content }}"}),
        ("embeds", "/pooling", {"input": TEXTS, "task": "token_embed"}),
        ("embeds", "/pooling", {"messages": CONVERSATION, "task": "embed", "chat_template": "a fox"}),
        ("embeds", "/score", {"queries": QUERY, "documents": DOCUMENTS}),
        ("embeds", "/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}),
        ("ranks", "/classify", {"input": TEXTS, "use_activation": False}),
        ("ranks", "/classify", {"messages": CONVERSATION, "chat_template": "{{ messages[1].content }}"}),
        ("ranks", "/score", {"data_1": QUERY, "items": DOCUMENTS[:1]}),
        ("ranks", "/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}),
        ("embeds", "/v1/embeddings", {"input": [1, 64]}),
        ("embeds", "/v1/embeddings", {"input": "a", "model": "b"}),
        ("embeds", "/v1/embeddings", {"input": [], "encoding_format": "base64"}),
        ("embeds", "/v1/embeddings", {"inputs": "a"}),
        ("ranks", "/rerank", {"query": QUERY}),
        ("ranks", "/score", {"text_1": QUERY}),
        ("ranks", "/pooling", {"input": "a", "task": "embed"}),
    ],
)
def test_invocations_answer_as_the_route_of_the_bodys_fields(
    servers: dict[str, Server], kind: str, path: str, body: dict[str, Any]
) -> None:
    here, there = post(servers[kind], "/invocations", **body), post(servers[kind], path, **body)
    assert here.status_code == there.status_code
    assert here.status_code == 200 or here.json()["error"]["param"]
    assert dict(leaves(here.json())) == pytest.approx(dict(leaves(there.json())), abs=NEAR)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what JSON holds, and where, but for what differs from one request to the next."""
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{path}.{key}")
    elif path not in (".id", ".created"):
        yield path, value


@pytest.mark.parametrize("documents", [None, [], 3, [None], [{}], {"text": "x"}])
def test_documents_that_are_none_are_refused(embeds: Server, documents: object) -> None:
    body = {"query": "x", "documents": documents}
    answer = httpx.post(f"{embeds.url}/rerank", json=body, timeout=PATIENCE)
    assert answer.status_code == 400, answer.text
    assert "text" in answer.json()["error"]["message"]


def test_mistakes_are_told_in_one_sentence(embeds: Server, ranks: Server, server: Server) -> None:
    refused(post(server, "/v1/embeddings", input="a"), "model", "this model generates", "--runner pooling")
    refused(post(embeds, "/v1/completions", prompt="a"), "model", "embeds or classifies and cannot generate")
    refused(post(ranks, "/v1/embeddings", input="a"), "task", "not embed")
    refused(post(ranks, "/v1/embeddings", input="a " * 200000), "task", "not embed")  # before the text is read
    refused(post(embeds, "/v1/embeddings", input=[]), "input", "an input is text")
    refused(post(embeds, "/v1/embeddings", input=[["a"]]), "input", "a list of inputs holds texts")
    refused(post(embeds, "/v1/embeddings", input=[1, 64]), "input", "token id 64")
    refused(post(embeds, "/v1/embeddings", input="a " * 200), "input", "202 tokens", "truncate_prompt_tokens")
    refused(post(embeds, "/v1/embeddings", input="a " * 200000), "input", "characters")
    refused(post(embeds, "/v1/embeddings", input="a", dimensions=33), "dimensions", "have 32")
    refused(post(embeds, "/v1/embeddings", input="a", truncate_prompt_tokens=2), "truncate_prompt_tokens", "no room")
    refused(post(ranks, "/score", text_1="a"), "text_2", "text_2 is required")
    refused(post(ranks, "/score", text_1="a", queries="b", text_2="c"), "text_1", "text_1 and queries are the same")
    refused(post(ranks, "/score", text_1=["a", "b"], text_2=["a"]), "text_1", "2 texts on one side and 1")
    refused(post(ranks, "/rerank", query="a", documents=[1]), "documents", "a list of texts")
    refused(post(ranks, "/rerank", query="a", documents=["b"], instruction="c"), "instruction", "takes no instruction")
    cut = post(embeds, "/v1/embeddings", input="a " * 200, truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["prompt_tokens"] == pooled_models.POSITIONS


def test_many_inputs_at_once_and_a_client_that_leaves(embeds: Server, vectors: dict[str, list[float]]) -> None:
    inputs = [TEXTS[index % 3] for index in range(300)]
    data = post(embeds, "/v1/embeddings", input=inputs).json()["data"]
    for index in (0, 151, 299):
        assert data[index]["embedding"] == pytest.approx(vectors[inputs[index]], abs=NEAR)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(embeds.url + "/v1/embeddings", json={"input": inputs * 6}, timeout=0.05)
    assert embeds.wait_idle(), "what nobody waits for has ended in the engine"


def test_requests_are_counted(embeds: Server) -> None:
    def counted() -> float:
        lines = httpx.get(embeds.url + "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))

    assert embeds.wait_idle(), "what ran for a client that left may end just now"
    before = counted()
    post(embeds, "/v1/embeddings", input=TEXTS)
    assert counted() - before == sum(len(text.split()) + 2 for text in TEXTS)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["embeds", "ranks"])
def test_nothing_that_is_sent_breaks_the_server(servers: dict[str, Server], kind: str, tmp_path: Path) -> None:
    chosen = "^/(v1/embeddings|pooling|classify|score|rerank|invocations)$"
    command = [*SCHEMATHESIS, "--no-color", "run", f"{servers[kind].url}/openapi.json", "--checks", CHECKS]
    command += ["--include-path-regex", chosen, "--max-time", "30", "--phases", "coverage,fuzzing", "--seed", "1"]
    command += ["--generation-database", "none", "--no-shrink", "--request-timeout", "120", "--warnings", "off"]
    command += ["--suppress-health-check", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " generated, " in done.stdout, "it asked nothing"
    assert servers[kind].wait_idle()


def test_texts_are_compared_by_the_vectors_of_their_tokens(tmp_path: Path, start_server: StartServer) -> None:
    query, documents = late_models.QUERY, late_models.DOCUMENTS
    folder, socket = late_models.save("pylate", tmp_path / "model"), tmp_path / "socket"
    want = [late_models.expected("pylate", query, document) for document in documents]
    with engine_in_a_thread(socket, model=str(folder), max_num_seqs=4), start_server(folder, socket) as server:

        def post(path: str, **body: Any) -> Any:
            return httpx.post(server.url + path, json=body, timeout=PATIENCE).json()

        ranked = post("/v1/rerank", query=query, documents=documents)["results"]
        scored = post("/v1/score", text_1=query, text_2=documents)["data"]
        pooled = post("/pooling", input=[query, documents[0]], task="token_embed")["data"]
        refused = post("/v1/embeddings", input=query)["error"]["message"]
    assert [each["score"] for each in scored] == pytest.approx(want, abs=NEAR)
    assert [each["index"] for each in ranked] == sorted(range(4), key=lambda index: -want[index])
    assert len(pooled[0]["data"]) == 8
    assert len(pooled[1]["data"][0]) == late_models.WIDTH
    assert "this model does token_embed" in refused
