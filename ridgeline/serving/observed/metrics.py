"""Prometheus' metrics, made of `Stats`. Those that routers, autoscalers and benchmark clients read have vLLM's names,
the others `ridgeline:*`.

The engine's counts come ready-made from its process, so all API servers show the same figures. Only the figures about
an API server itself are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.plan.request import Preemption
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.observed.expert_figures import load_of, metric_lines
from ridgeline.serving.observed.histograms import BOUNDS
from ridgeline.transport.messages import Distribution, EngineFacts, Stats, StepFigures
from ridgeline.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = ("stop", "length", "abort", "error")
NEWEST_STEPS = 128  # steps that the gauge of headroom looks at
ENGINE = ("model_name", "engine")  # labels of the engine's figures, as vLLM has them
SIZES = ("kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_cache_max_concurrency", "gpu_memory_utilization")
CACHE = (*ENGINE, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", *SIZES)
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_TIERS = ("device", "host", "disk", "p2p", "external_unspecified")
LORA = ("waiting_lora_adapters", "running_lora_adapters", "max_lora")  # as vLLM has them
SHOWN_ADAPTERS = 32  # names in one label
DEVICE = (*ENGINE, "device", "dtype", "max_model_len")

HELP = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between a request's tokens.",
    "request_time_per_output_token_seconds": "Mean time of a request's tokens after the first.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival until the request was first scheduled.",
    "request_prefill_time_seconds": "From then to its first token.",
    "request_decode_time_seconds": "From the first token to the end.",
    "request_inference_time_seconds": "From first scheduled to the end.",
    "request_prompt_tokens": "Prompt tokens of requests that ended.",
    "request_generation_tokens": "Output tokens of requests that ended.",
    "iteration_tokens_total": "New tokens of a step, and those of prompts that ended in it and were not cached.",
    "request_max_num_generation_tokens": "Output tokens of the longest completion of a request that ended.",
    "request_params_max_tokens": "Output tokens that a request might have had.",
    "request_params_n": "Completions that a request asked for.",
    "request_num_preemptions": "Times that a request started over.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that were not found in the prefix cache.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that got their first token.",
    "generation_tokens": "Tokens generated.",
    "preemptions": "Times a running request lost its slot and blocks and started over.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
}
DRAFTS = {
    "drafts": ("vllm:spec_decode_num_drafts", "Rows of steps that verified drafts."),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified."),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Drafts of them that were right."),
}
HITS = "prefix_cache_hits"
POLICY_COUNTS = (  # kind and name among the policy's counts, metric, text
    ("lengths", "outputs", "ridgeline:predicted_outputs", "Outputs that ended, whose length had been predicted."),
    ("lengths", "error_tokens", "ridgeline:predicted_output_error_tokens", "Tokens by which these predictions erred."),
    ("slo", "refused", "ridgeline:slo_refused", "Requests whose objective could not be promised."),
    ("slo", "missed", "ridgeline:slo_missed", "Requests that could not start in time."),
)
VLLM_COUNTERS = {"preemptions": "num_preemptions"}  # where the name differs


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a page of metrics is made of.

    `engine` is the number of the engine that it tells of, whose `facts` and `stats` are the newest known, and None
    before it ever answered. `api_servers` is their number.
    `open_requests`, `open_tokens`, `stalls` and `stall_seconds` are those of this API server, which is called `name`.
    `rejected` counts the requests that its queue turned away, by the bound. `price_per_hour` is that of the engine's
    devices, 0 where it is unknown; `now` is the time since 1970.
    """

    engine: int = 0
    model: str
    up: bool
    restarts: int
    facts: EngineFacts | None
    stats: Stats | None
    name: str
    api_servers: int
    open_requests: int
    open_tokens: int
    rejected: Mapping[str, int] = field(default_factory=dict)
    stalls: int = 0
    stall_seconds: float = 0.0
    price_per_hour: float = 0.0
    now: float = 0.0

    @property
    def labels(self) -> list[str]:
        """The values of the labels ENGINE."""
        return [self.model, str(self.engine)]

    @property
    def counters(self) -> Mapping[str, float]:
        """The engine's counts by name, of which there may be none."""
        return self.stats.counters if self.stats is not None else {}


