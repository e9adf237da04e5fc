"""Configuration: frozen, keyword-only, resolved once and passed down. Command-line flags derive from these fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Literal

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.rebalancing import Rebalancing, read_eplb
from ridgeline.core.settings.speculation import LOOKAHEAD, Speculation, speculation_of
from ridgeline.core.settings.together import SIZES, check_together
from ridgeline.kernels.base.kv_format import kv_format

# Seconds that a step may take: no load of a model outlives less, and torch takes no more than some thousand years
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 1, 1_000_000_000
SHORTEST_SILENCE = 1.0  # seconds; processes give a sign of life twice a second

DTYPES = ("float32", "bfloat16", "float16")
MAX_LOGPROBS = 20  # likeliest tokens that a request may have reported for each token, unless an operator says more
DTYPE_ALIASES = {"half": "float16", "float": "float32"}

# Settings that may be text such as 8k
COUNTS = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory")
FACTORS = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
FACTORS |= {letter: 1024**power for power, letter in enumerate("KMGT", 1)}

# Settings that are whole numbers and never None
WHOLE = (*SIZES, "num_redundant_experts", "moe_expert_cache_size")

# Tokens per cache block by default. Kernels read larger blocks faster (docs/log.md: pages of 64 gain about 10 % over
# pages of 16 in prefill). Smaller blocks match prefixes and bound requests more finely.
DEFAULT_BLOCK_SIZE = {"cuda": 64, "cpu": 16}


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """The settings that a user chooses. None means that the model and the machine decide.

    model: a folder or a hub id.
    runner: "generate", "pooling" (the model embeds or classifies), or "auto": as the model's files say.
    convert: what a decoder becomes that pools: "embed", or "classify" by the scores of tokens; "auto": as its files
        say, or else "embed"; "none": nothing.
    download_dir: the folder that keeps models of the hub (default: the hub client's own).
    tokenizer, tokenizer_revision: a folder or a hub id whose tokenizer and chat template take the place of the model's.
    hf_overrides: entries of config.json that take the place of the model's, as in {"rope_theta": 1000000.0}. Objects
        are merged.
    generation_config: the source of sampling defaults: "auto" (the model's generation_config.json), "none", or a folder
        with such a file.
    override_generation_config: sampling defaults that win over these, as in {"temperature": 0.7}.
    dtype: one of DTYPES (half is float16 and float is float32), or "auto": the checkpoint's own, but float32 on a CPU
        without bfloat16 instructions, where float32 is far faster.
    device: "auto", "cpu", "cuda" or "cuda:1".
    max_model_len: the longest prompt and output together, in tokens. It may be text, in which 8k is 8000, 8K is 8192
        and auto is None. So may max_num_batched_tokens and kv_cache_memory.
    max_logprobs: the most likeliest tokens that a request may have reported for each token. -1: the whole vocabulary.
    enable_prompt_embeds: prompts may come as vectors in the place of tokens' embeddings.
    enable_sleep_mode: a GPU's memory can be given back, and the weights kept in the host's, while the engine sleeps.
    max_num_seqs: how many requests run at once.
    max_num_batched_tokens: the most tokens that one step runs.
    gpu_memory_utilization: the share of the device's memory that the engine may use in all.
    kv_cache_memory: bytes for the KV cache on each device, in place of that share.
    block_size: tokens per cache block (64 on a GPU, otherwise 16).
    kv_cache_dtype: how keys and values are cached: "auto" as the activations (or as the checkpoint says), "bfloat16",
        or in 8 bits with a scale for each token and key head: "fp8" (the same as "fp8_e4m3"), "fp8_e5m2" or "int8".
    state_cache_share: of a model with states of constant size (recurrent layers), the share of the cache's pages that
        states kept for later requests may take, beside keys and values. Those of running requests do not count.
    state_checkpoint_interval: the tokens after which a long prompt or output leaves such a state behind, besides at its
        end and where prompts part. The default follows from the bytes of a state, beside those of keys and values.
    load_format: "dummy" fills the weights with random numbers.
    enforce_eager: launch ops one by one instead of replaying CUDA graphs; this is slower and starts sooner.
    deterministic: a request gets the same bits whatever runs beside it (GPU only; slower).
    cascade: decoding requests with the same first cache blocks read their keys together. The default is yes on a GPU,
        but not with deterministic.
    tensor_parallel_size: how many devices divide every matrix between them; each is a process of its own. On a CPU the
        ranks are processes too.
    pipeline_parallel_size: into how many stages the layers are divided. A step's rows pass through the stages in parts,
        so that all of them work at once. Every stage has tensor_parallel_size devices.
    pipeline_layer_partition: how many layers each stage has, as "10,12,10"; by default stages take equally long.
    prefill_context_parallel_size: how many devices (or groups of `tensor_parallel_size`) divide the cached tokens, and
        the tokens of long prompts, between them. Each holds the same weights.
    prefill_context_parallel_threshold: the tokens of a step from which on they are divided. The default follows from
        model and device; shorter steps every device runs by itself.
    enable_expert_parallel: these devices divide the experts of a mixture between them, and no expert's matrices.
    data_parallel_size: with enable_expert_parallel, how many ranks have requests and a cache of their own, and divide
        the experts alone between them (data-parallel attention).
    all2all_backend: how tokens reach the ranks of their experts with data_parallel_size: "distributed" (NCCL or gloo),
        "peer" (GPUs write into each other's memory), or "auto": that where they can.
    moe_expert_cache_size: of how many experts of a layer the device holds the matrices; those of all lie in the host's
        memory. 0: all are on the device.
    num_redundant_experts: so many further copies of experts lie on the ranks that divide them, of those with most
        tokens.
    init_expert_location: a file with the tokens that every expert got in some run, by which experts are placed.
    enable_eplb: experts and their copies move between ranks while these run, to where the newest load wants them.
    eplb_config: how that is done, as in {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 8}: after
        every `step_interval` steps, by the tokens of the newest `window_size`.
    distributed_timeout_seconds: how long a step, or one rank's wait for the others, may take before it fails.
    hang_timeout: the seconds without a sign of life after which a process is taken to hang: a rank, and with
        `ridgeline serve` every process of the server. It is ended then, and replaced.
    rank_trace_dir: a folder for traces of steps that show which rank waited for which. Ranks then note when they come
        to collectives and leave them, which takes some microseconds each.
    itl_target: the milliseconds that a step with prompts should take at most while requests decode, since these wait
        for it. 0 sets no bound. With None `ridgeline serve` derives it from model and device; offline, where no client
        waits, there is none.
    speculative_config: how drafts of tokens to come are made, which a step verifies together, as in {"method": "ngram",
        "num_speculative_tokens": 4, "prompt_lookup_max": 4}, or {"model": FOLDER, "num_speculative_tokens": 4} for a
        draft model (`core.settings.speculation.Speculation`). Answers are the same as without it. A CPU, for models
        whose cache keeps every token.
    kernels: op → implementation, where the platform's first choice is not wanted ("reference" always exists).
    quantization: how plain weights of linear maps are rounded when they are loaded. "w8a8": to int8, with a scale for
        each output, and activations too, with a scale for each token (a GPU, or a CPU with VNNI, or with AVX2 and a C++
        compiler). "fp8" and "fp8-block": likewise to E4M3, with scales for outputs and tokens, or for blocks of 128.
        "w4a16": to four bits, with a scale for each 128 inputs. "int8": to int8 beside plain activations (a CPU). A
        checkpoint that is quantized needs none of them; its own method may be named.
    """

    model: str | Path = ""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    revision: str | None = None
    download_dir: str | Path | None = None
    tokenizer: str | Path | None = None
    tokenizer_revision: str | None = None
    hf_overrides: Mapping[str, object] | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, object] | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_logprobs: int = MAX_LOGPROBS
    enable_prompt_embeds: bool = False
    enable_sleep_mode: bool = False
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    state_cache_share: float = 0.5
    state_checkpoint_interval: int | None = None
    scheduling_policy: str = "fcfs"
    seed: int = 0
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    deterministic: bool = False
    cascade: bool | None = None
    quantization: str | None = None
    itl_target: float | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layer_partition: str | None = None
    prefill_context_parallel_size: int = 1
    prefill_context_parallel_threshold: int | None = None
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    all2all_backend: Literal["auto", "distributed", "peer"] = "auto"
    moe_expert_cache_size: int = 0
    num_redundant_experts: int = 0
    init_expert_location: str | Path | None = None
    enable_eplb: bool = False
    eplb_config: Mapping[str, object] | None = None
    distributed_timeout_seconds: float = 120.0
    hang_timeout: float = 10.0
    rank_trace_dir: str | None = None
    speculative_config: Mapping[str, object] | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    debug_checks: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, count(given, name))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        self._check_types()
        check_overrides(self.hf_overrides, self.override_generation_config)
        speculation_of(self.speculative_config)
        self._take_redundant_experts()
        if self.max_logprobs < -1:
            raise InvalidConfig(f"max_logprobs must be at least 0, or -1 for all, got {self.max_logprobs!r}.")
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidConfig(f"unknown dtype {self.dtype!r}; use auto, {', '.join(DTYPES)}.")
        if self.load_format not in ("auto", "safetensors", "dummy"):
            raise InvalidConfig(f"unknown load_format {self.load_format!r}; use auto, safetensors or dummy.")
        if self.runner not in ("auto", "generate", "pooling"):
            raise InvalidConfig(f"unknown runner {self.runner!r}; use auto, generate or pooling.")
        if self.convert not in ("auto", "none", "embed", "classify"):
            raise InvalidConfig(f"unknown convert {self.convert!r}; use auto, none, embed or classify.")
        kv_format(self.kv_cache_dtype)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidConfig(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}."
            )
        if not 0 <= self.state_cache_share <= 1:
            raise InvalidConfig(f"state_cache_share must be from 0 to 1, got {self.state_cache_share!r}.")
        if not SHORTEST_TIMEOUT <= self.distributed_timeout_seconds <= LONGEST_TIMEOUT:
            raise InvalidConfig(
                f"distributed_timeout_seconds must be at least {SHORTEST_TIMEOUT} and at most {LONGEST_TIMEOUT:,}, got "
                f"{self.distributed_timeout_seconds!r}."
            )
        if not SHORTEST_SILENCE <= self.hang_timeout <= LONGEST_TIMEOUT:
            raise InvalidConfig(
                f"hang_timeout must be at least {SHORTEST_SILENCE:g} and at most {LONGEST_TIMEOUT:,}, got "
                f"{self.hang_timeout!r}."
            )
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise InvalidConfig(f"seed must fit into 64 bits, got {self.seed!r}.")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory",
            *SIZES,
            "prefill_context_parallel_threshold",
            "state_checkpoint_interval",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value!r}.")
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise InvalidConfig(f"block_size must be a power of two, got {self.block_size!r}.")
        for name in ("num_redundant_experts", "moe_expert_cache_size"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"{name} must not be negative, got {getattr(self, name)!r}.")
        if self.all2all_backend not in ("auto", "distributed", "peer"):
            raise InvalidConfig(f"unknown all2all_backend {self.all2all_backend!r}; use auto, distributed or peer.")
        self._check_together()

    def _take_redundant_experts(self) -> None:
        """Take the number that `eplb_config` may have."""
        _, redundant = read_eplb(self.eplb_config)
        if redundant is None:
            return
        if self.num_redundant_experts not in (0, redundant):
            raise InvalidConfig(
                f"num_redundant_experts is {self.num_redundant_experts}, and {redundant} in eplb_config; leave one of "
                "them out."
            )
        object.__setattr__(self, "num_redundant_experts", redundant)

    def _check_together(self) -> None:
        """Refuse settings that contradict each other."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        unset = {"cascade"} if not self.cascade else set()  # False asks for nothing
        if not kv_format(self.kv_cache_dtype).quantized:
            unset.add("kv_cache_dtype")
        check_together({name: value for name, value in given.items() if name not in unset})
        if self.speculation is not None and self.speculation.method == LOOKAHEAD and self.ranks > 1:
            raise InvalidConfig(
                f"lookahead decoding runs on one device yet; leave {' and '.join(self.divided_by)} out, or take "
                "another method."
            )

    @property
    def rebalancing(self) -> Rebalancing | None:
        """The times at which experts change ranks, or None if they stay where they are."""
        return read_eplb(self.eplb_config)[0] if self.enable_eplb else None

    @property
    def speculation(self) -> Speculation | None:
        """The way in which drafts are made, or None if there are none."""
        return speculation_of(self.speculative_config)

    @property
    def num_drafts(self) -> int:
        """The drafts of a request's next tokens that a step verifies at most."""
        return 0 if self.speculation is None else self.speculation.num_drafts

    @property
    def draft_depth(self) -> int | None:
        """The most of these drafts that can be right, if they form a tree."""
        tree = None if self.speculation is None else self.speculation.tree
        return None if tree is None else tree.depth

    @property
    def drafted_ahead(self) -> int:
        """The positions behind a step's tokens at which a draft model or a head writes keys of its drafts."""
        return 0 if self.speculation is None else self.speculation.drafted_ahead

    @property
    def divided_by(self) -> list[str]:
        """The settings by which several devices divide the model between them."""
        return [name for name in SIZES if getattr(self, name) > 1]

    @property
    def ranks(self) -> int:
        """The processes of one engine, each on a device."""
        return prod(getattr(self, name) for name in SIZES)

    def _check_types(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory",
            "block_size",
            "seed",
            "max_logprobs",
            "prefill_context_parallel_threshold",
            "state_checkpoint_interval",
            *WHOLE,
        ):
            value = getattr(self, name)
            optional = name not in ("seed", "max_logprobs", *WHOLE)
            if not (isinstance(value, int) and not isinstance(value, bool)) and not (optional and value is None):
                raise InvalidConfig(f"{name} must be a whole number, got {value!r}.")
        for name in (
            "enable_prefix_caching",
            "enable_prompt_embeds",
            "enable_sleep_mode",
            "skip_tokenizer_init",
            "enforce_eager",
            "deterministic",
            "cascade",
            "debug_checks",
            "enable_expert_parallel",
            "enable_eplb",
        ):
            if not isinstance(getattr(self, name), bool) and not (name == "cascade" and self.cascade is None):
                raise InvalidConfig(f"{name} must be True or False, got {getattr(self, name)!r}.")
        for name in ("tokenizer", "download_dir"):
            if not isinstance(getattr(self, name), str | Path | None) or getattr(self, name) == "":
                raise InvalidConfig(f"{name} must be a path or a hub id, got {getattr(self, name)!r}.")
        if not isinstance(self.pipeline_layer_partition, str | None):
            raise InvalidConfig(
                f'pipeline_layer_partition must be text such as "10,12,10", got {self.pipeline_layer_partition!r}.'
            )
        if not isinstance(self.init_expert_location, str | Path | None) or self.init_expert_location == "":
            raise InvalidConfig(f"init_expert_location must be the name of a file, got {self.init_expert_location!r}.")
        if not isinstance(self.rank_trace_dir, str | None) or self.rank_trace_dir == "":
            raise InvalidConfig(f"rank_trace_dir must be the name of a folder, got {self.rank_trace_dir!r}.")
        if self.itl_target is not None and not (_is_real(self.itl_target) and 0 <= self.itl_target < float("inf")):
            raise InvalidConfig(f"itl_target must be a number of milliseconds from 0, got {self.itl_target!r}.")
        for name in ("gpu_memory_utilization", "distributed_timeout_seconds", "hang_timeout", "state_cache_share"):
            if not isinstance(getattr(self, name), (int, float)):
                raise InvalidConfig(f"{name} must be a number, got {getattr(self, name)!r}.")


def count(text: str, name: str) -> int | None:
    """Return the number that a text holds, in which k, m, g, t are powers of 1000 and K, M, G, T of 1024, or None for
    auto and -1. Raise InvalidConfig. `name` is the setting's."""
    spelled = text.strip()
    if spelled in ("-1", "auto"):
        return None
    number, factor = (spelled[:-1], FACTORS[spelled[-1]]) if spelled[-1:] in FACTORS else (spelled, 1)
    whole, _, part = number.partition(".")
    digits = whole + part
    if not (whole and digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise InvalidConfig(f"{name} must be a whole number, or one as 8k (8000) or 8K (8192), got {text!r}.")
    tokens, rest = divmod(int(digits) * factor, 10 ** len(part))
    if rest or (part and factor % 1000):
        raise InvalidConfig(f"{name} is {text!r}, which is no whole number; fractions go with k, m, g and t.")
    return tokens


def check_overrides(config: object, generation: object) -> None:
    """Raise InvalidConfig unless both are objects, or None, that may override what they are for."""
    for name, value in (("hf_overrides", config), ("override_generation_config", generation)):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidConfig(f'{name} must be an object, as {{"key": 1}}, got {value!r}.')
    for name in ("quantization_config", "compression_config"):
        if isinstance(config, Mapping) and name in config:
            raise InvalidConfig(f"hf_overrides cannot set {name}, which tells how the files are stored; leave it out.")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_limits(max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int) -> None:
    """Raise InvalidConfig if a step has no room for a token of every running request and its drafts."""
    if num_drafts and max_num_batched_tokens < max_num_seqs * (1 + num_drafts):
        raise InvalidConfig(
            f"{max_num_seqs} sequences of {1 + num_drafts} tokens each, with their drafts, make steps of more than "
            f"max_num_batched_tokens ({max_num_batched_tokens}); lower max_num_seqs or raise that."
        )
    if max_num_batched_tokens < max_num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens is {max_num_batched_tokens}, below max_num_seqs {max_num_seqs}; "
            "every running request needs room for one token per step."
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The resolved settings of the control plane.

    state_cache_share, state_checkpoint_interval: as in `LLMConfig`.
    lookahead_depth: how many plans may be in flight at once.
    itl_target: the seconds that a step should take at most while requests decode (engine/itl.py).
    cascade: plans name the rows that share their first blocks.
    pools: the model pools: prompts end with vectors instead of tokens.
    num_drafts: how many drafts of a request's next tokens a step verifies at most.
    draft_depth: how many of these can be right at most, if they form a tree, of which rows verify all or nothing. None:
        they form a chain.
    drafted_ahead: at how many positions behind those of a plan the worker may write, because a model drafts there.
    even_drafts: all rows of a step verify as many drafts, or none does: a captured graph has one shape.
    lookup: how many tokens prompt lookup compares at least and at most in the texts of requests with token masks; 0, 0:
        nothing is looked up there.
    cuts_chunks: the worker may run a chunk of a prompt in pieces, which end anywhere (`ranks/parts.py`).
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    state_cache_share: float = 0.5
    state_checkpoint_interval: int | None = None
    lookahead_depth: int = 2
    itl_target: float | None = None
    cascade: bool = False
    pools: bool = False
    num_drafts: int = 0
    draft_depth: int | None = None
    drafted_ahead: int = 0
    even_drafts: bool = False
    lookup: tuple[int, int] = (0, 0)
    cuts_chunks: bool = False
    debug_checks: bool = False

    def __post_init__(self) -> None:
        check_limits(self.max_num_seqs, self.max_num_batched_tokens, self.num_drafts)
