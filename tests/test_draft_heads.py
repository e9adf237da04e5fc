"""Drafts by heads that read the target's hidden states. Each draft must be the one that the head's paper defines
(`head_oracle.py`), whatever happened to the request before; and tokens must be those of plain decoding."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.assembly import device
from ridgeline.compression.folder import write
from ridgeline.compression.quantize import quantized
from ridgeline.compression.schemes import MakeConfig
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.layers.rotary import Rotary
from ridgeline.worker import memory
from ridgeline.worker.speculation import backlog
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.block_head import BlockHead
from ridgeline.worker.speculation.feature_head import FeatureHead
from tests import tiny_models
from tests.covering import by_values
from tests.devices import DEVICES
from tests.driving import Outcome, Rig, ask, rig
from tests.head_oracle import (
    HEADS,
    DFlash,
    DSpark,
    Eagle,
    Eagle3,
    GatedDSpark,
    Head,
    Medusa,
    Mtp,
    NarrowEagle3,
    QwenMtp,
    QwenNextMtp,
    RecurrentDSpark,
    SureDSpark,
    Target,
    WindowedDFlash,
)
from tests.test_draft_model import watch
from tests.test_speculation import DRAFTS, Always, Fickle, Turning, check_same, evenly, plain, prompt, requests

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
    if isinstance(own.runner.proposer, FeatureHead | BlockHead):
        watch(own)
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
            those = [text for text in texts if text[cached:][:1] == [last]]
            assert any(drafts == head.drafts(text[: cached + 1], len(drafts)) for text in those)
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


@cache
def greedy(folder: Path) -> dict[str, Outcome]:
    """What these become without drafts. The same object for the same model."""
    with rig(folder, enable_prefix_caching=False) as own:
        return own.run(*GREEDY)


@pytest.mark.few(8)
@pytest.mark.parametrize("how", [Always, Fickle], ids=["always", "now and then"])
def test_drafts_are_those_of_the_paper(how: type[Always], head: Head, folder: Path, tmp_path: Path) -> None:
    files = head.save(tmp_path / "head")
    want = greedy(folder)
    with rig(folder, enable_prefix_caching=False, **drafting(head, files)) as own:
        record = Record(always(own, how))
        got = own.run(*GREEDY)
        check_same(got, want)
    assert record.check(head, texts_of(GREEDY, got)) > 100


@pytest.mark.few(3)
def test_a_prefix_that_was_found_has_the_heads_keys_too(head: Head, folder: Path, tmp_path: Path) -> None:
    files = head.save(tmp_path / "head")
    first, again = ask("first", prompt(45, 1), max_tokens=20), ask("again", prompt(45, 1), max_tokens=20)
    with rig(folder, **drafting(head, files)) as own:
        always(own).run(first)
        record = Record(own)
        got = own.run(again)
        assert own.engine.scheduler.figures().hit_tokens > 30
    assert record.check(head, texts_of([again], got)) > 30


@pytest.mark.few(3)
@pytest.mark.usefixtures("crowded")
def test_requests_that_give_way_draft_as_before(head: Head, folder: Path, tmp_path: Path) -> None:
    files = head.save(tmp_path / "head")
    want = greedy(folder)
    little = {"kv_cache_memory": 210_000 if isinstance(head, DFlash) else 150_000, "enable_prefix_caching": False}
    with rig(folder, **little, **drafting(head, files)) as own:
        record = Record(always(own))
        got = own.run(*GREEDY)
        check_same(got, want)
        assert own.engine.scheduler.preemptions.total() > 0
    assert record.check(head, texts_of(GREEDY, got)) > 100


@pytest.mark.few(2)
@pytest.mark.parametrize(  # the passes of Eagle are those of Eagle 3, and its drafts are compared above
    "kind", [pytest.param(Eagle, marks=pytest.mark.thorough), Eagle3, Medusa, DSpark], ids=lambda kind: kind.__name__
)
def test_tokens_are_those_of_plain_decoding(kind: type[Head], target: Target, folder: Path, tmp_path: Path) -> None:
    files = kind(target).save(tmp_path / "head")
    want = plain(folder)
    for how in (Always, Fickle):
        with rig(folder, **drafting(kind(target), files)) as own:
            check_same(always(own, how).run(*requests(own.runner.decoder.spec.vocab_size)), want)


@pytest.mark.few(5)
@pytest.mark.parametrize("buckets", [False, True], ids=["op by op", "in buckets"])
@pytest.mark.parametrize("kind", [Eagle, NarrowEagle3, Medusa, WindowedDFlash, DSpark], ids=lambda kind: kind.__name__)
def test_even_steps_draft_as_the_paper_does(
    kind: type[Head], buckets: bool, target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all rows of a step as many drafts or none, padded to the sizes of captured graphs."""
    head = kind(target)
    files = head.save(tmp_path / "head")
    want = greedy(folder)
    with rig(folder, enable_prefix_caching=False, **drafting(head, files)) as own:
        evenly(own, monkeypatch if buckets else None)
        record = Record(always(own, Turning))
        got = own.run(*GREEDY)
        check_same(got, want)
        assert not own.errors
    assert record.check(head, texts_of(GREEDY, got)) > 60


