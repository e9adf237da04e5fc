"""The whole engine on Triton kernels: in the interpreter here, as captured graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.core.plan.step import StepPlan
from ridgeline.engine.step_drafting import StepDrafting
from ridgeline.kernels.ops import OPS
from ridgeline.worker.inputs import Shape
from ridgeline.worker.step import DeviceStep
from ridgeline_bench.scripts.told_drafts import tell
from tests import test_draft_trees as draft_trees
from tests import test_lookahead_decoding as lookahead_decoding
from tests import tiny_models
from tests.driving import Rig, ask, rig
from tests.head_oracle import Eagle, Eagle3, Head, Medusa, Target
from tests.test_draft_heads import Record, texts_of
from tests.test_speculation import Always, evenly, prompt

PROMPTS = {"a": tuple(range(5, 24)), "b": (7, 8, 9), "c": tuple(range(40, 78)), "d": (3,)}
TRITON = {name: "triton" for name, op in OPS.items() if any(i.name == "triton" for i in op.implementations)}


def requests(max_tokens: int = 6) -> list:
    own: dict[str, dict] = {
        "b": {"guidance_scale": 1.5, "negative_prompt": list(range(60, 70))},
        "d": {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    }
    return [ask(name, ids, max_tokens=max_tokens, **own.get(name, {})) for name, ids in PROMPTS.items()]


def plain(folder: Path, max_tokens: int = 6) -> dict[str, list[int]]:
    with rig(folder) as own:
        return {name: outcome.tokens for name, outcome in own.run(*requests(max_tokens)).items()}


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "bloom", "gemma2", "neox", "gemma4_moe", "qwen3_5", "lfm2", "falcon_h1", "rwkv", "deepseek_v3"),
        *(pytest.param(family, marks=pytest.mark.thorough) for family in ("qwen3", "mistral")),  # as others' layers
        *(pytest.param(family, marks=pytest.mark.thorough) for family in ("jamba", "zamba2", "nemotron_h_moe")),  # slow
    ],
)
def test_tokens_equal_those_of_the_plain_ops(tiny_model: Callable[[str], Path], family: str) -> None:
    assert "paged_attention" in TRITON
    folder = tiny_model(family)
    max_tokens = 6 if family == "llama" else 3  # it takes long to interpret
    with rig(folder, kernels=TRITON) as own:
        outcomes = own.run(*requests(max_tokens))
        assert not own.errors
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == plain(folder, max_tokens)


@pytest.mark.parametrize(
    "family",
    ["mistral", "rwkv", "mamba", *(pytest.param(family, marks=pytest.mark.thorough) for family in ("llama", "lfm2"))],
)
def test_drafts_change_no_token(tiny_model: Callable[[str], Path], family: str) -> None:
    """As on a GPU: all rows of a step verify as many drafts, or none does."""
    folder = tiny_model(family)
    asked = [
        ask("a", [5, 6, 7, 8] * 4, max_tokens=8),
        ask("b", [9, 10, 11] * 3, max_tokens=6, temperature=0.8, top_p=0.9, seed=5),
        ask("c", [12, 13] * 5, max_tokens=7, repetition_penalty=1.2, logprobs=1),
        ask("d", [14, 15] * 5, max_tokens=7, allowed_token_ids=(14, 15, 16), lookahead=1),
    ]
    with rig(folder) as own:
        want = own.run(*asked)
    texts = [[*each.prompt_token_ids, *want[each.id].tokens] for each in asked]

    def told(known: list[int], count: int) -> np.ndarray:
        """Every third draft is wrong."""
        text = next(text for text in texts if text[: len(known)] == known)
        return np.array(
            [token if (len(known) + i) % 3 else 1 for i, token in enumerate(text[len(known) :][:count])], np.int32
        )

    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    with rig(folder, kernels=TRITON, speculative_config=lookup) as own:
        running = own.engine.scheduler.running
        own.runner.drafted.cut, running._even, running.drafting = None, True, StepDrafting(4)
        tell(own.runner, lambda known_N, count: told(known_N.tolist(), count))
        got = own.run(*asked)
        counts = own.engine.scheduler.figures().drafts
        assert not own.errors
    assert {name: outcome.tokens for name, outcome in got.items()} == {name: o.tokens for name, o in want.items()}
    assert counts is not None
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]


@pytest.mark.parametrize("method", ["draft_model", pytest.param("eagle", marks=pytest.mark.thorough), "eagle3"])
def test_networks_draft_what_they_draft_with_the_plain_ops(
    tiny_model: Callable[[str], Path], method: str, tmp_path: Path
) -> None:
    """A draft model that is the target itself, and heads whose drafts a plain implementation knows."""
    folder, taps = tiny_model("llama"), (0,)
    head: Head | None = None
    if method != "draft_model":
        head = {"eagle": Eagle, "eagle3": Eagle3}[method](Target(tiny_models.build("llama")), taps=taps)
    files = folder if head is None else head.save(tmp_path / "head")
    asked = [ask("a", prompt(17, 1), max_tokens=7), ask("b", prompt(5, 2), max_tokens=6)]
    with rig(folder) as own:
        want = own.run(*asked)
    config = {"method": method, "model": files, "num_speculative_tokens": 3}
    with rig(folder, kernels=TRITON, speculative_config=config) as own:
        evenly(own)
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        record = Record(own)
        got = own.run(*asked)
        counts = own.engine.scheduler.figures().drafts
        assert not own.errors
    assert {name: outcome.tokens for name, outcome in got.items()} == {name: o.tokens for name, o in want.items()}
    assert counts is not None
    if head is None:
        assert counts["accepted_tokens"] > 0.5 * counts["draft_tokens"]
    else:
        assert record.check(head, texts_of(asked, got)) > 10


@pytest.mark.parametrize("method", ["medusa", pytest.param("eagle", marks=pytest.mark.thorough), "eagle3"])
def test_trees_are_what_they_are_with_the_plain_ops(
    tiny_model: Callable[[str], Path], method: str, tmp_path: Path
) -> None:
    """Trees of any form with the right tokens in any branch; trees of heads that stay, and others."""
    folder, dynamic = tiny_model("llama"), method == "eagle3"
    head = {"medusa": Medusa, "eagle": Eagle, "eagle3": Eagle3}[method](Target(tiny_models.build("llama")), taps=(0,))
    files = head.save(tmp_path / "head")
    asked = [ask("a", prompt(17, 1), max_tokens=7), ask("b", prompt(5, 2), max_tokens=6)]
    with rig(folder) as own:
        want = own.run(*asked)
    with rig(folder, kernels=TRITON, **draft_trees.drafting(head, files, dynamic=dynamic)) as own:
        evenly(own)
        draft_trees.trees(own)
        record = None
        if method == "medusa":
            draft_trees.Told(own, texts_of(asked, want))
        else:
            record = draft_trees.Record(own)
        got = own.run(*asked)
        counts = own.engine.scheduler.figures().drafts
        assert not own.errors
    assert {name: outcome.tokens for name, outcome in got.items()} == {name: o.tokens for name, o in want.items()}
    assert counts is not None
    if record is None:
        assert counts["accepted_tokens"] > 3
    else:
        assert record.check(draft_trees.oracle_of(head, dynamic=dynamic), texts_of(asked, got)) > 20


def test_lookahead_drafts_what_it_drafts_with_the_plain_ops(tiny_model: Callable[[str], Path]) -> None:
    folder, sizes, oracle = tiny_model("llama"), (3, 3, 2), tiny_models.build("llama")

    @torch.no_grad()
    def draw(text: tuple[int, ...]) -> int:
        return int(oracle(input_ids=torch.tensor([text])).logits[0, -1].argmax())

    asked = [ask("a", prompt(17, 1), max_tokens=9), ask("b", prompt(5, 2), max_tokens=8)]
    with rig(folder, kernels=TRITON, **lookahead_decoding.looking(sizes)) as own:
        evenly(own)
        checked = lookahead_decoding.Checked(draft_trees.trees(own), draw, sizes)
        got = own.run(*asked)
        assert not own.errors
    for each in asked:
        text = tuple(each.prompt_token_ids)
        for token in got[each.id].tokens:
            assert token == draw(text)
            text = (*text, token)
    assert checked.drafts > 40


MIXED = ((range(5, 22), 2), ((7, 8, 9), 4), ((3,), 3))  # prompts, and how many tokens to generate


def mixture() -> list:
    return [ask(f"m{i}", tuple(ids), max_tokens=length) for i, (ids, length) in enumerate(MIXED)]


def tallies(own: Rig) -> Tensor:
    """How many tokens each layer's experts got: [layers, experts]."""
    return torch.stack([layer.feed_forward.tally_E for layer in own.runner.segments.decoder.layers])


