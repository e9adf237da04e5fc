"""vLLM's arguments of its Python API that ours have not: refused in one sentence, as a request's fields are, or taken
where they change no answer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ridgeline.core.errors import InvalidRequest

logger = logging.getLogger(__name__)

_Call = TypeVar("_Call", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


class Absent(NamedTuple):
    """An argument that is not here.

    why: the end of the sentence, without its full stop.
    idle: values that ask for nothing, beside None, False and what is empty.
    harmless: any value is taken, and `why` is logged once.
    ours: the name that it has here.
    """

    why: str = ""
    idle: tuple[object, ...] = ()
    harmless: bool = False
    ours: str = ""


_GRAMMARS = Absent("grammars are `ridgeline serve`'s; send the request there")
_LEAVE = Absent("it is not supported; leave it out")
_CACHE = Absent("the prefix cache changes no answer", harmless=True)
_OUTPUTS = Absent("generate returns whole outputs, and stream pieces of one", harmless=True)

PROMPTS: dict[str, Absent] = {
    "mm_processor_kwargs": Absent("it stands in the prompt, beside multi_modal_data"),
    "tokenization_kwargs": Absent("encode texts with get_tokenizer() and give token ids"),
}
_TOKENS = {"tokenization_kwargs": PROMPTS["tokenization_kwargs"]}
CHATS = _TOKENS | {"chat_template_content_format": Absent("messages reach the template as texts", ("auto", "string"))}
SCORES = PROMPTS | {
    "data_1": Absent(ours="prompts"),
    "data_2": Absent(ours="continuations"),
    "chat_template": Absent("put it into the model's folder, as chat_template.jinja"),
}
BEAMS = PROMPTS | {
    "use_tqdm": Absent("beams of all prompts end together", harmless=True),
    "concurrency_limit": Absent("the engine runs what it has room for", harmless=True),
    "priority": _LEAVE,
}
SAMPLING: dict[str, Absent] = {
    "extra_args": _LEAVE,
    "flat_logprobs": _LEAVE,
    "guided_decoding": _GRAMMARS,
    "logits_processors": _LEAVE,
    "output_kind": _OUTPUTS,
    "prompt_logprob_start": Absent(ours="prompt_logprobs_start"),
    "prompt_logprob_token_ids": _LEAVE,
    "routed_experts_prompt_start": _LEAVE,
    "skip_clone": Absent("parameters are never changed", harmless=True),
    "skip_reading_prefix_cache": _CACHE,
    "spaces_between_special_tokens": Absent("the tokenizers' library puts no spaces there either way", harmless=True),
    "stream_interval": _OUTPUTS,
    "structured_outputs": _GRAMMARS,
    "thinking_token_budget": Absent("budgets of reasoning are `ridgeline serve`'s; send the request there", (-1,)),
    "trace_decode_token_ids": _LEAVE,
    "truncate_prompt_tokens": Absent("give token ids, cut to the length that you want"),
    "watermarking": _LEAVE,
}
POOLING: dict[str, Absent] = {
    "extra_kwargs": _LEAVE,
    "late_chunking_params": _LEAVE,
    "late_interaction_params": _LEAVE,
    "normalize": Absent(ours="use_activation"),
    "output_kind": _OUTPUTS,
    "requires_token_ids": _LEAVE,
    "returned_token_ids": _LEAVE,
    "skip_reading_prefix_cache": _CACHE,
    "step_tag_id": _LEAVE,
}
BEAM_SEARCH: dict[str, Absent] = {
    "allowed_token_ids": _LEAVE,
    "include_stop_str_in_output": _LEAVE,
    "skip_special_tokens": Absent("special tokens have no text in outputs", (True,)),
    "structured_outputs": _GRAMMARS,
    "temperature": Absent("beams are the likeliest ones, whatever the temperature", (0, 1)),
    "watermarking": _LEAVE,
}
# Methods and properties of vLLM's `LLM`
METHODS: dict[str, str] = {
    "apply_model": "no code of a caller's runs on the network; LLM().assembly holds what was loaded",
    "collective_rpc": "no code of a caller's runs in workers",
    "enqueue": "use generate, or stream",
    "enqueue_chat": "use chat, or chat_prompt and stream",
    "from_engine_args": "use LLM(…) with the same arguments",
    "get_metrics": "each output has its own metrics, and `ridgeline serve` has /metrics",
    "get_world_size": "LLM().config tells how the model is divided",
    "init_weight_transfer_engine": "use update_weights, or `ridgeline serve --weight-transfer`",
    "llm_engine": "use LLM().engine",
    "release_kv_cache_memory": "use sleep, which gives back weights too",
    "reset_mm_cache": "what is kept of pictures and sound is bounded, and the oldest goes first",
    "reward": "use encode or classify",
    "start_profile": "`ridgeline profile` measures kernels",
    "stop_profile": "`ridgeline profile` measures kernels",
    "wait_for_completion": "use generate, or stream",
}


def takes_vllms(absent: Mapping[str, Absent]) -> Callable[[_Call], _Call]:
    """Return a decorator for what takes vLLM's arguments too. It raises InvalidRequest for one that asks for something
    that is not here."""

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def taking(*given: Any, **named: Any) -> Any:
            for name in sorted(named.keys() & absent.keys()):
                value, found = named.pop(name), absent[name]
                if value is None:
                    continue
                if found.ours:
                    named[found.ours] = value
                elif found.harmless:
                    _tell(name, found.why)
                elif value and value not in found.idle:
                    raise InvalidRequest(f"{name} is not here: {found.why}.", param=name)
            return call(*given, **named)

        return taking  # type: ignore[return-value]

    return decorate


def with_vllms_fields(absent: Mapping[str, Absent]) -> Callable[[_Class], _Class]:
    """Return the same decorator for the constructor of a class."""

    def decorate(kind: _Class) -> _Class:
        setattr(kind, "__init__", takes_vllms(absent)(kind.__init__))  # type: ignore[misc]  # noqa: B010
        return kind

    return decorate


@functools.cache
def _tell(name: str, why: str) -> None:
    """Log it once."""
    logger.info("%s has no effect: %s.", name, why)