class Late(Always):
    """Rows verify drafts in bursts of steps, far from each other."""

    steps = 0

    def width(self, rows: int, *, masked: bool) -> int:
        return self.most if self.steps % 20 > 14 else 0

    def note(self, record: Any, result: object, seconds: float) -> bool:
        self.steps += 1
        return True


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [Eagle3, DFlash], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("buckets", [None, False, True], ids=["cut", "op by op", "in buckets"])
def test_a_head_runs_over_many_tokens_at_once_where_no_drafts_are_wanted(
    kind: type[Head],
    buckets: bool | None,
    target: Target,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    asked = [ask(f"{seed}", prompt(5, seed), max_tokens=50 + seed) for seed in range(3)]
    with rig(folder) as own:
        want = own.run(*asked)
    monkeypatch.setattr(backlog, "LONGEST", 16)
    with rig(folder, enable_prefix_caching=False, **drafting(head, files)) as own:
        if buckets is not None:
            evenly(own, monkeypatch if buckets else None)
        record, runs, proposer = Record(always(own, Late)), Counter[torch.nn.Module](), own.runner.proposer
        assert isinstance(proposer, FeatureHead | BlockHead)
        head_of = proposer.head  # features are products of what was read, which plain steps do not make
        for module in (head_of.layers[0].mixer.qkv,) if kind is DFlash else (head_of, head_of.join):
            module.register_forward_hook(lambda which, *_: runs.update([which]))
        got = own.run(*asked)
        check_same(got, want)
        steps = own.engine.scheduler.running.drafting.steps  # type: ignore[union-attr]
        drafted = sum(1 for _, _, drafts in record.made if drafts)
        assert len(runs) == (1 if kind is DFlash else 2)
        assert max(runs.values()) < steps / 4 + DRAFTS * drafted
    assert record.check(head, texts_of(asked, got)) > 40


class Never(Always):
    def width(self, rows: int, *, masked: bool) -> int:
        return 0


def test_a_head_runs_over_prompts_alone_while_drafts_stay_off(
    target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens for which a slot has no room are dropped, so a head that does not pay costs no pass."""
    monkeypatch.setattr(backlog, "LONGEST", 8)
    with rig(folder, **drafting(Eagle3(target), Eagle3(target).save(tmp_path / "head"))) as own:
        always(own, Never)
        proposer, runs = own.runner.proposer, list[int]()
        assert isinstance(proposer, FeatureHead)
        proposer.head.register_forward_hook(lambda *_: runs.append(1))
        own.run(ask("one", prompt(5, 3), max_tokens=60))
    assert len(runs) == 1


def test_no_drafts_are_made_behind_a_step_in_a_graph_whose_tokens_wait(
    target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where its sampling runs op by op, as it does with penalties: there the host cannot let them catch up."""
    head, asked = Eagle3(target), ask("one", prompt(1, 3), max_tokens=9, frequency_penalty=0.5)
    with rig(folder, **drafting(head, head.save(tmp_path / "head"))) as own:
        evenly(own, monkeypatch)
        proposer, wanted_by = own.runner.proposer, list[tuple[Catching, int]]()
        assert proposer is not None
        note = proposer.note

        def noting(*given: Any) -> None:
            wanted_by.append((given[-1].catching, given[-2]))
            note(*given)

        proposer.note = noting  # type: ignore[method-assign]
        always(own).run(asked)
        assert not own.errors
    assert (Catching.LATER, 0) in wanted_by
    assert {wanted for catching, wanted in wanted_by if catching is Catching.LATER} == {0}
    assert any(wanted for _, wanted in wanted_by)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
def test_on_a_gpu_drafts_are_those_of_the_paper(
    kind: type[Head], eager: bool, target: Target, folder: Path, tmp_path: Path
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    settings = {"device": "cuda", "deterministic": True, "enforce_eager": eager, "enable_prefix_caching": False}
    settings |= {"block_size": 16, "kv_cache_memory": 1 << 26}
    with rig(folder, **settings) as own:
        want = own.run(*GREEDY)
    with rig(folder, **settings, **drafting(head, files)) as own:
        own.engine.scheduler.running.drafting = Turning()  # type: ignore[assignment]
        record = Record(own)
        got = own.run(*GREEDY)
        check_same(got, want)
        assert not own.errors
    assert record.check(head, texts_of(GREEDY, got)) > 60 or not eager  # graphs replay `note`, which records nothing


def glm_with_mtp(files: Path, family: str = "glm4_moe") -> tuple[Path, Head]:
    """A model with its layer for multi-token prediction, and that layer's oracle."""
    layers = 3
    folder = tiny_models.save(family, files, num_hidden_layers=layers + 1)
    head = Mtp(tiny_models.build(family, num_hidden_layers=layers + 1))
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1, "mlp_layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    stored |= {f"model.layers.{layers}.{name}": tensor for name, tensor in head.tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return folder, head


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "deepseek_v32"])
def test_the_layer_for_multi_token_prediction_drafts_as_transformers_computes_it(
    family: str, device: str, tmp_path: Path
) -> None:
    folder, head = glm_with_mtp(tmp_path / "model", family)
    settings = {"device": device, "enable_prefix_caching": False, "enforce_eager": True}
    with rig(folder, **settings) as own:
        want = own.run(*GREEDY)
    asked = {"method": "glm4_moe_mtp" if family == "glm4_moe" else "deepseek_mtp", "num_speculative_tokens": DRAFTS}
    with rig(folder, **settings, speculative_config=asked) as own:
        record = Record(always(own))
        got = own.run(*GREEDY)
        check_same(got, want)
    assert record.check(head, texts_of(GREEDY, got)) > 100


def test_heads_of_other_formats_are_found(folder: Path, target: Target, tmp_path: Path) -> None:
    """Published files call one tensor by several names."""
    eagle3, medusa = NarrowEagle3(target), Medusa(target)
    renamed: dict[str, dict[str, torch.Tensor]] = {
        "speculators": {name.replace("midlayer.", "layers.0."): each for name, each in eagle3.tensors.items()},
        "vllm": {
            re.sub(r"(\d)\.1\.", r"lm_heads.\1.", re.sub(r"(\d)\.0\.linear", r"blocks.\1.layers.0", name)): each
            for name, each in medusa.tensors.items()
        },
    }
    configs = {
        "speculators": {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": eagle3.narrow,
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in eagle3.taps],
            "transformer_layer_config": {name: eagle3.config[name] for name in eagle3.config if name != "eagle_config"},
        },
        "vllm": {"num_heads": medusa.count, "num_hidden_layers": 1},
    }
    for name, head in {"speculators": eagle3, "vllm": medusa}.items():
        files = tmp_path / name
        files.mkdir()
        (files / "config.json").write_text(json.dumps(configs[name]))
        save_file(renamed[name], files / "model.safetensors")
        with rig(folder, enable_prefix_caching=False, **drafting(head, files)) as own:
            record = Record(always(own))
            got = own.run(*GREEDY)
        assert record.check(head, texts_of(GREEDY, got)) > 100


