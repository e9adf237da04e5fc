"""Files and batches by OpenAI's client, at a server as users start it: what is done, refused, ended, and done again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ridgeline.cli.serve import prepare
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.batches.offline import OfflineBatch
from ridgeline.serving.processes.engine_settings import encode
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.served import Served
from tests.command import run_here
from tests.serving.conftest import PATIENCE

LIMIT = 1 << 16  # bytes of a line
FILE_LIMIT = 1 << 20
SETTINGS = ("--dtype", "float32", "--max-num-seqs", "2", "--batch-in-flight", "8", "--served-model-name", "m")


def line(name: str, *, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"model": "m", "prompt": f"Once upon {name}", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"custom_id": name, "method": "POST", "url": url, "body": {**given, **body}}


def lines(*each: dict[str, Any] | bytes) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in each)


def client_of(served: Served, key: str = "a") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def begin(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions", **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(**{"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h", **more})


def until(client: openai.OpenAI, name: str, good: Callable[[Any], bool] | None = None) -> Any:
    """The batch, once it has ended or is as wanted."""
    deadline = time.monotonic() + PATIENCE
    while True:
        batch = client.batches.retrieve(name)
        if (good or (lambda batch: batch.status in ("completed", "failed", "expired", "cancelled")))(batch):
            return batch
        assert time.monotonic() < deadline, repr(batch)
        time.sleep(0.05)


def told(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    """The lines of a file by custom id, of which each stands there once."""
    if file is None:
        return {}
    found = [json.loads(each) for each in client.files.content(file).text.splitlines()]
    by_name = {each["custom_id"]: each for each in found}
    assert len(by_name) == len(found)
    return by_name


@pytest.mark.dealt
def test_the_process_of_batches_ends_at_sigterm_by_itself(tmp_path: Path) -> None:
    """It ends with code 0, also while it waits for an engine that never comes."""
    config = ServeConfig(batch_dir=str(tmp_path / "batches"))
    model = NamedModel(str(EMBEDDED_MODEL), ("m",), (str(tmp_path / "no engine"),))
    command = [sys.executable, "-m", "ridgeline.serving.processes.batch_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(encode({"config": config, "model": model, "name": "batches-1"}) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("batches")
    bounds = ("--max-body-bytes", str(LIMIT), "--batch-file-bytes", str(FILE_LIMIT))
    with Served(*SETTINGS, "--batch-dir", str(folder), "--api-key", "a", "--api-key", "b", *bounds) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def test_a_batch_gives_what_its_requests_give_alone(client: openai.OpenAI) -> None:
    asked = [line(f"r{n}") for n in range(12)] + [line("wrong", temperature=-1), line("long", prompt="word " * 9000)]
    batch = begin(client, lines(*asked), metadata={"for": "a test"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", "/v1/completions")
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.metadata == {"for": "a test"}
    ended = until(client, batch.id)
    counts = ended.request_counts
    assert (ended.status, counts.total, counts.completed, counts.failed) == ("completed", 14, 12, 2)
    assert batch.created_at <= ended.in_progress_at <= ended.finalizing_at <= ended.completed_at
    done, failed = told(client, ended.output_file_id), told(client, ended.error_file_id)
    assert done.keys() == {f"r{n}" for n in range(12)}
    for name in ("r0", "r11"):
        body = line(name)["body"]
        alone = client.completions.create(
            model="m", prompt=body["prompt"], max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
        response = done[name]["response"]
        assert (response["status_code"], done[name]["error"]) == (200, None)
        assert response["body"]["choices"][0]["text"] == alone.choices[0].text
        assert response["request_id"].startswith("req-")
    assert ended.usage.output_tokens == 48
    assert ended.usage.input_tokens == sum(d["response"]["body"]["usage"]["prompt_tokens"] for d in done.values())
    assert {name: each["response"]["status_code"] for name, each in failed.items()} == {"wrong": 400, "long": 400}
    assert failed["wrong"]["response"]["body"]["error"]["param"] == "temperature"


def test_every_endpoint_answers_as_it_does_alone(client: openai.OpenAI) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}
    asked = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    ended = until(client, begin(client, lines(asked), "/v1/chat/completions").id)
    [answer] = told(client, ended.output_file_id).values()
    alone = client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    embed = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}
    ended = until(client, begin(client, lines(embed), "/v1/embeddings").id)
    [answer] = told(client, ended.error_file_id).values()
    assert "generates" in answer["response"]["body"]["error"]["message"]


def test_answers_of_a_batch_are_kept_in_its_files_alone(client: openai.OpenAI) -> None:
    """A background's answer would be that it has begun."""

    def asked(name: str, **more: Any) -> dict[str, Any]:
        body = {"model": "m", "input": "Hello", "max_output_tokens": 3, **more}
        return {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body}

    ended = until(client, begin(client, lines(asked("plain"), asked("later", background=True)), "/v1/responses").id)
    [plain], [later] = (told(client, file).values() for file in (ended.output_file_id, ended.error_file_id))
    assert (plain["custom_id"], plain["response"]["body"]["store"]) == ("plain", False)
    assert (later["response"]["status_code"], "background" in later["response"]["body"]["error"]["message"]) == (
        400,
        True,
    )