EXPERT_CACHE = {  # of `ExpertCacheFigures`; once for each step and layer
    "needed": ("ridgeline:expert_cache_queries", "Experts that steps needed, where experts lie in the host's memory."),
    "found": ("ridgeline:expert_cache_hits", "Those of them that were on the device, or on their way, by then."),
    "foreseeable": ("ridgeline:expert_predictions", "Needed experts of layers whose experts were predicted."),
    "foreseen": ("ridgeline:expert_predictions_right", "Those of them that were predicted by the layer before."),
    "copied": ("ridgeline:expert_cache_copied_bytes", "Bytes of experts that were copied to the device."),
}


REBALANCED = {  # of `Rebalanced`
    "looks": ("ridgeline:expert_rebalancing_looks", "Looks at the load of the ranks that divide the experts."),
    "moves": ("ridgeline:expert_moves", "Places on ranks at which another expert of a layer came to lie."),
    "copied": ("ridgeline:expert_moved_bytes", "Bytes of experts that ranks sent each other for that."),
}
BUSIEST = {  # likewise
    "before": "Tokens of the busiest rank ÷ their mean by the newest look, as experts lay; 1 is best.",
    "after": "The same with experts as they lie once the moves of that look are done.",
}


CHECKPOINTS = {  # of `engine.cache.checkpoints.Counts`
    "made": ("ridgeline:state_checkpoints_made", "States of constant size that were kept in the prefix cache."),
    "evicted": ("ridgeline:state_checkpoints_evicted", "Those of them that were given up."),
    "used": ("ridgeline:state_checkpoints_used", "Times a request began at one of them."),
}


ENCODER = {  # of `EncoderFigures`
    "pictures": ("ridgeline:encoder_pictures", "Pictures that the encoder saw."),
    "patches": ("ridgeline:encoder_patches", "Patches of these pictures."),
    "seconds": ("ridgeline:encoder_seconds", "Seconds of the device that this took, beside those of steps."),
}


BELOW = {  # of `engine.cache.host_tier.TierCounts`
    "loaded": ("vllm:kv_offload_load_bytes", "Bytes of cache blocks that came back from the host's memory."),
    "saved": ("vllm:kv_offload_store_bytes", "Bytes of evicted cache blocks that went to the host's memory."),
    "lost": ("vllm:kv_offload_stores_skipped", "Evicted blocks that did not: too many were on their way, or held."),
    "loaded_blocks": ("ridgeline:host_cache_loaded_blocks", "Cache blocks that came back from the host's memory."),
    "saved_blocks": ("ridgeline:host_cache_saved_blocks", "Evicted cache blocks that went to the host's memory."),
    "evicted": ("ridgeline:host_cache_evicted_blocks", "Blocks that the host's memory gave up for others."),
    "load_seconds": ("vllm:kv_offload_load_time", "Seconds that copies from the host's memory took."),
    "save_seconds": ("vllm:kv_offload_store_time", "Seconds that copies to the host's memory took."),
    "disk_queried": ("ridgeline:disk_cache_queries", "Prompt tokens that device and host lacked."),
    "disk_hit": ("ridgeline:disk_cache_hits", "Those of them that were read from the disk."),
    "disk_forgone": ("ridgeline:disk_cache_forgone", "Those that are there, where computing them was faster."),
    "disk_late": ("ridgeline:disk_cache_late_requests", "Requests that computed tokens since a read took too long."),
    "disk_ahead": ("ridgeline:disk_cache_read_ahead", "Tokens that were read before their request came."),
    "disk_unwritten": (
        "ridgeline:disk_cache_unwritten_blocks",
        "Blocks that the host gave up before they were written.",
    ),
    "disk_evicted": ("ridgeline:disk_cache_evicted_blocks", "Blocks that the disk gave up for others."),
    "disk_refused": ("ridgeline:disk_cache_refused_blocks", "Blocks that were not written since the disk was full."),
    "disk_corrupt": ("ridgeline:disk_cache_corrupt_blocks", "Blocks and files on the disk that were damaged."),
    "disk_failed": (
        "ridgeline:disk_cache_failures",
        "Reads and writes of the disk for which the system gave an error.",
    ),
}
TIERING = {  # vLLM's names for tiers below the host's memory, each with a label that says which
    "disk_read_bytes": ("vllm:kv_offload_tiering_read_bytes", "Bytes of cache blocks that were read from the disk."),
    "disk_written_bytes": ("vllm:kv_offload_tiering_write_bytes", "Bytes of cache blocks that went to the disk."),
    "disk_read_seconds": ("vllm:kv_offload_tiering_read_time", "Seconds of threads that read from the disk."),
    "disk_write_seconds": ("vllm:kv_offload_tiering_write_time", "Seconds of threads that wrote to the disk."),
}
DISK = "1:fs"  # the first tier below, a file system, as vLLM labels it


