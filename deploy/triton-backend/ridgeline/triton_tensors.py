"""The tensors of a request, and those of its answer, as Triton's vLLM back end has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

from ridgeline.serving.apis.kserve.inference import fields_of
from ridgeline.serving.errors import BadRequest, failure_of
from ridgeline.serving.generation.service import Run
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.text.outputs import CompletionOutput

TEXT, PARAMETERS, PROMPT_LENGTH = "text_input", "sampling_parameters", "num_input_tokens"
RETURNED = ("finish_reason", "cumulative_logprob", "logprobs", PROMPT_LENGTH, "num_output_tokens")
SWITCHES = ("stream", "exclude_input_in_output", *(f"return_{name}" for name in RETURNED))
INPUTS = dict.fromkeys((TEXT, PARAMETERS), "TYPE_STRING") | dict.fromkeys(SWITCHES, "TYPE_BOOL")
OUTPUTS = dict.fromkeys(("text_output", "finish_reason", "logprobs"), "TYPE_STRING") | {
    "cumulative_logprob": "TYPE_FP32",
    PROMPT_LENGTH: "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
}
# Fields of /v1/completions that are inputs here.
TENSORS = {"prompt": TEXT, "prompt_embeds": TEXT, "suffix": TEXT, "echo": "exclude_input_in_output"}
CODES = {  # Triton's, by HTTP's status
    400: "INVALID_ARG", 404: "NOT_FOUND", 408: "CANCELLED", 429: "UNAVAILABLE", 499: "CANCELLED",
    503: "UNAVAILABLE", 504: "UNAVAILABLE", 507: "UNAVAILABLE",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request as it came. `wanted` are the outputs beside the text, and `timeout` is in seconds."""

    text: str
    stream: bool
    prepend: bool
    fields: dict[str, Any]
    wanted: frozenset[str]
    timeout: float | None


class Part(NamedTuple):
    """What a response holds of a completion: its new text, and its tokens from `begin` on."""

    text: str
    output: CompletionOutput
    begin: int = 0


def complete(config: Any) -> Any:
    """Return a model's configuration with all tensors: it need not name any."""
    given = config.as_dict()
    there = {each["name"] for side in ("input", "output") for each in given[side]}
    for name in INPUTS.keys() - there:
        config.add_input({"name": name, "data_type": INPUTS[name], "dims": [1], "optional": name != TEXT})
    for name in OUTPUTS.keys() - there:
        config.add_output({"name": name, "data_type": OUTPUTS[name], "dims": [1 if name == PROMPT_LENGTH else -1]})
    config.set_max_batch_size(0)
    if "model_transaction_policy" not in given:
        config.set_model_transaction_policy({"decoupled": True})
    return config


# ---- what comes -----------------------------------------------------------------------------------------------------


def read(request: Any, *, streams: bool) -> Asked:
    """Return what a request asks for. Raise BadRequest."""
    text = _text(request, TEXT)
    if text is None:
        raise BadRequest(f"{TEXT} is missing.", param=TEXT)
    parameters = _text(request, PARAMETERS)
    given = decode((parameters or request.parameters() or "{}").encode())
    if not isinstance(given, dict):
        raise BadRequest(f"{PARAMETERS} must be a JSON object.", param=PARAMETERS)
    for name in given.keys() & TENSORS.keys():
        raise BadRequest(f"{name} is no parameter here; use the input {TENSORS[name]}.", param=name)
    given.setdefault("timeout", request.timeout())
    fields, timeout = fields_of(given)
    stream = _switch(request, "stream", bool(given.get("stream", False)))
    prepend = not _switch(request, "exclude_input_in_output", stream)
    if stream and prepend:
        raise BadRequest("exclude_input_in_output cannot be false in a stream.", param="exclude_input_in_output")
    if stream and not streams:
        raise BadRequest("this model answers once; set model_transaction_policy { decoupled: true }.", param="stream")
    if stream and fields.get("n", 1) not in (1, "1"):
        raise BadRequest("a stream has one completion; leave n out, or set stream to false.", param="n")
    wanted = frozenset(name for name in RETURNED if _switch(request, f"return_{name}", False))
    return Asked(text, stream, prepend, fields, wanted, timeout)


def _element(request: Any, name: str) -> Any:
    """Return the one element of an input, or None without that input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    elements = tensor.as_numpy().reshape(-1)
    if len(elements) != 1:
        raise BadRequest(f"{name} has {len(elements)} elements, and must have one.", param=name)
    return elements[0]


def _switch(request: Any, name: str, default: bool) -> bool:
    value = _element(request, name)
    return default if value is None else bool(value)


def _text(request: Any, name: str) -> str | None:
    value = _element(request, name)
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name} is not UTF-8: {error.reason} at byte {error.start}.", param=name) from None


# ---- what is answered -----------------------------------------------------------------------------------------------


async def responses(run: Run, asked: Asked) -> AsyncIterator[tuple[Any, bool]]:
    """Yield the responses of a run, in pieces as they come or when it has ended, and whether each is the last."""
    prompt, length = (asked.text if asked.prepend else ""), len(run.asked.prompt_token_ids)
    alone = run.asked.params.num_drawn == 1 and run.asked.beams is None  # else only the end tells the best
    if asked.stream and alone:
        async for piece in run.pieces():
            part = Part(piece.text, piece.output, len(piece.output.token_ids) - len(piece.token_ids))
            yield response([part], asked.wanted, length), piece.ended
        return
    result = await run.finish()
    parts = [Part(prompt + output.text, output) for output in result.outputs]
    yield response(parts, asked.wanted, length), True


def response(parts: Sequence[Part], wanted: frozenset[str], prompt_length: int) -> Any:
    """Return a response with an element for each completion."""
    made: dict[str, Callable[[], np.ndarray]] = {
        "finish_reason": lambda: _texts(str(part.output.finish_reason) for part in parts),
        "cumulative_logprob": lambda: np.array([part.output.cumulative_logprob or 0.0 for part in parts], np.float32),
        "logprobs": lambda: _texts(map(_logprobs, parts)),
        PROMPT_LENGTH: lambda: np.array([prompt_length], np.uint32),
        "num_output_tokens": lambda: np.array([len(each.output.token_ids) - each.begin for each in parts], np.uint32),
    }
    outputs = {"text_output": _texts(part.text for part in parts)} | {name: made[name]() for name in sorted(wanted)}
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])


def failed(error: BaseException) -> Any:
    """Return the response for an error, with Triton's code for its kind."""
    failure = failure_of(error)
    code = getattr(pb_utils.TritonError, CODES.get(failure.status, "INTERNAL"))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(failure.message, code))


def _texts(texts: Iterable[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], dtype=object)


def _logprobs(part: Part) -> str:
    """Return the logprobs of a part's tokens as JSON, in vLLM's form: by token id, for each token."""
    scored = part.output.logprobs
    if scored is None:
        return "null"
    return json.dumps([{str(ident): asdict(each) for ident, each in entry.items()} for entry in scored[part.begin :]])