class MaskedDFlash(DFlash):
    """With a vector of its own for masks, as XiaomiMiMo publishes it, and a narrow vocabulary."""

    narrow = 90

    def make(self) -> None:
        super().make()
        self.tensors["mask_embedding"] = self.random(1, self.width)[0]
        chosen = torch.randperm(self.vocabulary, generator=self._generator)[: self.narrow].sort().values
        self.tensors["d2t"] = chosen - torch.arange(self.narrow)
        self.tensors["lm_head.weight"] = self.random(self.narrow, self.width)

    def embedded(self, tokens: list[int]) -> torch.Tensor:
        return torch.cat((self.target.embedding[tokens[:1]], self.tensors["mask_embedding"].repeat(len(tokens) - 1, 1)))

    def scores(self, output_NM: torch.Tensor) -> torch.Tensor:
        found = torch.full((len(output_NM), self.vocabulary), float("-inf"))
        found[:, torch.arange(self.narrow) + self.tensors["d2t"]] = output_NM @ self.tensors["lm_head.weight"].T
        return found

    @property
    def config(self) -> dict[str, Any]:
        """The form of vLLM's speculators, whose layers are counted from 1."""
        layer = super().config
        own = layer.pop("dflash_config")
        about = {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]}
        taps = {"aux_hidden_state_layer_ids": [tap + 1 for tap in self.taps], "mask_token_id": own["mask_token_id"]}
        sizes = {"block_size": layer.pop("block_size"), "draft_vocab_size": self.narrow}
        return {**about, **taps, **sizes, "transformer_layer_config": layer}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [GatedDSpark, RecurrentDSpark, MaskedDFlash], ids=lambda kind: kind.__name__)
