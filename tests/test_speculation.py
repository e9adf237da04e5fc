"""Drafts change nothing but the number of steps: whichever method makes them, whatever a request asks for, and whatever
happens to it. Tokens and logprobs are compared with those of the same engine without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import RowKind, StepPlan
from ridgeline.core.plan.token_bits import packed
from ridgeline.core.settings.speculation import verified_widths
from ridgeline.engine.step_drafting import StepDrafting
from ridgeline.worker import graphs
from ridgeline.worker.drawing import SAMPLING
from ridgeline.worker.graphs import CAPTURED_FEATURES, Graph, Graphs
from ridgeline.worker.inputs import Shape
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.drafts import Drafts
from ridgeline.worker.step import DeviceStep
from ridgeline_bench.scripts.told_drafts import tell
from tests.driving import Outcome, Rig, ask, disturbed, rig

TinyModel = Callable[[str], Path]
DRAFTS = 3
LOOKUP = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# One family for each mechanism: windows between full attention; learned positions; a mixture, with sinks; a mixture
# with keys of two sizes. Layers of Llama are among those of the first, and Qwen3's mixture is as the last two.
FAMILIES = (
    *("mixed", "gpt2", "gpt_oss", "gemma4_moe"),
    *(pytest.param(family, marks=pytest.mark.thorough) for family in ("llama", "qwen3_moe")),
)


def mainly(*families: str) -> list[Any]:
    """Return all families, of which others than these are thorough: each way to draft meets windows and one more
    mechanism, and prompt lookup all of them."""
    names = [each if isinstance(each, str) else each.values[0] for each in FAMILIES]
    return [pytest.param(each, marks=() if each in families else pytest.mark.thorough) for each in names]


KINDS = ("mixed", pytest.param("llama", marks=pytest.mark.thorough))
NUMBERS = ("quantization", "kv_cache_dtype")  # the settings that change them
VOCABULARY = 300  # tokens that all tiny models have
SETTINGS: dict[str, dict[str, Any]] = {
    "small chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    "small blocks": {"max_num_seqs": 2, "block_size": 2, "scheduling_policy": "priority"},
    "int8": {"quantization": "int8"},
}


class Scripted:
    """A proposer that knows what comes, and is wrong on purpose. share: of its drafts that are right."""

    def __init__(self, texts: Sequence[Sequence[int]], share: float) -> None:
        self._texts, self._share, self._draw = texts, share, random.Random(0)
        self.asked = 0

    def propose(self, known_N: np.ndarray, count: int) -> np.ndarray:
        self.asked += 1
        known = known_N.tolist()
        text = next((text for text in self._texts if list(text[: len(known)]) == known), known)
        right = text[len(known) : len(known) + count]
        wrong = [self._draw.randrange(VOCABULARY) for _ in right]
        chosen = [a if self._draw.random() < self._share else b for a, b in zip(right, wrong, strict=True)]
        return np.array(chosen[: self._draw.randrange(count + 1)], np.int32)


class Always:
    """All requests verify as many drafts as they may, whatever it costs."""

    saved = 0.0
    most = DRAFTS

    def wanted(self, seq: Any) -> int:
        return self.most if seq.guessable else 0

    def width(self, rows: int, *, masked: bool) -> int:
        return self.most

    def note(self, record: object, result: object, seconds: float) -> bool:
        return False


class Fickle(Always):
    """Rows verify now so many drafts and now none."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def wanted(self, seq: Any) -> int:
        return self._draw.choice([0, min(1, self.most), self.most]) if seq.guessable else 0

    def note(self, record: Any, result: object, seconds: float) -> bool:
        for seq in record.seqs:
            seq.drafts = self.wanted(seq)
        return True


class Turning(Always):
    """All rows of a step verify as many drafts as a graph may have, or none does, now so and now so, as on a GPU."""

    whole = False  # they form a tree

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def width(self, rows: int, *, masked: bool) -> int:
        return self._draw.choice((0, *verified_widths(self.most, whole=self.whole)))

    def note(self, record: object, result: object, seconds: float) -> bool:
        return self._draw.random() < 0.3


class Even:
    """A mask that allows even tokens only."""

    def accept(self, token_id: int) -> None: ...

    def allowed(self) -> np.ndarray:
        return packed(np.arange(self.size) % 2 == 0)

    def __init__(self, size: int) -> None:
        self.size = size


def prompt(length: int, seed: int) -> list[int]:
    """A prompt that repeats itself."""
    draw = random.Random(seed)
    words = [[draw.randrange(3, VOCABULARY) for _ in range(4)] for _ in range(3)]
    return [token for _ in range(length) for token in draw.choice(words)][:length]


