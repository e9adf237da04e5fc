"""What becomes of a preempted request's blocks that the device gives up (`--preemption-mode`)."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import Preemption, Request, SamplingParams
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.host_tier import HostTierSettings, Preempted
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.sequence import Sequence
from tests.engine.layouts import layout_of

PROMPT, SLOW, FAST = 16, 1.0, 1e12  # tokens, and bytes a second: a token runs in a millisecond


def waiting(number: int) -> Sequence:
    return Sequence(
        Request(
            id=str(number),
            prompt_token_ids=tuple(range(100 * number, 100 * number + PROMPT)),
            params=SamplingParams(max_tokens=4),
            seed=0,
            max_total_tokens=PROMPT + 4,
        ),
        num_groups=1,
    )


def run(manager: CacheManager, seq: Sequence) -> None:
    assert manager.admit(seq, reserve_blocks=0)
    assert manager.tables.extend(seq, PROMPT - 1, PROMPT) is not None
    manager.publish_chunk(seq, seq.cached_tokens, PROMPT)
    seq.has_emitted = True
    seq.tokens.append(7)


def resumed(preempted: Preempted, rate: float) -> tuple[int, int]:
    """Return how many blocks were saved while another request ran in the place of a preempted one, and how many of its
    tokens it finds when it starts again."""
    tier = HostTierSettings(pages=40, bytes_per_second=rate, staging_bytes=1 << 30, preempted=preempted)
    manager = CacheManager(layout_of(((None, 1),), 4, 7), prefix_caching=True, max_chunk=64, host_tier=tier)
    assert manager.tier is not None
    first, second = (waiting(number) for number in (1, 2))
    run(manager, first)
    first.preemptions[Preemption.BLOCKS] += 1
    manager.release(first, 1, PROMPT, resumes=True)
    run(manager, second)
    saved = manager.tier.counts.saved_blocks
    manager.release(second, 2, PROMPT, ended=True)
    assert manager.admit(first, reserve_blocks=0)
    return saved, first.cached_tokens


@pytest.mark.parametrize(
    ("preempted", "rate", "saves", "found"),
    [("auto", FAST, True, 16), ("auto", SLOW, True, 8), ("swap", SLOW, True, 16), ("recompute", FAST, False, 8)],
)
def test_blocks_of_a_preempted_request_move_as_it_was_asked_for(
    preempted: Preempted, rate: float, saves: bool, found: int
) -> None:
    """Six pages: the second request needs two more than are free, and the first one's tail goes."""
    assert resumed(preempted, rate) == (2 if saves else 0, found)


def test_swapping_needs_memory_to_swap_to() -> None:
    with pytest.raises(InvalidConfig, match="set kv_offloading_size, in GiB"):
        LLMConfig(model="x", preemption_mode="swap")
    assert LLMConfig(model="x", preemption_mode="swap", kv_offloading_size=1.0).preemption_mode == "swap"
    with pytest.raises(InvalidConfig, match="unknown preemption_mode 'later'; use auto, recompute or swap"):
        LLMConfig(model="x", preemption_mode="later")  # type: ignore[arg-type]
