"""Adapters of models whose decoder attends to an encoder's output, beside PEFT: of the encoder's layers, of both
attentions of the decoder's, and of the output layer. The tolerances are those of the models' own tests."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.errors import InvalidRequest
from tests import encoder_decoders, whispers
from tests.models.test_encoder_decoders import prompts
from tests.models.test_whisper import prompts as sounds
from tests.models.test_whisper import start
from tests.peft_adapters import PeftAdapter

TOLERANCE = 3e-4
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=9, logprobs=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "debug_checks": True}
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "enable_lora_vocabulary": True}
TARGETS = {
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "t5_v1_1": ["q", "v", "wi_0", "wo", "lm_head"],
    "bart": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "marian": ["q_proj", "v_proj", "fc2", "lm_head"],
}


def adapters_of(model: Any, targets: list[str], folder: Path) -> list[PeftAdapter]:
    """Return adapters of the encoder and the decoder, of the encoder alone, and of what reads its output alone."""
    names = "|".join(targets)
    apart = {"parts of both": targets, "encoder": rf".*encoder\..*\.({names})"}
    apart["across"] = r".*(encoder_attn|EncDecAttention)\.(k|k_proj|v|v_proj)"
    return [
        PeftAdapter.of(deepcopy(model), folder / name, seed, r=2 + 3 * seed, target_modules=own)
        for seed, (name, own) in enumerate(apart.items())
    ]


def check(result: Any, begun: list[int], want: Any) -> None:
    [output] = result.outputs
    assert output.logprobs is not None
    exact = want([*begun, *output.token_ids])[len(begun) - 1 : -1]
    for place, token in enumerate(output.token_ids):
        assert output.logprobs[place][token].logprob == pytest.approx(float(exact[place, token]), abs=TOLERANCE)


@pytest.mark.parametrize("family", TARGETS)
def test_texts_are_read_and_written_with_a_requests_own_adapter(family: str, tmp_path: Path) -> None:
    """Inputs of several adapters and of none are encoded in one step."""
    plain = encoder_decoders.build(family)
    adapters = adapters_of(plain, TARGETS[family], tmp_path)
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    given, asked = prompts((17, 5, 30, 9)), [*named, *named[::-1]]
    with LLM(encoder_decoders.save(family, tmp_path / "model"), **SETTINGS, **ADAPTERS) as llm:
        inputs: list[Any] = [{"prompt_token_ids": each} for each in given * 2]
        for index, result in enumerate(llm.generate(inputs, PARAMS, lora_request=asked, use_tqdm=False)):
            own = asked[index]
            oracle = plain if own is None else adapters[own.lora_int_id - 1].model
            encoded = given[index % 4]
            check(
                result,
                encoder_decoders.start(family),
                lambda tokens: encoder_decoders.logprobs(oracle, encoded, tokens),  # noqa: B023
            )


@pytest.mark.dealt
def test_sounds_are_heard_with_a_requests_own_adapter(tmp_path: Path) -> None:
    """The cache keeps what an encoder made of a sound for each adapter apart."""
    kind, plain = "multilingual", whispers.build("multilingual")
    targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "proj_out"]
    adapters = adapters_of(plain, targets, tmp_path)
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    with LLM(whispers.save(kind, tmp_path / "model"), **SETTINGS, **ADAPTERS) as llm:
        for prompt in sounds(kind, 2):
            for _ in range(2):
                outputs = llm.generate([prompt] * 4, PARAMS, lora_request=named, use_tqdm=False)
                for result, oracle in zip(outputs, [plain, *(each.model for each in adapters)], strict=True):
                    samples = prompt["multi_modal_data"]["audio"][0]
                    check(
                        result,
                        start(kind, "de", "transcribe", "notimestamps"),
                        lambda tokens: whispers.logprobs(oracle, kind, samples, tokens),  # noqa: B023
                    )
        embedded = PeftAdapter.of(deepcopy(plain), tmp_path / "embedded", target_modules=["conv1", "q_proj"])
        with pytest.raises(InvalidRequest, match="conv1"):
            llm.generate([prompt], PARAMS, lora_request=LoRARequest("b", 9, embedded.folder))
