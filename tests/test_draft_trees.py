"""Trees of drafts change nothing but the number of steps, wherever in a tree the right tokens stand; and trees that
heads draft are those of the papers (`head_oracle.py`)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.step import Feature
from ridgeline.core.settings.draft_tree import MOST_NODES, dynamic_tree_of, static_tree_of
from ridgeline.core.settings.speculation import speculation_of
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.parallel.axis import Alone
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.passes import Draws
from ridgeline.worker.speculation.trees import TreeDraws, words_of
from ridgeline.worker.vocabulary import Vocabulary
from tests import tiny_models
from tests.covering import by_pairs, by_values
from tests.driving import Outcome, Rig, ask, disturbed, rig
from tests.head_oracle import Eagle, Eagle3, Head, Medusa, Mtp, NarrowEagle3, Target
from tests.test_draft_model import watch
from tests.test_speculation import KINDS, Always, Fickle, Turning, check_same, evenly, mainly, plain, prompt, requests

TinyModel = Callable[[str], Path]
Draft = tuple[int, ...]  # the tokens from a row's last one on
STATIC = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0), (0, 0, 2), (1, 0, 0), (0, 0, 0, 0)]"
PATHS = static_tree_of(STATIC, 16).paths
NODES, DEPTH = len(PATHS), 4
LATENT = tuple(family for family in tiny_models.LATENT if family not in tiny_models.RECURRENT)
DYNAMIC = {"num_speculative_tokens": 3, "eagle_topk": 3, "num_draft_tokens": 10}
GREEDY = [
    ask("long", prompt(45, 1), max_tokens=20),  # its prompt runs in chunks
    ask("short", prompt(3, 2), max_tokens=14),
    ask("one", prompt(1, 3), max_tokens=9),
    ask("same", prompt(45, 1), max_tokens=10),
    ask("ends soon", prompt(9, 4), max_tokens=2),
]


@cache
def greedy(folder: Path) -> dict[str, Outcome]:
    """What these become without drafts. The same object for the same model."""
    with rig(folder, enable_prefix_caching=False) as own:
        return own.run(*GREEDY)


def medusa_of(folder: Path, files: Path, heads: int = DEPTH) -> dict[str, Any]:
    """The settings by which random heads of Medusa draft trees for the model of a folder."""
    with rig(folder) as own:
        spec = own.runner.decoder.spec
    shapes = {"0.linear.weight": (spec.hidden_size, spec.hidden_size), "0.linear.bias": (spec.hidden_size,)}
    files.mkdir()
    (files / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": 1}))
    tensors = {f"{head}.{name}": torch.randn(shape) for head in range(heads) for name, shape in shapes.items()}
    tensors |= {f"{head}.1.weight": torch.randn(spec.vocab_size, spec.hidden_size) for head in range(heads)}
    save_file(tensors, files / "model.safetensors")
    config = {"method": "medusa", "model": files, "speculative_token_tree": STATIC}
    return {"speculative_config": config}


def trees(own: Rig, how: type[Always] = Always) -> Rig:
    """Let all requests that may verify trees do so."""
    running = own.engine.scheduler.running
    kind = type(how.__name__, (how,), {"most": running.each - 1, "whole": True})
    running.drafting = kind()
    return own


class Told:
    """Writes trees of any form into a runner's tables, in which the right tokens stand in some branch up to some depth.

    texts: what the requests will have written.
    """

    def __init__(self, own: Rig, texts: Sequence[Sequence[int]], seed: int = 0) -> None:
        self._texts, self._draw = [list(text) for text in texts], random.Random(seed)
        self._slots, self._proposer = own.runner.slots, own.runner.proposer
        self._vocabulary = own.runner.decoder.spec.vocab_size
        assert self._proposer is not None
        note, assign = self._proposer.note, self._proposer.assign
        prompts: dict[int, list[int]] = {}

        def assigning(deltas: Any) -> None:
            assign(deltas)
            prompts.update({each.slot: [*each.prompt, *each.output] for each in deltas if hasattr(each, "prompt")})

        def noting(out_token_RK: Tensor, slots_R: Tensor, *others: Any) -> None:
            note(out_token_RK, slots_R, *others)
            for slot, emitted in zip(slots_R.tolist(), out_token_RK.tolist(), strict=True):
                known = prompts.setdefault(slot, [])
                known += [token for token in emitted if token >= 0]
                if emitted[0] >= 0:
                    self._tell(slot, known)

        self._proposer.note, self._proposer.assign = noting, assigning  # type: ignore[method-assign]

    def _tell(self, slot: int, known: list[int]) -> None:
        assert self._proposer is not None
        assert self._proposer.tree_SN is not None
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        room = int(self._slots.max_len_S[slot]) - len(known) - 1
        parents, depths, right = self._form()
        right_depth, path = self._draw.randrange(DEPTH + 1), [0]
        tokens, bits = [-1], [1]
        for node in range(1, 1 + NODES):
            bits.append(bits[parents[node]] | 1 << node)
            token = self._draw.randrange(self._vocabulary)
            if parents[node] == path[-1] and node in right and depths[node] <= right_depth:
                token = text[len(known) + depths[node] - 1] if len(known) + depths[node] <= len(text) else token
                path.append(node)
            tokens.append(token if depths[node] <= room and not self._slots.stopped_S[slot] else -1)
        self._proposer.drafts_SD[slot] = torch.tensor(tokens[1:]).int()
        self._proposer.tree_SN[slot] = words_of(bits)

    def _form(self) -> tuple[list[int], list[int], set[int]]:
        """Parents and depths of nodes in the order of depths, and a path down to some depth."""
        depths = [0, *range(1, DEPTH + 1), *(self._draw.randint(1, DEPTH) for _ in range(NODES - DEPTH))]
        depths.sort()
        parents = [0] + [self._draw.choice([n for n in range(at) if depths[n] == depths[at] - 1])
                         for at in range(1, 1 + NODES)]  # fmt: skip
        right, node = set[int](), self._draw.randrange(1, 1 + NODES)
        while node:
            right.add(node)
            node = parents[node]
        return parents, depths, right


def texts_of(asked: Sequence[Any], answers: dict[str, Outcome]) -> list[list[int]]:
    return [[*request.prompt_token_ids, *answers[request.id].tokens] for request in asked]


# A dense model stands for those whose attention to latents is beside a mixture.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family",
    [
        *mainly("mixed", "gpt_oss"),
        *(pytest.param(each, marks=() if each == "minicpm3" else pytest.mark.thorough) for each in LATENT),
    ],
)
def test_right_tokens_in_any_branch_change_no_token(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model(family)
    want, settings = plain(folder), medusa_of(folder, tmp_path / "heads")
    for how in (Always, Fickle):
        with rig(folder, max_num_batched_tokens=64, **settings) as own:
            Told(trees(own, how), texts_of(requests(0), want))
            check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
            counts = own.engine.scheduler.figures().drafts
            assert not own.errors
        assert counts is not None
        assert counts["accepted_tokens"] > 30
        assert counts[f"accepted_tokens_per_pos: {DEPTH - 1}"] > 0


@pytest.mark.dealt
def test_nodes_that_stay_keep_their_index_keys(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Levels and scales move with the latents, or later tokens would choose others. Rows whose tokens choose are beside
    rows of fewer tokens."""
    folder, levels = tiny_model("deepseek_v32"), {"kv_cache_dtype": "int8"}
    want, settings = plain(folder, **levels), medusa_of(folder, tmp_path / "heads")
    for how in (Always, Fickle):
        with rig(folder, max_num_batched_tokens=64, **settings, **levels) as own:
            Told(trees(own, how), texts_of(requests(0), want))
            check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
            counts = own.engine.scheduler.figures().drafts
            assert not own.errors
        assert counts is not None
        assert counts["accepted_tokens"] > 30


