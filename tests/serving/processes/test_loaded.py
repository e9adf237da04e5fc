"""A model whose weights are read again, from another folder or the same one, in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.assembly import assemble
from ridgeline.core.errors import ModelLoadError
from ridgeline.core.plan.sleep import KINDS
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.gemm.fp8.saturation import saturations
from ridgeline.serving.observed.engine_stats import EngineStats
from ridgeline.serving.observed.metrics import Snapshot, render
from ridgeline.serving.processes.adapters import EngineAdapters
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.serving.processes.loaded import Loaded
from ridgeline.serving.processes.turn import Turn
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.driving import Rig, ask
from tests.test_speculation import LOOKUP, Always, prompt

NO_ADAPTERS = EngineAdapters(EngineSettings(socket="none", options={}, served_name="m"))

COUNTED = (
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_draft_tokens",
    "ridgeline:preemptions",
    "ridgeline:step_seconds",
    "ridgeline:state_checkpoints_made",
    "ridgeline:prefix_cache_group_hits",
    "ridgeline:expert_tokens",
    "ridgeline:saturated_activations",
)


def reloaded(loaded: Loaded) -> None:
    loaded.reload("")


def slept(loaded: Loaded) -> None:
    loaded.fall_asleep(2)
    loaded.wake(KINDS)


def reloaded_in_vain(loaded: Loaded) -> None:
    """Order a folder that is not there: the old weights are read again."""
    with pytest.raises(ModelLoadError, match="/nowhere"):
        loaded.reload("/nowhere")


def work(loaded: Loaded) -> None:
    """Let there be something to count: hits, a preemption, drafts, checkpoints, tokens of experts, saturations."""
    loaded.go_on()
    loaded.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
    own = Rig(loaded.engine)
    own.run(ask("first", prompt(20, 1), max_tokens=4))
    own.add(*(ask(f"{number}", [*prompt(20, 1), number + 3], max_tokens=20) for number in range(2)))
    for _ in range(4):
        own.step()
    loaded.engine.pause()
    while loaded.engine.has_work:
        own.step()
    loaded.fall_asleep(1)
    loaded.wake(KINDS)
    loaded.go_on()
    own.run()
    saturations(torch.device("cpu")).add_(5)


def counters(loaded: Loaded) -> dict[tuple[str, ...], float]:
    """Return the counters of the engine and its worker that the page of metrics shows, by name and labels."""
    stats = EngineStats().message(loaded.told(), [])
    snapshot = Snapshot(
        model="m", up=True, restarts=0, facts=None, stats=stats, name="a", api_servers=1, open_requests=0, open_tokens=0
    )
    families = text_string_to_metric_families(render(snapshot).decode())
    samples = [sample for family in families if family.type == "counter" for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


@pytest.mark.dealt
@pytest.mark.few(2)
@pytest.mark.parametrize("replace", [reloaded, slept, reloaded_in_vain])
def test_counters_go_on_where_another_engine_takes_the_place(
    replace: Callable[[Loaded], None], tiny_model: Callable[[str], Path]
) -> None:
    """Each of the two engines does the same."""
    config = LLMConfig(
        model=str(tiny_model("qwen3_next")),
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        block_size=4,
        speculative_config=LOOKUP,
    )
    loaded = Loaded(assemble(config), config, "m", 0, Turn(), lambda request, stats: None, NO_ADAPTERS)
    try:
        work(loaded)
        loaded.engine.pause()
        engine, once, kept = loaded.engine, counters(loaded), loaded.told().figures.checkpoints
        replace(loaded)
        assert loaded.engine is not engine
        assert counters(loaded) == once
        now = loaded.told().figures
        assert kept is not None
        assert kept.kept > 0
        assert now.checkpoints == kept._replace(kept=0), "a gauge is as it is now"
        assert now.pages_used == 0
        work(loaded)
        twice = counters(loaded)
    finally:
        loaded.shutdown()
    named = {name: sum(value for key, value in once.items() if key[0] == f"{name}_total") for name in COUNTED}
    assert all(named.values()), named
    time = "ridgeline:step_seconds_total", "0", "m"
    assert twice.pop(time) > once.pop(time)
    assert twice == {key: 2 * value for key, value in once.items()}


@pytest.mark.parametrize("disk", [False, True])
def test_an_engine_with_tiers_below_tells_of_itself_while_it_is_gone(disk: bool, tmp_path: Path) -> None:
    below: dict[str, Any] = {"kv_disk": tmp_path / "kv", "kv_disk_size": 1 / 32} if disk else {}
    config = LLMConfig(
        model=str(EMBEDDED_MODEL), device="cpu", max_model_len=64, max_num_seqs=2, kv_offloading_size=0.01, **below
    )  # fmt: skip
    loaded = Loaded(assemble(config), config, "m", 0, Turn(), lambda request, stats: None, NO_ADAPTERS)
    try:
        for number in range(2):
            loaded.go_on()
            Rig(loaded.engine).run(ask(f"{number}", prompt(40, 1), max_tokens=4))
            loaded.engine.pause()
            before = counters(loaded)
            assert any(name.startswith("ridgeline:disk_") for name, *_ in before) == disk
            loaded.fall_asleep(2)
            asleep = counters(loaded)
            loaded.wake(KINDS)
            for after in (asleep, counters(loaded)):
                assert before.keys() == after.keys()
                assert all(value <= after[key] for key, value in before.items())
    finally:
        loaded.shutdown()


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_what_drafts_stays_where_other_weights_take_the_models_place(method: str, tmp_path: Path) -> None:
    copy = shutil.copytree(EMBEDDED_MODEL, tmp_path / "copy")
    config = LLMConfig(
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        speculative_config={"method": method, "num_speculative_tokens": 2},
    )
    loaded = Loaded(assemble(config), config, "embedded", 0, Turn(), lambda request, stats: None, NO_ADAPTERS)
    try:
        loaded.reload(str(copy))
        assert loaded.facts.folder == str(copy)
        loaded.engine.resume()
        own = Rig(loaded.engine)
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        assert len(own.run(ask("a", prompt(20, 1), max_tokens=20))["a"].tokens) == 20
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["draft_tokens"] > 0
    finally:
        loaded.shutdown()