def test_what_is_wrong_with_a_file_is_told_line_by_line(client: openai.OpenAI) -> None:
    wrong = lines(
        line("good"),
        b'{"custom_id": "x", ',
        b"[1, 2]",
        b"\xff\xfe",
        {**line("x"), "method": "GET"},
        line("y", url="/v1/chat/completions"),
        line("good"),
        line("z", model="none"),
        line("s", stream=True),
        {key: value for key, value in line("n").items() if key != "custom_id"},
        {**line("b"), "body": []},
        line("huge", prompt="x" * LIMIT),
        b'{"custom_id": "deep", "body": ' + b"[" * 20_000,
        line("v", encoding_format="bytes_only"),
    )
    batch = until(client, begin(client, wrong).id)
    assert (batch.status, batch.request_counts.total, batch.output_file_id) == ("failed", 0, None)
    assert batch.failed_at is not None
    assert [(each.line, each.code) for each in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "invalid_json_line"),
        (4, "invalid_json_line"),
        (5, "invalid_method"),
        (6, "invalid_url"),
        (7, "duplicate_custom_id"),
        (8, "model_not_found"),
        (9, "invalid_request"),
        (10, "missing_required_parameter"),
        (11, "missing_required_parameter"),
        (12, "line_too_long"),
        (13, "invalid_json_line"),
        (14, "invalid_request"),
    ]
    empty = until(client, begin(client, b"\n\n").id)
    assert [each.code for each in empty.errors.data] == ["empty_file"]


