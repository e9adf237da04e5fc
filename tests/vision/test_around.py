"""What stands around pictures: sleep, adapters, plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from ridgeline import LLM
from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline.models import known, model_config
from ridgeline.offline.adapters import LoRARequest
from ridgeline.perf.footprint import weight_bytes
from ridgeline.perf.precision import precision
from tests.driving import likeliest, rig
from tests.hearing import tiny as hearing
from tests.models import vision_configs
from tests.peft_adapters import PeftAdapter
from tests.vision import tiny

TinyModel = Callable[[str], Path]
TOWERS = ["llava", "qwen2_5_vl", "qwen3_vl", "mistral3", "idefics3", "gemma3", "blip-2", "internvl", "glm4v"]
DIVIDED = ["llava", "qwen2_5_vl"]


def test_vectors_go_while_the_engine_sleeps(tiny_vision: TinyModel) -> None:
    a = tiny.drawn("llava", 0)
    with rig(tiny_vision("llava"), max_num_batched_tokens=64) as own:
        own.run(tiny.asked("llava", "before", [5, 6], a, [7]))
        assert own.runner.inserted.stored
        own.engine.pause()
        own.engine.sleep()
        assert not own.runner.inserted.stored
        own.engine.wake()
        own.engine.resume()
        request = tiny.asked("llava", "after", [5, 6], a, [7])
        own.run(request)
        assert own.outcomes["after"].tokens == tiny.by_transformers("llava", request, [a])
        assert own.engine.scheduler.pictures.misses == 2


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen3_vl", "chameleon"])
def test_adapters_change_the_decoder(family: str, tiny_vision: TinyModel, tmp_path: Path) -> None:
    layers = r"model\.(language_model\.)?layers\.\d+\.self_attn\.(q|v)_proj"
    adapter = PeftAdapter.of(deepcopy(tiny.build(family)), tmp_path / "text", target_modules=layers)
    a = tiny.drawn(family, 0)
    request = tiny.asked(family, "x", [5, 6], a, [7, 8, 9])
    with LLM(tiny_vision(family), dtype="float32", device="cpu", enable_lora=True, skip_tokenizer_init=True) as llm:
        used = llm._adapters.use(LoRARequest("text", 1, str(adapter.folder)))
        assert used is not None
        engine, tokens = llm.engine, list[int]()
        engine.add(used.of(request))
        while engine.has_work:
            tokens += [event.token_id for event in engine.step() if event.token_id >= 0]
    model = adapter.model.get_base_model()
    assert tokens == likeliest(request.prompt_token_ids, 8, lambda ids: tiny.scores(model, family, ids, [a]))


# Every linear map of the tower and of what projects its vectors, and some of the text's
SEEING = (
    r"(?!.*\.head\.).*(vision_tower|vision_model|visual|projector|connector|merger|qformer|language_projection)\..*"
)


def adapters_of_tower(family: str, folder: Path, count: int) -> list[PeftAdapter]:
    model = tiny.build(family)
    linear = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    targets = [name for name in linear if re.fullmatch(SEEING, name)] + ["q_proj"]
    return [PeftAdapter.of(deepcopy(model), folder / str(n), n, target_modules=targets) for n in range(count)]


@pytest.mark.parametrize(("family", "ranks"), [*((each, 1) for each in TOWERS), *((each, 2) for each in DIVIDED)])
def test_adapters_change_towers_and_projectors(family: str, ranks: int, tiny_vision: TinyModel, tmp_path: Path) -> None:
    """One picture, with two adapters and with none in one batch, then again from the vectors that are kept."""
    adapters = adapters_of_tower(family, tmp_path, 2)
    a, b = tiny.drawn(family, 0), tiny.drawn(family, 1)
    requests = [tiny.asked(family, str(n), [5, 6], a, [7, 8 + n % 3], b, [9]) for n in range(6)]
    settings = {
        "enable_lora": True,
        "enable_tower_connector_lora": True,
        "max_loras": 2,
        "enable_prefix_caching": False,
    }
    settings |= {"tensor_parallel_size": ranks, "skip_tokenizer_init": True}
    with LLM(tiny_vision(family), dtype="float32", device="cpu", **settings) as llm:
        used = [llm._adapters.use(LoRARequest(str(n), n + 1, str(each.folder))) for n, each in enumerate(adapters)]
        engine, tokens = llm.engine, {each.id: list[int]() for each in requests}
        for n, request in enumerate(requests):
            own = None if n % 3 == 2 else used[n % 3]
            engine.add(request if own is None else own.of(request))
            if n % 3 == 2:
                while engine.has_work:
                    for event in engine.step():
                        tokens[event.request_id] += [event.token_id] if event.token_id >= 0 else []
        assert engine.scheduler.pictures.misses == 6  # of each adapter, and of none, two pictures, and once
    for n, request in enumerate(requests):
        model = tiny.build(family) if n % 3 == 2 else adapters[n % 3].model.get_base_model()
        wanted = likeliest(request.prompt_token_ids, 8, lambda ids, own=model: tiny.scores(own, family, ids, [a, b]))
        assert tokens[request.id] == wanted, n
    assert tokens["0"] != tokens["3"] or tokens["0"] != tokens["1"]


@pytest.mark.parametrize("name", ["Qwen2Audio", "Qwen3OmniMoeThinker"])
def test_adapters_change_what_hears(name: str, tmp_path: Path) -> None:
    model, heard = hearing.build(name), hearing.sounds()[0]
    linear = [each for each, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = [each for each in linear if "audio_tower" in each or "multi_modal_projector" in each]
    adapter = PeftAdapter.of(deepcopy(model), tmp_path / "adapter", target_modules=targets)
    requests = [hearing.asked(name, str(n), [5, 6], heard, [7, 8]) for n in range(2)]
    settings = {"enable_lora": True, "enable_tower_connector_lora": True, "skip_tokenizer_init": True}
    with LLM(hearing.save(name, tmp_path / "model"), dtype="float32", device="cpu", **settings) as llm:
        used = llm._adapters.use(LoRARequest("heard", 1, str(adapter.folder)))
        assert used is not None
        engine, tokens = llm.engine, {each.id: list[int]() for each in requests}
        engine.add(requests[0])
        engine.add(used.of(requests[1]))
        while engine.has_work:
            for event in engine.step():
                tokens[event.request_id] += [event.token_id] if event.token_id >= 0 else []
    for request, own in zip(requests, (model, adapter.model.get_base_model()), strict=True):
        wanted = likeliest(request.prompt_token_ids, 8, lambda ids, own=own: hearing.scores(own, name, ids, [heard]))
        assert tokens[request.id] == wanted


def test_adapters_of_towers_are_refused_by_name(tiny_vision: TinyModel, tmp_path: Path) -> None:
    tower = PeftAdapter.of(
        deepcopy(tiny.build("qwen3_vl")), tmp_path / "tower", target_modules=r"model\.visual\.blocks\.0\.attn\.qkv"
    )
    with (
        LLM(tiny_vision("qwen3_vl"), dtype="float32", device="cpu", enable_lora=True, skip_tokenizer_init=True) as llm,
        pytest.raises((InvalidConfig, InvalidRequest), match=r"visual\.blocks\.0\.attn\.qkv.*enable_tower"),
    ):
        llm._adapters.use(LoRARequest("tower", 1, str(tower.folder)))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("DeepseekOCR2ForCausalLM", "those of DeepseekOcr2 are"),
        ("MiniCPMV", "learned queries; MiniCPM-V 4.6 runs"),
        ("InternVLChatModel", "with -hf is"),
    ],
)
def test_families_without_a_tower_here_are_refused_by_name(name: str, why: str) -> None:
    assert known({"architectures": [name]})  # so that transformers' modules are not tried
    with pytest.raises(ModelLoadError, match=f"^{name} does not run here: .*{why}") as caught:
        model_config({"architectures": [name]})
    assert "\n" not in str(caught.value)


def test_plans_count_the_towers_weights() -> None:
    spec = model_config(vision_configs.QWEN3_VL_8B).spec
    assert weight_bytes(spec, precision("bfloat16")) == 2 * 8_767_123_696


def test_pictures_that_no_step_has_needed_yet_are_counted(tiny_vision: TinyModel) -> None:
    a, b = tiny.drawn("llava", 0), tiny.drawn("llava", 1)
    with rig(tiny_vision("llava"), max_num_batched_tokens=24) as own:
        engine = own.engine
        engine.add(tiny.asked("llava", "one", [5], a, [6] * 20, b))
        engine.add(tiny.asked("llava", "two", [7], a))
        told = [engine.scheduler.figures().pictures]
        while engine.has_work:
            engine.step()
            told.append(engine.scheduler.figures().pictures)
    assert all(each is not None for each in told)
    waits = [each["waiting"] for each in told if each is not None]
    assert waits[0] == 3
    assert waits == sorted(waits, reverse=True)
    assert told[-1] == {"queries": 3, "hits": 1, "waiting": 0}
