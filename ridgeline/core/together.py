"""Settings that do not go together, and those that need another one, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.core.errors import InvalidConfig

TP, PP, CP = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
SIZES = (TP, PP, CP)  # each makes so many ranks of one, so an engine has as many as their product

_STAGES = "a stage hands on all tokens of a step, of which ranks with divided tokens have a share"
_UNSEEN = "what these ranks say to each other is not noted yet"

APART: Mapping[tuple[str, str], str] = {
    ("cascade", "deterministic"): "cascade makes a request's bits depend on what runs beside it",
    ("deterministic", CP): "the division of a step depends on what runs beside a request",
    ("cascade", CP): "no rank has all keys of a common beginning",
    ("kv_cache_dtype", CP): "levels do not travel between ranks yet",
    (PP, CP): _STAGES,
    ("rank_trace_dir", CP): _UNSEEN,
}

# Setting → the settings of which it needs one, and why
NEEDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "pipeline_layer_partition": ((PP,), "it deals layers out to stages"),
    "prefill_context_parallel_threshold": ((CP,), "it says which steps ranks divide"),
    "rank_trace_dir": ((TP, PP), "it shows which rank waits for which"),
}


def check_together(given: Mapping[str, object]) -> None:
    """Raise InvalidConfig if settings contradict each other. given: those that differ from their defaults."""
    for (one, other), why in APART.items():
        if one in given and other in given:
            raise InvalidConfig(
                f"{_said(given, one)} and {_said(given, other)} do not go together: {why}; leave one of them out."
            )
    for name, (others, why) in NEEDS.items():
        if name in given and not any(other in given for other in others):
            raise InvalidConfig(f"{_said(given, name)}: {why}; set {' or '.join(others)} too, or leave it out.")
    axes = [name for name in SIZES if name in given]
    if "rank_trace_dir" in given and len(axes) > 1:
        raise InvalidConfig(f"rank_trace_dir follows one axis; set only one of {', '.join(axes)}.")
    if "enable_expert_parallel" in given and axes and TP not in given:
        raise InvalidConfig(
            f"enable_expert_parallel divides experts between the ranks of {TP}, which is 1; raise that, or leave "
            "enable_expert_parallel out."
        )


def _said(given: Mapping[str, object], name: str) -> str:
    return f"{name}={given[name]!r}"