def requests(vocabulary: int) -> list[Request]:
    """One request for each thing that may be asked for."""
    common = prompt(40, 0)
    return [
        ask("greedy", prompt(30, 1), max_tokens=24, logprobs=2),
        ask("short", prompt(9, 2), max_tokens=2),
        ask("one", prompt(5, 3), max_tokens=1),
        ask("random", prompt(21, 4), max_tokens=20, temperature=0.7, seed=11),
        ask("filtered", prompt(17, 5), max_tokens=20, temperature=1.0, top_p=0.8, top_k=40, min_p=0.01, seed=5),
        ask("typical", prompt(17, 6), max_tokens=12, temperature=0.9, typical_p=0.9, seed=6),
        ask("penalized", prompt(25, 7), max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
        ask("present", prompt(25, 8), max_tokens=16, temperature=0.8, presence_penalty=0.6, seed=9),
        ask("biased", prompt(12, 9), max_tokens=12, logit_bias={7: 4.0, 9: 5.0}),
        ask("patient", prompt(12, 10), max_tokens=16, min_tokens=9, stop_ids=frozenset(range(3, 60))),
        ask("stops", prompt(14, 11), max_tokens=30, stop_ids=frozenset(range(3, 40))),
        ask("masked", prompt(14, 12), max_tokens=10, mask=Even(vocabulary)),
        ask("guided", prompt(14, 13), max_tokens=10, guidance_scale=1.5),
        ask("named", prompt(14, 14), max_tokens=8, logprob_token_ids=(3, 4, 5), logprobs=0),
        ask("paced", prompt(14, 15), max_tokens=8, lookahead=0),
        ask("scored", prompt(14, 16), max_tokens=8, prompt_logprobs=1, logprobs=1),
        ask("shares", [*common, 5], max_tokens=16),
        ask("shares too", [*common, 6, 7], max_tokens=16),
    ]


def check_same(got: dict[str, Outcome], want: dict[str, Outcome]) -> None:
    assert got.keys() == want.keys()
    for name, outcome in want.items():
        own = got[name]
        assert (own.tokens, own.finish_reason, own.error) == (outcome.tokens, outcome.finish_reason, None), name
        assert [token for token, _ in own.scored] == [token for token, _ in outcome.scored], name
        assert np.allclose([p for _, p in own.scored], [p for _, p in outcome.scored], atol=2e-4), name
        assert np.allclose([p.logprob for p in own.prompt], [p.logprob for p in outcome.prompt], atol=2e-4), name


def plain(folder: Path, **settings: Any) -> dict[str, Outcome]:
    """What one device makes of the requests without drafts. The same object for the same model and numbers: others of
    the settings must change no token either."""
    return _plain(folder, *((name, value) for name, value in settings.items() if name in NUMBERS))


@cache
def _plain(folder: Path, *settings: tuple[str, Any]) -> dict[str, Outcome]:
    with rig(folder, **dict(settings)) as own:
        return own.run(*requests(own.runner.decoder.spec.vocab_size))


def scripted(own: Rig, want: dict[str, Outcome], asked: Sequence[Request], share: float) -> Scripted:
    """Let a rig's drafts be those of a proposer that knows the outcomes."""
    texts = [[*request.prompt_token_ids, *want[request.id].tokens] for request in asked]
    own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
    proposer = Scripted(texts, share)
    tell(own.runner, proposer.propose)
    return proposer


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token_whoever_makes_them(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    want = plain(folder)
    asked = requests(0)
    for share in (None, 1.0, 0.6, 0.0):
        with rig(folder, speculative_config=LOOKUP) as own:
            if share is not None:
                scripted(own, want, asked, share)
            check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
            counts = own.engine.scheduler.figures().drafts
            assert counts is not None
            assert counts["draft_tokens"] > 0
            if share == 1.0:  # a right draft that ends its request has no token behind it that would tell
                assert 60 < counts["draft_tokens"] - 3 <= counts["accepted_tokens"]
            if share == 0.0:
                assert counts["accepted_tokens"] < 0.1 * counts["draft_tokens"]


def test_suffix_decoding_changes_no_token(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixed")
    with rig(folder, speculative_config={"method": "suffix", "num_speculative_tokens": 6}) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), plain(folder))
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["draft_tokens"] > 20
        assert counts["accepted_tokens"] > 0


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    "settings", [{"kv_cache_memory": 1 << 17}, *SETTINGS.values()], ids=["little memory", *SETTINGS]
)
def test_settings_change_no_token(family: str, settings: dict[str, Any], tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    want = plain(folder, **settings)
    with rig(folder, speculative_config=LOOKUP, **settings) as own:
        scripted(own, want, requests(0), 0.8)
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_give_way_or_leave_change_nothing_for_others(seed: int, tiny_model: TinyModel) -> None:
    folder, draw = tiny_model("mixed"), random.Random(seed)
    want, asked = plain(folder), requests(0)
    with rig(folder, speculative_config=LOOKUP) as own:
        scripted(own, want, asked, 0.7)
        own.add(*requests(own.runner.decoder.spec.vocab_size))
        left = disturbed(own, draw, gives_way=0.25, leaves=0.02)
        check_same({k: v for k, v in own.outcomes.items() if k not in left},
                   {k: v for k, v in want.items() if k not in left})  # fmt: skip
        for name in left:
            assert own.outcomes[name].tokens == want[name].tokens[: len(own.outcomes[name].tokens)]


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_rows_may_stop_verifying_while_drafts_are_under_way(family: str, tiny_model: TinyModel) -> None:
    """A row of one token behind one that verifies in a plan before: where it ends is not known when it is planned."""
    folder = tiny_model(family)
    want, asked = plain(folder), requests(0)
    with rig(folder, speculative_config=LOOKUP) as own:
        scripted(own, want, asked, 0.6)
        own.engine.scheduler.running.drafting = Fickle()  # type: ignore[assignment]
        own.add(*requests(own.runner.decoder.spec.vocab_size))
        while own.engine.has_work:
            own.step()
            for seq in own.engine.scheduler.running.leaders():
                assert len(seq.hashes) * 4 <= len(seq.tokens), "a block that is not full has a name"
        assert not own.errors
        check_same(own.outcomes, want)


def test_a_step_for_every_token_becomes_a_step_for_four(tiny_model: TinyModel) -> None:
    request = ask("a", prompt(20, 1), max_tokens=40)
    with rig(tiny_model("llama")) as own:
        want = own.run(request)
        plain_steps = len(own.results)
    with rig(tiny_model("llama"), speculative_config=LOOKUP) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        text = [*request.prompt_token_ids, *want["a"].tokens]
        tell(own.runner, lambda known_N, count: np.array(text[len(known_N) : len(known_N) + count], np.int32))
        assert own.run(request)["a"].tokens == want["a"].tokens
        steps = sum(len(result.emitted_R) > 0 and result.emitted_R.sum() > 0 for result in own.results)
        counts = own.engine.scheduler.figures().drafts
    assert plain_steps >= 40
    assert steps == 11  # the prompt's token, nine of four, and one of three
    assert counts is not None
    assert counts["accepted_tokens"] == 29
    assert [counts[f"accepted_tokens_per_pos: {k}"] for k in range(3)] == [10, 10, 9]


def test_a_draft_never_reaches_beyond_the_longest_context(tiny_model: TinyModel) -> None:
    """Learned positions end with the context: a draft behind the last one would have none."""
    with rig(tiny_model("gpt2")) as own:
        limit = own.engine.config.max_model_len
    request = ask("a", prompt(limit - 9, 1), max_tokens=9)
    for room in ({}, {"max_num_seqs": 1}):  # memory for one such request, and its drafts
        with rig(tiny_model("gpt2"), speculative_config={**LOOKUP, "num_speculative_tokens": 7}, **room) as own:
            assert own.engine.config.max_model_len == limit
            outcome = own.run(request)["a"]
        assert (len(outcome.tokens), outcome.finish_reason) == (9, "length")


def test_small_steps_leave_room_for_drafts(tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), speculative_config=LOOKUP, max_num_seqs=None, max_num_batched_tokens=9) as own:
        assert own.engine.config.max_num_seqs == 2  # of 1 + DRAFTS tokens each
        assert len(own.run(ask("a", prompt(20, 1), max_tokens=5))["a"].tokens) == 5