def test_experts_get_the_tokens_of_requests_and_no_others(tiny_model: Callable[[str], Path]) -> None:
    """Rows that have stopped run on for a step or two. Steps are padded with rows and tokens, as captured ones are."""
    folder = tiny_model("qwen3_moe")
    with rig(folder) as own:
        expected = {name: outcome.tokens for name, outcome in own.run(*mixture()).items()}
        plain_tally = tallies(own)
    with rig(folder, kernels=TRITON, max_num_seqs=8) as own:
        segments = own.runner.segments
        forward = segments.forward
        own.runner.launch.inputs = lambda plan: segments.inputs(  # type: ignore[method-assign]
            Shape(len(plan.rows) + 2, plan.num_tokens + 2, plan.rows.tokens_each), plan
        )

        def without_lengths(step: DeviceStep) -> None:
            step.lengths = None
            forward(step)

        segments.forward = without_lengths  # type: ignore[method-assign]
        outcomes = own.run(*mixture())
        assert not own.errors
        tally = tallies(own)
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == expected
    tokens = sum(len(ids) + length - 1 for ids, length in MIXED)  # the last token of each is never run
    assert tally.sum(1).tolist() == [2 * tokens] * len(tally)  # two experts each
    assert torch.equal(tally, plain_tally)


COMMON = tuple(range(100, 148))  # 12 blocks
SHARING = [
    ask(f"s{i}", (*COMMON, *range(20, 20 + tail)), max_tokens=length)
    for i, (tail, length) in enumerate(((1, 5), (5, 3), (2, 6), (9, 4)))
]


