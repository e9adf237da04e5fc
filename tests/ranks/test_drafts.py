"""Drafts on ranks that divide every matrix of the target: all verify the same ones, and as many are right as on one
device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.plan.request import Preemption
from tests import tiny_models
from tests.driving import Outcome, Rig, ask, rig
from tests.head_oracle import DSpark, Eagle3, Head, Medusa, SharedMedusa, Target
from tests.test_draft_heads import LAYERS
from tests.test_recent_drafts import accepted, again, named
from tests.test_speculation import DRAFTS, LOOKUP, Always, check_same, prompt, requests

pytestmark = pytest.mark.usefixtures("forked_ranks")

RANKS = {"tensor_parallel_size": 2, "debug_checks": False}
VOCABULARY = 320  # of the tiny models
AGAIN = ask("again", [*prompt(30, 1), 7], max_tokens=16)  # its prompt begins as that of a request before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def want(folder: Path) -> dict[str, Outcome]:
    """The answers of one device without drafts."""
    with rig(folder) as own:
        return own.run(*requests(VOCABULARY), AGAIN)


def drafted(own: Rig) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """Let every row verify as many drafts as it may, and now and then a request give way. Return the answers, and the
    counts of drafts."""
    scheduler = own.engine.scheduler
    scheduler.running.drafting = Always()  # type: ignore[assignment]
    own.add(*requests(VOCABULARY))
    for step in range(1000):
        running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
        if step % 7 == 6 and running and scheduler.preemptions.total() < 8:
            scheduler._preempt(running[0], Preemption.BLOCKS)
        if not own.engine.has_work:
            break
        own.step()
    answers, figures = own.run(AGAIN), scheduler.figures()
    assert scheduler.preemptions.total() > 3
    assert figures.hit_tokens > 20
    assert figures.drafts is not None
    assert not own.errors
    return answers, {name: count for name, count in figures.drafts.items() if name != "seconds_saved"}


@pytest.fixture
def of(folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Returns a function that saves a head for the target, and gives the config that drafts with it."""

    def made(kind: type[Head], **more: Any) -> dict[str, Any]:
        head = kind(Target(tiny_models.build("llama", num_hidden_layers=LAYERS)))
        files = head.save(tmp_path / "head")
        return {"method": head.method, "model": files, "num_speculative_tokens": DRAFTS, **more}

    return made


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_drafts_on_two_ranks_change_no_token(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    with rig(folder) as own:
        vocabulary = own.runner.decoder.spec.vocab_size
        want = own.run(*requests(vocabulary))
    with rig(folder, speculative_config=LOOKUP, **RANKS) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        check_same(own.run(*requests(vocabulary)), want)
        counts = own.engine.scheduler.figures().drafts
    assert counts is not None
    assert counts["draft_tokens"] > counts["accepted_tokens"] > 0


def test_masks_along_drafts_reach_both_ranks(tiny_model: Callable[[str], Path]) -> None:
    """Each rank has the bits of its own part of the vocabulary."""
    folder, settings = tiny_model("llama"), {"tensor_parallel_size": 2, "debug_checks": False}
    asked = [
        ask("two", [7, 8] * 6, allowed_token_ids=(7, 8), max_tokens=20, lookahead=1, logprobs=1),
        ask("far", [7, 290] * 6, allowed_token_ids=(7, 40, 290), max_tokens=20, temperature=1.0, seed=3, lookahead=1),
        ask("bad", [7, 8] * 6, bad_words=[[7, 8], [9]], logit_bias={7: 9.0, 8: 9.0}, max_tokens=20, lookahead=1),
        ask("free", [5, 6] * 6, logit_bias={5: 9.0, 6: 9.0}, max_tokens=20),
    ]
    with rig(folder) as own:
        want = own.run(*asked)
    with rig(folder, speculative_config=LOOKUP, **settings) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        given, provide = [], own.worker.provide_masks

        def noting(plan_id: int, masks: Any, drafts: Any = None) -> None:
            given.extend(each.token_ids_D for each in (drafts or {}).values())
            provide(plan_id, masks, drafts)

        own.worker.provide_masks = noting  # type: ignore[method-assign]
        check_same(own.run(*asked), want)
    assert sum(map(len, given)) > 20


@pytest.mark.thorough
def test_ranks_find_the_same_in_what_others_wrote(tiny_model: Callable[[str], Path]) -> None:
    folder, settings = tiny_model("llama"), {"tensor_parallel_size": 2, "debug_checks": False}
    with rig(folder) as own:
        vocabulary = own.runner.decoder.spec.vocab_size
        want = own.run(*requests(vocabulary))
    with rig(folder, speculative_config={**LOOKUP, "lookup_recent_tokens": 64}, **settings) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        check_same(own.run(*requests(vocabulary)), want)
        for turn in (2, 3):
            check_same(named(own.run(*again(requests(vocabulary), turn)), turn), want)
        assert accepted(own) > 0


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "method",
    [
        "draft model",
        "eagle3",
        "dspark",
        pytest.param("medusa", marks=pytest.mark.thorough),
        "layer skip",
        "cascade",
        pytest.param("tree", marks=pytest.mark.thorough),
    ],
)
def test_networks_draft_on_two_ranks_as_on_one_device(
    method: str, folder: Path, want: dict[str, Outcome], of: Callable[..., dict[str, Any]]
) -> None:
    """A draft model has all heads of attention and scores of its own. Heads share the divided table, and some the
    divided scores too."""
    drafts = {"num_speculative_tokens": DRAFTS}
    config: dict[str, Any] = {
        "draft model": lambda: {"method": "draft_model", "model": folder, **drafts},
        "eagle3": lambda: of(Eagle3),
        "dspark": lambda: of(DSpark),
        "medusa": lambda: of(Medusa),
        "layer skip": lambda: {"method": "layer_skip", "skip_layers": [0, 2], **drafts},
        "cascade": lambda: of(SharedMedusa, prompt_lookup_max=2),
        "tree": lambda: of(Eagle3, eagle_topk=2, num_draft_tokens=6),
    }[method]()
    with rig(folder, speculative_config=config, debug_checks=False) as own:
        answers, counts = drafted(own)
        check_same(answers, want)
    with rig(folder, speculative_config=config, **RANKS) as own:
        answers, found = drafted(own)
        check_same(answers, want)
        cached = sum(len(group.layers) for group in own.engine.layout.groups)
        assert cached == LAYERS + {"draft model": LAYERS, "eagle3": 1, "tree": 1, "dspark": DSpark.layers}.get(
            method, 0
        )
    assert found == counts
    assert found["accepted_tokens"] > 0
    if method == "draft model":
        assert found["accepted_tokens"] > 0.9 * found["draft_tokens"]  # it is the target itself
