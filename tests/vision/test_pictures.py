"""Prompts with pictures through the whole engine, beside transformers' models with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.assembly import choices
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.pictures import ShownPictures
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.reserve import StepSizes
from ridgeline.defaults import choose_device
from ridgeline.kernels.pictures.views import Box, View
from ridgeline.models import model_config
from ridgeline.parallel.axis import Alone
from ridgeline.perf.footprint import parameters
from ridgeline.worker import graphs
from ridgeline.worker.embeds import own_share
from ridgeline.worker.pictures import TowerMemory
from tests.driving import ask, disturbed, rig
from tests.models import vision_configs
from tests.test_speculation import Replayed
from tests.test_triton_engine import TRITON
from tests.vision import tiny

TinyModel = Callable[[str], Path]
Asked = tuple[Request, list[np.ndarray]]
RECURRENT = ("minicpmv4_6", "qwen3_5")  # their states are kept at few places, so fewer tokens are found
BESIDE = (
    "llava_onevision",
    "qwen3_5_moe",
    "glm4v_moe",
    "chameleon_swin",
)  # whose layout differs beside others, or test_video.py has them
FAMILIES = [name for name in tiny.FAMILIES if name not in BESIDE]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def words(count: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 290) for _ in range(count)]


def request(family: str, name: str, *parts: list[int] | np.ndarray, **params: object) -> Asked:
    return tiny.asked(family, name, *parts, **params), [part for part in parts if isinstance(part, np.ndarray)]


def requests(family: str) -> list[Asked]:
    a, b, c = (tiny.drawn(family, number) for number in range(3))
    return [
        request(family, "in the middle", words(7, 1), a, words(5, 2)),
        request(family, "first", b, words(3, 3)),
        request(family, "last", words(6, 4), c),
        request(family, "two, one behind a word", words(2, 5), a, words(1, 6), b, words(9, 6)),
        request(family, "long", words(40, 7), b, words(30, 8), a, words(3, 9)),
        request(family, "none", words(12, 10)),
    ]


def room(family: str, tokens: int) -> int:
    """Return the tokens of a step: so many, if it can be so small."""
    return max(tokens, tiny.FAMILIES[family].chunk)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [8, 64])  # chunks of 8 cut all pictures but those that are seen both ways
def test_tokens_are_those_of_transformers(family: str, chunk: int, tiny_vision: TinyModel) -> None:
    with rig(tiny_vision(family), max_num_batched_tokens=room(family, chunk)) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
        for each, pictures in requests(family):
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_writes_what_transformers_writes(family: str, tiny_vision: TinyModel) -> None:
    """Steps without pictures replay graphs, and rows behind pictures too."""
    with rig(tiny_vision(family), device="cuda", block_size=16, max_num_batched_tokens=room(family, 64)) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
        for each, pictures in requests(family):
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id


@pytest.mark.parametrize(
    "family",
    [each if each in ("qwen3_vl", "gemma3") else pytest.param(each, marks=pytest.mark.thorough) for each in FAMILIES],
)
def test_kernels_and_buckets_write_it_too(family: str, tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take rows of angles as they lie in memory, and a row that decodes is rotated by its position, which is
    behind pictures not the number of its keys."""
    pytest.importorskip("triton")
    wanted = requests(family)[:4:3]
    monkeypatch.setattr(graphs, "Graph", Replayed)
    with rig(tiny_vision(family), block_size=16, max_num_batched_tokens=room(family, 32), kernels=TRITON) as own:
        own.runner.segments.take_given(32)
        own.runner.launch.graphs = found = graphs.Graphs(own.runner.segments, 4, 32)
        plans, submit = list[Any](), own.engine._worker.submit
        monkeypatch.setattr(own.engine._worker, "submit", lambda plan: (plans.append(plan), submit(plan)))
        outcomes = own.run(*(each for each, _ in wanted))
        for each, pictures in wanted:
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id
        replays = sum(graph.replays for graph in found._graphs.values())  # type: ignore[attr-defined]
        apart = sum(plan.num_tokens > 32 or any(span.both_ways for span in plan.spans) for plan in plans)
        assert replays == len(plans) - apart
        assert any(span.inserted for plan in plans for span in plan.spans)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3", "chameleon"])
