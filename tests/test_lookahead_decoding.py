"""Lookahead decoding changes nothing but the number of steps, and its drafts are those of the paper, which an oracle
computes with whole sequences, without a cache and with dictionaries."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import Preemption
from ridgeline.core.plan.step import Assign, Feature
from ridgeline.core.settings.draft_tree import lookahead_tree_of
from ridgeline.core.settings.speculation import speculation_of
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.lookahead import BUCKETS, NEWEST, Lookahead, first_pool, first_window
from ridgeline.worker.speculation.proposer import Taken
from tests import tiny_models
from tests.covering import by_values
from tests.driving import Rig, ask, rig
from tests.test_draft_trees import trees
from tests.test_speculation import Always, Fickle, Turning, check_same, evenly, mainly, plain, prompt, requests

TinyModel = Callable[[str], Path]
Sizes = tuple[int, int, int]  # window, n-gram, guesses
SMALL: Sizes = (3, 3, 2)
GREEDY = [
    ask("long", prompt(45, 1), max_tokens=60),  # its prompt runs in chunks
    ask("short", prompt(3, 2), max_tokens=24),
    ask("one", prompt(1, 3), max_tokens=19),
    ask("same", prompt(45, 1), max_tokens=20),
    ask("ends soon", prompt(9, 4), max_tokens=2),
]


def looking(sizes: Sizes = SMALL) -> dict[str, Any]:
    names = "window_size", "ngram_size", "verification_set_size"
    config = {"method": "lookahead", **dict(zip(names, sizes, strict=True))}
    return {"speculative_config": config, "max_num_batched_tokens": 256}


# ---- tokens are those of plain decoding -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", mainly("mixed", "gpt2"))
def test_tokens_are_those_of_plain_decoding(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    want = plain(folder)
    for how in (Always, Fickle):
        with rig(folder, **looking()) as own:
            trees(own, how)
            check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
            counts = own.engine.scheduler.figures().drafts
            assert not own.errors
        assert counts is not None
        assert counts["draft_tokens"] > 100


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_memory": 1 << 18},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 48},
        {"max_num_seqs": 2, "block_size": 2, "scheduling_policy": "priority"},
    ],
    ids=["little memory", "small chunks", "small blocks"],
)
def test_settings_change_no_token(settings: dict[str, Any], tiny_model: TinyModel) -> None:
    folder = tiny_model("mixed")
    want = plain(folder, **settings)
    with rig(folder, **{**looking(), **settings}) as own:
        trees(own)
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert not own.errors


@pytest.mark.parametrize(("family", "buckets"), by_values(("llama", "mixed"), (False, True)))
def test_even_steps_change_no_token(
    family: str, buckets: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all rows of a step verify their trees or none does, padded to the sizes of captured graphs."""
    folder, out = tiny_model(family), ("masked", "guided", "named", "penalized", "present")
    want = plain(folder)
    with rig(folder, **looking()) as own:
        evenly(own, monkeypatch if buckets else None)
        mine = [each for each in requests(own.runner.decoder.spec.vocab_size) if each.id not in out]
        check_same(own.run(*mine), {name: each for name, each in want.items() if name not in out})
        counts = own.engine.scheduler.figures().drafts
        assert not own.errors
    assert counts is not None
    assert counts["draft_tokens"] > 100


@pytest.mark.parametrize("even", [False, True], ids=["rows as they are", "even"])
def test_no_draft_lies_behind_the_longest_context(even: bool, tiny_model: TinyModel) -> None:
    """Learned positions end with the context: a draft behind the last one would have none."""
    folder = tiny_model("gpt2")
    with rig(folder) as own:
        limit = own.engine.config.max_model_len
    asked = ask("a", prompt(limit - 30, 1), max_tokens=30), ask("b", prompt(20, 2), max_tokens=40)
    with rig(folder) as own:
        want = own.run(*asked)
    with rig(folder, **looking((4, 4, 2))) as own:
        if even:
            evenly(own)
        else:
            trees(own)
        check_same(own.run(*asked), want)
        assert not own.errors


# ---- the paper's algorithm ------------------------------------------------------------------------------------------