def test_block_heads_of_other_forms_draft_as_their_authors_define(
    kind: type[Head], device: str, target: Target, folder: Path, tmp_path: Path
) -> None:
    head = kind(target)
    settings = {"device": device, "enable_prefix_caching": False, "enforce_eager": True}
    with rig(folder, **settings, **drafting(head, head.save(tmp_path / "head"))) as own:
        record = Record(always(own))
        got = own.run(*GREEDY)
        check_same(got, greedy(folder))
    assert record.check(head, texts_of(GREEDY, got)) > 100


@pytest.mark.parametrize("kind", [DFlash, DSpark], ids=lambda kind: kind.__name__)
def test_a_block_head_that_guesses_at_random_is_switched_off_within_64_steps(
    kind: type[Head], target: Target, folder: Path, tmp_path: Path
) -> None:
    """A row's share of right drafts falls with every wrong one. Once it has, one draft is tried in 64 tokens."""
    head = kind(target)
    with rig(folder, **drafting(head, head.save(tmp_path / "head"))) as own:
        own.add(ask("long", prompt(9, 1), max_tokens=240))
        tried = list[int]()
        while own.engine.has_work:
            own.step()
            counts = own.engine.scheduler.figures().drafts
            assert counts is not None
            tried.append(int(counts["draft_tokens"]))
        assert 0 < tried[63] <= 40
        assert tried[-1] - tried[63] <= 3 * DRAFTS