def render(*snapshots: Snapshot) -> bytes:
    """Return the metrics in Prometheus' text format, with one snapshot for each engine of the server."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(_together([families(snapshot) for snapshot in snapshots])))
    lines: dict[str, None] = {}  # each once: all engines' lines have the same head
    for snapshot in snapshots:
        if figures := snapshot.stats.experts if snapshot.stats else None:
            lines |= dict.fromkeys(metric_lines(figures, dict(zip(ENGINE, snapshot.labels, strict=True))))
    return generate_latest(registry) + "".join(f"{line}\n" for line in lines).encode()


def _together(pages: Sequence[list[Metric]]) -> list[Metric]:
    """Return each metric once, with the samples of all pages. What all tell alike is the server's, and stays once."""
    found: dict[str, Metric] = {}
    for page in pages:
        for metric in page:
            before = found.setdefault(metric.name, metric)
            if before is not metric:
                before.samples.extend(sample for sample in metric.samples if sample not in before.samples)
    return list(found.values())


def families(snapshot: Snapshot) -> list[Metric]:
    """Return every metric there is but the tokens of each expert. One that has no value now has no samples."""
    return [
        *_server(snapshot),
        *_engine(snapshot),
        *_cost(snapshot),
        *_sources(snapshot),
        *_states(snapshot),
        *_pictures(snapshot),
        *_below(snapshot),
        *_drafts(snapshot),
        *_experts(snapshot),
        *_rebalanced(snapshot),
        *_ranks(snapshot),
        *_adapters(snapshot),
        *_histograms(snapshot),
        *_device(snapshot),
    ]


def headroom(steps: Sequence[StepFigures]) -> float | None:
    """Return limit ÷ time over these steps, or None if either is unknown."""
    return Headroom(sum(step.seconds for step in steps), sum(step.limit for step in steps)).share


class _Once(Collector):
    """A collector of metrics that are made already."""

    def __init__(self, made: list[Metric]) -> None:
        self._made = made

    def collect(self) -> Iterable[Metric]:
        return self._made


def _server(snapshot: Snapshot) -> Iterable[Metric]:
    labels = snapshot.labels
    yield _gauge("ridgeline:engine_up", "1 while the engine's process answers.", ENGINE, [(labels, snapshot.up)])
    yield _counter("ridgeline:engine_restarts", "Engines that were replaced.", ENGINE, [(labels, snapshot.restarts)])
    yield _gauge("ridgeline:faces", "Processes that serve the network.", (), [([], snapshot.api_servers)])
    of_face: dict[str, tuple[str, float]] = {
        "requests": ("Completions running or waiting that came through the API server asked.", snapshot.open_requests),
        "tokens": ("Their prompts and all that they may write.", snapshot.open_tokens),
    }
    for what, (text, value) in of_face.items():
        yield _gauge(f"ridgeline:face_open_{what}", text, ("face",), [([snapshot.name], value)])
    stalled: dict[str, tuple[str, float]] = {
        "stalls": ("Times the event loop of the API server asked was held up.", snapshot.stalls),
        "stall_seconds": ("For how long in all; its log says by what.", snapshot.stall_seconds),
    }
    for what, (text, value) in stalled.items():
        yield _counter(f"ridgeline:face_loop_{what}", text, ("face",), [([snapshot.name], value)])
    yield _gauge("ridgeline:build_info", "1; the label has the version.", ("version",), [([__version__], 1)])


