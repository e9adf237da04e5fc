"""Lines of a batch: what clients ask for, checked line by line, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bounded_json import Size
from ridgeline.serving.stored.records import LONGEST_CUSTOM_ID, MOST_ERRORS, Counts, Mistake, Usage

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_LINES = 50_000  # as with OpenAI
PIECE = 1 << 20  # bytes of an input that are looked at one after the other


class Asked(NamedTuple):
    """A request of a batch. `number` is its line's, from 0."""

    number: int
    custom_id: str
    url: str
    body: bytes


class Outcome(msgspec.Struct):
    """The outcome of a request, with the answer of its endpoint as it was."""

    id: str
    custom_id: str
    response: Response | None
    error: dict[str, Any] | None


class Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Invalid(Exception):
    """A line that cannot be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None
    encoding_format: Any = None


_lines, _bodies = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Body)


def raw_lines(path: Path, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line that is not empty, with its number from 0; None for one that is longer than `longest` bytes, of
    which no more than that is ever read at once."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(longest + 1):
            whole: bytes | None = line
            while line and not line.endswith(b"\n") and len(line) > longest:
                whole, line = None, file.readline(longest + 1)
            if whole is None or whole.strip():
                yield number, whole
            number += 1


def read_line(number: int, line: bytes | None, endpoint: str | None, endpoints: Collection[str], longest: int) -> Asked:
    """Return the line's request. Raise Invalid."""
    if line is None:
        raise Invalid("line_too_long", f"This line is longer than {longest} bytes, the most that a request may have.")
    try:
        Size().add(line)
        found = _lines.decode(line)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise Invalid("invalid_json_line", "This line is not parseable as valid JSON.") from None
    except BadRequest as error:
        raise Invalid("invalid_json_line", f"This line cannot be taken: {error}") from None
    name = found.custom_id
    if name is None:
        raise Invalid("missing_required_parameter", "Missing required parameter: 'custom_id'.", "custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {LONGEST_CUSTOM_ID} characters."
        raise Invalid("invalid_custom_id", message, "custom_id")
    if found.method != "POST":
        raise Invalid("invalid_method", "The method of a request must be POST.", "method")
    if endpoint is not None and found.url != endpoint:
        message = f"The URL provided for this request does not match the batch endpoint, {endpoint}."
        raise Invalid("invalid_url", message, "url")
    if found.url not in endpoints:
        raise Invalid("invalid_url", f"The URL of a request must be one of {', '.join(sorted(endpoints))}.", "url")
    body = bytes(found.body)
    if not body.startswith(b"{"):
        raise Invalid("missing_required_parameter", "Missing required parameter: 'body', an object.", "body")
    return Asked(number, name, found.url, body)


def check(
    path: Path,
    endpoint: str | None,
    endpoints: Collection[str],
    longest: int,
    known: Callable[[Any], bool],
    *,
    one_model: bool,
) -> tuple[Counts, str | None, list[Mistake]]:
    """Return the number of requests in a file, their model, and the file's mistakes, of which only the first are
    listed.

    `known` says if there is a model of that name. With `one_model` all requests must name the same one. It takes as
    much memory as 32 bytes a line and one line.
    """
    counts, mistakes, seen = Counts(), list[Mistake](), set[bytes]()
    models: list[str | None] = []
    for number, line in raw_lines(path, longest):
        if len(mistakes) >= MOST_ERRORS:
            break
        counts.total += 1
        if counts.total > MOST_LINES:
            message = f"The file has more than {MOST_LINES} requests; divide it."
            mistakes.append(Mistake("too_many_tasks", message))
            break
        try:
            asked = read_line(number, line, endpoint, endpoints, longest)
            digest = digest_of(asked.custom_id)
            if digest in seen:
                message = f"The custom_id {asked.custom_id!r} is that of another request too; each must be unique."
                raise Invalid("duplicate_custom_id", message, "custom_id")
            seen.add(digest)
            body = _bodies.decode(asked.body)
            if body.stream:
                raise Invalid("invalid_request", "A request of a batch cannot be streamed.", "body.stream")
            if body.encoding_format in ("bytes", "bytes_only"):
                message = "A batch holds no vectors as bytes; ask for base64."
                raise Invalid("invalid_request", message, "body.encoding_format")
            if not known(body.model):
                raise Invalid("model_not_found", f"There is no model {str(body.model)[:200]!r} here.", "body.model")
            models = models or [body.model]
            if one_model and body.model != models[0]:
                message = f"The model {body.model!r} is not that of the requests before, {models[0]!r}."
                raise Invalid("mismatched_model", message, "body.model")
        except Invalid as error:
            mistakes.append(Mistake(error.code, error.message, number + 1, error.param))
    if not counts.total:
        mistakes.append(Mistake("empty_file", "The file has no requests."))
    return counts, models[0] if models else None, mistakes


# ---- what came of them ----------------------------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Used(msgspec.Struct):
    """The usage of any endpoint's answer."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Used | None = None


class _Answered(msgspec.Struct):
    body: _Answer | None = None


class _Done(msgspec.Struct):
    custom_id: str
    response: _Answered | None = None


_done = msgspec.json.Decoder(_Done)


class Written:
    """A file of outcomes, to which whole lines are added. `usage` is theirs together, and `count` their number."""

    def __init__(self, path: Path, done: set[bytes]) -> None:
        """Open the file, or begin it. A line that a dead process left incomplete is taken away, and the requests of the
        others are added to `done`."""
        self.path = path
        self.usage, self.count = Usage(), 0
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        whole = 0
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                done.add(digest_of(self._note(line)))
        os.ftruncate(self._descriptor, whole)
        self._size = whole

    def add(self, outcome: Outcome) -> None:
        """Add a line. If the disk is full, nothing is added and OSError is raised."""
        line = msgspec.json.encode(outcome) + b"\n"
        at = 0
        try:
            while at < len(line):
                at += os.write(self._descriptor, line[at:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)
        self._note(line)

    def settle(self) -> None:
        """Wait until all lines are on the disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _note(self, line: bytes) -> str:
        found = _done.decode(line)
        self.count += 1
        used = found.response.body.usage if found.response is not None and found.response.body is not None else None
        if used is not None:
            ins, outs = used.prompt_tokens_details, used.completion_tokens_details
            ins, outs = ins or used.input_tokens_details, outs or used.output_tokens_details
            self.usage.input += used.prompt_tokens or used.input_tokens
            self.usage.output += used.completion_tokens or used.output_tokens
            self.usage.cached += (ins.cached_tokens or 0) if ins is not None else 0
            self.usage.reasoning += (outs.reasoning_tokens or 0) if outs is not None else 0
        return found.custom_id


def custom_ids(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """Yield the custom id of each outcome in a file, and where its line begins."""
    at = 0
    for line in file:
        yield _done.decode(line).custom_id, at
        at += len(line)


def digest_of(custom_id: str) -> bytes:
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
