"""Mutated HTTP requests: bodies, heads, chunkings and values of fields that are a little or very wrong.

`make(seed)` is one case: the same bytes for the same seed. `ask` sends it and says what came back: a status, or how the
connection ended. What a server must do with each: answer or hang up, never with 500, and work afterwards.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

METHODS = ("POST", "POST", "POST", "POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "BREW", "")
SHORT = {"max_tokens": 1}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
HI = [{"role": "user", "content": "hi"}]
# Conversations with calls, as three APIs have them
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": ""}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL | {"id": "call_1"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
]
BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "r", "signature": "s"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"b": [1]}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]}],
    },
]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "1"},
]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}\n'
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "x", "temperature": 0},
    {"prompt": [1, 2, 3], "echo": True, "logprobs": 1},
    {"prompt": ["a", "b"], "n": 2, "stream": True},
    {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}, "stop": ["z"]},
    {"prompt": "x", "logit_bias": {"5": 1}, "bad_words": ["q"], "prompt_logprobs": 1},
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["<|endoftext|>", "<think>", "<tool_call>"]},
    {"regex": "(<think>|<\\|endoftext\\|>)a{2}"},
    {"regex": "((((kz{990}){999}){999}){999})"},
    {"regex": "((a{1,40}){1,40}){1,40}"},
    {"json": {"type": "string", "format": "date-time"}},
    {"json": {"type": "string", "format": "idn-email", "maxLength": 9}},
    {"json": {"type": "array", "items": {"type": "array", "minItems": 900}, "maxItems": 900}},
    {"json": {"enum": ["<think>", {"<|endoftext|>": 1}]}},
    {"grammar": 'start: (("a"~1..99)~1..99)~1..99'},
)
# a route, and a body that it takes
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("/v1/completions", SHORT | body) for body in COMPLETIONS),
    *(("/v1/completions", SHORT | {"prompt": "x", "structured_outputs": grammar}) for grammar in GRAMMARS),
    ("/v1/chat/completions", SHORT | {"messages": HI}),
    (
        "/v1/chat/completions",
        SHORT
        | {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"type": "function", "function": FUNCTION}],
        },
    ),
    (
        "/v1/chat/completions",
        SHORT
        | {
            "messages": [{"role": "assistant", "tool_calls": [CALL]}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/chat/completions", SHORT | {"messages": HI, "response_format": {"type": "json_object"}}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/tokenize", {"messages": HI, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    ("/v1/responses", {"input": HI, "max_output_tokens": 1, "stream": True, "instructions": "y", "store": False}),
    ("/v1/responses", {"input": HI, "max_output_tokens": 1, "background": True, "previous_response_id": "resp_1"}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 1, "tools": [{"type": "function"} | FUNCTION]}),
    ("/v1/messages", SHORT | {"messages": HI, "system": "s"}),
    ("/v1/messages", SHORT | {"messages": HI, "stream": True, "tools": [{"name": "f", "input_schema": {}}]}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": "base64", "dimensions": 2}),
    ("/pooling", {"input": "x"}),
    ("/classify", {"input": ["x"]}),
    ("/score", {"text_1": "x", "text_2": ["y", "z"]}),
    ("/rerank", {"query": "x", "documents": ["y", {"text": "z"}], "top_n": 1}),
    ("/v1/embeddings", {"messages": HISTORY, "encoding_format": "bytes", "embed_dtype": "fp8_e4m3"}),
    ("/pooling", {"input": [[1, 2], [3]], "truncate_prompt_tokens": 1, "task": "token_embed"}),
    ("/invocations", {"input": "x", "dimensions": 8, "truncation_side": "left"}),
    ("/invocations", SHORT | {"messages": HISTORY}),
    ("/invocations", {"query": "x", "documents": ["y"], "max_tokens_per_doc": 1}),
    ("/v1/chat/completions", SHORT | {"messages": HISTORY}),
    ("/v1/messages", SHORT | {"messages": BLOCKS}),
    ("/v1/responses", {"input": ITEMS, "max_output_tokens": 1}),
    ("/api/chat", {"messages": HISTORY, "stream": False, "options": {"num_predict": 1}}),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": 1, "num_ctx": 9}, "format": "json"}),
    ("/api/embed", {"input": ["x", "y"], "truncate": True, "dimensions": 8}),
    ("/api/embeddings", {"prompt": "x"}),
    ("/api/show", {"model": "embedded"}),
    ("/completion", {"prompt": ["x", 5], "n_predict": 1, "logit_bias": [[5, 1.0]]}),
    ("/infill", {"input_prefix": "x", "input_suffix": "y", "n_predict": 1}),
    ("/apply-template", {"messages": HISTORY}),
    ("/embedding", {"content": ["x", "y"]}),
    ("/v2/embed", {"texts": ["x"], "embedding_types": ["float", "ubinary"], "truncate": "START", "max_tokens": 1}),
    ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": "x"}]}], "input_type": "classification"}),
    ("/v1/files", {"file": LINE, "purpose": "batch"}),
    ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ("/v2/models/embedded/infer", {"inputs": [TENSOR], "parameters": {"max_tokens": 1}}),
    ("/v2/models/embedded/generate", SHORT | {"text_input": "x"}),
    ("/v2/repository/models/x/load", {"parameters": {"config": "{}"}}),
    ("/v2/repository/index", {"ready": True}),
    ("/pause", {}),
    ("/sleep", {"level": 1}),
    ("/reload_weights", {"path": "/tmp"}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../..", "load_inplace": True}),
    ("/v1/unload_lora_adapter", {"lora_name": "x"}),
)
PAGES = (
    *("/", "/docs", "/redoc", "/openapi.json", "/metrics", "/v1/models", "/v1/requests", "/dashboard", "/nowhere"),
    *("/v2/models/embedded/stats", "/v2/models/embedded/config", "/v2/models/stats", "/v2"),
    *("/v1/files", "/v1/files/file-1/content", "/v1/files?limit=-1&after=x", "/v1/batches", "/v1/batches?limit=x"),
    *("/v1/responses/resp_1", "/v1/responses/resp_1/input_items?limit=0", "/pause?mode=x", "/sleep?level=9"),
)
BOUNDS = ("max_tokens", "max_output_tokens", "n_predict")
BOUNDARY = "6dafa3"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, 5e-324),
    *("", "x", "\x00", "\ud800", "é", "\U0001f600", "x" * 5000, "../..", "{{ 7 * 7 }}", "%s%n", "<|endoftext|>", "NaN"),
    *([], {}, [[]], [{}], [None], [1] * 300, [[1], [2]], ["a", 1], {"": ""}, {"a": {"b": {"c": []}}}, {"role": "user"}),
)
LINES = (
    *("Expect: 100-continue", "Expect: nothing", "Connection: close", "Connection: upgrade\r\nUpgrade: h2c"),
    *("Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 3, 3"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Transfer-Encoding: gzip, chunked", "X: " + "a" * 5000),
    *(
        "Idempotency-Key: k",
        "Idempotency-Key: " + "k" * 300,
        "X-Request-Id: a b",
        "X-Request-Id: ok.1",
        "traceparent: 00",
    ),
    *(
        "Authorization: Bearer",
        "Authorization: Basic !!!",
        "Origin: http://a",
        "X\x00Y: 1",
        "X : 1",
        ": 1",
        "X",
        " folded",
    ),
    *("Content-Type: text/xml", "Accept-Encoding: br", "Host: y", "Cookie: " + "c=1; " * 500, "X: \x7f", "X: é"),
    *(f"X-{i}: 1" for i in range(4)),
)


def make(seed: int, key: str = "") -> bytes:
    """A whole request, to be followed by the end of the client's side."""
    draw = random.Random(seed)
    path, plain = draw.choice(BODIES)
    body, method = _body(draw, plain), "POST"
    if path == "/v1/files" and draw.random() < 0.9:
        body = _as_form(draw, plain)
    if draw.random() < 0.3:  # a route that takes no such thing
        path, method = draw.choice((*PAGES, *(path for path, _ in BODIES))), draw.choice(METHODS)
    if draw.random() < 0.1:
        path += draw.choice(("?", "?a=1", "%00", "%", "/../..", "//", "#", " x", "é", "?" + "a" * 3000, "\\"))
    head = [f"{method} {path} HTTP/{draw.choice(('1.1',) * 12 + ('1.0', '2.0', '0.9', '1', 'x'))}", "Host: x"]
    if key and draw.random() < 0.95:
        head.append(f"Authorization: Bearer {key}")
    if path == "/v1/files":
        head.append(f"Content-Type: multipart/form-data; boundary={BOUNDARY}")
    framed = _framed(draw, body, head)
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        head.insert(draw.randrange(1, len(head) + 1), draw.choice(LINES))
    data = "\r\n".join(head).encode("latin-1", "replace") + b"\r\n\r\n" + framed
    return _flipped(draw, data) if draw.random() < 0.1 else data


