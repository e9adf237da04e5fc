"""Settings that do not go together, and those that need another one, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.core.errors import InvalidConfig

TP, PP, CP = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
DP = "data_parallel_size"
SIZES = (TP, PP, CP, DP)  # each makes so many ranks of one, so an engine has as many as their product
OFFLOAD, COPIES, LOCATION = "moe_expert_cache_size", "num_redundant_experts", "init_expert_location"
HOST_LORAS = ("max_cpu_loras", "max_cpu_lora_bytes")
MOVING, BELOW = "enable_eplb", ("cpu_offload_gb", "offload_group_size")
NOT_BELOW: Mapping[str, str] = {
    DP: "a rank computes experts for others while it has no step of its own",
    MOVING: "experts that move must be on the device",
    "pipeline_devices": "it says which layers are where",
    OFFLOAD: "one of them says what waits in the host's memory",
    "speculative_config": "each pass of drafts would copy all layers",
    "enable_lora": "adapters change products of weights that stay where they are",
    "enable_sleep_mode": "sleep moves the weights of a device",
}

APART: Mapping[tuple[str, str], str] = {
    ("cascade", "deterministic"): "cascade makes a request's bits depend on what runs beside it",
    ("deterministic", CP): "the division of a step depends on what runs beside a request",
    ("cascade", CP): "no rank has all keys of a common beginning",
    ("pipeline_devices", "device"): "it says where each stage is",
    ("pipeline_devices", TP): "a stage of several devices has those of `device`",
    ("kv_cache_dtype", CP): "levels do not travel between ranks yet",
    (PP, CP): "a stage hands on all tokens of a step, of which ranks with divided tokens have a share",
    **{(other, DP): "ranks with requests of their own divide nothing but the experts yet" for other in (TP, PP, CP)},
    **{("rank_trace_dir", axis): "what these ranks say to each other is not noted yet" for axis in (CP, DP)},
    **{
        (name, axis): "copies of experts lie on ranks of one axis alone"
        for name in (COPIES, LOCATION, MOVING)
        for axis in (PP, CP)
    },
    ("kv_offloading_size", "enable_prefix_caching"): "blocks in the host's memory are found by their prefixes",
    ("kv_offloading_size", "pipeline_devices"): "stages of unlike devices have blocks of unlike sizes",
    **{(OFFLOAD, axis): "experts in the host's memory are for one device yet" for axis in SIZES},
    (MOVING, "deterministic"): "the order of a token's sums follows from the ranks of its experts",
    (OFFLOAD, "quantization"): "it copies plain weights",
    **{(name, other): why for name in BELOW for other, why in NOT_BELOW.items()},
    **{(name, DP): "ranks with requests of their own read folders at unlike times" for name in HOST_LORAS},
    ("enable_lora_experts", DP): "ranks send tokens to each other without their adapters",
    **{("enable_lora_experts", name): "adapters lie with experts that stay" for name in (COPIES, LOCATION, MOVING)},
    ("enable_lora", OFFLOAD): "the experts of such a model are moved step by step",
    **{("speculative_config", axis): "drafts are verified by ranks that have all tokens yet" for axis in (PP, CP, DP)},
}

# Setting → groups of settings, of each of which it needs one, and why
NEEDS: Mapping[str, tuple[tuple[tuple[str, ...], ...], str]] = {
    "pipeline_layer_partition": (((PP,),), "it deals layers out to stages"),
    "pipeline_devices": (((PP,),), "it places stages on devices"),
    "prefill_context_parallel_threshold": (((CP,),), "it says which steps ranks divide"),
    "rank_trace_dir": (((TP, PP),), "it shows which rank waits for which"),
    "kv_disk": ((("kv_offloading_size",),), "blocks come to the disk by way of the host's memory"),
    "sleep_mode_offload_cudagraph": ((("enable_sleep_mode",),), "graphs go to the host with the weights"),
    **dict.fromkeys(
        ("kv_disk_size", "kv_disk_eviction", "kv_disk_ttl", "kv_disk_tenant_size"),
        ((("kv_disk",),), "it is about that directory"),
    ),
    DP: (
        (("enable_expert_parallel",),),
        "without it these are engines side by side, which `ridgeline serve --data-parallel-size` starts",
    ),
    "all2all_backend": (((DP,),), "it is for ranks with tokens of their own"),
    "eplb_config": (((MOVING,),), "it says how experts move"),
    "offload_num_in_group": ((("offload_group_size",),), "it is about the layers of a group"),
    **dict.fromkeys(("offload_prefetch_step", "offload_params"), ((BELOW,), "it is about layers in the host's memory")),
    **dict.fromkeys(
        (
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
            "max_cpu_lora_bytes",
            "enable_lora_factors",
            "enable_lora_experts",
            "enable_lora_vocabulary",
            "enable_tower_connector_lora",
        ),
        ((("enable_lora",),), "it is for adapters"),
    ),
    "enable_lora_tables": ((("enable_lora_vocabulary",),), "it makes room for whole tables of the vocabulary"),
    **dict.fromkeys(
        (COPIES, LOCATION, MOVING), ((("enable_expert_parallel",), (TP, DP)), "it places experts on ranks")
    ),
}


def check_together(given: Mapping[str, object]) -> None:
    """Raise InvalidConfig if settings contradict each other. given: those that differ from their defaults."""
    for (one, other), why in APART.items():
        if one in given and other in given:
            raise InvalidConfig(
                f"{_said(given, one)} and {_said(given, other)} do not go together: {why}; leave one of them out."
            )
    for name, (groups, why) in NEEDS.items():
        lacking = [" or ".join(group) for group in groups if not any(other in given for other in group)]
        if name in given and lacking:
            raise InvalidConfig(f"{_said(given, name)}: {why}; set {' and '.join(lacking)} too, or leave it out.")
    axes = [name for name in SIZES if name in given]
    if "rank_trace_dir" in given and len(axes) > 1:
        raise InvalidConfig(f"rank_trace_dir follows one axis; set only one of {', '.join(axes)}.")
    if "enable_expert_parallel" in given and axes and TP not in given and DP not in given:
        raise InvalidConfig(
            f"enable_expert_parallel divides experts between the ranks of {TP}, which is 1; raise that, or leave "
            "enable_expert_parallel out."
        )


def _said(given: Mapping[str, object], name: str) -> str:
    return f"{name}={given[name]!r}"
