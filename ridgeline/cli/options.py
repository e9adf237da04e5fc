"""Command-line options derived from the fields of the configuration dataclasses.

A command is written with two parameters, `engine` and `sampling`. `with_options` replaces them by one option per field
listed here and builds the objects from what the user gave.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.settings.config import COUNTS, LLMConfig, count

ENGINE_HELP = {
    "model": "Model folder or Hugging Face hub id; the embedded model when none is given.",
    "model_impl": "Whose layers run: ridgeline, transformers (with our attention and cache), or auto (the first that "
    "has the architecture).",
    "runner": "auto, generate, or pooling (the model embeds or classifies).",
    "convert": "What a decoder becomes that pools: auto, none, embed, or classify (by the scores of yes and no).",
    "revision": "Branch, tag or commit of a hub model.",
    "download_dir": "Folder that keeps models of the hub.",
    "tokenizer": "Folder or hub id whose tokenizer and chat template are used instead of the model's.",
    "tokenizer_revision": "Branch, tag or commit of that tokenizer.",
    "hf_overrides": "JSON object of entries that win over those of the model's config.json.",
    "generation_config": "Source of sampling defaults: auto (the model's folder), none, or another folder.",
    "override_generation_config": "JSON object of sampling defaults that win over these.",
    "dtype": "auto (the checkpoint's own, or float32 on a CPU without bfloat16), float32 (float), bfloat16 or "
    "float16 (half).",
    "device": "auto, cpu, cuda or cuda:N.",
    "max_model_len": "Longest prompt + output, in tokens (8k is 8000, 8K is 8192).",
    "max_num_seqs": "Requests that run at once.",
    "max_num_batched_tokens": "Most tokens that one step runs.",
    "enable_chunked_prefill": "Let a step run a part of a prompt; else each runs in one step.",
    "max_num_partial_prefills": "Most prompts under way of which a step runs a part (0: as many as fit).",
    "max_long_partial_prefills": "Most of these that are long: above the threshold, or 4 % of the context (0: all).",
    "long_prefill_token_threshold": "Most tokens of one prompt that a step runs (0: as many as fit).",
    "max_logprobs": "Most likeliest tokens that a request may have reported for each token (-1: the whole vocabulary).",
    "enable_sleep_mode": "Let a GPU's memory be given back while the engine sleeps (POST /sleep).",
    "sleep_mode_offload_cudagraph": "Let the memory of CUDA graphs go to the host with the weights.",
    "enable_prompt_embeds": "Take prompts as vectors (prompt_embeds) in the place of tokens.",
    "enable_mm_embeds": "Take pictures and sounds as vectors that their tower made (image_embeds, audio_embeds).",
    "gpu_memory_utilization": "Share of the GPU's memory to use.",
    "encoder_cache_bytes": "Bytes of vectors of pictures and sounds that are kept (default: of four steps' tokens).",
    "kv_cache_memory": "Bytes for the KV cache, instead of a share.",
    "block_size": "Tokens per KV cache block.",
    "kv_cache_dtype": "auto, bfloat16, fp8 (fp8_e4m3), fp8_e5m2 or int8: how keys and values are cached.",
    "enable_prefix_caching": "Reuse the KV cache of equal prompt beginnings.",
    "kv_offloading_size": "GiB of the host's memory for cache blocks that the device has no room for.",
    "kv_offloading_backend": "native.",
    "preemption_mode": "auto, recompute (a preempted request's blocks never go to the host's memory) or swap (always).",
    "kv_disk": "Directory on a local disk for cache blocks beyond that; a server that starts again finds them.",
    "kv_disk_size": "GiB of that directory.",
    "kv_disk_eviction": "Block that goes first there: lru, lfu or cost (spares least time for its bytes).",
    "kv_disk_ttl": "Seconds after which a block is deleted there (0: never).",
    "session_ttl": "Most seconds for which a session's blocks are kept ahead of others, where requests ask for that.",
    "session_share": "Share of the cache's memory that one client's sessions keep.",
    "kv_disk_tenant_size": "GiB there of one tenant (default: no bound).",
    "state_cache_share": "Share of the cache for recurrent states that are kept for later requests.",
    "state_checkpoint_interval": "Tokens after which a long prompt leaves such a state (default: by its bytes).",
    "kv_events_config": "JSON object that says where changes of the prefix cache are published, for example "
    '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}.',
    "scheduling_policy": "fcfs, priority, vtc, drr, dlpm, srpt or slo (docs/scheduling.md has what each promises).",
    "tenant_weights": "Shares of service of tenants, where these are not equal: a=2,b=1 (vtc, drr and dlpm).",
    "priority_aging": "Seconds of waiting after which a request rises by a level (priority; 0: never, as in vLLM).",
    "slo_ttft_ms": "Milliseconds to the first token promised to requests that name none (slo).",
    "slo_itl_ms": "Milliseconds between tokens promised to requests that name none (slo; 0: none).",
    "itl_target": "Milliseconds that a step with prompts may take while requests decode (0: no limit).",
    "tensor_parallel_size": "Devices that divide every matrix between them.",
    "pipeline_parallel_size": "Stages that divide the layers between them, each of so many devices.",
    "pipeline_devices": "Kind of each stage's device, as cpu,cuda (default: that of --device).",
    "pipeline_layer_partition": "Layers of each stage, as 10,12,10 (default: so that stages take equally long).",
    "prefill_context_parallel_size": "Devices that divide the cached tokens, and long prompts, between them.",
    "prefill_context_parallel_threshold": "Tokens of a step from which on they divide these (default: by the model).",
    "enable_expert_parallel": "Let these devices divide the experts between them, and no expert's matrices.",
    "data_parallel_size": "With enable_expert_parallel: ranks with requests of their own that share the experts.",
    "mm_encoder_tp_mode": "weights: all devices see all pictures of a step; data: each sees a share of them.",
    "all2all_backend": "distributed (NCCL, gloo), peer (GPUs' memory) or auto: how tokens reach their experts.",
    "cpu_offload_gb": "GiB of layers that wait in the host's memory and come to the device in every step.",
    "offload_group_size": "Layers in groups of so many, of each of which the last ones wait there instead (0: by GiB).",
    "offload_num_in_group": "Layers of each group that wait.",
    "offload_prefetch_step": "Layers that come ahead of the one that is computed.",
    "offload_params": "Parts of weights' names in the files that wait alone, as mlp.experts (default: all matrices).",
    "offload_backend": "auto, prefetch or uva, which do the same.",
    "moe_expert_cache_size": "Experts of a layer on the device; the others wait in the host's memory (0: all on it).",
    "num_redundant_experts": "Further copies of busy experts, on all ranks together.",
    "init_expert_location": "JSON file with the tokens that experts got, by which they are placed on ranks.",
    "enable_eplb": "Move experts and their copies between ranks while these run, as the load wants it.",
    "eplb_config": 'JSON object that says how, for example {"window_size": 1000, "step_interval": 3000}.',
    "distributed_timeout_seconds": "Seconds after which a step on several devices is given up.",
    "hang_timeout": "Seconds without a sign of life after which a process is taken to hang, and replaced.",
    "numa_bind": "Keep to the cores and the memory of the NUMA node that a GPU is connected to.",
    "rank_trace_dir": "Folder for traces of which rank waited for which (several devices; slower).",
    "speculative_config": "JSON object that says how drafts are made, for example "
    '{"method": "ngram", "num_speculative_tokens": 4}.',
    "seed": "Seed for requests that have none of their own.",
    "kernel_cache": "Folder of kernels compiled ahead (ridgeline compile --cache).",
    "load_format": "auto, safetensors, or dummy (random weights).",
    "encoder_device": "Device of what sees pictures or hears sounds, such as cuda:1 (default: that of --device).",
    "mm_encoder_only": "Load what sees pictures or hears sounds alone; POST /pooling gives its vectors.",
    "language_model_only": "Load the text model alone, without what sees pictures or hears sounds.",
    "quantization": "Round plain weights when they are loaded: fp8, fp8-block, w8a8 (activations too), w4a16, or int8 "
    "(a CPU).",
    "enforce_eager": "Launch ops one by one instead of replaying CUDA graphs.",
    "capture_at_start": "Capture all CUDA graphs before the server is ready, and none while it serves.",
    "enable_lora": "Let requests run with adapters (LoRA).",
    "max_loras": "Adapters that requests run with at once; requests with others wait.",
    "max_lora_rank": "Largest rank of an adapter.",
    "max_cpu_loras": "Adapters in the host's memory; others are read from their folders again (default: all).",
    "enable_lora_vocabulary": "Let adapters change embeddings and output layers too.",
    "enable_lora_tables": "Let adapters have embeddings and output layers whole, which takes memory for each.",
    "enable_lora_experts": "Let adapters change mixtures' experts too, which takes memory for all of them.",
    "enable_tower_connector_lora": "Let adapters change towers of pictures, listeners and their projectors too.",
    "enable_lora_factors": "Let adapters be IA3 or DoRA too, which makes all steps with adapters slower.",
    "max_cpu_lora_bytes": "Bytes that their matrices may have there, on all ranks together (default: any number).",
    "deterministic": "Give a request the same bits whatever runs beside it (slower; on a CPU not all models).",
    "cascade": "Let requests with a common beginning read its cached keys together (default: on a GPU).",
    "debug_checks": "Compare engine and device state at every step (slow).",
}

RANKS = tuple(name for name in ENGINE_HELP if "parallel" in name)  # settings that divide a model over devices

SAMPLING_HELP = {
    "n": "Completions per prompt.",
    "temperature": "0 is greedy.",
    "top_k": "Keep the k likeliest tokens (0: all).",
    "top_p": "Keep the likeliest tokens that together reach p.",
    "min_p": "Drop tokens less likely than p times the likeliest.",
    "typical_p": "Keep the tokens of about average information content that together have this probability.",
    "repetition_penalty": "Above 1 discourages tokens already seen.",
    "presence_penalty": "Subtracted once from tokens already written.",
    "frequency_penalty": "Subtracted per occurrence from tokens already written.",
    "guidance_scale": "Above 1 leads away from the negative prompt (two sequences run for every completion).",
    "negative_prompt": "Text that guidance leads away from (default: the prompt's last token).",
    "max_tokens": "Longest output, in tokens.",
    "min_tokens": "Shortest output, in tokens.",
    "ignore_eos": "Go on past the end-of-sequence token.",
    "stop": "Texts that end the output (one or more).",
    "stop_token_ids": "Token ids that end the output (one or more).",
    "seed": "Seed of the random draws: same seed, same text.",
    "logprobs": "Report the log-probabilities of this many of the likeliest tokens (with --json).",
}

CLI_DEFAULTS: Mapping[str, Any] = {"max_tokens": 256}

ALIASES = {  # the short ones as vLLM has them, the long ones as `ridgeline plan` has them
    "data_parallel_size": ("-dp", "--dp"),
    "tensor_parallel_size": ("-tp", "--tp"),
    "pipeline_parallel_size": ("-pp", "--pp"),
    "prefill_context_parallel_size": ("-pcp", "--cp"),
    "speculative_config": ("-sc",),
}

SAMPLING_NAMES = {"seed": "sampling_seed"}  # both objects have a field named seed


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(…, engine: dict, sampling: dict)` the options above.

    `engine` gets every engine field. `sampling` gets only what the user set, so that the model's own defaults fill in
    the rest.
    """

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        engine = {name: given.pop(name) for name in ENGINE_HELP}
        sampling = {name: given.pop(SAMPLING_NAMES.get(name, name)) for name in SAMPLING_HELP}
        unset: tuple[object, ...] = (None, [], ())
        engine["model"] = engine["model"] or ""
        command(**given, engine=engine, sampling={k: v for k, v in sampling.items() if v not in unset})

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [p for name, p in own.items() if name not in ("engine", "sampling")]
    parameters += [option(LLMConfig, name, text, "Engine") for name, text in ENGINE_HELP.items()]
    parameters += [option(SamplingParams, name, text, "Sampling", unset=True) for name, text in SAMPLING_HELP.items()]
    return signed(wrapped, parameters)


