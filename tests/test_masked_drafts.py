"""Drafts of rows with token masks change nothing but the number of steps. Tokens and logprobs are compared with those
of the same engine without drafts, and masks that were led along drafts with fresh ones that saw the same tokens."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ridgeline
from ridgeline.core.plan.request import MASK_FAILED, Preemption, Request, Thinking, TokenMask, drafting
from ridgeline.core.plan.step import MaskedDrafts
from ridgeline.core.plan.token_bits import has, only, packed, unpacked
from ridgeline.engine.masks import constrained

pytest.importorskip("llguidance")
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from ridgeline.serving.grammars import grammar as grammars
from ridgeline.serving.grammars.grammar import usable
from ridgeline.serving.grammars.kept import Compiled
from ridgeline.serving.grammars.masks import GrammarMask
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar
from tests import tiny_models
from tests.covering import by_values
from tests.driving import Outcome, Rig, ask, rig
from tests.engine.profiles import quick_settings
from tests.test_speculation import DRAFTS, LOOKUP, Always, Fickle, Turning, check_same, evenly

FOLDER = Path(ridgeline.__file__).parent / "assets" / "embedded"
TEXTS = Tokenizer.from_folder(FOLDER)
VOCAB, EOS = 4096, 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace", "Barbara"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 6}, "city": {"enum": ["Berlin", "Paris"]}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "address", "numbers"],
    "additionalProperties": False,
}
REGEX = r"(The answer is (yes|no)\. ){2}[a-z]{3}"
EBNF = 'root ::= "begin " item ("; " item)? " end"\nitem ::= "first" | "second" [0-9] [0-9]'
FORCED = "The quick brown fox jumps over the lazy dog; then it sleeps until noon."
SPOKEN = FORCED.replace(".", r"\.")
PROMPT = TEXTS.encode('def address(name): return {"name": name, "address": {"street": 1, "city": 2}, "numbers": []}\n')


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TEXTS.backend.to_str(), VOCAB, [EOS])


@cache
def matcher(kind: Any, text: str) -> LLMatcher:
    return grammars.matcher(usable(Grammar(kind=kind, text=text)), tokenizer())


def grammar(kind: str, text: str) -> GrammarMask:
    return GrammarMask(Compiled(matcher(kind, text), tokenizer()), LLExecutor(1))


def as_json() -> GrammarMask:
    return grammar("json", json.dumps(SCHEMA))


def thinks(request: Request, budget: int) -> Request:
    think = Thinking(inside=True, ends=((61, 62),), closing=(61, 62), budget=budget)
    return replace(request, thinking=think, lookahead=1)


def requests() -> list[Request]:
    """Requests with each kind of mask, and some without."""
    ends = {"stop_ids": frozenset([EOS]), "max_tokens": 60}
    warm = {**ends, "temperature": 1.0}
    few = tuple(range(300, 320))
    return [
        ask("json", PROMPT, mask=as_json(), logprobs=2, **ends),
        ask("json at random", PROMPT, mask=as_json(), seed=1, **warm),
        ask("the same again", PROMPT, mask=as_json(), seed=2, **warm),
        ask("json that is short", PROMPT[:9], mask=as_json(), seed=3, **{**warm, "max_tokens": 9}),
        ask("json, penalized", PROMPT, mask=as_json(), seed=4, repetition_penalty=1.2, frequency_penalty=0.3, **warm),
        ask("regex", PROMPT[:12], mask=grammar("regex", REGEX), **ends),
        ask("regex, filtered", PROMPT[:7], mask=grammar("regex", REGEX), seed=5, top_p=0.9, top_k=30, **warm),
        ask("forced", PROMPT[:9], mask=grammar("regex", SPOKEN), seed=11, **warm),
        ask("ebnf", PROMPT[:20], mask=grammar("grammar", EBNF), seed=6, **warm),
        ask("late", PROMPT[:5], mask=grammar("regex", "ab*"), seed=6, min_tokens=9, logit_bias={EOS: 50.0}, **warm),
        ask("few", PROMPT[:10], allowed_token_ids=few, max_tokens=24, temperature=1.5, seed=7, lookahead=1),
        ask("two", PROMPT[:10], allowed_token_ids=(400, 401), max_tokens=24, lookahead=1, logprobs=0),
        ask("bad", PROMPT[:10], bad_words=[[5, 6], [7]], max_tokens=20, lookahead=1),
        thinks(ask("thinks", PROMPT[:8], mask=as_json(), seed=8, **warm), 4),
        thinks(ask("only thinks", PROMPT[:8], max_tokens=16, seed=9, temperature=1.0), 6),
        ask("free", PROMPT[:31], max_tokens=24),
        ask("free, in a loop", [400, 401] * 8, logit_bias={400: 20.0, 401: 20.0}, max_tokens=24),
        ask("free at random", PROMPT[:14], max_tokens=30, temperature=0.8, seed=10),
    ]


class Given:
    """Notes all drafts that rows with masks verify, and how the host chose them."""

    def __init__(self, own: Rig) -> None:
        self.drafts: list[list[int]] = []
        provide = own.worker.provide_masks

        def noting(plan_id: int, masks: Any, drafts: dict[int, MaskedDrafts] | None = None) -> None:
            for row, (token_ids_D, bits_DW) in (drafts or {}).items():
                self.drafts.append(token_ids_D.tolist())
                for draft, bits_W in zip(self.drafts[-1], [masks[row], *bits_DW], strict=False):
                    assert has(bits_W, draft)
            provide(plan_id, masks, drafts)

        own.worker.provide_masks = noting  # type: ignore[method-assign]

    @property
    def count(self) -> int:
        return sum(map(len, self.drafts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("masked"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def want(folder: Path) -> dict[str, Outcome]:
    with rig(folder) as own:
        found = own.run(*requests())
        assert not own.errors
    assert {name for name, outcome in found.items() if outcome.finish_reason == "stop"} >= {"regex", "ebnf", "late"}
    written = TEXTS.decode(found["regex"].tokens)
    assert written.startswith("The answer is ")
    return found


@pytest.mark.parametrize("how", [None, Always, Fickle], ids=["as it pays", "always", "now and then"])
def test_drafts_change_no_token(how: type[Always] | None, folder: Path, want: dict[str, Outcome]) -> None:
    with rig(folder, speculative_config=LOOKUP) as own:
        if how is not None:
            own.engine.scheduler.running.drafting = how()  # type: ignore[assignment]
        given = Given(own)
        check_same(own.run(*requests()), want)
        assert given.count > (200 if how is Always else 5)
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["accepted_tokens"] > (120 if how is Always else 3)
        if how is Always:
            assert counts["draft_tokens"] > given.count + 10, "only rows with masks had drafts"


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
        {"max_num_seqs": 2, "block_size": 2},
        {"kv_cache_memory": 1 << 17},
    ],
    ids=["small chunks", "small blocks", "little memory"],
)
def test_settings_change_no_token(settings: dict[str, Any], folder: Path, want: dict[str, Outcome]) -> None:
    with rig(folder, speculative_config=LOOKUP, **settings) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        check_same(own.run(*requests()), want)
        assert not own.errors


@pytest.mark.parametrize(("how", "buckets"), by_values((None, Turning), (False, True), turn=1))
def test_even_steps_change_no_token(
    buckets: bool, how: type[Always] | None, folder: Path, want: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with masks no longer keep others from verifying."""
    with rig(folder, speculative_config=LOOKUP) as own:
        given = Given(own)
        evenly(own, monkeypatch if buckets else None)
        if how is not None:
            own.engine.scheduler.running.drafting = how()  # type: ignore[assignment]
        check_same(own.run(*requests()), want)
        assert given.count > 5
        if buckets:
            replayed = [graph for graph in own.runner.launch.graphs._graphs.values() if graph.replays]  # type: ignore[union-attr, attr-defined]
            assert any(graph.drafts is not None for graph in replayed)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "layer_skip"])
