"""vLLM's flags that are no settings of ours under the same name: one row each, for the command line, for `LLM()`, for
`ridgeline migrate` and for docs/api-flags.md.

A flag is renamed (ours means the same), accepted (it changes no answer, and a line says why) or refused (it would
change one, and the line says what to do). A refused flag is accepted with the values that ask for what happens anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ridgeline.core.errors import InvalidConfig


class State(StrEnum):
    RENAMED = "renamed"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class Takes(StrEnum):
    """The words that follow a flag. A SWITCH has a form with --no- too."""

    NOTHING = "switch"
    VALUE = "value"
    LIST = "list"


@dataclass(frozen=True)
class Flag:
    """A flag of vLLM's. `name` has dashes.

    text: why it is accepted, or what to do where it is refused.
    ours: our flag where it is renamed.
    harmless: values with which it is accepted although it is refused. A JSON object is harmless if all its keys are in
        one that is listed, with the same value or, where that is empty, with any.
    """

    name: str
    state: State
    takes: Takes
    text: str
    ours: str = ""
    harmless: tuple[str, ...] = ()

    def is_harmless(self, value: object) -> bool:
        """Return True if this value asks for nothing that we do not do. None and False never ask for anything."""
        if value is None or value is False or value in ([], {}, ""):
            return True
        if value is True:
            return False
        spelled = str(value)
        return spelled in self.harmless or any(_covers(each, value) for each in self.harmless if each[:1] == "{")


def _covers(listed: str, value: object) -> bool:
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return False
    taken = json.loads(listed)
    return isinstance(given, Mapping) and all(key in taken and taken[key] in ("", given[key]) for key in given)


SWITCH, VALUE, LIST = Takes.NOTHING, Takes.VALUE, Takes.LIST

_RENAMED: tuple[tuple[str, Takes, str, str], ...] = (
    ("kv-cache-memory-bytes", VALUE, "--kv-cache-memory", "the same bytes"),
    ("device-memory-utilization", VALUE, "--gpu-memory-utilization", "the same share"),
    ("max-num-queued-reqs", VALUE, "--max-queue-requests", "running requests count too"),
    ("max-num-queued-tokens", VALUE, "--max-queue-tokens", "all open requests' tokens count, with their outputs"),
    ("otlp-traces-endpoint", VALUE, "--otlp-endpoint", "the same address"),
    ("uvicorn-log-level", VALUE, "--log-level", "one level is for the whole server"),
    ("disable-uvicorn-access-log", SWITCH, "--no-access-log", "no line for each request"),
    ("swap-space", VALUE, "--kv-offloading-size", "GiB of the host's memory, for all devices together"),
    (
        "kv-transfer-config",
        VALUE,
        "--kv-offloading-size",
        "connectors that offload (OffloadingConnector, SimpleCPUOffloadConnector, LMCache's) become this flag and "
        "--kv-disk; others are refused",
    ),
    ("cpu-offload-params", LIST, "--offload-params", "the same names"),
    ("disable-cascade-attn", SWITCH, "--no-cascade", "requests with a common beginning read their keys one by one"),
)

# (why, what it takes, names)
_ACCEPTED: tuple[tuple[str, Takes, str], ...] = (
    (
        "no code from a model's folder is ever run, so there is nothing to trust; a model whose architecture is not "
        "among `ridgeline models` is refused when it is loaded",
        SWITCH,
        "trust-remote-code",
    ),
    ("no code from a model's folder is ever run", VALUE, "code-revision"),
    (
        "each rank has what its own weights need of both matrices, and graphs are one for steps with adapters",
        SWITCH,
        "fully-sharded-loras specialize-active-lora",
    ),
    (
        "with --enable-lora-experts an adapter's file says how its experts' matrices are stored, and an adapter in "
        "another form is refused when it is loaded",
        SWITCH,
        "enable-mixed-moe-lora-format enable-moe-shared-loras",
    ),
    ("biases of adapters are served with --enable-lora-factors", SWITCH, "enable-lora-bias"),
    ("an adapter runs on all modules of which it has matrices", LIST, "lora-target-modules"),
    (
        "adapters run in the model's dtype, and those with other numbers of words or labels are refused when they are "
        "loaded",
        VALUE,
        "lora-dtype lora-extra-vocab-size max-lora-cls-labels",
    ),
    ("an adapter is asked for by its name, never by a kind of input", VALUE, "default-mm-loras"),
    (
        "what requests hold is never logged; --no-access-log leaves out the line of each request",
        SWITCH,
        "disable-log-requests enable-log-requests enable-log-outputs enable-log-deltas log-error-stack",
    ),
    ("what requests hold is never logged", VALUE, "max-log-len"),
    (
        "tools are the model's to choose wherever a request has them and --tool-call-parser names their form",
        SWITCH,
        "enable-auto-tool-choice",
    ),
    (
        "statistics are not logged; they are at /metrics",
        SWITCH,
        "disable-log-stats aggregate-engine-logging enable-logging-iteration-details",
    ),
    (
        "the next step is always planned while one runs",
        SWITCH,
        "async-scheduling disable-async-output-proc use-v2-block-manager multi-step-stream-outputs",
    ),
    ("the next step is always planned while one runs", VALUE, "num-scheduler-steps num-lookahead-slots"),
    ("every token is sent as soon as its text is certain", VALUE, "stream-interval"),
    (
        "steps take what fits; --itl-target bounds the time that prompts take from requests that decode",
        VALUE,
        "scheduler-delay-factor max-num-scheduled-tokens prefill-schedule-interval watermark",
    ),
    (
        "steps take what fits; --itl-target bounds the time that prompts take from requests that decode",
        SWITCH,
        "long-prefill-token-threshold-adaptive scheduler-reserve-full-isl disable-chunked-mm-input",
    ),
    (
        "kernels are chosen by device and model; `ridgeline explain` shows them",
        VALUE,
        "attention-backend attention-config moe-backend linear-backend mamba-backend mamba-ssu-algorithm "
        "gdn-prefill-backend kda-prefill-backend kda-decode-backend sparse-indexer-topk-backend kernel-config "
        "ir-op-priority mm-encoder-attn-backend engram-config replayssm-buffer-len",
    ),
    (
        "kernels are chosen by device and model; `ridgeline explain` shows them",
        SWITCH,
        "monokernel enable-flashinfer-autotune use-replayssm use-fp64-gumbel kv-sharing-fast-prefill "
        "swa-bounded-replay",
    ),
    (
        "nothing is compiled at start, and graphs are captured for the sizes that the device gains by; --enforce-eager "
        "leaves graphs out",
        VALUE,
        "compilation-config optimization-level performance-mode max-cudagraph-capture-size max-seq-len-to-capture",
    ),
    ("graphs are captured for the sizes that the device gains by", LIST, "cudagraph-capture-sizes cuda-graph-sizes"),
    (
        "all bits of the hash of a prefix's tokens are compared with a keyed hash of our own",
        VALUE,
        "prefix-caching-hash-algo",
    ),
    (
        "cached pages leave by their last use alone",
        VALUE,
        "prefix-cache-retention-interval prefix-match-unit cp-kv-cache-interleave-size dcp-kv-cache-interleave-size",
    ),
    ("layers of different kinds always share one pool of pages", SWITCH, "disable-hybrid-kv-cache-manager"),
    ("8-bit caches keep a scale for each token and key head", SWITCH, "calculate-kv-scales"),
    (
        "states are kept for later requests by --state-cache-share and --state-checkpoint-interval",
        VALUE,
        "mamba-block-size mamba-cache-mode",
    ),
    (
        "states are kept for later requests by --state-cache-share and --state-checkpoint-interval",
        SWITCH,
        "enable-mamba-shared-prefix-checkpoint",
    ),
    (
        "files are mapped and copied straight to the device, and the bar is shown on terminals alone",
        VALUE,
        "safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size "
        "max-parallel-loading-workers pt-load-map-location",
    ),
    (
        "files are mapped and copied straight to the device, and the bar is shown on terminals alone",
        SWITCH,
        "use-tqdm-on-load",
    ),
    ("only files that are read are fetched", LIST, "ignore-patterns"),
    (
        "collectives are chosen by the links between devices; `ridgeline comm` measures them",
        SWITCH,
        "disable-custom-all-reduce disable-nccl-for-dp-synchronization enable-shm-tensor-arena enable-dbo "
        "enable-batch-sharded-sampling enable-hc-sp dcp-q-replicate enable-ep-weight-filter enable-nccl-comm-suspend",
    ),
    (
        "collectives are chosen by the links between devices; `ridgeline comm` measures them",
        VALUE,
        "dbo-decode-token-threshold dbo-prefill-token-threshold ubatch-size dp-sync-interval dcp-comm-backend "
        "cpu-distributed-timeout-seconds",
    ),
    (
        "experts are placed by --init-expert-location and --num-redundant-experts",
        VALUE,
        "expert-placement-strategy",
    ),
    ("--numa-bind finds the node by the GPU's PCI address", LIST, "numa-bind-nodes numa-bind-cpus"),
    (
        "texts are tokenized and rendered in threads and a process of each API server (--api-server-count)",
        VALUE,
        "renderer-num-workers tokenizer-pool-size",
    ),
    (
        "the device keeps vectors of pictures and sounds, in the bytes of --encoder-cache-bytes, and nothing else of "
        "them is kept",
        VALUE,
        "mm-processor-cache-gb mm-processor-cache-type mm-shm-cache-max-object-size-mb ec-manager-config",
    ),
    (
        "the device keeps vectors of pictures and sounds, in the bytes of --encoder-cache-bytes, and nothing else of "
        "them is kept",
        SWITCH,
        "disable-mm-preprocessor-cache",
    ),
    ("pictures and sounds are told apart by SHA-256", VALUE, "mm-hasher-algorithm"),
    (
        "encoders run in the model's dtype",
        VALUE,
        "mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path "
        "mm-encoder-fp8-scale-save-margin",
    ),
    ("pixels lie in memory that processes share", VALUE, "mm-tensor-ipc mm-ipc-gpu-memory-gb"),
    ("pictures are resized and normalised on the model's device", VALUE, "mm-processor-device"),
    ("pictures are resized and normalised on the model's device", SWITCH, "mm-device-do-normalize"),
    ("the memory of encoders is computed, and nothing runs for it", SWITCH, "skip-mm-profiling"),
    ("a chat template places each part where it stands", SWITCH, "interleave-mm-strings"),
    ("a request's settings of processors are checked", SWITCH, "trust-request-mm-kwargs"),
    ("figures of pictures and encoders are at /metrics", SWITCH, "enable-mm-processor-stats"),
    ("a stream without news sends a comment every 15 s", VALUE, "sse-keep-alive-interval"),
    ("usage always has prompt_tokens_details", SWITCH, "enable-prompt-tokens-details"),
    ("every answer has X-Request-Id", SWITCH, "enable-request-id-headers"),
    ("open requests are always counted: ridgeline:face_open_requests", SWITCH, "enable-server-load-tracking"),
    ("/tokenizer_info is always there", SWITCH, "enable-tokenizer-info-endpoint"),
    ("tools are left out of the prompt wherever tool_choice is none", SWITCH, "exclude-tools-when-tool-choice-none"),
    ("lines about /health appear at the level debug alone", VALUE, "disable-access-log-for-endpoints"),
    ("--log-level and --log-json say how logs look", VALUE, "log-config-file logging-config"),
    (
        "headers and bodies have bounds of their own (--max-body-bytes)",
        VALUE,
        "h11-max-incomplete-event-size h11-max-header-count",
    ),
    ("/docs takes its scripts from where FastAPI does; /openapi.json needs none", SWITCH, "enable-offline-docs"),
    ("system_fingerprint names Ridgeline's version", VALUE, "fingerprint-mode fingerprint-value"),
    (
        "docs/serving.md lists the metrics there are",
        VALUE,
        "show-hidden-metrics-for-version kv-cache-metrics-sample custom-histogram-buckets "
        "per-request-spec-decode-metrics",
    ),
    ("docs/serving.md lists the metrics there are", LIST, "collect-detailed-traces"),
    (
        "docs/serving.md lists the metrics there are",
        SWITCH,
        "kv-cache-metrics cudagraph-metrics enable-layerwise-nvtx-tracing enable-mfu-metrics",
    ),
    ("nothing is compiled while requests run but what `ridgeline explain` names", VALUE, "jit-monitor-mode"),
    ("nothing is compiled while requests run but what `ridgeline explain` names", SWITCH, "jit-monitor-verbose"),
    ("grammars are compiled by llguidance alone", VALUE, "guided-decoding-backend"),
    ("grammars are compiled by llguidance alone", SWITCH, "guided-decoding-disable-fallback"),
    ("--tool-call-parser names the form, and reasoning needs no switch", SWITCH, "enable-reasoning"),
    ("a checkpoint's own method needs no permission", SWITCH, "allow-deprecated-quantization"),
    ("settings are flags and never environment variables", SWITCH, "fail-on-environ-validation"),
    ("the address of other nodes is used with --nnodes alone", VALUE, "master-addr master-port"),
    (
        "a supervisor restarts what dies or hangs (--hang-timeout, --step-timeout)",
        VALUE,
        "watchdog-config fault-tolerance-config dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s "
        "dp-supervisor-probe-failure-threshold data-parallel-supervisor-port",
    ),
    (
        "a supervisor restarts what dies or hangs (--hang-timeout, --step-timeout)",
        SWITCH,
        "enable-fault-tolerance",
    ),
    ("no route takes Cohere's bodies", SWITCH, "cohere-is-reasoning-model"),
    ("no route takes Cohere's bodies", VALUE, "cohere-format"),
    ("scores of pairs are computed where the model is", SWITCH, "enable-flash-late-interaction"),
    ("states are kept in the numbers that docs/state.md names", SWITCH, "enable-mamba-cache-stochastic-rounding"),
    ("states are kept in the numbers that docs/state.md names", VALUE, "mamba-cache-philox-rounds"),
)

_SPECULATION = "drafts are asked for by --speculative-config (docs/speculation.md)"
_NODES = "one server runs on one machine; start one on each and put a balancer before them"
_PARSERS = (
    "install a package with an entry point of ridgeline.{}_parser (docs/plugins.md), and name it with --{}-parser"
)
_CODE = "code beside the engine's own is not loaded; leave it out"
_PULLED = "caches are not sent between servers; leave it out"
_SLEEP = "sleeping is one thing here: weights to the host, or everything gone (docs/sleep.md)"
_REASONING = "how reasoning is written follows from --reasoning-parser; bounds are a request's thinking_token_budget"

# (what to do, what it takes, names, harmless values)
_REFUSED: tuple[tuple[str, Takes, str, tuple[str, ...]], ...] = (
    (_SPECULATION, VALUE,
     "spec-method spec-model spec-tokens speculative-model num-speculative-tokens "
     "speculative-draft-tensor-parallel-size ngram-prompt-lookup-max ngram-prompt-lookup-min", ()),
    ("prompt adapters are not supported; leave them out", SWITCH, "enable-prompt-adapter", ()),
    (_NODES, VALUE, "nnodes", ("1",)),
    (_NODES, VALUE, "node-rank data-parallel-start-rank data-parallel-rank", ("0",)),
    (_NODES, VALUE, "data-parallel-address elastic-ep-max-dp-size", ()),
    (_NODES, VALUE, "data-parallel-rpc-port", ("29550",)),
    (_NODES, VALUE, "data-parallel-backend distributed-executor-backend", ("mp", "uni")),
    (_NODES, SWITCH,
     "headless data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb "
     "enable-elastic-ep ray-workers-use-nsight", ()),
    ("all engines of a server run on this machine; use --data-parallel-size", VALUE, "data-parallel-size-local", ()),
    ("set CUDA_VISIBLE_DEVICES before the command", LIST, "device-ids", ()),
    ("cached tokens are divided by --prefill-context-parallel-size", VALUE, "decode-context-parallel-size", ("1",)),
    (_PULLED, VALUE, "ec-transfer-config", ("{}",)),
    ("--weight-transfer RANGE and --admin-key KEY let trainers send weights", VALUE, "weight-transfer-config", ("{}",)),
    (_PULLED, SWITCH, "tokens-only enable-scale-out", ()),
    (_SLEEP, VALUE, "sleep-mode-backend", ("cumem",)),
    (_SLEEP, LIST, "sleep-preserve-parameter-names", ()),
    ("device memory is torch's to allocate; leave it out", SWITCH, "enable-cumem-allocator", ()),
    (_PARSERS.format("tool_call", "tool-call"), VALUE, "tool-parser-plugin", ()),
    (_PARSERS.format("reasoning", "reasoning"), VALUE, "reasoning-parser-plugin", ()),
    (_CODE, VALUE,
     "io-processor-plugin worker-extension-cls scheduler-cls "
     "logits-processor-pattern model-class-overrides additional-config model-loader-extra-config", ("{}",)),
    (_CODE, VALUE, "worker-cls", ("auto",)),
    (_CODE, LIST, "logits-processors", ()),
    (_REASONING, VALUE, "reasoning-config", ('{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',)),
    (_REASONING, SWITCH, "include-reasoning", ()),
    ("efforts reach the template as they are", VALUE, "reasoning-effort-map", ("{}",)),
    ("efforts reach the template as they are", VALUE, "anthropic-disabled-thinking-effort", ("auto",)),
    ("tools run at the client; leave it out", VALUE, "tool-server", ()),
    ("a tool's `strict` is followed as each request says; leave it out", VALUE, "tool-strict-level", ("auto",)),
    ("use --runner pooling, and --convert", VALUE, "task", ("auto", "generate")),
    ("how a model pools is in its folder, in modules.json", VALUE, "pooler-config override-pooler-config", ("{}",)),
    ("a folder needs config.json as Hugging Face writes it", VALUE, "config-format", ("auto", "hf")),
    ("put config.json into the model's folder, or use --hf-overrides", VALUE, "hf-config-path", ()),
    ('use --hf-overrides \'{"rope_scaling": …}\' or \'{"rope_theta": …}\'', VALUE, "rope-scaling rope-theta", ()),
    ("set the environment variable HF_TOKEN, which `ps` does not show", VALUE, "hf-token", ()),
    ("tokenizer.json, tokenizer.model or tiktoken.model is read; convert other files", VALUE, "tokenizer-mode",
     ("auto", "hf", "slow")),
    ("--quantization names the method; finer settings are a checkpoint's (`ridgeline quantize`)", VALUE,
     "quantization-config quantization-param-path", ("{}",)),
    ("every layer's cache has the format that --kv-cache-dtype names", LIST, "kv-cache-dtype-skip-layers", ()),
    ("windows are the model's; set --max-model-len to stay inside them", SWITCH, "disable-sliding-window", ()),
    ("set --kv-cache-memory instead, in bytes", VALUE, "num-gpu-blocks-override", ()),
    ("requests that run are bounded by --max-num-seqs", VALUE, "max-num-active-seqs", ()),
    ("states are kept in the numbers that docs/state.md names", VALUE, "mamba-cache-dtype mamba-ssm-cache-dtype",
     ("auto",)),
    ("log-probabilities are the model's own, before penalties", VALUE, "logprobs-mode", ("raw_logprobs",)),
    ("nothing of a step is reported but tokens and their log-probabilities", SWITCH,
     "enable-return-routed-experts return-sampling-mask enable-trace-replay", ()),
    ("nothing of a step is reported but tokens and their log-probabilities", VALUE, "aux-output-config", ("{}",)),
    ("all frames of a video that the processor chooses are seen", VALUE, "video-pruning-rate", ("0", "0.0")),
    ("all frames of a video that the processor chooses are seen", VALUE, "video-pruning-method", ()),
    ("messages reach the template as texts", VALUE, "chat-template-content-format", ("auto", "string")),
    ("answers have the role assistant", VALUE, "response-role", ("assistant",)),
    ("start the server again after a certificate has changed", SWITCH, "enable-ssl-refresh", ()),
    ("gRPC has a port beside HTTP's; use --grpc-port", SWITCH, "grpc", ()),
    ("grammars follow each request; only the key `backend` is taken", VALUE, "structured-outputs-config",
     ('{"backend": ""}',)),
    ("clients send and get text; leave it out", SWITCH, "skip-tokenizer-init", ()),
    ("`ridgeline profile` measures kernels", VALUE, "profiler-config", ("{}",)),
    ("text is not watermarked; leave it out", VALUE, "watermark-config", ("{}",)),
    ("diffusion models do not run; `ridgeline models` lists those that do", VALUE, "diffusion-config", ("{}",)),
)  # fmt: skip

# Values of our own settings under vLLM's names.
VALUES: Mapping[str, Mapping[str, str]] = {
    "load-format": {"hf": "auto", "gguf": "auto"},
    "all2all-backend": dict.fromkeys(
        (
            *("naive", "pplx", "deepep_high_throughput", "deepep_low_latency", "allgather_reducescatter"),
            *("flashinfer_all2allv", "mori"),
        ),
        "auto",
    ),
    "uvicorn-log-level": {"critical": "error", "trace": "debug"},
    "log-level": {
        "critical": "error",
        "trace": "debug",
        **{n.upper(): n for n in ("debug", "info", "warning", "error")},
    },
}

# Short forms, and names that newer versions changed.
ALIASES = {
    "-q": "quantization",
    "-asc": "api-server-count",
    "-n": "nnodes",
    "-r": "node-rank",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-ep": "enable-expert-parallel",
    "-sc": "speculative-config",
    "-dc": "diffusion-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-O": "optimization-level",
}


def _rows() -> Iterator[Flag]:
    for name, takes, ours, text in _RENAMED:
        yield Flag(name, State.RENAMED, takes, text, ours)
    for text, takes, names in _ACCEPTED:
        yield from (Flag(name, State.ACCEPTED, takes, text) for name in names.split())
    for text, takes, names, harmless in _REFUSED:
        yield from (Flag(name, State.REFUSED, takes, text, harmless=harmless) for name in names.split())


FLAGS: Mapping[str, Flag] = {flag.name: flag for flag in _rows()}


KV_TRANSFER = "kv_transfer_config"
OFFLOADING_GB = 1 << 30  # LMCache's sizes are in GiB
OFFLOADERS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
LMCACHE = ("LMCacheConnectorV1", "LMCacheConnectorV1Dynamic", "LMCacheMPConnector")
INSTEAD = "use --kv-offloading-size, in GiB, and --kv-disk, a directory"


def of_kv_transfer(value: object) -> dict[str, object]:
    """Return vLLM's `kv_transfer_config`, an object or its JSON, as settings of ours, where it asks for blocks in the
    host's memory or on a disk. Raise InvalidConfig for anything else: caches are not sent between servers."""
    name, given = "kv_transfer_config", value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"{name} must be a JSON object ({error}).") from error
    if not isinstance(given, Mapping):
        raise InvalidConfig(f"{name} must be a JSON object, got {str(value)[:80]!r}.")
    if not given:
        return {}
    connector, role = given.get("kv_connector"), given.get("kv_role", "kv_both")
    extra = given.get("kv_connector_extra_config") or {}
    if connector not in (*OFFLOADERS, *LMCACHE):
        raise InvalidConfig(
            f"{name}: the connector {connector!r} sends caches between servers, which is not supported; to keep them "
            f"on this host {INSTEAD}."
        )
    if role != "kv_both" or not isinstance(extra, Mapping):
        raise InvalidConfig(f"{name}: kv_role must be kv_both and kv_connector_extra_config an object; or {INSTEAD}.")
    found = _lmcache(extra) if connector in LMCACHE else _offloading(extra)
    if "kv_offloading_size" not in found:
        raise InvalidConfig(f"{name}: {connector} does not say how many bytes of the host's memory; {INSTEAD}.")
    return found