class Paper:
    """The drafts of one request. draw: the token that greedy decoding draws behind a text. known: what is written when
    it begins. window: the guesses with which it begins, by level, which the paper leaves to chance."""

    def __init__(
        self, draw: Callable[[tuple[int, ...]], int], known: Sequence[int], window: list[list[int]], sizes: Sizes
    ) -> None:
        self.draw, self.text, self.window = draw, list(known), window
        _, self.length, self.guesses = sizes
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        grams = [tuple(known[at : at + self.length]) for at in range(len(known) - self.length + 1)]
        for at, gram in enumerate(grams):
            if gram not in grams[at + 1 :]:
                self.put(gram)

    def put(self, gram: tuple[int, ...]) -> None:
        """Keep an n-gram, and of those that begin with the same token the newest ones."""
        kept = self.pool.setdefault(gram[0], [])
        if gram not in kept:
            kept.append(gram)
            del kept[: -self.guesses]

    def tree(self) -> list[tuple[int, ...]]:
        """Return the way to every node: the window level by level, and then n-grams that begin with the last token, as
        far as they leave the nodes before."""
        columns = range(len(self.window[0]))
        ways = [
            (*self.window[0][: column + 1], *(self.window[above][column] for above in range(1, level + 1)))
            for level in range(len(self.window))
            for column in columns
        ]
        width = len(columns)
        parent = {at: -1 if at == 0 else at - 1 if at < width else at - width for at in range(len(ways))}
        for gram in self.pool.get(self.text[-1], []):
            at = -1
            for place in range(1, self.length):
                way = gram[1 : place + 1]
                found = [node for node in range(len(ways)) if parent[node] == at and ways[node] == way]
                if not found:
                    parent[len(ways)] = at
                    found = [len(ways)]
                    ways.append(way)
                at = found[0]
        self.parent = parent
        return ways

    def step(self) -> list[int]:
        """Verify the tree; return the tokens that are emitted."""
        ways, text, width = self.tree(), tuple(self.text), len(self.window[0])
        last = [self.draw(text + way) for way in ways[width * (self.length - 2) : width * (self.length - 1)]]
        emitted, at = [self.draw(text)], -1
        while True:
            right = [node for node, way in enumerate(ways) if self.parent[node] == at and way[-1] == emitted[-1]]
            if not right:
                break
            at = right[0]
            emitted.append(self.draw(text + ways[at]))
        for column in range(width):
            self.put((*(level[column] for level in self.window), last[column]))
        self.window = [*self.window[1:], last]
        self.text += emitted
        return emitted


class Checked:
    """Compares all drafts of a rig with those of the paper, request by request."""

    def __init__(self, own: Rig, draw: Callable[[tuple[int, ...]], int], sizes: Sizes) -> None:
        proposer = own.runner.proposer
        assert isinstance(proposer, Lookahead)
        self.proposer, self.slots, self._draw, self._sizes = proposer, own.runner.slots, draw, sizes
        self.drafts = self.accepted = 0
        self._papers: dict[int, Paper] = {}
        self._drafted: dict[int, bool] = {}
        note, assign = proposer.note, proposer.assign

        def assigning(deltas: Sequence[Any]) -> None:
            assign(deltas)
            for each in deltas:
                if isinstance(each, Assign):
                    window = proposer.window_SLW[each.slot].tolist()
                    self._papers[each.slot] = Paper(draw, (*each.prompt, *each.output), window, sizes)
                    self._drafted[each.slot] = False

        def noting(out_token_RK: Tensor, slots_R: Tensor, *others: Any) -> None:
            wanted, taken = others[-2], others[-1]
            for row, slot in enumerate(slots_R.tolist()):
                emitted = [token for token in out_token_RK[row].tolist() if token >= 0]
                if emitted and slot in self._papers:
                    ran = taken.drawn_RN is not None and int((taken.drawn_RN[row] >= 0).sum()) > 1
                    self._emitted(slot, emitted, ran=ran)
            note(out_token_RK, slots_R, *others)
            for row, slot in enumerate(slots_R.tolist()):
                if int(out_token_RK[row, 0]) >= 0 and slot in self._papers:
                    self._made(slot, wanted)

        proposer.note, proposer.assign = noting, assigning  # type: ignore[method-assign, assignment]

    def _emitted(self, slot: int, emitted: list[int], *, ran: bool) -> None:
        paper = self._papers[slot]
        if ran and self._drafted[slot]:
            whole = paper.step()
            assert emitted == whole[: len(emitted)]
            assert len(emitted) == len(whole) or int(self.slots.stopped_S[slot])
            self.accepted += len(emitted) - 1
        else:
            assert len(emitted) == 1
            paper.text += emitted

    def _made(self, slot: int, wanted: int) -> None:
        tree_SN = self.proposer.tree_SN
        assert tree_SN is not None
        tokens, words = self.proposer.drafts_SD[slot].tolist(), tree_SN[slot].tolist()
        length = int(self.slots.kv_len_S[slot])
        self._drafted[slot] = any(token >= 0 for token in tokens)
        if not self._drafted[slot]:
            assert wanted == 0 or int(self.slots.stopped_S[slot]) or length + 2 >= int(self.slots.max_len_S[slot])
            return
        found = Counter[tuple[int, ...]]()
        for node, token in enumerate(tokens, start=1):
            above = [at for at in range(1, node + 1) if words[node] >> at & 1]
            assert words[node] & 1
            assert (
                words[node] & (1 << 64) - 1 == (words[above[-2] if len(above) > 1 else 0] | 1 << node) & (1 << 64) - 1
            )
            if token >= 0:
                found[tuple(tokens[at - 1] for at in above)] += 1
        paper = self._papers[slot]
        assert len(paper.text) == length + 1
        assert found == Counter(paper.tree())
        self.drafts += found.total()