def test_on_a_gpu_drafts_change_no_token(method: str, eager: bool, folder: Path) -> None:
    settings = {"device": "cuda", "deterministic": True, "enforce_eager": eager}
    with rig(folder, **settings) as own:
        want = own.run(*requests())
        assert not own.errors
    config = LOOKUP if method == "ngram" else {"method": method, "num_speculative_tokens": DRAFTS}
    config = config | {"draft_model": {"model": str(folder)}, "layer_skip": {"skip_layers": [1]}}.get(method, {})
    with rig(folder, **settings, speculative_config=config) as own:
        given = Given(own)
        own.engine.scheduler.running.drafting = Turning()  # type: ignore[assignment]
        check_same(own.run(*requests()), want)
        assert not own.errors
        assert given.count > 5


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_give_way_or_leave_change_nothing_for_others(
    seed: int, folder: Path, want: dict[str, Outcome]
) -> None:
    draw, left = random.Random(seed), set()
    with rig(folder, speculative_config=LOOKUP) as own:
        scheduler = own.engine.scheduler
        scheduler.running.drafting = Always()  # type: ignore[assignment]
        own.add(*requests())
        for _ in range(2000):
            if not own.engine.has_work:
                break
            running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
            if running and draw.random() < 0.25 and scheduler.preemptions.total() < 12:
                scheduler._preempt(draw.choice(running), Preemption.BLOCKS)
            elif running and draw.random() < 0.02:
                left.add(leaver := draw.choice(running).id)
                own.engine.abort(leaver)
            own.step()
        assert scheduler.preemptions.total() > 3
        check_same({k: v for k, v in own.outcomes.items() if k not in left},
                   {k: v for k, v in want.items() if k not in left})  # fmt: skip