def test_two_ranks_see_what_one_sees(family: str, tiny_vision: TinyModel) -> None:
    """Each has the whole tower. Vectors behind layers are added where sums over ranks are still to be made."""
    with rig(tiny_vision(family), max_num_batched_tokens=16, tensor_parallel_size=2) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
        for each, pictures in requests(family):
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("chameleon", marks=pytest.mark.thorough)])
def test_two_ranks_share_the_pictures_of_a_step(family: str, tiny_vision: TinyModel) -> None:
    """Each sees some, and gets the vectors of the others. Both see pictures that are codes."""
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
    with rig(tiny_vision(family), max_num_batched_tokens=256, **settings) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
        for each, pictures in requests(family):
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id


@pytest.mark.parametrize("family", ["qwen3_vl", "chameleon"])
def test_a_tower_may_have_a_device_of_its_own(
    family: str, tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights do not count among the model's. (A machine without GPUs has one device, which is given two names.)"""
    with rig(tiny_vision(family), max_num_batched_tokens=64) as own:
        whole = own.runner.decoder.weight_bytes
    apart = torch.device("cpu", 0)
    monkeypatch.setattr(
        choices, "choose_device", lambda wanted, *_: apart if wanted == "cpu:0" else choose_device(wanted)
    )
    with rig(tiny_vision(family), max_num_batched_tokens=64, encoder_device="cpu:0") as own:
        tower = own.runner.decoder.tower
        assert tower is not None
        assert own.runner.decoder.weight_bytes == whole - sum(each.nbytes for each in tower.parameters())
        assert tower.ops is not own.runner.decoder.ops
        outcomes = own.run(*(each for each, _ in requests(family)))
        for each, pictures in requests(family):
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id


@pytest.mark.gpu
def test_a_tower_on_the_cpu_beside_a_gpu(tiny_vision: TinyModel) -> None:
    settings: dict[str, Any] = {"device": "cuda", "block_size": 16, "encoder_device": "cpu"}
    with rig(tiny_vision("qwen3_vl"), max_num_batched_tokens=64, **settings) as own:
        tower, pictures = own.runner.decoder.tower, own.runner.inserted.pictures
        assert tower is not None
        assert next(tower.parameters()).device.type == "cpu"
        assert pictures is None or pictures.graphs is None
        outcomes = own.run(*(each for each, _ in requests("qwen3_vl")))
        for each, shown in requests("qwen3_vl"):
            assert outcomes[each.id].tokens == tiny.by_transformers("qwen3_vl", each, shown), each.id


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_a_tower_on_the_second_gpu_replays_its_graphs(family: str, tiny_vision: TinyModel) -> None:
    settings: dict[str, Any] = {"device": "cuda:0", "encoder_device": "cuda:1", "kv_cache_memory": 1 << 26}
    with rig(tiny_vision(family), max_num_batched_tokens=64, block_size=16, encoder_cache_bytes=0, **settings) as own:
        tower, pictures = own.runner.decoder.tower, own.runner.inserted.pictures
        assert tower is not None
        assert {str(each.device) for each in tower.parameters()} == {"cuda:1"}
        assert {str(each.device) for layer in own.runner.decoder.layers for each in layer.parameters()} == {"cuda:0"}
        for _ in range(2):  # op by op, and from graphs
            outcomes = own.run(*(each for each, _ in requests(family)))
            for each, shown in requests(family):
                assert outcomes[each.id].tokens == tiny.by_transformers(family, each, shown), each.id
            own.engine.forget_prefixes()
            while own.engine.rest():
                pass
        assert pictures is not None
        assert pictures.graphs is not None
        assert any(graph.is_captured for graph in pictures.graphs.graphs.values())


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("mode", ["weights", "data"])
def test_two_gpus_see_what_one_sees(mode: str, tiny_vision: TinyModel) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": mode, "kv_cache_memory": 1 << 26}
    with rig(tiny_vision("qwen3_vl"), device="cuda", block_size=16, max_num_batched_tokens=256, **settings) as own:
        outcomes = own.run(*(each for each, _ in requests("qwen3_vl")))
        for each, shown in requests("qwen3_vl"):
            assert outcomes[each.id].tokens == tiny.by_transformers("qwen3_vl", each, shown), each.id


def test_a_device_for_a_tower_needs_one(tiny_vision: TinyModel) -> None:
    for family, settings, words in (
        ("llava", {"encoder_device": "tpu"}, "encoder_device is the unknown device 'tpu'"),
        ("llava", {"encoder_device": "cpu:3"}, "encoder_device is the unknown device 'cpu:3'"),
        ("llava", {"encoder_device": "cuda:77"}, "encoder_device 'cuda:77' was asked for"),
        ("llava", {"encoder_device": "cpu", "enable_lora": True, "enable_tower_connector_lora": True}, "does not go"),
        ("llava", {"encoder_device": "cpu", "language_model_only": True}, "leave it out"),
    ):
        with pytest.raises(InvalidConfig, match=words), rig(tiny_vision(family), **settings):
            pass


def test_ranks_share_pictures_by_their_patches() -> None:
    class Rank(Alone):
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, 2

    def picture(rows: int) -> ShownPictures:
        return replace(shown, views=(View(rows * 7, 28, Box(0, 0, rows * 7, 28)),))

    shown = tiny.shown("llava", tiny.drawn("llava", 0))
    every = {str(n): picture(rows) for n, rows in enumerate((1, 9, 4, 6, 1))}
    first, second = own_share(every, Rank(0)), own_share(every, Rank(1))
    assert (list(first), list(second)) == (["0", "1", "4"], ["2", "3"])
    assert {**first, **second} == every


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "chameleon"])
def test_two_stages_see_what_one_sees(family: str, tiny_vision: TinyModel) -> None:
    """The first has the tower. The second is told the places of tokens in pictures."""
    with rig(tiny_vision(family), max_num_batched_tokens=16, pipeline_parallel_size=2) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
        for each, pictures in requests(family):
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id