def _body(draw: random.Random, plain: dict[str, Any]) -> bytes:
    value = json.loads(json.dumps(plain))
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        _mutate(draw, value)
    for name in BOUNDS:  # a chat without a bound fills the context: right, and slow
        if name in plain and (value.get(name) is None or (isinstance(value[name], int) and value[name] > 8)):
            value[name] = 1
    if "options" in plain and isinstance(options := value.get("options") or {}, dict):
        value["options"] = options | {"num_predict": 1}
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    match draw.randrange(12):
        case 0:
            return _flipped(draw, text)
        case 1:
            return text[: draw.randrange(len(text) + 1)]
        case 2:
            return draw.choice((b"", b"[]", b"null", b"1", b'"x"', b"[" * 3000, b"\xff\xfe", b"{}{}", b" " * 3000))
    return text


def _as_form(draw: random.Random, plain: dict[str, Any]) -> bytes:
    """A form of several parts, with a part too many or too few and heads that are none."""
    parts = [(name, str(text)) for name, text in plain.items()]
    for _ in range(draw.choice((0, 0, 1, 2))):
        parts.insert(0, draw.choice((("purpose", "batch"), ("x", "y" * 300), ("file", "{}\n" * 40), ("", "\x00"))))
    if draw.random() < 0.2:
        parts.pop()
    text = ""
    for name, value in parts:
        more = draw.choice(("", "", "; filename=a", '; filename="../é\\""', ";;=", "; filename*=UTF-8''%ff"))
        text += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
    data = (text + draw.choice((f"--{BOUNDARY}--\r\n",) * 5 + ("", f"--{BOUNDARY}", "--"))).encode()
    return _flipped(draw, data) if draw.random() < 0.3 else data