def test_files_are_listed_read_and_deleted_by_their_owner_alone(served: Served, client: openai.OpenAI) -> None:
    content = lines(line("only")) + b" " * 300_000
    file = client.files.create(
        file=("ünï.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (file.bytes, file.filename, file.purpose) == (len(content), "ünï.jsonl", "batch")
    assert file.expires_at == file.created_at + 7200
    assert client.files.content(file.id).read() == content
    assert client.files.retrieve(file.id) == file
    assert client.files.list(limit=1).data == [file]
    assert file.id not in [each.id for each in client.files.list(purpose="batch_output")]
    whole = [each.id for each in client.files.list(limit=2)]  # page by page
    assert len(whole) == len(set(whole)) >= 3
    assert [each.id for each in client.files.list(order="asc")] == whole[::-1]
    other = client_of(served, "b")
    for read in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            read(file.id)
    assert list(other.files.list()) == list(other.batches.list()) == []
    batch = begin(client, lines(line("x", max_tokens=1)))
    for use in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            use(batch.id)
    client.files.delete(batch.input_file_id)  # the batch has its own name for the content
    assert until(client, batch.id).status == "completed"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert client.batches.list(limit=1).data[0].id == batch.id


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"files": {"file": ("f", b"x" * (FILE_LIMIT + 1))}, "data": {"purpose": "batch"}}, "longer than"),
        (
            {"files": {"file": ("f", b"x")}, "data": {"purpose": "fine-tune"}},
            "purpose is one of batch, vision, user_data",
        ),
        ({"files": {"file": ("f", b"x")}}, "purpose is one of batch, vision, user_data"),
        ({"files": {"other": ("f", b"x")}, "data": {"purpose": "batch"}}, "longer|no file|unknown"),
        ({"files": {"file": ("f", b"x")}, "data": {"purpose": "batch", "porpoise": "1"}}, "unknown field"),
        ({"files": [("file", ("f", b"x")), ("file", ("f", b"x"))], "data": {"purpose": "batch"}}, "more than one"),
        ({"files": {"file": ("f", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "7200"}}, "anchor"),
        ({"content": b"{}", "headers": {"content-type": "application/json"}}, "multipart/form-data"),
        ({"content": b"--b\r\n\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "ends before"),
        ({"content": b"--b", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "ends before"),
        ({"content": b"x" * 9999, "headers": {"content-type": "multipart/form-data; boundary=b"}}, "begin with"),
        ({"files": {"file": ("f", b"x")}, "headers": {"idempotency-key": "k"}}, "Idempotency-Key"),
    ],
)
def test_uploads_that_are_none_are_refused(served: Served, given: dict[str, Any], said: str) -> None:
    headers = {"authorization": "Bearer a", **given.pop("headers", {})}
    answer = httpx.post(f"{served.url}/v1/files", headers=headers, timeout=PATIENCE, **given)
    assert answer.status_code in (400, 413)
    assert re.search(said, answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"extra_body": {"completion_windows": "24h"}}, "completion_windows"),
    ],
)
def test_batches_that_make_no_sense_are_refused(client: openai.OpenAI, wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        begin(client, lines(line("x")), **wrong)
    assert refused.value.status_code in (400, 404)
    assert refused.value.param in (param, "id")


def test_whoever_waits_goes_before_a_batch(client: openai.OpenAI) -> None:
    """Two requests fit into the engine, and eight of a batch are under way."""
    batch = begin(client, lines(*(line(f"r{n}", max_tokens=200) for n in range(12))))
    before = until(client, batch.id, lambda batch: batch.request_counts.completed > 0).request_counts.completed
    for _ in range(3):
        answer = client.completions.create(model="m", prompt="Now", max_tokens=4, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
    after = client.batches.retrieve(batch.id)
    assert after.status == "in_progress"
    assert after.request_counts.completed - before < 6, "each waited for what was under way"
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    assert cancelled.cancelling_at is not None
    ended = until(client, batch.id)
    assert ended.status == "cancelled"
    assert len(told(client, ended.output_file_id)) == ended.request_counts.completed < 12
    assert ended.error_file_id is None
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'cancelled'"):
        client.batches.cancel(batch.id)


def test_lines_that_have_no_answer_when_the_time_is_over_are_told(client: openai.OpenAI) -> None:
    batch = begin(client, lines(*(line(f"r{n}", max_tokens=200) for n in range(30))), completion_window="1s")
    ended = until(client, batch.id)
    assert ended.status == "expired"
    assert ended.expired_at >= ended.expires_at
    late = told(client, ended.error_file_id)
    assert late.keys() | told(client, ended.output_file_id).keys() == {f"r{n}" for n in range(30)}
    assert {each["error"]["code"] for each in late.values()} == {"batch_expired"}
    assert {each["response"] for each in late.values()} == {None}


@pytest.mark.thorough  # `tests/serving/batches/test_runner.py` has runs that were cut off
def test_a_batch_goes_on_where_a_killed_server_left_it(tmp_path: Path) -> None:
    asked = [line(f"r{n}", max_tokens=200 if n in (6, 7) else 6) for n in range(24)]  # some are left when it looks
    settings = (*SETTINGS, "--batch-dir", str(tmp_path))
    with Served(*settings) as served:
        client = client_of(served)
        batch = begin(client, lines(*asked))
        until(client, batch.id, lambda batch: batch.request_counts.completed >= 4)
    outputs = tmp_path / "batches" / batch.id / "output.jsonl"
    before = outputs.read_bytes()
    whole = before[: before.rindex(b"\n") + 1]
    assert 4 <= whole.count(b"\n") < 24
    with outputs.open("ab") as file:
        file.write(b'{"custom_id": "torn')  # as a machine that lost its power may leave it
    with Served(*settings) as served:
        client = client_of(served)
        until(client, batch.id, lambda batch: batch.request_counts.completed > whole.count(b"\n"))
        os.kill(served.engine, 9)  # its requests are run again, too
        ended = until(client, batch.id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 24)
        content = client.files.content(ended.output_file_id).read()
        assert content.startswith(whole), "what was done is not done again"
        assert told(client, ended.output_file_id).keys() == {each["custom_id"] for each in asked}
        assert not outputs.exists()


def test_without_a_folder_there_are_no_batches(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidConfig, match="folder of batches"):
        prepare({"batch_dir": str(file), "port": 0}, source="a test")


@pytest.mark.dealt
def test_run_batch_goes_from_file_to_file_in_order(tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    asked = [line(f"r{n}", temperature=-1 if n == 3 else 0) for n in range(6)]
    asked.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(*asked))
    command = [sys.executable, "-m", "ridgeline", "run-batch", "-i", str(source), "-o", str(target), *SETTINGS]
    done = subprocess.run([*command, "--model", str(EMBEDDED_MODEL)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "6 of 7 requests have answers" in done.stderr
    found = [json.loads(each) for each in target.read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in asked]
    assert [each["response"]["status_code"] for each in found] == [200, 200, 200, 400, 200, 200, 200]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_run_batch_goes_on_and_says_what_is_wrong(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(line("a"), line("a"), b"{"))
    batch = OfflineBatch(source, target, LIMIT)
    with pytest.raises(InvalidRequest, match=r"line 2: The custom_id 'a' .* line 3: This line is not parseable"):
        batch.begin(["m"])
    source.write_bytes(lines(line("a"), line("b")))
    assert not batch.begin(["m"])
    again = OfflineBatch(source, target, LIMIT)
    assert not again.begin(["m"])
    assert again.state().id == batch.state().id
    source.write_bytes(lines(line("c")))
    with pytest.raises(InvalidRequest, match="another input"):
        OfflineBatch(source, target, LIMIT).begin(["m"])
    refused = run_here("run-batch", "-i", str(source), "-o", str(target), "--port", "3")
    assert (refused.returncode, "port has no meaning here" in refused.stderr) == (2, True)