def _engine(snapshot: Snapshot) -> Iterable[Metric]:
    labels, stats = snapshot.labels, snapshot.stats

    def gauge(name: str, text: str, value: float | None) -> Metric:
        return _gauge(name, text, ENGINE, [] if value is None else [(labels, value)])

    def counter(name: str, text: str, value: float | None) -> Metric:
        return _counter(name, text, ENGINE, [] if value is None else [(labels, value)])

    now = stats if snapshot.up else None  # a dead engine runs nothing, whatever it reported last
    idle = None if stats is None else 0.0
    yield gauge("vllm:num_requests_running", "Requests that steps advance.", now.running if now else idle)
    yield gauge("vllm:num_requests_waiting", "Requests that wait for room.", now.waiting if now else idle)
    waiting = [
        ([*labels, reason], count)
        for reason, count in (("capacity", now.waiting if now else 0), ("deferred", 0))
        if stats
    ]
    by_reason = "Requests that wait, by why: nothing but room is ever waited for."
    yield _gauge("vllm:num_requests_waiting_by_reason", by_reason, (*ENGINE, "reason"), waiting)
    awake = [([*labels, state], float(level == now.asleep)) for level, state in enumerate(SLEEP_STATES) if now]
    yield _gauge("vllm:engine_sleep_state", "1 for the state that the engine is in.", (*ENGINE, "sleep_state"), awake)
    paused = float(now.paused) if now else None
    yield gauge("ridgeline:engine_paused", "1 while the engine begins no steps, because an order paused it.", paused)
    usage = now.pages_used / now.num_pages if now else idle
    yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.", usage)
    for name, text in COUNTERS.items():
        yield counter(f"vllm:{VLLM_COUNTERS.get(name, name)}", text, stats.counters[name] if stats else None)
    ended = [([*labels, reason], stats.finished.get(reason, 0)) for reason in REASONS] if stats else []
    yield _counter("vllm:request_success", "Requests that ended, by why.", (*ENGINE, "finished_reason"), ended)
    why = [([*labels, why], stats.counters.get(f"preemptions: {why}", 0)) for why in Preemption] if stats else []
    text = "Times a running request started over, by why."
    yield _counter("ridgeline:preemptions", text, (*ENGINE, "reason"), why)
    of_policy = _policy_counts(stats.counters if stats else {})
    service = [([*labels, name], value) for name, value in of_policy.get("service", {}).items()]
    text = "Predicted milliseconds of work done for a tenant, by the policies that count it."
    if service:
        yield _counter("ridgeline:tenant_service_milliseconds", text, (*ENGINE, "tenant"), service)
    for kind, name, metric, text in POLICY_COUNTS:
        if kind in of_policy:
            yield counter(metric, text, of_policy[kind][name])
    started = stats.started if stats else None
    yield gauge("ridgeline:engine_start_time_seconds", "When the engine started, since 1970.", started)
    yield counter("ridgeline:steps", "Steps of the engine.", stats.steps if stats else None)
    yield counter("ridgeline:step_seconds", "Time the device took for them.", stats.step_seconds if stats else None)
    yield counter("ridgeline:limit_seconds", "The least it could have.", stats.limit_seconds if stats else None)
    lost = stats.counters.get("kv_cache_saturated", 0) if stats else None
    yield counter("ridgeline:kv_cache_saturated", "Numbers that the checkpoint's KV scales could not hold.", lost)
    cut_off = "Activations beyond the range of their static scale, which were cut off."
    yield counter("ridgeline:saturated_activations", cut_off, stats.saturations if stats else None)
    share = headroom(stats.recent[-NEWEST_STEPS:]) if stats else None
    yield gauge("ridgeline:headroom", f"Limit divided by time over the newest {NEWEST_STEPS} steps; 1 is best.", share)