@pytest.mark.parametrize("threshold", [1, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.thorough)])
def test_ranks_that_divide_a_context_see_what_one_sees(family: str, threshold: int, tiny_vision: TinyModel) -> None:
    """Each has the tower, and rows of the vectors for the tokens that it runs, or all of them in short steps."""
    settings = {"prefill_context_parallel_size": 2, "prefill_context_parallel_threshold": threshold}
    with rig(tiny_vision(family), max_num_batched_tokens=64, **settings) as own:
        outcomes = own.run(*(each for each, _ in requests(family)))
        for each, pictures in requests(family):
            assert outcomes[each.id].tokens == tiny.by_transformers(family, each, pictures), each.id


def test_ranks_with_requests_of_their_own_see_pictures(tiny_vision: TinyModel) -> None:
    settings: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with rig(tiny_vision("qwen3_vl_moe"), max_num_batched_tokens=64, **settings) as own:
        outcomes = own.run(*(each for each, _ in requests("qwen3_vl_moe")))
        for each, pictures in requests("qwen3_vl_moe"):
            assert outcomes[each.id].tokens == tiny.by_transformers("qwen3_vl_moe", each, pictures), each.id


def test_divisions_that_a_tower_does_not_fit_are_refused(tiny_vision: TinyModel) -> None:
    for family, settings, words in (
        ("qwen3_vl_moe", {"pipeline_parallel_size": 3}, "behind 2 layers"),
        ("gemma3", {"prefill_context_parallel_size": 2}, "both ways, and prefill_context_parallel_size"),
    ):
        with pytest.raises(InvalidConfig, match=words), rig(tiny_vision(family), **settings):
            pass


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_and_aborts_change_no_token(family: str, tiny_vision: TinyModel) -> None:
    wanted = requests(family)
    with rig(tiny_vision(family), max_num_batched_tokens=room(family, 16)) as own:
        own.add(*(replace(each, id=f"{each.id}{again}") for again in ("", " again") for each, _ in wanted))
        left = disturbed(own, Random(1), gives_way=0.3, leaves=0.02)
        for each, pictures in wanted:
            tokens = tiny.by_transformers(family, each, pictures)
            for name in {each.id, f"{each.id} again"} - left:
                assert own.outcomes[name].tokens == tokens, name


