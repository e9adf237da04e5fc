"""The engine's counts against what its model is seen to do, and those of engines that followed one another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from ridgeline.assembly import assemble
from ridgeline.core.plan.expert_cache import ExpertCacheFigures
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.rank_waits import RankWaits
from ridgeline.core.plan.request import Preemption
from ridgeline.core.plan.worker import WorkerFigures
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.rebalancing import Rebalanced
from ridgeline.engine.cache.checkpoints import Counts
from ridgeline.engine.figures import Figures
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.observed.counted import Counted
from ridgeline.serving.processes.engine_host import EngineHost
from ridgeline.serving.processes.engine_settings import EngineSettings
from tests.driving import Rig, ask
from tests.test_speculation import LOOKUP, Always, prompt

SETTINGS = EngineSettings(socket="", options={}, served_name="m")


@pytest.mark.parametrize(
    "speculative_config", [None, LOOKUP, {"method": "lookahead"}], ids=["none", "lookup", "window"]
)
def test_the_tokens_of_a_step_are_those_that_ran(speculative_config: dict[str, Any] | None) -> None:
    """A plan has as many drafts as there may be; on a CPU only those run that there are."""
    config = LLMConfig(device="cpu", dtype="float32", max_model_len=128, speculative_config=speculative_config)
    assembly = assemble(config)
    host = EngineHost(assembly, config, None, SETTINGS)  # type: ignore[arg-type]  # no message is sent
    own = Rig(assembly.engine)
    ran, planned = list[int](), 0
    own.runner.decoder.embed.register_forward_hook(lambda _, inputs, x_TM: ran.append(len(inputs[0])))
    if speculative_config:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
    try:
        own.add(*(ask(f"{number}", prompt(30 + number, number), max_tokens=25) for number in range(3)))
        while own.engine.has_work:
            host._step()
            assert own.engine.last_plan is not None
            planned += own.engine.last_plan.num_tokens
    finally:
        own.engine.shutdown()
    assert (planned > sum(ran)) == bool(speculative_config)
    assert [step.tokens for step in host._stats._recent] == ran


def test_what_follows_on_what_is_a_sum_of_counts_and_the_last_of_the_rest() -> None:
    def figures(now: int, count: int) -> Figures:
        return Figures(
            running=now,
            waiting=now,
            pages_used=now,
            num_pages=now,
            queried_tokens=count,
            hit_tokens=count,
            preemptions=Counter({Preemption.SLEEP: count}),
            group_hits=Counter({"kv": count, "never": 0}),
            checkpoints=Counts(count, count, count, now),
            drafts={"drafts": count, "seconds_saved": -0.5 * count},
        )

    def counted(now: int, count: int) -> Counted:
        return Counted(
            figures(now, count),
            Headroom(count, count),
            WorkerFigures(
                experts=ExpertLoad((0,), (2,), np.full((1, 2), count), np.full((1, 2), now), now, now),
                kv_saturated=count,
                saturated=count,
                waits=[RankWaits(rank, count, count, count, now) for rank in range(2)],
                expert_cache=ExpertCacheFigures(*[count] * 5),
                moved_bytes=count,
                rebalanced=Rebalanced(count, count, count, now, now),
            ),
        )

    both, wanted = counted(1, 10).after(counted(2, 20)), counted(1, 30)
    assert both.worker.experts is not None
    assert both.figures == wanted.figures
    assert dict(both.figures.group_hits) == {"kv": 30, "never": 0}, "what never counted anything is shown too"
    assert both.headroom == wanted.headroom
    assert both.worker.experts.total_LE.tolist() == [[30, 30]]
    assert both.worker.experts.step_LE.tolist() == [[1, 1]]
    assert (both.worker.kv_saturated, both.worker.saturated) == (30, 30)
    assert (both.worker.waits, both.worker.expert_cache) == (wanted.worker.waits, wanted.worker.expert_cache)
    assert both.worker.rebalanced == wanted.worker.rebalanced