def _policy_counts(counters: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the counts of the scheduling policy, by kind and name."""
    found: dict[str, dict[str, float]] = {}
    for key, value in counters.items():
        if key.startswith("policy: "):
            kind, _, name = key.removeprefix("policy: ").partition(": ")
            found.setdefault(kind, {})[name] = value
    return found


def _adapters(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the requests of each adapter, where there are some. Labels are bounded, as `EngineAdapters` counts them."""
    found: dict[str, dict[str, float]] = {"requests": {}, "running": {}, "waiting": {}}
    for key, value in snapshot.counters.items():
        kind, _, name = key.partition(": ")
        if kind.startswith("adapter "):
            found[kind.removeprefix("adapter ")][name] = value
    if not snapshot.counters.get("adapters: places"):
        return
    asked = [([*snapshot.labels, name], value) for name, value in found["requests"].items()]
    text = "Requests with an adapter so far, by its name."
    yield _counter("ridgeline:lora_requests", text, (*ENGINE, "lora_name"), asked)
    names = [",".join(sorted(found[kind])[:SHOWN_ADAPTERS]) for kind in ("waiting", "running")]
    places = f"{snapshot.counters['adapters: places']:.0f}"
    text = "When the engine told which adapters requests run with and wait for, since 1970."
    yield _gauge("vllm:lora_requests_info", text, LORA, [([*names, places], snapshot.now)] if snapshot.up else [])


def _cost(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield what the engine has cost since it started, idle time included, where the price of an hour is known."""
    stats, price = snapshot.stats, snapshot.price_per_hour
    if not price or stats is None:
        return
    spent, tokens = price * max(0.0, snapshot.now - stats.started) / 3600, stats.counters["generation_tokens"]
    yield _gauge("ridgeline:price_per_hour", "Price of its devices for an hour.", ENGINE, [(snapshot.labels, price)])
    yield _counter("ridgeline:cost", "Price of the time since it started.", ENGINE, [(snapshot.labels, spent)])
    text = "That price for a million tokens that it has generated."
    per_million = [(snapshot.labels, 1e6 * spent / tokens)] if tokens else []
    yield _gauge("ridgeline:cost_per_million_tokens", text, ENGINE, per_million)


def _sources(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the sources of prompts' tokens, and the requests that the queue refused. There are no caches but those of
    the device and of the host's memory, so the counts of others stay 0."""
    counters = snapshot.stats.counters if snapshot.stats else None
    cached, computed, hits = (
        0 if counters is None else counters.get(name, 0)
        for name in ("prompt_tokens_cached", "prompt_tokens_computed", "prefix_cache_hits")
    )

    def counter(name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
        labels = [(key,) if label else () for key in values]
        told = [([*snapshot.labels, *own], value) for own, value in zip(labels, values.values(), strict=True)]
        return _counter(f"vllm:{name}", text, (*ENGINE, *((label,) if label else ())), [] if counters is None else told)

    by_source = dict(zip(PROMPT_SOURCES, (computed, cached, 0), strict=True))
    yield counter(
        "prompt_tokens_by_source",
        "Prompt tokens of requests that got their first token, by source.",
        by_source,
        "source",
    )
    yield counter("prompt_tokens_cached", "Those of them that the prefix cache held.", {"": cached})
    names = ("queried", "hit", "disk_hit")
    below = {name: 0 if counters is None else counters.get(f"below: {name}", 0) for name in names}
    disk = min(below["disk_hit"], below["hit"])  # what is read from the disk is found in the host's memory then
    by_tier = {
        **dict.fromkeys(CACHE_TIERS, 0),
        "device": hits - below["hit"],
        "host": below["hit"] - disk,
        "disk": disk,
    }
    text = "Prompt tokens found in a cache, by where it is."
    yield counter("prompt_tokens_cached_by_source", text, by_tier, "source")
    for kind, text, count in (
        ("queries", "Prompt tokens that the device's cache lacked, looked up in the host's memory.", below["queried"]),
        ("hits", "Prompt tokens found there.", below["hit"]),
    ):
        yield counter(f"external_prefix_cache_{kind}", text, {"": count})
    seen = {name: snapshot.counters.get(f"pictures: {name}", 0) for name in ("queries", "hits")}
    yield counter("mm_cache_queries", "Pictures, videos and sounds whose vectors steps needed.", {"": seen["queries"]})
    yield counter("mm_cache_hits", "Those of them that no encoder had to see again.", {"": seen["hits"]})
    turned_away = [([snapshot.model, reason], count) for reason, count in snapshot.rejected.items()]
    text = "Requests that a full queue turned away."
    yield _counter("vllm:admission_rejections", text, ("model_name", "reason"), turned_away)


def _drafts(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the metrics of an engine that verifies drafts."""
    counters = snapshot.counters
    if "drafts: drafts" not in counters:
        return
    yield from _counted(snapshot, "drafts", DRAFTS)
    text = "Drafts that were right, by their place behind the last token."
    found = ((name.partition("accepted_tokens_per_pos: "), count) for name, count in counters.items())
    places = [([*snapshot.labels, place], count) for (_, there, place), count in found if there]
    yield _counter("vllm:spec_decode_num_accepted_tokens_per_pos", text, (*ENGINE, "position"), places)
    text = "Time that drafts have saved so far, beside the rate of steps without them; below 0: they cost time."
    told = [(snapshot.labels, counters["drafts: seconds_saved"])]
    yield _gauge("ridgeline:spec_decode_seconds_saved", text, ENGINE, told)


def _pictures(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the metrics of a model that sees pictures."""
    if "encoder: pictures" not in snapshot.counters or "pictures: waiting" not in snapshot.counters:
        return
    yield from _counted(snapshot, "encoder", ENCODER)
    waiting = [(snapshot.labels, snapshot.counters["pictures: waiting"])]
    text = "Pictures, videos and sounds of requests that no step has needed yet."
    yield _gauge("ridgeline:pictures_waiting", text, ENGINE, waiting)


def _states(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the metrics of a model with states of constant size."""
    counters = snapshot.counters
    if "checkpoints: made" not in counters:
        return
    yield from _counted(snapshot, "checkpoints", CHECKPOINTS)
    kept = [(snapshot.labels, counters["checkpoints: kept"])]
    yield _gauge("ridgeline:state_checkpoints", "States that the prefix cache keeps now.", ENGINE, kept)
    text = "Prompt tokens after which a cache group could have gone on by itself; the least of them are the hits."
    found = ((name.partition(": "), tokens) for name, tokens in counters.items())
    hits = [([*snapshot.labels, group], tokens) for (head, _, group), tokens in found if head == HITS and group]
    yield _counter("ridgeline:prefix_cache_group_hits", text, (*ENGINE, "group"), hits)


def _below(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the metrics of a cache with a tier in the host's memory."""
    counters, labels = snapshot.counters, snapshot.labels
    if "below: size" not in counters:
        return
    yield from _counted(snapshot, "below", BELOW)
    moved = {"GPU_to_CPU": counters["below: saved"], "CPU_to_GPU": counters["below: loaded"]}
    told = [([*labels, way], num_bytes) for way, num_bytes in moved.items()]
    text = "Bytes of cache blocks that moved, by the way they went."
    yield _counter("vllm:kv_offload_total_bytes", text, (*ENGINE, "transfer_type"), told)
    if "below: save_seconds" in counters:
        took = {"GPU_to_CPU": counters["below: save_seconds"], "CPU_to_GPU": counters["below: load_seconds"]}
        text = "Seconds that these moves took."
        told = [([*labels, way], seconds) for way, seconds in took.items()]
        yield _counter("vllm:kv_offload_total_time", text, (*ENGINE, "transfer_type"), told)
    if "below: disk_bytes" in counters:
        for name, (metric, text) in TIERING.items():
            yield _counter(metric, text, (*ENGINE, "tier"), [([*labels, DISK], counters[f"below: {name}"])])
        text = "Bytes of cache blocks on the disk, those of other servers included."
        yield _gauge("ridgeline:disk_cache_bytes", text, ENGINE, [(labels, counters["below: disk_bytes"])])
    used, size = counters["below: used"], counters["below: size"]
    text = "Share of the host's memory for cache blocks that holds some, 0 to 1."
    yield _gauge("vllm:kv_offload_cpu_cache_usage_perc", text, ENGINE, [(labels, used / size)])
    yield _gauge("vllm:kv_offload_cpu_allocation_size", "Bytes of that memory, of a rank.", ENGINE, [(labels, size)])


def _experts(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the metrics of a mixture of experts. The tokens of each expert come from `metric_lines`."""
    if snapshot.stats is None or snapshot.stats.experts is None:
        return
    yield from _counted(snapshot, "expert_cache", EXPERT_CACHE)
    load = load_of(snapshot.stats.experts)
    layers = [[*snapshot.labels, str(layer)] for layer in load.layers]
    busiest, reached = zip(layers, load.imbalance, strict=True), zip(layers, load.reached, strict=True)
    labels = (*ENGINE, "layer")
    yield _gauge(
        "ridgeline:experts_imbalance", "Tokens of a layer's busiest expert ÷ their mean; 1 is best.", labels, busiest
    )
    yield _gauge("ridgeline:experts_reached", "Experts of a layer that had tokens in one recent step.", labels, reached)
    text = "Always 0: no expert has a capacity, so none drops a token."
    yield _counter("ridgeline:expert_dropped_tokens", text, ENGINE, [(snapshot.labels, 0)])


def _rebalanced(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the metrics of ranks between which experts move (`enable_eplb`)."""
    yield from _counted(snapshot, "rebalanced", REBALANCED)
    for name, text in BUSIEST.items():
        if (value := snapshot.counters.get(f"rebalanced: {name}")) is not None:
            yield _gauge(f"ridgeline:expert_busiest_rank_{name}", text, ENGINE, [(snapshot.labels, value)])


def _ranks(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield the metrics of ranks that are traced (`rank_trace_dir`)."""
    told = snapshot.stats.ranks if snapshot.stats is not None else []
    if not told:
        return
    labels = (*ENGINE, "rank")
    shares = [([*snapshot.labels, str(each.rank)], each.share) for each in told]
    text = f"Share of the newest {NEWEST_STEPS} steps in which a rank waited for others in collectives, 0 to 1."
    yield _gauge("ridgeline:rank_wait_share", text, labels, shares)
    for name, text, read in (
        ("rank_wait_seconds", "Time a rank waited for others in collectives.", lambda each: each.waited),
        ("rank_waited_for_seconds", "Time others waited for this rank.", lambda each: each.caused),
    ):
        values = [([*snapshot.labels, str(each.rank)], read(each)) for each in told]
        yield _counter(f"ridgeline:{name}", text, labels, values)


def _histograms(snapshot: Snapshot) -> Iterable[Metric]:
    for name, bounds in BOUNDS.items():
        made = HistogramMetricFamily(f"vllm:{name}", HELP[name], labels=ENGINE)
        if snapshot.stats is not None:
            found = snapshot.stats.histograms[name]
            made.add_metric(snapshot.labels, buckets=_buckets(bounds, found), sum_value=found.total)
        yield made


def _buckets(bounds: Sequence[float], found: Distribution) -> list[tuple[str, float]]:
    """Return the buckets in Prometheus' form, in which each bound counts everything below it too."""
    buckets, so_far = [], 0
    for bound, count in zip([*map(str, map(float, bounds)), "+Inf"], found.counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets


def _device(snapshot: Snapshot) -> Iterable[Metric]:
    facts = snapshot.facts
    cache, device = [], []
    if facts is not None:
        prefix = str(facts.enable_prefix_caching)
        dtype = facts.cache_dtype or facts.dtype
        tokens = facts.kv_cache_tokens
        sizes = (
            facts.kv_cache_memory_bytes,
            tokens,
            round(tokens / facts.max_model_len, 2),
            facts.gpu_memory_utilization,
        )
        cache = [
            ([*snapshot.labels, str(facts.block_size), str(facts.num_pages), dtype, prefix, *map(str, sizes)], 1.0)
        ]
        device = [([*snapshot.labels, facts.device, facts.dtype, str(facts.max_model_len)], 1.0)]
    yield _gauge("vllm:cache_config_info", "1; the labels have the cache's settings.", CACHE, cache)
    yield _gauge("ridgeline:device_info", "1; the labels say what the engine runs on.", DEVICE, device)
    gpus = snapshot.stats.gpus if snapshot.stats and snapshot.up else []
    for name, text, read in (
        ("utilization_ratio", "Share of time in which a kernel ran, 0 to 1.", lambda gpu: gpu.utilization),
        ("memory_used_bytes", "Memory in use, by anyone.", lambda gpu: gpu.memory_used),
        ("memory_total_bytes", "Memory there is.", lambda gpu: gpu.memory_total),
        ("power_watts", "Power drawn.", lambda gpu: gpu.power),
        ("temperature_celsius", "Temperature.", lambda gpu: gpu.temperature),
    ):
        told = [((str(gpu.index), gpu.name), value) for gpu in gpus if (value := read(gpu)) is not None]
        yield _gauge(f"ridgeline:gpu_{name}", text, ("gpu", "name"), told)


def _counted(snapshot: Snapshot, group: str, table: Mapping[str, tuple[str, str]]) -> Iterable[Metric]:
    """Yield those counters of a group that the engine has."""
    for name, (metric, text) in table.items():
        if (count := snapshot.counters.get(f"{group}: {name}")) is not None:
            yield _counter(metric, text, ENGINE, [(snapshot.labels, count)])


Values = Iterable[tuple[Sequence[str], float]]  # by the values of a metric's labels


def _gauge(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(made: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for of, value in values:
        made.add_metric(of, float(value))
    return made