@pytest.mark.parametrize("family", [each for each in FAMILIES if not each.startswith(("paligemma", *RECURRENT))])
def test_a_picture_is_encoded_once(family: str, tiny_vision: TinyModel) -> None:
    """Blocks have 4 tokens, so prefix hits end inside of pictures."""
    a, b = tiny.drawn(family, 0), tiny.drawn(family, 1)
    with rig(tiny_vision(family)) as own:
        scheduler, part = own.engine.scheduler, own.runner.inserted
        assert part._pictures is not None

        def run(name: str, *parts: list[int] | np.ndarray) -> tuple[int, int]:
            encoded, hits = part._pictures.encoded, scheduler.cache.hit_tokens  # type: ignore[union-attr]
            each, pictures = request(family, name, *parts)
            own.run(each)
            assert own.outcomes[name].tokens == tiny.by_transformers(family, each, pictures)
            return part._pictures.encoded - encoded, scheduler.cache.hit_tokens - hits  # type: ignore[union-attr]

        vectors = tiny.shown(family, a).vectors
        assert run("first", words(6, 1), a, words(4, 2)) == (1, 0)
        assert run("again", words(6, 1), a, words(4, 2)) == (0, 6 + vectors + 3)
        assert run("other words before", words(5, 3), a, words(4, 2)) == (0, 0)
        assert run("another behind", words(6, 1), a, words(2, 5), b)[0] == 1
        assert run("another picture", words(6, 1), b, words(4, 2))[1] == 4
        scheduler.pictures.forget()
        encoded, hits = run("forgotten", words(6, 1), a, words(9, 9))
        assert hits == (6 + vectors) // 4 * 4
        assert encoded == (hits < 6 + vectors)


def test_several_completions_share_a_picture(tiny_vision: TinyModel) -> None:
    a = tiny.drawn("llava", 0)
    each, pictures = request("llava", "x", words(7, 1), a, words(5, 2))
    with rig(tiny_vision("llava"), max_num_batched_tokens=64) as own:
        own.run(*(replace(each, id=str(index)) for index in range(3)))
        assert own.runner.inserted._pictures is not None
        assert own.runner.inserted._pictures.encoded == 1
        assert all(outcome.tokens == tiny.by_transformers("llava", each, pictures) for outcome in own.outcomes.values())


@pytest.mark.parametrize("more", [0, -1, 4095])
def test_vectors_that_are_not_used_go_first(more: int, tiny_vision: TinyModel) -> None:
    """There are bytes for two pictures beside those of the newest plan, a byte less, or almost those of a third."""
    size = 16 * 64 * 4
    room, lasting = 2 * size + more, (2, 3) if more >= 0 else (3,)
    with rig(tiny_vision("llava"), max_num_batched_tokens=64, encoder_cache_bytes=room) as own:
        held, stored = own.engine.scheduler.pictures, own.runner.inserted.stored
        for number in range(4):
            own.run(request("llava", f"picture {number}", words(5, number), tiny.drawn("llava", number))[0])
        own.run(ask("none", words(5, 9)))
        kept = {tiny.asked("llava", "x", tiny.drawn("llava", n)).inserted[0].name for n in lasting}
        assert sum(each.nbytes for each in stored.values()) == len(lasting) * size <= room
        assert stored.keys() == kept
        assert held.misses == 4
        own.run(request("llava", "evicted", words(6, 7), tiny.drawn("llava", 0), words(2, 2))[0])
        assert held.misses == 5
        each, pictures = request("llava", "evicted", words(6, 7), tiny.drawn("llava", 0), words(2, 2))
        assert own.outcomes["evicted"].tokens == tiny.by_transformers("llava", each, pictures)