def _mutate(draw: random.Random, value: Any) -> None:
    """Change one value anywhere inside: replace it, delete it, or repeat it."""
    while isinstance(value, (dict, list)) and value:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        if isinstance(value[key], (dict, list)) and value[key] and draw.random() < 0.6:
            value = value[key]
            continue
        if draw.random() < 0.15:
            del value[key]
        elif isinstance(value, dict) and draw.random() < 0.3:
            value[
                draw.choice(("n", "best_of", "stop", "stream", "suffix", "user", "x", "logprobs", "seed", "top_p"))
            ] = deepcopy(draw.choice(VALUES))
        else:
            value[key] = deepcopy(draw.choice(VALUES))
        return


def _framed(draw: random.Random, body: bytes, head: list[str]) -> bytes:
    kind = draw.random()
    if kind < 0.6:
        head.append(f"Content-Length: {len(body)}")
        return body
    if kind < 0.7:
        head.append(f"Content-Length: {max(0, len(body) + draw.choice((-3, -1, 1, 3, 1000)))}")
        return body
    if kind < 0.75:
        return body
    head.append("Transfer-Encoding: chunked")
    data, step = b"", draw.choice((1, 3, 16, 1000))
    for at in range(0, len(body), step):
        piece = body[at : at + step]
        extension = draw.choice((b"",) * 6 + (b";a=b", b";" + b"e" * 200, b" ", b";\x00"))
        data += b"%x" % (len(piece) + (draw.random() < 0.002)) + extension + b"\r\n" + piece + b"\r\n"
    trailers = draw.choice(
        (b"",) * 4 + (b"X-T: 1\r\n", b"X-T: 1\r\n" * 300, b"Content-Length: 5\r\n", b"bad trailer\r\n")
    )
    return data + draw.choice((b"0\r\n" + trailers + b"\r\n",) * 8 + (b"", b"0", b"-1\r\n", b"ffffffffffffffff\r\n"))


def _flipped(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        if found:
            found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found)


def ask(address: tuple[str, int], data: bytes, timeout: float = 60.0) -> str:
    """The status of the last answer, "cut" where there was none, "hung" where the server waited for more than that."""
    found = b""
    try:
        with socket.create_connection(address, timeout=timeout) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                found += piece
    except TimeoutError:
        return "hung"
    except OSError:
        pass
    statuses = [line.split(b" ")[1] for line in found.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    finals = [status for status in statuses if status != b"100"]
    if b'"code":"engine_error"' in found or b'data: {"error":{"message":"the server failed' in found:
        return "500"
    return finals[-1].decode() if finals else "cut"


def campaign(url: str, key: str, cases: int, seed: int, memory: Callable[[], int], workers: int = 8) -> int:
    """Send so many; print what came back, and each 500 with its case. 1 where the server broke."""
    host, _, port = url.partition(":")
    address, counts, began = (host, int(port)), Counter[str](), time.monotonic()
    bad: list[int] = []

    def one(number: int) -> None:
        status = ask(address, make(number, key))
        counts[status] += 1
        if status in ("500", "hung"):
            bad.append(number)
            print(f"case {number}: {status}: {make(number, key)[:400]!r}", flush=True)

    one(seed)
    before = memory()
    with ThreadPoolExecutor(workers) as pool:
        for start in range(seed, seed + cases, 2500):
            list(pool.map(one, range(start, min(start + 2500, seed + cases))))
            seconds = time.monotonic() - began
            print(f"{start + 2500 - seed} cases in {seconds:.0f} s, API server: {memory() >> 20} MiB", flush=True)
    after = memory()
    print(f"answers: {dict(sorted(counts.items()))}; memory {before >> 20} MiB before, {after >> 20} MiB after")
    alive = ask(address, make_plain(key)) in ("200", "400")  # a model that embeds completes nothing
    print("the server still answers" if alive else "THE SERVER DOES NOT ANSWER")
    return int(bool(bad) or not alive)


def make_plain(key: str) -> bytes:
    body = b'{"prompt": "x", "max_tokens": 1}'
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body