def together(own: Rig) -> tuple[dict[str, list[int]], list[tuple[int, int]]]:
    """The tokens of all requests, and (rows, tokens) of the prefix groups that the plans named."""
    submit = own.worker.submit
    named: list[tuple[int, int]] = []

    def recording(plan: StepPlan) -> None:
        for rows, tokens in plan.rows.prefixes:
            assert plan.expected is not None
            forms = [plan.expected[slot] for slot in plan.rows.slots_R[rows].tolist()]
            assert len({form.blocks[0][: tokens // 4] for form in forms}) == 1
            assert min(form.kv_len for form in forms) >= tokens
            named.append((len(rows), tokens))
        submit(plan)

    own.worker.submit = recording  # type: ignore[method-assign]
    outcomes = own.run(*SHARING, *requests(3))
    assert not own.errors
    return {name: outcome.tokens for name, outcome in outcomes.items()}, named


# gpt_oss has windows on every other layer. Tests of the kernels show slopes too. The others have states beside keys.
@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        *(pytest.param(f, marks=pytest.mark.thorough) for f in ("bloom", "qwen3_5", "falcon_h1", "zamba2")),
    ],
)
def test_reading_shared_prefixes_together_changes_no_token(tiny_model: Callable[[str], Path], family: str) -> None:
    folder = tiny_model(family)
    with rig(folder, max_num_seqs=7) as own:
        expected, named = together(own)
        assert not named
    with rig(folder, max_num_seqs=7, kernels=TRITON, cascade=True) as own:
        tokens, named = together(own)
    assert (4, len(COMMON)) in named
    assert tokens == expected


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "bloom", "gpt_oss", "qwen3_5", "falcon_h1", "zamba2"])
def test_on_a_gpu_shared_prefixes_change_no_token(
    tiny_model: Callable[[str], Path], family: str, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.worker.graphs.FEW_ROWS", 3)  # so few share nothing
    folder = tiny_model(family)
    with rig(folder, max_num_seqs=7) as own:
        expected, _ = together(own)
    options = {"device": "cuda", "enforce_eager": enforce_eager, "kv_cache_memory": 1 << 26}
    with rig(folder, max_num_seqs=7, cascade=True, **options) as own:
        tokens, named = together(own)
    assert (4, len(COMMON)) in named
    assert tokens == expected


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "mistral",
        "mixed",
        "gpt2",
        "bloom",
        "gemma2",
        "neox",
        "qwen3_moe",
        "gpt_oss",
        "gemma4",
        "gemma4_moe",
        "lfm2",
        "jamba",
        "falcon_h1",
        "zamba2",
    ],
)
def test_on_a_gpu_graphs_change_nothing(tiny_model: Callable[[str], Path], family: str, enforce_eager: bool) -> None:
    folder = tiny_model(family)
    with rig(folder, device="cuda", enforce_eager=enforce_eager, kv_cache_memory=1 << 26) as own:
        outcomes = own.run(*requests())
        assert not own.errors
        assert own.runner.device == torch.device("cuda", 0) or own.runner.device.type == "cuda"
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == plain(folder)
