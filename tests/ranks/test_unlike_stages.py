"""Stages on unlike devices: where each is, what all choose alike, and the tokens of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec")

from ridgeline import LLM, SamplingParams
from ridgeline.assembly import wiring
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.defaults import choose_block_size, choose_dtype, choose_limits, device_of_rank, shared_device
from ridgeline.kernels.base.cost import StepShape
from ridgeline.ranks import recruits
from ridgeline.serving.processes.placement import environments
from ridgeline_bench.scripts.random_gguf import write
from tests.driving import ask, rig
from tests.ranks.unlike_rank import on_the_cpu

PROMPTS = [[(7 * n + k) % 290 + 5 for n in range(length)] for k, length in enumerate((3, 40, 90))]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def settings(devices: str, **more: Any) -> dict[str, Any]:
    return {"pipeline_parallel_size": devices.count(",") + 1, "pipeline_devices": devices, **more}


def config_of(devices: str, partition: str | None = None) -> LLMConfig:
    return LLMConfig(model="", pipeline_layer_partition=partition, **settings(devices))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, by name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("gpus")
def test_each_stage_has_a_device_of_its_kind() -> None:
    config = config_of("cuda,cpu,cuda,cpu", "1,2,3,1")
    assert [str(device_of_rank(config, rank)) for rank in range(4)] == ["cuda:0", "cpu", "cuda:1", "cpu"]
    with pytest.raises(InvalidConfig, match="'cuda:2' was asked for, but the last GPU here is cuda:1"):
        device_of_rank(config_of("cuda,cuda,cpu,cuda", "1,1,1,1"), 3)


@pytest.mark.usefixtures("gpus")
def test_what_ranks_must_choose_alike_is_chosen_for_the_cpu_but_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    config = config_of("cpu,cuda", "1,3")
    devices = [device_of_rank(config, rank) for rank in range(2)]
    shared = [shared_device(config, device) for device in devices]
    assert {choose_limits(config, device) for device in shared} == {choose_limits(config, torch.device("cpu"))}
    assert {choose_dtype("auto", "bfloat16", device).name for device in shared} == {"float32"}
    assert {choose_block_size(config, device) for device in devices} == {64}, "GPUs' kernels are made for that"
    alike = config_of("cpu,cpu")
    assert [choose_block_size(alike, device_of_rank(alike, rank)) for rank in range(2)] == [16, 16]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (settings("cpu,tpu", pipeline_layer_partition="1,1"), "'tpu' is neither cpu nor cuda"),
        ({**settings("cpu,cuda"), "pipeline_parallel_size": 3}, "pipeline_parallel_size is 3; set that to 2"),
        ({"pipeline_devices": "cpu"}, "set pipeline_parallel_size too"),
        (settings("cpu,cuda"), "set pipeline_layer_partition"),
        (settings("cpu,cpu", device="cpu"), "do not go together"),
        (settings("cpu,cpu", tensor_parallel_size=2), "do not go together"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        LLMConfig(model="", **given)


def test_engines_side_by_side_do_not_share_the_cpu() -> None:
    engine = {"model": "", "pipeline_layer_partition": "1,1", **settings("cpu,cuda")}
    with pytest.raises(InvalidConfig, match="would share the CPU; leave one of them out"):
        environments(ServeConfig(data_parallel_size=2, engine=engine))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return write(folder, folder / "model.gguf", "Q4_K_M")


@pytest.mark.usefixtures("forked_ranks")
def test_stages_on_two_devices_give_the_tokens_of_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [ask(f"{n}", prompt, max_tokens=6) for n, prompt in enumerate(PROMPTS)]
    options: dict[str, Any] = {"device": "auto", "kv_cache_memory": 1 << 22, "block_size": None}
    with rig(model, **{**options, "device": "cpu"}) as one:
        want = one.run(*asked)
    with rig(model, **options, **settings("cpu,cpu")) as two:
        alike = two.run(*asked)
        assert two.worker.facts.block_size == 16
    # The second device goes by the name of a GPU
    monkeypatch.setattr(recruits, "MODULE", "tests.ranks.unlike_rank")
    monkeypatch.setattr(wiring, "device_of_rank", on_the_cpu)
    with rig(model, **options, **settings("cpu,cuda", pipeline_layer_partition="1,3")) as two:
        unlike, facts = two.run(*asked), two.worker.all_facts
    assert [each.block_size for each in facts] == [64, 64]
    assert facts[1].weights > facts[0].weights, "three layers are more than one"
    for name, outcome in want.items():
        assert outcome.error is None
        assert alike[name].tokens == unlike[name].tokens == outcome.tokens


def test_a_step_of_all_stages_at_work_lasts_as_long_as_the_slowest() -> None:
    class Takes:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def step_limit(self, shape: StepShape) -> float:
            return self.seconds * shape.num_sampled

    assert wiring.Slowest([Takes(1.0), Takes(3.0)]).step_limit(StepShape([1], [1], 2)) == 6.0


# ---- on a GPU -------------------------------------------------------------------------------------------------------

DIVISIONS = [("cpu,cuda", "1,3"), ("cuda,cpu", "3,1"), ("cpu,cuda,cpu", "1,2,1")]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Written(NamedTuple):
    """What a model writes behind each prompt, and its scores of the prompts' own tokens."""

    tokens: list[Any]
    logprobs: list[float]


def written(model: Path, **more: Any) -> Written:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 128}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=1)
    with LLM(model, skip_tokenizer_init=True, max_num_seqs=4, kv_cache_memory=1 << 26, **options, **more) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    scored = [
        entry[token].logprob
        for prompt, result in zip(PROMPTS, results, strict=True)
        for token, entry in zip(prompt[1:], result.prompt_logprobs[1:], strict=True)
    ]
    return Written([result.outputs[0].token_ids for result in results], scored)


@pytest.fixture(scope="module")
def on_one(model: Path, plain: Path) -> list[Written]:
    return [written(file, device="cuda") for file in (plain, model)]


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    return write(model.parent, model.with_name("plain.gguf"), "F32")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(("devices", "partition"), DIVISIONS)
def test_a_model_divided_between_cpu_and_gpu_writes_what_one_device_writes(
    devices: str, partition: str, model: Path, plain: Path, on_one: list[Written]
) -> None:
    divided = settings(devices, pipeline_layer_partition=partition)
    assert written(plain, **divided).tokens == on_one[0].tokens
    # A CPU multiplies codes with activations in int8, which changes scores by 0.01, whose spread is 0.36
    np.testing.assert_allclose(written(model, **divided).logprobs, on_one[1].logprobs, atol=0.05)