@pytest.mark.parametrize("kind", [DSpark, GatedDSpark, SureDSpark], ids=lambda kind: kind.__name__)
def test_drafts_end_where_the_confidence_head_is_less_sure_than_asked(
    kind: type[DSpark], target: Target, folder: Path, tmp_path: Path
) -> None:
    head = kind(target)
    files, head.least = head.save(tmp_path / "head"), 0.4
    asked = drafting(head, files)
    asked["speculative_config"]["confidence_threshold"] = head.least
    with rig(folder, enable_prefix_caching=False, **asked) as own:
        record = Record(always(own))
        got = own.run(*GREEDY)
        check_same(got, greedy(folder))
    texts, lengths = texts_of(GREEDY, got), set[int]()
    assert record.check(head, texts) > 60
    for cached, last, drafts in record.made:
        those = [text for text in texts if text[cached:][:1] == [last]]
        if drafts and all(len(text) > cached + 2 + DRAFTS for text in those):
            assert any(drafts == head.drafts(text[: cached + 1], DRAFTS) for text in those)
            lengths.add(len(drafts))
    assert lengths == set(range(1, DRAFTS + 1))


def test_a_threshold_without_a_confidence_head_is_refused(folder: Path, target: Target, tmp_path: Path) -> None:
    head = DFlash(target)
    asked = drafting(head, head.save(tmp_path / "head"))
    asked["speculative_config"]["confidence_threshold"] = 0.5
    with pytest.raises(InvalidConfig, match="the checkpoint has no confidence head"), rig(folder, **asked):
        pass


@pytest.mark.parametrize(
    ("kind", "config", "sentence"),
    [
        (DFlash, {"dflash_config": {"target_layer_ids": [0, 9], "mask_token_id": 3}}, "taps the layers [0, 9], and"),
        (DFlash, {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 999}}, "mask_token_id"),
        (DFlash, {"block_size": 1}, "block_size"),
        (DFlash, {"draft_vocab_size": 90}, "draft_vocab_size"),
        (DSpark, {"markov_head_type": "tree"}, "one of vanilla, gated, rnn"),
        (DSpark, {"markov_head_type": "rnn"}, "lack markov_head.joint_proj.weight"),
        (
            DSpark,
            {"confidence_head_with_markov": False},
            "confidence_head.proj.weight is [1, 72] of F32, wanted [1, 64]",
        ),
        (DSpark, {"markov_rank": 0}, "confidence_head_with_markov"),
        (DSpark, {"markov_rank": 4}, "markov_head.markov_w1.weight is [320, 8] of F32, wanted [320, 4]"),
    ],
)
def test_block_heads_that_do_not_fit_are_refused_in_one_sentence(
    kind: type[Head], config: dict[str, Any], sentence: str, folder: Path, target: Target, tmp_path: Path
) -> None:
    head = kind(target)
    files = head.save(tmp_path / "head")
    (files / "config.json").write_text(json.dumps({**head.config, **config}))
    with pytest.raises((InvalidConfig, ModelLoadError)) as raised, rig(folder, **drafting(head, files)):
        pass
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_made_numbers_need_no_files(folder: Path, target: Target, tmp_path: Path) -> None:
    for kind in (Eagle, Eagle3, Medusa, DSpark):
        head = kind(target)
        files = head.save(tmp_path / head.method)
        (files / "model.safetensors").unlink()
        with rig(folder, load_format="dummy", **drafting(head, files)) as own:
            assert not always(own).run(*GREEDY)["long"].error