def signed(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Return `command` with these parameters, of which typer makes the options."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def with_ranks(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(…, ranks: dict)` one option for each setting that divides a model over devices. `ranks` gets those
    that the user set."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        ranks = {name: value for name in RANKS if (value := given.pop(name)) is not None}
        command(**given, ranks=ranks)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for name, p in own.items() if name != "ranks"]
    parameters += [option(LLMConfig, name, ENGINE_HELP[name], "Several devices", unset=True) for name in RANKS]
    return signed(wrapped, parameters)


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of the records among its parameters. A record is a dataclass whose
    fields are annotated as options; commands that share options share it. `command` gets the records."""
    own = inspect.signature(command, eval_str=True).parameters
    records: dict[str, type[Any]] = {
        name: p.annotation
        for name, p in own.items()
        if isinstance(p.annotation, type) and dataclasses.is_dataclass(p.annotation)
    }

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in records.items()
        }
        command(**given, **made)

    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        parameters += (
            _options_of(records[name]) if name in records else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        )
    return signed(wrapped, parameters)


def _options_of(record: type[Any]) -> list[inspect.Parameter]:
    """Return an option for each field of a record, in their order."""
    hints, keyword = typing.get_type_hints(record, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(
            field.name, keyword, annotation=hints[field.name],
            default=_default(field),
        )
        for field in dataclasses.fields(record)
    ]  # fmt: skip


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def option(
    owner: type, field_name: str, text: str, panel: str, *, unset: bool = False, envvar: list[str] | None = None
) -> inspect.Parameter:
    """Return one option. `panel` is its panel in the help.

    With `unset` its default is None, meaning "not given", and the help names the real default. `envvar` holds the
    environment variables that set it if the command line does not.
    """
    field = next(f for f in dataclasses.fields(owner) if f.name == field_name)
    kind = _plain_type(typing.get_type_hints(owner)[field_name])
    name = SAMPLING_NAMES.get(field_name, field_name) if owner is SamplingParams else field_name
    flag = "--" + name.replace("_", "-")
    default = CLI_DEFAULTS.get(field_name, field.default)
    if unset:
        text += f" (default: {default})" if default not in (None, (), "") else ""  # in brackets it would be markup
        kind, default = typing.Optional[kind], None  # noqa: UP045 (typer reads this form)
    elif field_name == "model":
        kind, default = typing.Optional[str], None  # noqa: UP045
    is_flag = kind in (bool, typing.Optional[bool])  # noqa: UP045
    declarations = [f"{flag}/--no-{flag[2:]}"] if is_flag else [flag]
    parser: Callable[[str], Any] | None = None
    if field_name in COUNTS:
        parser = functools.partial(count, name=flag)
    elif kind in (dict, typing.Optional[dict]):  # noqa: UP045
        kind, parser = typing.Optional[str], functools.partial(json_object, what=flag)  # noqa: UP045
    made = typer.Option(
        default,
        *declarations,
        *ALIASES.get(field_name, ()),
        help=text,
        show_default=not unset and default is not None,
        rich_help_panel=panel,
        envvar=envvar,
        parser=parser,
        metavar=None if parser is None else "JSON" if field_name not in COUNTS else "INTEGER",
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=made, annotation=kind)


def _plain_type(hint: Any) -> Any:
    """Return a type that typer understands: unions lose None and all but their last member, literals become their type,
    and tuples become lists."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    if origin in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(hint) if m is not type(None)]
        plain = _plain_type(members[-1])
        return typing.Optional[plain] if type(None) in typing.get_args(hint) else plain  # noqa: UP045
    if origin is typing.Literal:
        return type(typing.get_args(hint)[0])
    if origin in (dict, Mapping):
        return dict
    return hint


def _once(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Return an object of these keys and values. Raise InvalidConfig if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidConfig(f"{what} has the key {twice!r} twice in one object; leave one of them out.")
    return found


def json_object(text: str, what: str = "further arguments") -> dict[str, Any]:
    """Return the object that a JSON option holds. An empty text is an empty object. Raise InvalidConfig."""
    try:
        value = json.loads(text or "{}", object_pairs_hook=functools.partial(_once, what=what))
    except InvalidConfig:
        raise
    except (ValueError, RecursionError) as error:  # too many brackets within each other
        raise InvalidConfig(f"{what} must be a JSON object, got {text!r} ({error}).") from error
    if not isinstance(value, dict):
        raise InvalidConfig(f"{what} must be a JSON object, got {text!r}.")
    return value
