"""Experts that lie where a measured load puts them, some on several ranks: the same results, and an even load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import Placement
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.layers.experts import Copies, ExpertStack
from ridgeline.parallel.exchange import SwapExchange
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.experts import imbalance
from ridgeline.perf.placement import equal_parts, placed, rank_loads
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.loader import read_model_config
from tests.parallel.divided import kept, numbers_of
from tests.parallel.test_exchange import CAPACITY, PROMPTS, decoder_of, logits
from tests.parallel.threads import ThreadAxis, on_ranks
from tests.weights.quantized_files import SCHEMES, quantize

pytestmark = pytest.mark.usefixtures("forked_ranks")

MIXTURE = Path(EMBEDDED_MODEL).with_name("embedded-moe")


def skewed(folder: Path, ranks: int, spare: int) -> Placement:
    """Places for a load in which later experts of a layer have more."""
    mixtures = [layer.feed_forward for layer in read_model_config(folder).spec.layers]
    counts = [each.routing.experts for each in mixtures if isinstance(each, ExpertsSpec)]
    return tuple(
        placed(np.arange(count) ** 2 + layer, ranks, (count + spare) // ranks) for layer, count in enumerate(counts)
    )


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # the experts' tensors one by one, and stacked with biases
@pytest.mark.parametrize("own_tokens", [False, True])
def test_copies_change_no_result(family: str, own_tokens: bool, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    whole, placement = decoder_of(folder, Mesh()), skewed(folder, 2, 2)
    assert any(len(set(own)) < sum(map(len, layer)) for layer in placement for own in [sum(layer, ())])

    @torch.inference_mode()
    def rank(axis: ThreadAxis) -> Tensor:
        if own_tokens:
            mesh = Mesh(exchange=SwapExchange(axis, CAPACITY), whole_experts=True, placement=placement)
        else:
            mesh = Mesh(tp=axis, whole_experts=True, placement=placement)
        return logits(decoder_of(folder, mesh), PROMPTS[0])

    want = logits(whole, PROMPTS[0])
    for got in on_ranks(2, rank):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["gptq", "fp8 dynamic"])
def test_copies_of_quantized_experts_keep_their_form(name: str, tmp_path: Path) -> None:
    folder, _ = quantize("qwen3_moe", SCHEMES[name], tmp_path / "model", hidden_size=512, head_dim=64)
    whole, placement = kept(folder, Mesh()), skewed(folder, 2, 2)
    parts = on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis, whole_experts=True, placement=placement)))
    stacks = [(path, module) for path, module in whole.named_modules() if isinstance(module, ExpertStack)]
    assert stacks
    for path, module in stacks:
        layer = int(path.split(".")[1])
        for part, experts in zip(parts, placement[layer], strict=True):
            own = part.get_submodule(path)
            assert isinstance(own, ExpertStack)
            torch.testing.assert_close(numbers_of(own), numbers_of(module)[list(experts)])


def test_copies_of_an_expert_share_its_tokens_by_what_the_tokens_are() -> None:
    """Experts 0 and 3 have copies: slots 0 and 3, 2 and 5."""
    copies = Copies([(0, 1, 3), (0, 2, 3)], 4, torch.device("cpu"))
    x_TM = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    expert_TK = torch.tensor([[0, 3]]).repeat(4000, 1)
    slot_TK = copies.chosen(expert_TK, x_TM)
    for column, both in ((0, {0, 3}), (1, {2, 5})):
        slots, counts = slot_TK[:, column].unique(return_counts=True)
        assert set(slots.tolist()) == both
        assert abs(int(counts[0]) - 2000) < 200  # three deviations of a fair coin are 95
    alone = torch.cat([copies.chosen(expert_TK[:1], x_TM[t : t + 1]) for t in range(50)])
    assert torch.equal(alone, slot_TK[:50])
    assert copies.chosen(torch.tensor([[1, 2]]), x_TM[:1]).tolist() == [[1, 4]]
    assert copies.chosen(torch.tensor([[4, 4]]), x_TM[:1]).tolist() == [[6, 6]]  # a token that goes nowhere
    assert copies.chosen(torch.tensor([[0, 3]]), x_TM[:1].bfloat16()).shape == (1, 2)


PROMPT = (
    "Once upon a time there was a little girl. She had a dog, and the dog had a ball. One day they went to the park."
)


@pytest.fixture(scope="module")
def run_of_the_mixture() -> tuple[np.ndarray, list[str]]:
    """The load of the shipped mixture's experts, and what it wrote."""
    with LLM(MIXTURE, device="cpu", dtype="float32") as llm:
        texts = written(llm)
        return llm.expert_load(), texts


def written(llm: LLM) -> list[str]:
    results = llm.generate([PROMPT, PROMPT[:30]], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    return [result.outputs[0].text for result in results]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_real_load_of_a_trained_mixture_is_evened_out(
    ranks: int, run_of_the_mixture: tuple[np.ndarray, list[str]]
) -> None:
    load_LE, _ = run_of_the_mixture
    for tokens_E in load_LE:
        equal = imbalance(rank_loads(tokens_E, equal_parts(16, ranks)))
        moved = imbalance(rank_loads(tokens_E, placed(tokens_E, ranks, 16 // ranks)))
        copied = imbalance(rank_loads(tokens_E, placed(tokens_E, ranks, 16 // ranks + 1)))
        assert moved <= equal
        assert copied < min(1.2, equal)  # a spare slot a rank


@pytest.mark.parametrize("size", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_an_engine_places_experts_by_a_file(
    size: dict[str, int], tmp_path: Path, run_of_the_mixture: tuple[np.ndarray, list[str]]
) -> None:
    load_LE, texts = run_of_the_mixture
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"logical_count": load_LE.tolist()}))
    placing = {"enable_expert_parallel": True, "num_redundant_experts": 4, "init_expert_location": file}
    with LLM(MIXTURE, device="cpu", dtype="float32", **size, **placing) as llm:  # type: ignore[arg-type]
        assert written(llm) == texts
        if "tensor_parallel_size" in size:
            np.testing.assert_array_equal(llm.expert_load(), load_LE)  # of experts, whichever copy had the tokens


def test_what_cannot_be_placed_is_one_sentence(tmp_path: Path) -> None:
    def refused(**options: object) -> str:
        with pytest.raises(InvalidConfig) as caught, LLM(MIXTURE, device="cpu", **options):  # type: ignore[arg-type]
            pass
        return str(caught.value)

    both = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert "set enable_expert_parallel" in refused(num_redundant_experts=2)
    assert "must not be negative" in refused(num_redundant_experts=-1, **both)
    assert "do not divide 16 experts" in refused(num_redundant_experts=1, **both)
    assert "at most 16 copies" in refused(num_redundant_experts=18, **both)
    assert "no file of JSON" in refused(init_expert_location=tmp_path / "none", **both)
    file = tmp_path / "load.json"
    for content, complaint in (
        ("{", "no file of JSON"),
        ('{"logical_count": 3}', "no file of JSON"),
        ('{"logical_count": [[1, 2]]}', "measure this model"),
        (json.dumps({"experts": {"tokens": [[-1] * 16] * 4}}), "below 0"),
    ):
        file.write_text(content)
        assert complaint in refused(init_expert_location=file, **both)