@pytest.mark.few(3)
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_memory": 1 << 18},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 48},
        {"max_num_seqs": 2, "block_size": 2, "scheduling_policy": "priority"},
        {"quantization": "int8", "block_size": 64},
        {"kv_cache_dtype": "int8"},
    ],
    ids=["little memory", "small chunks", "small blocks", "int8", "keys of 8 bits"],
)
def test_settings_change_no_token(family: str, settings: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model(family)
    want, drafting = plain(folder, **settings), medusa_of(folder, tmp_path / "heads")
    with rig(folder, **{"max_num_batched_tokens": 64, **drafting, **settings}) as own:
        Told(trees(own), texts_of(requests(0), want))
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert not own.errors


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_give_way_or_leave_change_nothing_for_others(
    seed: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder, draw = tiny_model("mixed"), random.Random(seed)
    want, settings = plain(folder), medusa_of(folder, tmp_path / "heads")
    with rig(folder, max_num_batched_tokens=64, **settings) as own:
        Told(trees(own), texts_of(requests(0), want), seed)
        own.add(*requests(own.runner.decoder.spec.vocab_size))
        left = disturbed(own, draw, gives_way=0.25, leaves=0.02)
        assert not own.errors
        check_same({k: v for k, v in own.outcomes.items() if k not in left},
                   {k: v for k, v in want.items() if k not in left})  # fmt: skip
        for name in left:
            assert own.outcomes[name].tokens == want[name].tokens[: len(own.outcomes[name].tokens)]


def test_the_next_of_many_finds_what_a_tree_left_in_the_cache(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Keys of accepted nodes are those that plain decoding would have left: another request goes on from them."""
    folder = tiny_model("mixed")
    first = ask("first", prompt(20, 1), max_tokens=30)
    with rig(folder) as own:
        want = own.run(first)
        text = [*first.prompt_token_ids, *want["first"].tokens]
        again = ask("again", text[:48], max_tokens=12, logprobs=1)
        want = own.run(again)
    settings = medusa_of(folder, tmp_path / "heads")
    with rig(folder, max_num_batched_tokens=64, **settings) as own:
        Told(trees(own), [text])
        own.run(first)
        before = own.engine.scheduler.figures().hit_tokens
        check_same(own.run(again), want)
        assert own.engine.scheduler.figures().hit_tokens - before > 40


@pytest.mark.parametrize(
    ("family", "buckets"),
    [
        *by_values(("mixed", "gpt2"), (False, True)),
        *(pytest.param("llama", buckets, marks=pytest.mark.thorough) for buckets in (False, True)),
    ],
)
def test_even_steps_change_no_token(
    family: str, buckets: bool, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all rows of a step verify their trees or none does, padded to the sizes of captured graphs."""
    folder = tiny_model(family)
    want, settings = plain(folder), medusa_of(folder, tmp_path / "heads")
    texts, out = texts_of(requests(0), want), ("masked", "guided", "named", "penalized", "present")
    with rig(folder, max_num_batched_tokens=64, **settings) as own:
        evenly(own, monkeypatch if buckets else None)
        Told(trees(own), texts)
        mine = [each for each in requests(own.runner.decoder.spec.vocab_size) if each.id not in out]
        check_same(own.run(*mine), {name: each for name, each in want.items() if name not in out})
        counts = own.engine.scheduler.figures().drafts
        assert not own.errors
    assert counts is not None
    assert counts["accepted_tokens"] > 20


class Record:
    """Notes all trees that are drafted, with the slot's number of cached tokens and its last token."""

    def __init__(self, own: Rig) -> None:
        self.proposer, self.slots = own.runner.proposer, own.runner.slots
        self.made: list[tuple[int, int, set[Draft]]] = []
        assert self.proposer is not None
        note = self.proposer.note

        def noting(out_token_RK: Tensor, slots_R: Tensor, *others: Any) -> None:
            note(out_token_RK, slots_R, *others)
            for slot in slots_R.tolist():
                self.made.append((int(self.slots.kv_len_S[slot]), int(self.slots.last_token_S[slot]), self._tree(slot)))

        self.proposer.note = noting  # type: ignore[method-assign]

    def _tree(self, slot: int) -> set[Draft]:
        assert self.proposer is not None
        assert self.proposer.tree_SN is not None
        tokens = self.proposer.drafts_SD[slot].tolist()
        bits = [each & (1 << 64) - 1 for each in self.proposer.tree_SN[slot].tolist()]
        found = set()
        for node, token in enumerate(tokens, start=1):
            above = [at for at in range(1, node + 1) if bits[node] >> at & 1]
            assert bits[node] & 1
            assert bits[node] == bits[above[-2] if len(above) > 1 else 0] | 1 << node
            if token >= 0:
                found.add(tuple(tokens[at - 1] for at in above))
        assert len(found) == sum(token >= 0 for token in tokens)
        return found

    def check(self, oracle: Callable[[list[int], int], set[Draft]], texts: list[list[int]]) -> int:
        """Compare every tree with the oracle's, as deep as its text lets it be. Return how many drafts there were."""
        count = 0
        for cached, last, tree in self.made:
            if tree:
                those = [text for text in texts if text[cached:][:1] == [last]]
                assert any(tree == oracle(text[: cached + 1], len(text) - cached - 2) for text in those)
                count += len(tree)
        return count


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_models.build("llama", num_hidden_layers=4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=4)


def drafting(head: Head, files: Path, *, dynamic: bool) -> dict[str, Any]:
    form = DYNAMIC if dynamic else {"speculative_token_tree": STATIC}
    return {"speculative_config": {"method": head.method, "model": files, **form}, "max_num_batched_tokens": 64}


def oracle_of(head: Head, *, dynamic: bool) -> Callable[[list[int], int], set[Draft]]:
    if dynamic:
        return lambda tokens, room: head.dynamic_tree(tokens, min(3, room), 3, 9)
    return lambda tokens, room: head.static_tree(tokens, [path for path in PATHS if len(path) <= room])


FORMS = [(Medusa, False), (Eagle, False), (Eagle, True), (NarrowEagle3, False), (NarrowEagle3, True)]
by_form = pytest.mark.parametrize(
    ("kind", "dynamic"), FORMS, ids=[f"{kind.__name__} {'dynamic' if dynamic else 'static'}" for kind, dynamic in FORMS]
)


def forms_and(*others: Any) -> list[Any]:
    """Return kinds of heads, forms of trees and values of another parameter, of which every two meet."""
    return by_pairs([Medusa, Eagle, NarrowEagle3], [False, True], others, where=lambda *case: case[:2] in FORMS)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "dynamic", "how"), forms_and(Always, Fickle))
def test_trees_are_those_of_the_paper(
    how: type[Always], kind: type[Head], dynamic: bool, target: Target, model: Path, tmp_path: Path
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    want = greedy(model)
    with rig(model, enable_prefix_caching=False, **drafting(head, files, dynamic=dynamic)) as own:
        trees(own, how)
        if kind is not Medusa:
            watch(own)
        record = Record(own)
        got = own.run(*GREEDY)
        assert not own.errors
        check_same(got, want)
    assert record.check(oracle_of(head, dynamic=dynamic), texts_of(GREEDY, got)) > 200


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "dynamic", "buckets"), forms_and(False, True))
def test_even_steps_draft_as_the_paper_does(
    buckets: bool,
    kind: type[Head],
    dynamic: bool,
    target: Target,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    want = greedy(model)
    with rig(model, enable_prefix_caching=False, **drafting(head, files, dynamic=dynamic)) as own:
        evenly(own, monkeypatch if buckets else None)
        trees(own, Turning)
        record = Record(own)
        got = own.run(*GREEDY)
        check_same(got, want)
        assert not own.errors
    assert record.check(oracle_of(head, dynamic=dynamic), texts_of(GREEDY, got)) > 60


@pytest.mark.gpu
@by_form
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
def test_on_a_gpu_trees_are_those_of_the_paper(
    eager: bool, kind: type[Head], dynamic: bool, target: Target, model: Path, tmp_path: Path
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    settings = {"device": "cuda", "deterministic": True, "enforce_eager": eager, "enable_prefix_caching": False}
    settings |= {"block_size": 16, "kv_cache_memory": 1 << 26}
    with rig(model, **settings) as own:
        want = own.run(*GREEDY)
    with rig(model, **settings, **drafting(head, files, dynamic=dynamic)) as own:
        trees(own, Turning)
        record = Record(own)
        got = own.run(*GREEDY)
        check_same(got, want)
        assert not own.errors
        proposed = (own.engine.scheduler.figures().drafts or {}).get("draft_tokens", 0)
    if eager:  # a replayed graph calls nothing of Python, so nothing is on record there
        assert record.check(oracle_of(head, dynamic=dynamic), texts_of(GREEDY, got)) > 60
    assert proposed > 20


@pytest.mark.dealt
def test_the_layer_for_multi_token_prediction_drafts_trees(tmp_path: Path) -> None:
    """The layer of a GLM-4.5, a mixture of experts."""
    folder = tiny_models.save("glm4_moe", tmp_path / "model", num_hidden_layers=3)
    head = Mtp(tiny_models.build("glm4_moe", num_hidden_layers=3))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    stored |= {f"model.layers.2.{name}": tensor for name, tensor in head.tensors.items()}
    save_file(stored, folder / "model.safetensors")
    with rig(folder, enable_prefix_caching=False) as own:
        want = own.run(*GREEDY)
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 64}
    with rig(folder, speculative_config={"method": "glm4_moe_mtp", **DYNAMIC}, **settings) as own:
        record = Record(trees(own))
        got = own.run(*GREEDY)
        check_same(got, want)
        assert not own.errors
    assert record.check(oracle_of(head, dynamic=True), texts_of(GREEDY, got)) > 150


@pytest.mark.few(2)
@by_form
@pytest.mark.usefixtures("crowded")
def test_requests_that_give_way_draft_as_before(
    kind: type[Head], dynamic: bool, target: Target, model: Path, tmp_path: Path
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    want = greedy(model)
    little = {"kv_cache_memory": 150_000 if kind is Medusa else 250_000, "enable_prefix_caching": False}
    with rig(model, **little, **drafting(head, files, dynamic=dynamic)) as own:
        record = Record(trees(own))
        got = own.run(*GREEDY)
        check_same(got, want)
        assert own.engine.scheduler.preemptions.total() > 0
    assert record.check(oracle_of(head, dynamic=dynamic), texts_of(GREEDY, got)) > 200


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "dynamic"), [(Medusa, False), (Eagle, False), (Eagle3, True)])
def test_tokens_are_those_of_plain_decoding(
    kind: type[Head], dynamic: bool, target: Target, model: Path, tmp_path: Path
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    want = plain(model)
    for how in (Always, Fickle):
        with rig(model, **drafting(head, files, dynamic=dynamic)) as own:
            trees(own, how)
            if kind is not Medusa:
                watch(own)
            check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
            assert not own.errors


def test_a_tree_of_63_drafts_runs(target: Target, model: Path, tmp_path: Path) -> None:
    head = Eagle(target)
    config = {"method": "eagle", "model": head.save(tmp_path / "head"), "num_speculative_tokens": 5}
    config |= {"eagle_topk": 8, "num_draft_tokens": 1 + MOST_NODES}
    want = greedy(model)
    with rig(model, speculative_config=config, max_num_batched_tokens=256, enable_prefix_caching=False) as own:
        record = Record(trees(own))
        watch(own)
        got = own.run(*GREEDY)
        check_same(got, want)
        assert not own.errors
    texts = texts_of(GREEDY, got)
    record.made = record.made[::6]  # the oracle takes its time
    assert record.check(lambda tokens, room: head.dynamic_tree(tokens, min(5, room), 8, MOST_NODES), texts) > 300


def test_a_prefix_that_was_found_has_the_heads_keys_too(target: Target, model: Path, tmp_path: Path) -> None:
    head = Eagle(target)
    settings = drafting(head, head.save(tmp_path / "head"), dynamic=True)
    first, again = ask("first", prompt(45, 1), max_tokens=20), ask("again", prompt(45, 1), max_tokens=20)
    with rig(model, **settings) as own:
        trees(own).run(first)
        record = Record(own)
        got = own.run(again)
        assert own.engine.scheduler.figures().hit_tokens > 30
    assert record.check(oracle_of(head, dynamic=True), texts_of([again], got)) > 80


# ---- how a tree is drawn --------------------------------------------------------------------------------------------


class Scene:
    """Three slots that have written 5 tokens: a greedy one, one that draws, and one that filters. What may follow a
    token is a row of a random table."""

    features = Feature.RANDOM | Feature.FILTER

    def __init__(self, vocabulary: int = 40) -> None:
        self.ops, self.slots = Ops(Platform.of(torch.device("cpu"))), Slots(3, 1, 16, vocabulary, torch.device("cpu"))
        slots, tables = self.slots, self.slots.sampling
        self.table_VV = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        slots.kv_len_S[:3], slots.max_len_S[:3], slots.stopped_S[:3] = 5, 60, 0
        slots.last_token_S[:3] = torch.tensor([3, 4, 5])
        tables.temperature_S[:3] = torch.tensor([0.0, 0.9, 1.3])
        tables.top_k_S[2], tables.seed_S[1], tables.seed_S[2] = 2, 7, 8
        self.slots_R, self.emitted_RK = torch.arange(3), torch.ones(3, 1, dtype=torch.int32)

    def chains(self, depth: int) -> Tensor:
        draws = Draws(depth, self.slots, Vocabulary(len(self.table_VV), Alone(), self.ops))
        draws.draw(
            self.emitted_RK, self.slots_R, self.features, depth, lambda place, token_R, runs_R: self.table_VV[token_R]
        )
        return draws.drafts_SD[:3]

    def trees(self, tree: Any) -> TreeDraws:
        vocabulary = Vocabulary(len(self.table_VV), Alone(), self.ops)
        draws = TreeDraws(tree, self.slots, vocabulary, self.ops)
        draws.draw(
            self.emitted_RK, self.slots_R, self.features, tree.nodes, lambda nodes: self.table_VV[nodes.token_RE]
        )
        return draws


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_first_draft_behind_every_node_is_the_draw_itself(dynamic: bool) -> None:
    """Random and filtered requests draft what they would draw; and so does every node of a depth, with its noise."""
    scene = Scene()
    tree = dynamic_tree_of(3, 4, 20) if dynamic else static_tree_of(STATIC, 16)
    made, chain_SD = scene.trees(tree), scene.chains(tree.depth)
    for slot in range(3):
        tokens, bits = [-1, *made.drafts_SD[slot].tolist()], made.tree_SN[slot].tolist()
        drafts = [
            tuple(tokens[at] for at in range(1, node + 1) if bits[node] >> at & 1) for node in range(1, len(bits))
        ]
        assert tuple(chain_SD[slot].tolist()) in drafts
        assert len(set(drafts)) == tree.nodes
        for node, draft in enumerate(drafts):
            before, at = draft[:-1], Scene()
            at.slots.last_token_S[slot] = before[-1] if before else at.slots.last_token_S[slot]
            at.slots.kv_len_S[slot] += len(before)
            drawn = (*before, int(at.chains(1)[slot, 0]))
            if dynamic:  # no sibling is more promising
                assert drawn in drafts
            elif PATHS[node][-1] == 0:
                assert drawn == draft


def test_nothing_is_drafted_behind_the_end_or_for_who_has_stopped() -> None:
    for tree in (dynamic_tree_of(3, 4, 20), static_tree_of(STATIC, 16)):
        scene = Scene()
        scene.slots.max_len_S[0], scene.slots.stopped_S[1], scene.slots.max_len_S[2] = 8, 1, 7
        made = scene.trees(tree)
        tokens_RD, bits_RN = made.drafts_SD[:3], made.tree_SN[:3]
        for node, bits in enumerate(bits_RN[0].tolist()[1:]):
            assert (tokens_RD[0, node] >= 0) == (
                bin(bits).count("1") == 2
            )  # kv_len 5, two more: one draft and its draw
        assert (tokens_RD[1:] == -1).all()


def test_a_tree_of_63_drafts_fills_the_word() -> None:
    scene, tree = Scene(), dynamic_tree_of(5, 8, 1 + MOST_NODES)
    bits = scene.trees(tree).tree_SN[1].tolist()
    assert bits[-1] < 0
    assert [bin(each & (1 << 64) - 1)[2:].find("1") for each in bits] == [0] * 64
    assert [(each & (1 << 64) - 1).bit_length() for each in bits] == list(range(1, 65))


# ---- what is asked for ----------------------------------------------------------------------------------------------


def asked(**config: Any) -> Any:
    return speculation_of({"method": "eagle", "model": "head", **config})


def test_a_static_tree_is_the_one_of_its_paths_in_any_order() -> None:
    for form in ("[(0, 0), (1,), (0,)]", [[1], [0], [0, 0]], [(0,), (0, 0), (1,)]):
        found = asked(speculative_token_tree=form)
        assert found.tree.paths == ((0,), (1,), (0, 0))
        assert (found.num_drafts, found.depth, found.drafted_ahead) == (3, 2, 1)
        assert found.tree.bits == (0b1, 0b11, 0b101, 0b1011)
    assert asked(speculative_token_tree=[[0], [1]], num_speculative_tokens=2).num_drafts == 2  # as vLLM wants it


def test_a_dynamic_tree_has_sglangs_numbers() -> None:
    found = asked(num_speculative_tokens=5, eagle_topk=8, num_draft_tokens=64)
    assert (found.num_drafts, found.depth, found.drafted_ahead) == (63, 5, 32)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"speculative_token_tree": "[(0,), (1, 0)]"}, "has the path (1, 0), and not (1,); add that"),
        ({"speculative_token_tree": "[(0,), (0,)]"}, "has the path (0,) twice"),
        ({"speculative_token_tree": "[0, 1]"}, "give the list of all paths"),
        ({"speculative_token_tree": "[(0,), ()]"}, "give the list of all paths"),
        ({"speculative_token_tree": "[(-1,)]"}, "give the list of all paths"),
        ({"speculative_token_tree": "[(63,)]"}, "from 0 to 62"),
        ({"speculative_token_tree": "__import__('os')"}, "give the list of all paths"),
        ({"speculative_token_tree": "(" * 5000}, "give the list of all paths"),
        ({"speculative_token_tree": []}, "give the list of all paths"),
        ({"speculative_token_tree": [[0] * n for n in range(1, 18)]}, "17 deep; give at most 63 nodes"),
        ({"speculative_token_tree": [[n] for n in range(60)] + [[0, n] for n in range(4)]}, "has 64 nodes"),
        ({"speculative_token_tree": [[0], [1]], "num_speculative_tokens": 3}, "has 2 nodes; leave it out"),
        ({"speculative_token_tree": [[0]], "eagle_topk": 2}, "a tree that stays, and eagle_topk"),
        ({"speculative_token_tree": [[0]], "method": "ngram", "model": None}, "is for the methods eagle, eagle3"),
        ({"speculative_token_tree": [[0]], "prompt_lookup_max": 3}, "does not go with prompt lookup"),
        ({"num_speculative_tokens": 3, "eagle_topk": 2}, "num_draft_tokens of speculative_config is missing"),
        ({"num_speculative_tokens": 3, "num_draft_tokens": 9}, "eagle_topk of speculative_config is missing"),
        ({"eagle_topk": 2, "num_draft_tokens": 9}, "num_speculative_tokens of speculative_config is missing"),
        ({"num_speculative_tokens": 9, "eagle_topk": 8, "num_draft_tokens": 9}, "64 drafts are gone on from, and 63"),
        ({"num_speculative_tokens": 2, "eagle_topk": 2, "num_draft_tokens": 8}, "give a number from 3 to 7"),
        ({"num_speculative_tokens": 2, "eagle_topk": 2, "num_draft_tokens": 65}, "a whole number from 1 to 64"),
        ({"num_speculative_tokens": 2, "eagle_topk": 2, "num_draft_tokens": 6, "method": "medusa"}, "give medusa a"),
    ],
)  # fmt: skip
def test_other_trees_are_refused_in_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        asked(**config)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_trees_that_a_model_or_a_head_cannot_draft_are_refused(
    tiny_model: TinyModel, target: Target, model: Path, tmp_path: Path
) -> None:
    files = Medusa(target).save(tmp_path / "medusa")
    deep = {"method": "medusa", "model": files, "speculative_token_tree": [[0] * n for n in range(1, 6)]}
    for folder, config, sentence in (
        (model, deep, "the depth of speculative_token_tree is 5, and the checkpoint has 4 heads"),
        (
            tiny_model("qwen3_5"),
            {**deep, "speculative_token_tree": STATIC},
            "trees of drafts are not for recurrent layers",
        ),
    ):
        with pytest.raises(InvalidConfig) as raised, rig(folder, max_num_batched_tokens=64, speculative_config=config):
            pass
        assert sentence in str(raised.value)
        assert "\n" not in str(raised.value)
