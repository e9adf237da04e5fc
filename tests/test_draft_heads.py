"""Drafts by heads that read the target's hidden states. Each draft must be the one that the head's paper defines
(`head_oracle.py`), whatever happened to the request before; and tokens must be those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.driving import Rig, ask, rig
from tests.head_oracle import HEADS, Eagle, Eagle3, Head, Medusa, Target
from tests.test_speculation import DRAFTS, Always, Fickle, check_same, plain, prompt, requests

LAYERS = 4  # of the target; the outputs of all but the last are tapped


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_models.build("llama", num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module", params=HEADS, ids=lambda kind: kind.__name__)
def head(request: pytest.FixtureRequest, target: Target) -> Head:
    made: Head = request.param(target)
    return made


def drafting(head: Head, folder: Path, drafts: int = DRAFTS) -> dict[str, Any]:
    return {"speculative_config": {"method": head.method, "model": folder, "num_speculative_tokens": drafts}}


def always(own: Rig, how: type[Always] = Always) -> Rig:
    own.engine.scheduler.running.drafting = how()  # type: ignore[assignment]
    return own


class Record:
    """Notes all drafts that are made, with the slot's number of cached tokens and its last token."""

    def __init__(self, own: Rig) -> None:
        self.proposer, self.slots = own.runner.proposer, own.runner.slots
        self.made: list[tuple[int, int, list[int]]] = []
        assert self.proposer is not None
        note = self.proposer.note

        def noting(out_token_RK: torch.Tensor, slots_R: torch.Tensor, *others: Any) -> None:
            note(out_token_RK, slots_R, *others)
            for slot in slots_R.tolist():
                drafts = [draft for draft in self.proposer.drafts_SD[slot].tolist() if draft >= 0]
                self.made.append((int(self.slots.kv_len_S[slot]), int(self.slots.last_token_S[slot]), drafts))

        self.proposer.note = noting  # type: ignore[method-assign]

    def check(self, head: Head, texts: list[list[int]]) -> int:
        """Compare every draft with the oracle's. Return how many there were."""
        count = 0
        for cached, last, drafts in self.made:
            if not drafts:
                continue
            wanted = [head.drafts(text[: cached + 1], len(drafts)) for text in texts if text[cached:][:1] == [last]]
            assert drafts in wanted
            count += len(drafts)
        return count


def texts_of(asked: list[Any], answers: dict[str, Any]) -> list[list[int]]:
    return [[*request.prompt_token_ids, *answers[request.id].tokens] for request in asked]


GREEDY = [
    ask("long", prompt(45, 1), max_tokens=30),  # its prompt runs in chunks
    ask("short", prompt(3, 2), max_tokens=20),
    ask("one", prompt(1, 3), max_tokens=12),
    ask("same", prompt(45, 1), max_tokens=18),
    ask("begins alike", [*prompt(45, 1)[:24], 7, 8], max_tokens=18),
    ask("ends soon", prompt(9, 4), max_tokens=2),
]


@pytest.mark.parametrize("how", [Always, Fickle], ids=["always", "now and then"])
def test_drafts_are_those_of_the_paper(how: type[Always], head: Head, folder: Path, tmp_path: Path) -> None:
    files = head.save(tmp_path / "head")
    with rig(folder, enable_prefix_caching=False) as own:
        want = own.run(*GREEDY)
    with rig(folder, enable_prefix_caching=False, **drafting(head, files)) as own:
        record = Record(always(own, how))
        got = own.run(*GREEDY)
        check_same(got, want)
    assert record.check(head, texts_of(GREEDY, got)) > 100


def test_a_prefix_that_was_found_has_the_heads_keys_too(head: Head, folder: Path, tmp_path: Path) -> None:
    files = head.save(tmp_path / "head")
    first, again = ask("first", prompt(45, 1), max_tokens=20), ask("again", prompt(45, 1), max_tokens=20)
    with rig(folder, **drafting(head, files)) as own:
        always(own).run(first)
        record = Record(own)
        got = own.run(again)
        assert own.engine.scheduler.figures().hit_tokens > 30
    assert record.check(head, texts_of([again], got)) > 30


def test_requests_that_give_way_draft_as_before(head: Head, folder: Path, tmp_path: Path) -> None:
    files = head.save(tmp_path / "head")
    with rig(folder) as own:
        want = own.run(*GREEDY)
    little = {"kv_cache_memory": 150_000, "enable_prefix_caching": False}
    with rig(folder, **little, **drafting(head, files)) as own:
        record = Record(always(own))
        got = own.run(*GREEDY)
        check_same(got, want)
        assert own.engine.scheduler.preemptions.total() > 0
    assert record.check(head, texts_of(GREEDY, got)) > 100


@pytest.mark.parametrize("kind", [Eagle, Eagle3, Medusa], ids=lambda kind: kind.__name__)
def test_tokens_are_those_of_plain_decoding(
    kind: type[Head], target: Target, folder: Path, tmp_path: Path
) -> None:
    files = kind(target).save(tmp_path / "head")
    want = plain(folder)
    for how in (Always, Fickle):
        with rig(folder, **drafting(kind(target), files)) as own:
            check_same(always(own, how).run(*requests(own.runner.decoder.spec.vocab_size)), want)