def _offloading(extra: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of an OffloadingConnector: bytes of the host's memory, and tiers below it."""
    found: dict[str, object] = {}
    for key in ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"):
        if key in extra:
            found["kv_offloading_size"] = _gib(key, extra[key], 1)
    tiers = extra.get("secondary_tiers") or []
    disks = [tier for tier in tiers if isinstance(tier, Mapping) and tier.get("type") == "fs" and tier.get("root_dir")]
    if not isinstance(tiers, list) or len(disks) != len(tiers) or len(tiers) > 1:
        raise InvalidConfig(f'kv_transfer_config: secondary_tiers may be one of type "fs" with a root_dir; {INSTEAD}.')
    for tier in disks:
        found["kv_disk"] = str(tier["root_dir"])
        if "max_disk_gib" in tier:
            found["kv_disk_size"] = _gib("max_disk_gib", tier["max_disk_gib"], OFFLOADING_GB)
    return found


def _lmcache(extra: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of LMCache, as far as they are in the object and not in its own files."""
    found: dict[str, object] = {}
    plain = {key.removeprefix("lmcache."): value for key, value in extra.items()}
    if "max_local_cpu_size" in plain:
        found["kv_offloading_size"] = _gib("max_local_cpu_size", plain["max_local_cpu_size"], OFFLOADING_GB)
    if plain.get("local_disk"):
        found["kv_disk"] = str(plain["local_disk"]).removeprefix("file://")
        if "max_local_disk_size" in plain:
            found["kv_disk_size"] = _gib("max_local_disk_size", plain["max_local_disk_size"], OFFLOADING_GB)
    if plain.get("remote_url"):
        raise InvalidConfig(f"kv_transfer_config: LMCache's remote_url is a cache on other machines; {INSTEAD}.")
    return found


def _gib(name: str, value: object, unit: int) -> float:
    try:
        size = float(value) * unit / (1 << 30)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        size = -1.0
    if not 0 < size < float("inf"):
        raise InvalidConfig(f"kv_transfer_config: {name} must be a number above 0, got {value!r}.")
    return size


def of_keywords(options: Mapping[str, Any], own: frozenset[str]) -> tuple[dict[str, Any], list[str]]:
    """Return vLLM's keyword arguments as our own (`own`), and a line about each that was left out or renamed.

    Raise InvalidConfig for one that is refused, and TypeError for an unknown one.
    """
    kept, lines = dict[str, Any](), list[str]()
    for name, value in options.items():
        flag = FLAGS.get(name.replace("_", "-"))
        if name in own:
            aliases = VALUES.get(name.replace("_", "-"), {})
            kept[name] = aliases.get(value, value) if isinstance(value, str) else value
        elif flag is None:
            raise TypeError(f"LLM() has no argument {name}")
        elif name == KV_TRANSFER:
            for ours_too, found in of_kv_transfer(value or {}).items():
                kept.setdefault(ours_too, found)
        elif flag.state is State.REFUSED and not flag.is_harmless(value):
            raise InvalidConfig(f"{name} is not supported ({flag.text}).")
        elif flag.state is State.RENAMED and value is not None:
            ours = flag.ours[2:].replace("-", "_")
            negated = ours.removeprefix("no_")
            target = ours if ours in own else negated
            if target not in own:
                lines.append(f"{name} is for servers: {flag.text}.")
            elif target == ours:
                kept[target] = value
            elif value:
                kept[target] = False
        else:
            lines.append(f"{name} has no effect: {flag.text}.")
    return kept, lines


# Flags of ours whose default is another than vLLM's, with the words that give vLLM's (none where nothing does), and the
# difference. vLLM's defaults are those of its sources in 2026.
DEFAULTS: tuple[tuple[str, str, str], ...] = (
    ("tool-call-parser", "none", "the chat template's form of calls is read; vLLM reads none until it is told."),
    ("reasoning-parser", "none", "the template's form of reasoning is read; in vLLM it stays in the content."),
    ("unknown-fields", "ignore", "a request with a field that no API knows is refused; vLLM ignores the field."),
    ("allowed-origins", "*", "pages of other origins may not call the server; in vLLM those of all may."),
    ("max-queue-requests", "0", "beyond 4096 open requests the answer is 429; vLLM takes all."),
    ("max-body-bytes", "", "a body has at most 32 MiB; vLLM takes any."),
    ("shutdown-timeout", "0", "running requests get 30 s to finish at the end; vLLM ends them at once."),
    ("gpu-memory-utilization", "0.92", "0.9 of the device's memory is used; vLLM takes 0.92."),
    ("itl-target", "0", "while requests decode, prompts get what fits into a bound of time; vLLM has none."),
)