class Replayed(Graph):
    """A bucket whose segments run op by op on a CPU each time they would be replayed."""

    is_captured = True

    def __init__(self, segments: Any, shape: Shape, *, cascade: bool = False, adapted: bool = False) -> None:
        assert not adapted
        cpu = torch.device("cpu")
        self.inputs = segments.inputs(shape, cascade=cascade)
        self.drafts = Drafts.alike(shape.rows, shape.each, cpu, segments.columns) if shape.each > 1 else None
        self._segments, self._adapted, self.replays = segments, adapted, 0
        self.given = segments.given if shape.each == 0 else None

    def forward(self, step: DeviceStep) -> None:
        self.replays += 1
        captured = self._own_step()
        self._segments.forward(captured)
        step.take(captured)

    def sample(self, step: DeviceStep) -> bool:
        if step.features & SAMPLING not in CAPTURED_FEATURES:
            return False
        wanted, step.wanted = step.wanted, None
        self._segments.sample(step)
        step.wanted = wanted
        return True


def evenly(own: Rig, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Let a rig on a CPU verify drafts as on a GPU: all rows of a step as many or none, and with a monkeypatch in
    buckets of fixed sizes."""
    running = own.engine.scheduler.running
    assert own.runner.drafted is not None
    own.runner.drafted.cut, running._even = None, True
    running.drafting = StepDrafting(running.each - 1, depth=running._depth)
    proposer = own.runner.proposer
    if proposer is not None and proposer.backlog is not None:
        proposer.backlog.padded, proposer.backlog.takes = True, (Catching.LATER,)
    if monkeypatch is not None:
        monkeypatch.setattr(graphs, "Graph", Replayed)
        own.runner.launch.graphs = Graphs(own.runner.segments, 4, 32)


@pytest.mark.parametrize("buckets", [False, True], ids=["op by op", "in buckets"])
@pytest.mark.parametrize("family", [*KINDS, "gpt2"])
def test_even_steps_change_no_token(
    family: str, buckets: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(family)
    want, asked = plain(folder), requests(0)
    texts = [[*request.prompt_token_ids, *want[request.id].tokens] for request in asked]
    for left_out in ((), ("masked", "guided", "named")):  # requests that verify nothing, nor does who runs beside them
        with rig(folder, speculative_config=LOOKUP) as own:
            if left_out:
                tell(own.runner, Scripted(texts, 0.7).propose)
            evenly(own, monkeypatch if buckets else None)
            mine = [each for each in requests(own.runner.decoder.spec.vocab_size) if each.id not in left_out]
            check_same(own.run(*mine), {name: each for name, each in want.items() if name not in left_out})
            counts = own.engine.scheduler.figures().drafts
            assert counts is not None
            assert counts["accepted_tokens"] > (5 if left_out else 0)  # of one draft at least in the first steps
            if buckets:
                replayed = [graph for graph in own.runner.launch.graphs._graphs.values() if graph.replays]  # type: ignore[union-attr, attr-defined]
                assert any(graph.drafts is not None for graph in replayed)
                assert any(graph.drafts is None for graph in replayed)


@pytest.mark.parametrize("drafts", [3, 5])
@pytest.mark.parametrize("buckets", [False, True], ids=["op by op", "in buckets"])
@pytest.mark.parametrize("family", KINDS)
def test_even_steps_of_any_width_change_no_token(
    family: str, buckets: bool, drafts: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While requests give way and leave, and rows go on with more drafts than the step before made, or with fewer."""
    folder, draw = tiny_model(family), random.Random(drafts)
    want, asked = plain(folder), [each for each in requests(0) if each.id not in ("masked", "guided", "named", "paced")]
    with rig(folder, speculative_config={**LOOKUP, "num_speculative_tokens": drafts}) as own:
        scripted(own, want, asked, 0.7)
        evenly(own, monkeypatch if buckets else None)
        turning = Turning()
        turning.most = drafts
        own.engine.scheduler.running.drafting = turning  # type: ignore[assignment]
        widths = widths_of(own)
        own.add(*asked)
        left = disturbed(own, draw, gives_way=0.2, leaves=0.02)
        assert widths == {0, *verified_widths(drafts, whole=False)}
        assert len(left) < len(asked) / 2
        kept = {name: outcome for name, outcome in want.items() if name in own.outcomes and name not in left}
        check_same({name: own.outcomes[name] for name in kept}, kept)
        for name in left:
            assert own.outcomes[name].tokens == want[name].tokens[: len(own.outcomes[name].tokens)]
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        by_place = [value for name, value in counts.items() if name.startswith("accepted_tokens_per_pos")]
        assert counts["accepted_tokens"] == sum(by_place) > 10
        assert by_place == sorted(by_place, reverse=True)


def widths_of(own: Rig) -> set[int]:
    """Return a set into which come the widths of all steps of decoding rows alone. Such a step is even."""
    worker, found = own.engine._worker, set[int]()
    submit = worker.submit

    def seen(plan: StepPlan) -> None:
        if not (plan.rows.kinds_R == RowKind.CHUNK).any():
            assert len({*plan.rows.num_tokens_R.tolist()}) == 1
            found.add(int(plan.rows.num_tokens_R[0]) - 1)
        submit(plan)

    worker.submit = seen  # type: ignore[method-assign]
    return found


def test_a_row_beside_the_longest_context_verifies_nothing_in_even_steps(tiny_model: TinyModel) -> None:
    with rig(tiny_model("gpt2")) as own:
        limit = own.engine.config.max_model_len
    asked = ask("a", prompt(limit - 12, 1), max_tokens=12), ask("b", prompt(20, 2), max_tokens=30)
    with rig(tiny_model("gpt2")) as own:
        want = own.run(*asked)
    with rig(tiny_model("gpt2"), speculative_config=LOOKUP) as own:
        evenly(own)
        check_same(own.run(*asked), want)
        assert not own.errors