@pytest.mark.parametrize(
    ("config", "tensors", "sentence"),
    [
        ({"hidden_size": 128}, {}, "says hidden_size 128, and the model's hidden states have 64"),
        ({"vocab_size": 7}, {}, "says vocab_size 7, and the model has"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, {}, "taps the layers [1, 9], and the model"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "x"}}, {}, "taps the layers 'x', and the model has 4"),
        ({"draft_vocab_size": 90}, {"lm_head.weight": (90, 64)}, "its files lack the tensor d2t"),
        ({}, {"midlayer.self_attn.q_norm.weight": (32,)}, "holds tensors that the head has no place for"),
        ({}, {"fc.weight": (64, 64)}, "fc.weight is [64, 64] of F32, wanted [64, 192]"),
        ({}, {"fc.weight": None}, "lacks tensors of the head: fc.weight"),
        ({"num_attention_heads": "4"}, {}, "num_attention_heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_sentence(
    config: dict[str, Any],
    tensors: dict[str, tuple[int, ...] | None],
    sentence: str,
    folder: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    head = Eagle3(target)
    for name, shape in tensors.items():
        if shape is None:
            del head.tensors[name]
        else:
            head.tensors[name] = torch.zeros(shape)
    files = head.save(tmp_path / "head")
    (files / "config.json").write_text(json.dumps({**head.config, **config}))
    with pytest.raises((InvalidConfig, ModelLoadError)) as raised, rig(folder, **drafting(head, files)):
        pass
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_head_that_is_not_there_is_refused_in_one_sentence(folder: Path, target: Target, tmp_path: Path) -> None:
    files = Medusa(target).save(tmp_path / "head")
    block, pickled = DFlash(target).save(tmp_path / "block"), tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((files / "config.json").read_text())
    (pickled / "pytest_model.bin").write_bytes(b"pickle")
    for asked, sentence in (
        ({"method": "medusa", "model": files, "num_speculative_tokens": 5}, "4 heads of Medusa, each of which drafts"),
        ({"method": "dflash", "model": block, "num_speculative_tokens": 8}, "blocks of 8 tokens, which hold 7 drafts"),
        ({"method": "eagle"}, "names no head for the method eagle, and the model ships with none"),
        ({"method": "mtp"}, "is for models whose checkpoints bring a layer for it"),
        ({"method": "eagle3", "model": tmp_path / "nothing"}, "nothing' does not exist"),
        ({"method": "medusa", "model": pickled}, "safetensors"),
    ):
        asked = {"num_speculative_tokens": 3, **asked}
        with pytest.raises((InvalidConfig, ModelLoadError)) as raised, rig(folder, speculative_config=asked):
            pass
        assert sentence in str(raised.value)
        assert "\n" not in str(raised.value)


def hybrid_with_mtp(files: Path, family: str = "qwen3_5") -> tuple[Path, Head]:
    """The same for a model with recurrent layers."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    shape: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": kinds}
    if family == "qwen3_next":
        shape["mlp_only_layers"] = []  # as those that were published: every layer has experts, this one too
    folder = tiny_models.save(family, files, **shape)
    head = (QwenMtp if family == "qwen3_5" else QwenNextMtp)(tiny_models.build(family, **shape))
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 3, "layer_types": kinds[:3]}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: each for name, each in load_file(folder / "model.safetensors").items() if ".layers.3." not in name}
    save_file(stored | head.tensors, folder / "model.safetensors")
    return folder, head


def hybrid_with_experts_and_mtp(files: Path) -> tuple[Path, Head]:
    """A Qwen3-Next: its layer for multi-token prediction has experts, as its others have."""
    return hybrid_with_mtp(files, "qwen3_next")


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("made", [hybrid_with_mtp, hybrid_with_experts_and_mtp])
def test_the_layer_of_a_hybrid_drafts_as_transformers_computes_it(made: Any, device: str, tmp_path: Path) -> None:
    """Recurrent layers verify what it drafts."""
    folder, head = made(tmp_path / "model")
    settings = {"device": device, "enable_prefix_caching": False, "enforce_eager": True}
    with rig(folder, **settings) as own:
        want = own.run(*GREEDY)
    asked = {"method": "qwen3_5_mtp" if made is hybrid_with_mtp else "qwen3_next_mtp", "num_speculative_tokens": DRAFTS}
    with rig(folder, **settings, speculative_config=asked) as own:
        record = Record(always(own))
        got = own.run(*GREEDY)
        check_same(got, want)
    assert record.check(head, texts_of(GREEDY, got)) > 100


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_layer_whose_norms_have_more_digits_drafts_in_the_model_s_dtype(dtype: str, tmp_path: Path) -> None:
    folder, _ = hybrid_with_mtp(tmp_path / "model")
    asks = [ask(str(n), prompt(n, n), max_tokens=30, logprobs=0) for n in (3, 9, 20, 45)]
    with rig(folder, dtype=dtype, enable_prefix_caching=False) as own:
        want = own.run(*asks)
    asked = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    with rig(folder, dtype=dtype, enable_prefix_caching=False, speculative_config=asked) as own:
        got = always(own).run(*asks)
        assert not own.errors
        assert own.engine.scheduler.figures().drafts["draft_tokens"] > 100
    near = 16 * torch.finfo(getattr(torch, dtype)).eps  # products of several rows may round other than those of one
    for name, outcome in want.items():
        assert len(got[name].scored) == len(outcome.scored) == len(outcome.tokens)
        both = zip(got[name].scored, outcome.scored, strict=True)
        own, other = next((pair for pair in both if pair[0][0] != pair[1][0]), ((0, 0.0), (0, 0.0)))
        assert abs(own[1] - other[1]) <= near, f"{name} parts where nothing is near a tie"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("made", "scheme"), by_values((glm_with_mtp, hybrid_with_mtp, hybrid_with_experts_and_mtp), ("fp8", "int8"), turn=1)
)
def test_a_quantized_folder_keeps_the_layer_for_multi_token_prediction(made: Any, scheme: str, tmp_path: Path) -> None:
    source, head = made(tmp_path / "model")
    folder = tmp_path / "quantized"
    write(quantized(source, MakeConfig(schemes=(scheme,))), folder, progress=lambda what, share: None)
    before, after = (load_file(each / "model.safetensors") for each in (source, folder))
    layer = [name for name in before if name.startswith(("mtp.", "model.layers.3."))]
    assert len(layer) >= len(head.tensors)
    assert all(torch.equal(after[name], before[name]) for name in layer)
    assert layer[0].split(".weight")[0] in (folder / "config.json").read_text()
    with rig(folder, enable_prefix_caching=False) as own:
        want = own.run(*GREEDY)
    asked = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    with rig(folder, enable_prefix_caching=False, speculative_config=asked) as own:
        check_same(always(own).run(*GREEDY), want)
        assert own.engine.scheduler.figures().drafts["draft_tokens"] > 100


class Loads:
    """Counts how often weights are loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, load = 0, device.load_weights

        def loading(*arguments: Any, **options: Any) -> None:
            self.count += 1
            load(*arguments, **options)

        monkeypatch.setattr(device, "load_weights", loading)


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "sentence"),
    [
        (Eagle, {"num_hidden_layers": 1000}, {}, "lacks tensors of the head: layers.1."),
        (Eagle, {"intermediate_size": 1 << 22}, {}, "gate_proj.weight is [96, 64] of F32, wanted [4194304, 64]"),
        (Medusa, {"medusa_num_layers": 64, "medusa_num_heads": 64}, {}, "lacks tensors of the head: 0.1.linear.weight"),
        (Eagle3, {"transformer_layer_config": "x"}, {}, "sets transformer_layer_config to 'x'; it must be an object"),
        (Eagle3, {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [True, 2]}, {}, "taps the layers [True, 1]"),
        (Eagle3, {}, {"fc.weight": torch.zeros(64, 192, dtype=torch.int8)}, "fc.weight is [64, 192] of I8, wanted"),
        (NarrowEagle3, {}, {"d2t": torch.full((90,), 0.5)}, "d2t is [90] of F32, and the head scores 90 tokens"),
        (NarrowEagle3, {}, {"d2t": torch.zeros(9, dtype=torch.int64)}, "d2t is [9] of I64, and the head scores 90"),
        (NarrowEagle3, {}, {"d2t": torch.full((90,), 1 << 62)}, "d2t names tokens that the model's 320 are not among"),
        (NarrowEagle3, {}, {"lm_head.weight": None}, "lacks tensors of the head: lm_head.weight"),
        (NarrowEagle3, {"draft_vocab_size": 321}, {}, "sets draft_vocab_size to 321; it must be at most 320"),
    ],
)
def test_heads_are_refused_before_anything_of_their_sizes_is_made(
    kind: type[Head],
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor | None],
    sentence: str,
    folder: Path,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, loads = kind(target), Loads(monkeypatch)
    head.tensors |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name in (name for name, tensor in tensors.items() if tensor is None):
        del head.tensors[name]
    files = head.save(tmp_path / "head")
    (files / "config.json").write_text(json.dumps({**head.config, **config}))
    with pytest.raises(ModelLoadError) as raised, rig(folder, **drafting(head, files)):
        pass
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert loads.count == 0