@pytest.mark.parametrize(("method", "even"), by_values(("draft_model", "layer_skip"), (False, True)))
def test_drafts_of_the_host_take_the_place_of_a_models(
    method: str, even: bool, folder: Path, want: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"method": method, "num_speculative_tokens": DRAFTS}
    config |= {"model": str(folder)} if method == "draft_model" else {"skip_layers": [1]}
    with rig(folder, speculative_config=config) as own:
        if even:
            evenly(own, monkeypatch)
        else:
            own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        given = Given(own)
        check_same(own.run(*requests()), want)
        assert given.count > 10


def test_states_that_every_token_replaces_are_those_of_plain_decoding(tmp_path: Path) -> None:
    folder = tiny_models.save("qwen3_5", tmp_path, vocab_size=VOCAB)
    asked = ("json", "regex", "ebnf", "two", "free")
    with rig(folder) as own:
        want = own.run(*[each for each in requests() if each.id in asked])
    for even in (False, True):
        with rig(folder, speculative_config=LOOKUP) as own:
            if even:
                evenly(own)
            else:
                own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
            given = Given(own)
            check_same(own.run(*[each for each in requests() if each.id in asked]), want)
            assert given.count > 20


def test_forced_text_comes_in_as_few_steps_as_there_can_be(folder: Path) -> None:
    """No prompt lookup is needed, and nothing is wrong for a model that writes the longest token that it may."""
    written = tokenizer().greedy_tokenize(FORCED)
    request = ask("a", PROMPT[:9], mask=grammar("regex", SPOKEN), max_tokens=80, stop_ids=frozenset([EOS]),
                  logit_bias={token: 10.0 * len(TEXTS.decode([token])) for token in written})  # fmt: skip
    skip = {"method": "layer_skip", "num_speculative_tokens": DRAFTS, "skip_layers": [1]}
    for config in (LOOKUP, skip):
        with rig(folder, speculative_config=config) as own:
            own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
            outcome = own.run(replace(request, token_mask=grammar("regex", SPOKEN)))["a"]
            assert outcome.tokens == [*written, EOS]
            steps = sum(int(result.emitted_R.sum()) > 0 for result in own.results)
            counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["accepted_tokens"] == counts["draft_tokens"]
        assert steps == 1 + -(-len(written) // (1 + DRAFTS))  # the prompt's token, and the others with the end


def test_a_repeated_text_is_looked_up_within_its_mask(folder: Path) -> None:
    """Two tokens take turns by chance or habit; what came before is drafted, and only what the mask allows."""
    asked = [ask("a", [400, 401] * 8, allowed_token_ids=(400, 401), max_tokens=30, lookahead=1)]
    with rig(folder, speculative_config=LOOKUP) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        given = Given(own)
        own.run(*asked)
    assert given.count > 20
    assert {token for drafts in given.drafts for token in drafts} == {400, 401}


def test_a_mask_that_cannot_go_back_runs_without_drafts(folder: Path) -> None:
    class Plain:
        def accept(self, token_id: int) -> None: ...

        def allowed(self) -> np.ndarray:
            return packed(np.isin(np.arange(VOCAB), (400, 401)))

    with rig(folder, speculative_config=LOOKUP) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        given = Given(own)
        tokens = own.run(ask("a", [400, 401] * 8, mask=Plain(), max_tokens=20))["a"].tokens
    assert (len(tokens), set(tokens) <= {400, 401}, given.drafts) == (20, True, [])


class Counting:
    """A mask that can go back: 400, 401, 402, … one after the other. `fault` is what goes wrong at token 5."""

    walks = True

    def __init__(self, fault: str = "") -> None:
        self.count, self.fault, self.broken = 0, fault, False

    def accept(self, token_id: int) -> None:
        assert token_id == 400 + self.count
        assert not self.broken
        if self.fault == "accept" and self.count == 5:
            self.broken = True
            raise RuntimeError("the grammar broke")
        self.count += 1

    def allowed(self) -> np.ndarray:
        assert not self.broken
        if self.fault == "allowed" and self.count == 5:
            self.broken = True
            raise RuntimeError("the grammar broke")
        if self.fault == "nothing" and self.count == 5:
            return packed(np.zeros(VOCAB, np.bool_))
        return packed(np.arange(VOCAB) == 400 + self.count)

    def forced(self) -> list[int]:
        return []

    def save(self) -> object:
        if self.fault == "save" and self.count >= 5:
            raise RuntimeError("the grammar broke")
        return self.count

    def restore(self, state: object) -> None:
        if self.fault == "restore" and self.count >= 5:
            raise RuntimeError("the grammar broke")
        assert isinstance(state, int)
        self.count, self.broken = state, False


@pytest.mark.parametrize("fault", ["accept", "allowed", "nothing", "save", "restore"])
def test_a_mask_that_fails_along_drafts_ends_its_own_request_only(
    fault: str, folder: Path, want: dict[str, Outcome]
) -> None:
    outcomes = []
    for config in (None, LOOKUP):
        with rig(folder, speculative_config=config) as own:
            if config is not None:
                own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
            free = next(each for each in requests() if each.id == "free")
            good = ask("good", PROMPT[:9], mask=Counting(), max_tokens=11)
            outcomes.append(own.run(free, ask("x", PROMPT[:9], mask=Counting(fault), max_tokens=11), good))
            assert not own.errors
    plain, drafted = outcomes
    assert drafted["free"].tokens == plain["free"].tokens == want["free"].tokens
    assert drafted["good"].tokens == plain["good"].tokens == list(range(400, 411))
    if fault in ("save", "restore"):  # a plain request's mask never goes back
        assert str(drafted["x"].error).startswith(MASK_FAILED)
        assert drafted["x"].tokens == plain["x"].tokens[: len(drafted["x"].tokens)]
        return
    assert (drafted["x"].tokens, drafted["x"].error) == (plain["x"].tokens, plain["x"].error)
    assert str(plain["x"].error).startswith(MASK_FAILED)
    assert len(plain["x"].tokens) == 5 + (fault == "accept")


# ---- masks that go back ---------------------------------------------------------------------------------------

GRAMMARS = {"json": ("json", json.dumps(SCHEMA)), "regex": ("regex", REGEX), "ebnf": ("grammar", EBNF)}


def ruled(name: str | None, bad: list[list[int]], budget: int | None, begins: bool, min_tokens: int) -> TokenMask:
    """A fresh mask of all rules that there are."""
    request = ask("x", [1, 2, 3], mask=grammar(*GRAMMARS[name]) if name else None, stop_ids=frozenset([EOS]),
                  bad_words=bad, min_tokens=min_tokens)  # fmt: skip
    if budget is not None:
        inside = {"inside": False, "begins": ((60, 61),)} if begins else {"inside": True}
        think = Thinking(ends=((61, 62),), closing=(61, 62), budget=budget, **inside)  # type: ignore[arg-type]
        request = replace(request, thinking=think, eos_ids=frozenset([EOS]))
    mask = constrained(request, VOCAB).token_mask
    assert mask is not None
    return mask


def some_allowed(mask: TokenMask, draw: random.Random) -> int | None:
    """A token that the mask allows, often one that reasoning is made of; None if rules contradict each other."""
    allowed = np.flatnonzero(unpacked(mask.allowed(), VOCAB)).tolist()
    special = [token for token in (60, 61, 62, EOS) if token in allowed]
    chosen = special if special and draw.random() < 0.3 else allowed
    return draw.choice(chosen) if chosen else None


@quick_settings(150)
@given(
    name=st.none() | st.sampled_from(sorted(GRAMMARS)),
    budget=st.none() | st.integers(0, 4),
    begins=st.booleans(),
    bad=st.lists(st.lists(st.integers(60, 63), min_size=2, max_size=3), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    walks=st.lists(st.integers(0, 16), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 20),
)
def test_a_mask_that_went_back_is_one_that_never_went(name, budget, begins, bad, min_tokens, walks, seed) -> None:
    rules, draw, taken = (name, bad, budget, begins, min_tokens), random.Random(seed), list[int]()
    mask = ruled(*rules)
    walker = drafting(mask)
    assert walker is not None
    for length in walks:
        state = walker.save()
        for _ in range(length):
            if (token := some_allowed(walker, draw)) is not None:
                walker.accept(token)
        walker.restore(state)
        fresh = ruled(*rules)
        for token in taken:
            fresh.accept(token)
        assert np.array_equal(walker.allowed(), fresh.allowed())
        forced = list(walker.forced())
        if (token := only(walker.allowed())) is not None and forced:
            assert forced[0] == token
        if (token := some_allowed(walker, draw)) is None:
            return
        taken.append(token)
        walker.accept(token)


@quick_settings(50)
@given(name=st.sampled_from(sorted(GRAMMARS)), length=st.integers(0, 30), seed=st.integers(0, 1 << 20))
def test_a_grammar_comes_back_from_a_token_that_it_does_not_allow(name: str, length: int, seed: int) -> None:
    """The library itself never leaves the state of an error."""
    mask, fresh, draw = grammar(*GRAMMARS[name]), grammar(*GRAMMARS[name]), random.Random(seed)

    def go_on(steps: int) -> None:
        for _ in range(steps):
            assert np.array_equal(mask.allowed(), fresh.allowed())
            token = some_allowed(mask, draw)
            assert token is not None
            mask.accept(token)
            fresh.accept(token)

    go_on(length)
    state = mask.save()
    forbidden = np.flatnonzero(~unpacked(mask.allowed(), VOCAB)).tolist()
    if not mask._matcher.is_stopped():
        with pytest.raises(Exception, match="grammar"):
            mask.accept(draw.choice(forbidden))
    mask.restore(state)
    go_on(5)


@given(st.sets(st.integers(0, 99), max_size=3))
def test_a_set_of_one_token_is_found(tokens: set[int]) -> None:
    bits_W = packed(np.isin(np.arange(100), list(tokens)))
    assert only(bits_W) == (next(iter(tokens)) if len(tokens) == 1 else None)
    assert {token for token in range(100) if has(bits_W, token)} == tokens
