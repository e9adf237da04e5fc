"""Models divided along several axes at once give the tokens and logprobs of one device, in float32.

Not every combination runs: a covering design has every pair of two axes' values at least once, the families of models
among them. All of its combinations run where the mark `thorough` is selected. What cannot be is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("msgspec")

from ridgeline.assembly import assemble
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import Request
from ridgeline.core.settings.config import LLMConfig
from ridgeline.ranks import recruits
from ridgeline.worker.state import context, context_latents
from tests import tiny_models
from tests.covering import covering
from tests.driving import Outcome, ask
from tests.ranks.stages import Stages, meshed
from tests.ranks.test_pipeline import assert_same

# Layers of Qwen2 and Qwen3 are among the others'.
QUICK = (
    *("llama", "gemma2", "gemma4_moe", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek"),
    *("qwen3_next", "nemotron_h_moe", "deepseek_v3"),
)
LONG = [int(token) for token in np.random.default_rng(7).integers(5, 300, 45)]


class Division(NamedTuple):
    """A model, and how many ranks each axis has. ep: experts are divided as wholes."""

    family: str
    tp: int
    pp: int
    ep: bool
    cp: int

    @property
    def settings(self) -> dict[str, Any]:
        sizes = {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "prefill_context_parallel_size": self.cp,
        }
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
        return {**given, **({"enable_expert_parallel": True} if self.ep else {})}

    @property
    def works(self) -> bool:
        """True if this page's own knowledge of models and axes says so; no code of the engine is asked."""
        if self.pp > 1 and self.cp > 1:
            return False
        _, values = tiny_models.CONFIGS[self.family]
        if self.cp > 1 and "index_topk" in values:
            return False
        if any(values[name] % self.tp for name in HEADS if name in values):
            return False
        if not self.ep:
            return True
        experts = next((values[name] for name in EXPERTS if name in values), None)
        return self.tp > 1 and bool(experts) and experts % self.tp == 0

    def __str__(self) -> str:
        return f"{self.family}-tp{self.tp}-pp{self.pp}{'-ep' if self.ep else ''}-cp{self.cp}"


HEADS = ("num_attention_heads", "n_head", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "num_heads")
WITHOUT_ATTENTION = ("mamba", "falcon_mamba", "mamba2", "rwkv")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def divisions(families: Iterable[str]) -> list[Division]:
    """Return every combination that divides something."""
    found = (Division(*values) for values in product(families, (1, 2, 4), (1, 2), (False, True), (1, 2)))
    return [each for each in found if each.tp * each.pp * each.cp > 1]


DESIGN = covering([each for each in divisions(QUICK) if each.works])
OTHERS = [each for each in divisions(tiny_models.FAMILIES) if each.works and each not in DESIGN]


def asked() -> list[Request]:
    """Chunks of a long prompt beside requests that decode, and blocks that are found again."""
    return [
        ask("long", LONG, max_tokens=5, logprobs=2),
        ask("filtered", [5, 6, 7], max_tokens=6, seed=2, temperature=0.9, top_p=0.8, top_k=20, logprobs=1),
        ask("scored", LONG[:14], max_tokens=3, prompt_logprobs=1),
        ask("found", [*LONG[:20], 7], max_tokens=5, seed=1, temperature=1.0, logprobs=0),
        ask("penalties", [9] * 9, max_tokens=6, repetition_penalty=1.3, presence_penalty=0.5, logprobs=1),
    ]


@pytest.mark.few(20)
@pytest.mark.parametrize(
    "division", [*DESIGN, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)], ids=str
)
def test_ranks_of_all_axes_give_what_one_device_gives(
    division: Division,
    tiny_model: Callable[[str], Path],
    one_device: Callable[[str], dict[str, Outcome]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways, cheapest, fewer_flops = Counter[str](), context.cheapest, context_latents.fewer_flops

    def noted(*arguments: Any) -> str:
        ways[found := cheapest(*arguments)] += 1
        return found

    def heads_noted(*arguments: Any, **sizes: Any) -> bool:
        ways["heads"] += 1
        return fewer_flops(*arguments, **sizes)

    monkeypatch.setattr(context, "cheapest", noted)
    monkeypatch.setattr(context_latents, "cheapest", noted)
    monkeypatch.setattr(context_latents, "fewer_flops", heads_noted)
    settings = dict(division.settings)
    if division.cp > 1:
        settings["prefill_context_parallel_threshold"] = 6
    with meshed(tiny_model(division.family), **settings) as own:
        got, worker = own.run(*asked()), own.worker
        assert own.errors == []
    assert_same(got, one_device(division.family))
    assert isinstance(worker, Stages)
    assert len(worker.workers) == division.tp * division.pp * division.cp
    assert max(map(len, worker.dealt)) == division.pp
    assert (ways.total() > 0) == (division.cp > 1 and division.family not in WITHOUT_ATTENTION)


def test_the_design_has_every_pair_that_works() -> None:
    """Counted otherwise than it was made."""
    values = {axis: {each[at] for each in DESIGN} for at, axis in enumerate(Division._fields)}
    assert values == {"family": {*QUICK}, "tp": {1, 2, 4}, "pp": {1, 2}, "ep": {False, True}, "cp": {1, 2}}
    for one, other in combinations(range(len(Division._fields)), 2):
        together = {(each[one], each[other]) for each in DESIGN}
        missing = set(product(*(sorted(values[Division._fields[at]]) for at in (one, other)))) - together
        for pair in missing:
            assert not any((each[one], each[other]) == pair for each in divisions(QUICK) if each.works), (
                f"{pair} works and is not in the design"
            )
    assert len(DESIGN) < len([each for each in divisions(QUICK) if each.works]) / 2


@pytest.mark.parametrize(
    "family", [*QUICK, "bloom", "granite_moe_shared", "mamba", "rwkv", "jamba", "zamba2", "kimi_linear", "minicpm3"]
)
def test_what_cannot_be_is_one_sentence(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other combination is refused before a process is started."""
    monkeypatch.setattr(recruits, "MODULE", "tests.ranks.nowhere")
    refused = [each for each in divisions([family]) if not each.works]
    assert refused
    for division in refused:
        with pytest.raises(InvalidConfig, match=r"^[^\n]+\.$"):
            assemble(LLMConfig(model=tiny_model(family), device="cpu", dtype="float32", **division.settings))