def test_the_towers_work_takes_from_the_budget(tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a patch costs as much as a token, two pictures come one by one: the second waits for the next step."""
    with rig(tiny_vision("llava"), max_num_batched_tokens=32) as own:
        scheduler = own.engine.scheduler
        assert 0 < scheduler.pictures.cost(tiny.shown("llava", tiny.drawn("llava", 0))) < 16
        monkeypatch.setattr(scheduler.pictures, "_patch_cost", 1.0)
        for number in range(2):
            own.add(request("llava", str(number), tiny.drawn("llava", number), words(3, 1))[0])
        plan = scheduler.schedule()
        assert plan is not None
        assert sum(each.shown is not None for span in plan.spans for each in span.inserted) == 1


def test_what_has_no_place_is_refused(tiny_vision: TinyModel, tiny_model: TinyModel) -> None:
    a = tiny.drawn("llava", 0)
    with rig(tiny_model("llama")) as own, pytest.raises(InvalidRequest, match="sees no pictures"):
        own.engine.check(request("llava", "x", words(3, 1), a)[0])
    other = np.zeros((35, 28, 3), np.uint8)
    with rig(tiny_vision("llava")) as own, pytest.raises(InvalidRequest, match=r"has 5 x 4 patches.* have 4 x 4"):
        own.engine.check(request("llava", "x", words(3, 1), other)[0])
    with rig(tiny_vision("llava")) as own, pytest.raises(InvalidRequest, match="guidance_scale is not"):
        own.engine.check(request("llava", "x", words(3, 1), a, guidance_scale=2.0)[0])


def test_memory_is_planned_for_the_tower(tiny_vision: TinyModel, tiny_model: TinyModel) -> None:
    with rig(tiny_vision("llava")) as own, rig(tiny_model("llama")) as text:
        assert text.runner.inserted._pictures is None
        spec = own.runner.decoder.spec
        sizes = StepSizes(device_type="cpu", itemsize=4, max_tokens=32, max_seqs=4, longest=64)
        assert spec.tower is not None
        reserved = TowerMemory(spec.tower).reserve(sizes)
    vectors = (4 * 32 + 16384) * 64 * 4  # those that are kept, and those of the largest picture
    assert reserved.held == vectors
    assert TowerMemory(spec.tower).reserve(replace(sizes, kept_bytes=99)).held == 16384 * 64 * 4 + 99
    assert reserved.passing > 16384 * (3 * 49 * 8 + 4 * 32 * 4)
    oracle = dict(tiny.build("llava").named_parameters())
    count = sum(each.numel() for each in oracle.values())
    dropped = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.")
    unused = sum(each.numel() for name, each in oracle.items() if any(part in name for part in dropped))
    assert parameters(spec).total == count - unused


PUBLISHED = {  # parameters, as the hub counts them, or transformers' class
    "Idefics3ForConditionalGeneration": 8_462_086_384,
    "KimiVLForConditionalGeneration": 16_407_656_048,  # with the corrections of its routers
    "Mistral3ForConditionalGeneration": 24_011_361_280,
    "LlavaForConditionalGeneration": 7_063_427_072,
    "LlavaNextForConditionalGeneration": 7_566_747_648,
    "LlavaOnevisionForConditionalGeneration": 8_029_890_080,
    "MiniCPMV4_6ForConditionalGeneration": 900_352_320,
    "PaddleOCRVLForConditionalGeneration": 905_601_648,  # with an output layer of its own; transformers 5.17 ties it
    "Phi4MultimodalForCausalLM": 4_744_004_032,  # without the adapters of its files
    "Qwen2VLForConditionalGeneration": 8_291_375_616,
    "Qwen2_5_VLForConditionalGeneration": 8_292_166_656,
    "Qwen3VLForConditionalGeneration": 8_767_123_696,
    "Qwen3VLMoeForConditionalGeneration": 31_070_754_032,
    "Glm4vForConditionalGeneration": 10_292_777_472,
    "Glm4vMoeForConditionalGeneration": 107_710_933_120,  # with the corrections of its routers
    "Qwen3_5ForConditionalGeneration": 27_356_728_560,
    "Qwen3_5MoeForConditionalGeneration": 35_107_181_936,
    "InternVLForConditionalGeneration": 7_944_373_760,
    "Gemma4ForConditionalGeneration": 4_797_114_083,  # without its sounds' part
    "Gemma3ForConditionalGeneration": 4_300_079_472,
    "PaliGemmaForConditionalGeneration": 2_923_466_480,
    "MllamaForConditionalGeneration": 10_670_220_835,
    "Blip2ForConditionalGeneration": 3_744_761_856,
    "DeepseekOCRForCausalLM": 3_336_106_240,
    "DeepseekOcr2ForConditionalGeneration": 3_389_119_360,
    "InstructBlipForConditionalGeneration": 7_913_210_624,
    "ChameleonForConditionalGeneration": 7_043_090_432,
}


@pytest.mark.parametrize("config", vision_configs.EVERY, ids=lambda config: config["model_type"])
def test_published_sizes_are_those_of_the_hub(config: dict[str, Any]) -> None:
    """The hub counts all layers of the tower; of LLaVA's the last is not used, nor the norm behind it. OneVision
    uses all but that norm."""
    spec, unused = model_config(config).spec, 0
    if spec.architecture.startswith("LlavaOnevision"):
        unused = 2 * 1152
    elif spec.architecture.startswith("Phi4"):
        unused = (
            30_480_160 - 2 * 80
        )  # the tower's last layer, norm and pooling; numbers of bands are no parameters there
    elif spec.architecture.startswith("DeepseekOCR"):
        unused = 3 * 14**2 * 1024  # the patches of its second tower, which reads those of the first
    elif spec.architecture.startswith("Chameleon"):
        unused = 256 * 257  # the first map of the decoder of pictures
    elif spec.architecture.startswith("Llava"):
        width, inner = 1024, 4096
        unused = 4 * width * (width + 1) + 2 * width * inner + inner + width + 3 * 2 * width
    assert parameters(spec).total + unused == PUBLISHED[spec.architecture]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, dtype: torch.dtype, tiny_vision: TinyModel) -> None:
    """In bfloat16 both differ from float32, and we by at most twice as much on average over all prompts."""
    name = str(dtype).removeprefix("torch.")
    oracle = tiny.build(family)
    rounded = oracle if dtype is torch.float32 else deepcopy(oracle).to(dtype)
    with rig(tiny_vision(family), dtype=name, max_num_batched_tokens=room(family, 16)) as own:
        asked = [(replace(e, params=e.params.replace(prompt_logprobs=0)), p) for e, p in requests(family)]
        own.run(*(each for each, _ in asked))
    far: list[tuple[Tensor, Tensor]] = []
    for each, pictures in asked:
        ids = list(each.prompt_token_ids)
        index = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        exact = tiny.scores(oracle, family, ids, pictures)[:-1].log_softmax(-1)[index]
        ours = torch.tensor([float(one.logprob) for one in own.outcomes[each.id].prompt])
        if dtype is torch.float32:
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-3)
            continue
        theirs = tiny.scores(rounded, family, ids, pictures)[:-1].float().log_softmax(-1)[index]
        far.append(((ours - exact).abs(), (theirs - exact).abs()))
    if far:
        we, they = (torch.cat(each).mean() for each in zip(*far, strict=True))
        assert we <= 2 * they + 1e-3
