"""Settings that divide a model: how many ranks they make, which of them go together, and where a server takes them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest

from ridgeline.cli.serve import of_engine_and_server
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.processes import placement

TP, PP, CP, DP = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
EXPERTS = {"enable_expert_parallel": True}
TESTED = [{TP, PP}, {TP, CP}]  # by tests/ranks/test_pipeline.py and tests/ranks/test_context_group.py


@pytest.mark.parametrize("pair", list(combinations((TP, PP, CP, DP), 2)), ids="-".join)
def test_two_axes_work_or_are_refused_by_name(pair: tuple[str, str]) -> None:
    options: dict[str, object] = dict(zip(pair, (2, 3), strict=True))
    if DP in pair:
        options |= EXPERTS
    if set(pair) in TESTED:
        config = LLMConfig(**options)  # type: ignore[arg-type]
        assert (config.ranks, set(config.divided_by)) == (6, set(pair))
        return
    with pytest.raises(InvalidConfig, match="do not go together") as caught:
        LLMConfig(**options)  # type: ignore[arg-type]
    assert all(f"{name}={options[name]}" in str(caught.value) for name in pair)


REFUSED: list[tuple[Mapping[str, object], str]] = [
    ({PP: 2, **EXPERTS}, "between the ranks of tensor_parallel_size, which is 1"),
    ({CP: 2, **EXPERTS}, "between the ranks of tensor_parallel_size, which is 1"),
    ({DP: 2}, "`ridgeline serve --data-parallel-size` starts"),
    ({"pipeline_layer_partition": "1,1"}, "set pipeline_parallel_size too"),
    ({"prefill_context_parallel_threshold": 8}, "set prefill_context_parallel_size too"),
    ({"rank_trace_dir": "here"}, "set tensor_parallel_size or pipeline_parallel_size too"),
    ({"rank_trace_dir": "here", TP: 2, PP: 2}, "follows one axis"),
    ({"rank_trace_dir": "here", CP: 2}, "do not go together: what these ranks say to each other is not noted"),
    ({"rank_trace_dir": "here", DP: 2, **EXPERTS}, "do not go together: what these ranks say"),
    ({"all2all_backend": "peer", TP: 2, **EXPERTS}, "set data_parallel_size too"),
    ({"num_redundant_experts": 2, TP: 2}, "set enable_expert_parallel too"),
    ({"init_expert_location": "load.json", **EXPERTS}, "set tensor_parallel_size or data_parallel_size too"),
    ({"num_redundant_experts": 2, TP: 2, PP: 2, **EXPERTS}, "copies of experts lie on ranks of one axis alone"),
    ({"init_expert_location": "load.json", TP: 2, CP: 2, **EXPERTS}, "copies of experts lie on ranks of one axis"),
    ({"moe_expert_cache_size": 2, PP: 2}, "for one device yet"),
    ({"moe_expert_cache_size": 2, CP: 2}, "for one device yet"),
    ({"cascade": True, "deterministic": True}, "what runs beside it; leave one of them out"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_what_contradicts_is_one_sentence(options: Mapping[str, object], why: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        LLMConfig(**options)  # type: ignore[arg-type]
    assert why in str(caught.value)
    assert str(caught.value).endswith(".")


def test_what_asks_for_nothing_contradicts_nothing() -> None:
    for options in ({"cascade": False, "deterministic": True}, {"cascade": False, CP: 2}, {"kv_cache_dtype": "auto"}):
        LLMConfig(**options)  # type: ignore[arg-type]
    assert LLMConfig(kv_cache_dtype="bfloat16", prefill_context_parallel_size=3).ranks == 3
    assert LLMConfig().ranks == 1


@pytest.mark.parametrize(
    ("settings", "engines", "ranks"),
    [
        ({DP: 3}, 3, 1),
        ({DP: 3, **EXPERTS}, 1, 3),
        ({DP: 3, TP: 2, **EXPERTS}, 3, 2),
        ({DP: 2, TP: 2, CP: 2}, 2, 4),
        ({DP: 2, TP: 2, PP: 2}, 2, 4),
    ],
)
def test_a_server_starts_engines_or_one_engine_of_ranks(
    settings: Mapping[str, object], engines: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, own = of_engine_and_server(settings)
    assert (own.get(DP, 1), LLMConfig(**engine).ranks) == (engines, ranks)
    monkeypatch.setattr(placement, "visible_gpus", lambda: 12)
    found = placement.environments(ServeConfig(**own, engine=engine))
    assert len(found) == engines
    if engines > 1:
        each = [environment[placement.VISIBLE].split(",") for environment in found]
        assert [len(gpus) for gpus in each] == [ranks] * engines
        assert len({gpu for gpus in each for gpu in gpus}) == engines * ranks