def repeating() -> Any:
    """A tiny Llama that writes 24 tokens only, and whose layers change little: what comes next depends mostly on the
    last token, so texts repeat soon."""
    model = tiny_models.build("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
            product.weight.data *= 0.03
    model.lm_head.weight.data[24:] = 0
    return model


@pytest.fixture(scope="module")
def draw() -> Callable[[tuple[int, ...]], int]:
    """Greedy decoding by that model, without a cache."""
    model, known = repeating(), dict[tuple[int, ...], int]()

    @torch.no_grad()
    def drawn(text: tuple[int, ...]) -> int:
        if text not in known:
            known[text] = int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax())
        return known[text]

    return drawn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repeating")
    repeating().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("sizes", [(4, 4, 3), (3, 2, 2), (1, 3, 1), (5, 8, 4)], ids=str)
def test_drafts_are_those_of_the_paper(sizes: Sizes, draw: Any, model: Path) -> None:
    with rig(model, **looking(sizes)) as own:
        checked = Checked(trees(own), draw, sizes)
        own.run(*GREEDY)
        assert not own.errors
    assert checked.drafts > 200
    assert checked.accepted > 5, checked.accepted


@pytest.mark.parametrize("buckets", [False, True], ids=["op by op", "in buckets"])
def test_even_steps_draft_as_the_paper_does(
    buckets: bool, draw: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without drafts in between leaves the windows as they are."""
    with rig(model, **looking()) as own:
        evenly(own, monkeypatch if buckets else None)
        checked = Checked(trees(own, Turning), draw, SMALL)
        own.run(*GREEDY)
        assert not own.errors
    assert checked.drafts > 100
    assert checked.accepted > 2


def test_requests_that_give_way_begin_again_as_the_paper_does(draw: Any, model: Path) -> None:
    pick = random.Random(0)
    with rig(model, **looking()) as own:
        scheduler = own.engine.scheduler
        checked = Checked(trees(own), draw, SMALL)
        own.add(*GREEDY)
        for _ in range(500):
            running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
            if running and pick.random() < 0.25 and scheduler.preemptions.total() < 8:
                scheduler._preempt(pick.choice(running), Preemption.BLOCKS)
            own.step()
        assert not own.engine.has_work
        assert scheduler.preemptions.total() > 3
    assert checked.drafts > 200


def test_a_text_that_repeats_itself_takes_fewer_steps(model: Path) -> None:
    asked = ask("a", prompt(20, 1), max_tokens=100)
    with rig(model) as own:
        want = own.run(asked)
        plain_steps = len(own.results)
    with rig(model, **looking((5, 4, 3))) as own:
        trees(own)
        check_same(own.run(asked), want)
        counts, steps = own.engine.scheduler.figures().drafts, len(own.results)
    assert counts is not None
    assert counts["accepted_tokens"] > 50
    assert steps < 0.6 * plain_steps


# ---- the pool and the window ----------------------------------------------------------------------------------------


def deposit(sizes: Sizes = (4, 3, 2), slots: int = 2, device: str = "cpu") -> Lookahead:
    window, ngram, guesses = sizes
    tables = Slots(slots, 1, 16, 40, torch.device(device))
    return Lookahead(lookahead_tree_of(window, ngram, guesses), tables, 64)


GRAM = st.tuples(st.sampled_from([1, 2, 1 + BUCKETS]), st.integers(1, 2), st.integers(1, 2))  # a bucket for two tokens
STEP = st.lists(st.tuples(st.booleans(), st.lists(GRAM, min_size=4, max_size=4)), min_size=2, max_size=2)


@given(st.lists(STEP, max_size=8))
def test_the_pool_keeps_the_newest_of_a_bucket(steps: list[list[tuple[bool, list[tuple[int, ...]]]]]) -> None:
    made = deposit()
    queues: list[dict[int, list[tuple[int, ...]]]] = [{}, {}]
    for step in steps:
        made._collect(torch.arange(2), torch.tensor([grams for _, grams in step]).int(),
                      torch.tensor([ran for ran, _ in step]))  # fmt: skip
        for queue, (ran, grams) in zip(queues, step, strict=True):
            before = {bucket: list(kept) for bucket, kept in queue.items()}
            new = [gram for at, gram in enumerate(grams) if ran and gram not in grams[:at]]
            for gram in new:
                if gram not in before.get(gram[0] % BUCKETS, []):
                    kept = queue.setdefault(gram[0] % BUCKETS, [])
                    kept.append(gram)
                    del kept[:-2]
        for slot, queue in enumerate(queues):
            for bucket in (1, 2):
                got = [
                    tuple(gram) for gram in made.pool_SEX[slot, 2 * bucket : 2 * bucket + 2].tolist() if gram[0] >= 0
                ]
                assert sorted(got) == sorted(queue.get(bucket, []))
            rest = made.pool_SEX[slot].clone()
            rest[2:6], rest[2 * BUCKETS :] = -1, -1  # the two buckets, and the one that no request reads
            assert (rest == -1).all()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(2, 5), st.integers(1, 4))
def test_a_pool_begins_with_the_newest_n_grams_of_the_text(known: list[int], length: int, guesses: int) -> None:
    pool_EX, turn_B = first_pool(known, length, guesses)
    grams = [tuple(known[at : at + length]) for at in range(len(known) - length + 1)]
    for token in range(4):
        mine = [gram for at, gram in enumerate(grams) if gram[0] == token and gram not in grams[at + 1 :]][-guesses:]
        got = [tuple(gram) for gram in pool_EX[token * guesses : (token + 1) * guesses].tolist() if gram[0] >= 0]
        assert got == mine
        assert turn_B[token] == len(mine) % guesses


def test_a_long_text_costs_no_more_than_its_newest_tokens() -> None:
    known = [*range(100), *([200] * NEWEST)]
    pool_EX, _ = first_pool(known, 3, 2)
    assert [gram for gram in pool_EX.tolist() if gram[0] >= 0] == [[200, 200, 200]]


@given(st.lists(st.integers(0, 299), min_size=1, max_size=60), st.integers(1, 7), st.integers(1, 9))
def test_a_window_begins_with_pieces_of_the_text_that_are_always_the_same(
    known: list[int], levels: int, width: int
) -> None:
    window_LW = first_window(known, levels, width)
    assert window_LW.tolist() == first_window(tuple(known), levels, width).tolist()
    around = known * (1 + levels)
    pieces = {tuple(around[at : at + levels]) for at in range(len(known))}
    assert {tuple(column) for column in window_LW.T.tolist()} <= pieces


def test_nothing_of_a_step_is_read_by_the_host() -> None:
    """Tensors without memory cannot be read."""
    made = deposit(device="meta")
    slots_R, one_R = torch.zeros(2, dtype=torch.int32, device="meta"), torch.zeros(2, device="meta").long()
    drawn_RN = torch.zeros(2, made.drafts_SD.shape[1] + 1, dtype=torch.int64, device="meta")
    taken = Taken(one_R, one_R, one_R, one_R, None, True, None, drawn_RN)
    emitted_RK = torch.zeros(2, 1 + made.depth, dtype=torch.int32, device="meta")
    made.note(emitted_RK, slots_R, None, Feature(0), made.drafts_SD.shape[1], taken)  # type: ignore[arg-type]


# ---- what is asked for ----------------------------------------------------------------------------------------------


def asked(**config: Any) -> Any:
    return speculation_of({"method": "lookahead", **config})


def test_sizes_make_nodes() -> None:
    found = asked()
    assert (found.tree.window, found.tree.ngram, found.tree.guesses) == (7, 5, 7)
    assert (found.num_drafts, found.depth, found.drafted_ahead) == (56, 10, 0)
    assert asked(window_size=5, ngram_size=8, verification_set_size=4).num_drafts == 63
    assert asked(ngram_size=3, num_speculative_tokens=28).num_drafts == 28


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"window_size": 10}, "window_size 10, ngram_size 5 and verification_set_size 7"),
        ({"window_size": 10}, "= 68 drafts, and a row has at most 63; lower one of them"),
        ({"window_size": 0}, "window_size of speculative_config is 0; give a whole number from 1 to 64"),
        ({"ngram_size": 1}, "ngram_size of speculative_config is 1; give at least 2"),
        ({"verification_set_size": "many"}, "verification_set_size of speculative_config is 'many'"),
        ({"num_speculative_tokens": 4}, "is 4, and the sizes of lookahead decoding make 56; leave it out"),
        ({"prompt_lookup_max": 3}, "does not go with prompt lookup yet"),
        ({"model": "small"}, 'has a "model", and the method lookahead needs none'),
        ({"eagle_topk": 3}, "eagle_topk of speculative_config is for the methods eagle"),
        ({"method": "ngram", "window_size": 3}, "window_size of speculative_config is for the method lookahead"),
    ],
)
def test_other_sizes_are_refused_in_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        asked(**config)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_recurrent_layers_are_refused(tiny_model: TinyModel) -> None:
    with (
        pytest.raises(InvalidConfig, match="trees of drafts are not for recurrent layers"),
        rig(tiny_model("qwen3_5"), **looking()),
    ):
        pass