def test_a_head_that_memory_cannot_hold_is_refused(
    folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all of its weights, also those that no layer of a model has."""
    head, loads = Medusa(target), Loads(monkeypatch)
    files = head.save(tmp_path / "head")
    (files / "config.json").write_text(json.dumps({"medusa_num_heads": 64, "medusa_num_layers": 64}))
    monkeypatch.setattr(memory, "host_memory", lambda: 60_000_000)
    with pytest.raises(InvalidConfig) as raised, rig(folder, load_format="dummy", **drafting(head, files)):
        pass
    assert "the head needs 6" in str(raised.value)  # 64 x 64 products of 64 x 64 numbers, in float32
    assert loads.count == 0


def test_a_full_vocabulary_in_another_order_is_heeded(folder: Path, target: Target, tmp_path: Path) -> None:
    class Shuffled(NarrowEagle3):
        narrow = tiny_models.VOCAB

        def make(self) -> None:
            super().make()
            self.tensors["d2t"] = torch.arange(self.narrow - 1, -1, -1) - torch.arange(self.narrow)

    head = Shuffled(target)
    files = head.save(tmp_path / "head")
    with rig(folder, **drafting(head, files)) as own:
        record = Record(always(own))
        got = own.run(*GREEDY[:2])
    assert record.check(head, texts_of(GREEDY[:2], got)) > 30


def test_rows_of_unlike_lengths_may_end_with_the_longest_context(folder: Path, target: Target, tmp_path: Path) -> None:
    """The first pass runs as many pairs of each row as the longest one has."""
    head = Eagle(target)
    files = head.save(tmp_path / "head")
    asked = ask("ends", prompt(40, 1), max_tokens=24), ask("goes on", prompt(20, 2), max_tokens=40)
    with rig(folder, max_model_len=64) as own:
        want = own.run(*asked)
    with rig(folder, max_model_len=64, **drafting(head, files)) as own:
        record = Record(always(own))
        check_same(got := own.run(*asked), want)
        assert not own.errors
    assert record.check(head, texts_of([*asked], got)) > 30


def test_angles_are_kept_for_positions_that_memory_holds(folder: Path, target: Target, tmp_path: Path) -> None:
    longer = tmp_path / "target"
    shutil.copytree(folder, longer)
    config = json.loads((longer / "config.json").read_text()) | {"max_position_embeddings": 1 << 22}
    (longer / "config.json").write_text(json.dumps(config))
    head = Eagle(target)
    with rig(longer, kv_cache_memory=1 << 20, **drafting(head, head.save(tmp_path / "head"))) as own:
        proposer = own.runner.proposer
        assert isinstance(proposer, FeatureHead)
        rows = [len(each.cos_sin_ZY) for each in proposer.head.modules() if isinstance(each, Rotary)]
        assert rows
        assert max(rows) < 4000
