"""Whisper beside transformers: tiny random models of each kind.

Logits are some tens of rounded sums of some tens of numbers near 1, which float32 keeps to 1e-5; log-probabilities of
3e-4 leave room for the spectra, whose logarithms differ by 1e-5 of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.small.log_mel.op import mel_filters
from ridgeline.models import model_config
from ridgeline.perf.footprint import parameters
from ridgeline.perf.roofline import ENCODER, step_ops
from ridgeline.text.outputs import RequestOutput
from ridgeline.weights.loader import checkpoint_views, empty_decoder
from ridgeline.worker.state import cross
from tests import whispers as oracle
from tests.devices import DEVICES, placed
from tests.models import whisper_configs

TOLERANCE = 3e-4
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return cache(lambda kind: oracle.save(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def llm(folder: Folder) -> Iterator[LLM]:
    with LLM(folder("multilingual"), device="cpu", dtype="float32", max_num_seqs=4, debug_checks=True) as found:
        yield found


def drawn(count: int = 20) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=7, max_tokens=count, logprobs=0, ignore_eos=True)


def start(kind: str, *more: str) -> list[int]:
    return [oracle.ids(kind)[f"<|{each}|>"] for each in ("startoftranscript", *more)]


def prompts(kind: str, count: int = 5) -> list[dict[str, Any]]:
    more = ("de", "transcribe", "notimestamps") if kind != "english" else ("notimestamps",)
    return [
        {"prompt_token_ids": start(kind, *more), "multi_modal_data": {"audio": (each, oracle.RATE)}}
        for each in oracle.sounds(count)
    ]


def run(llm: LLM, each: list[Any], params: SamplingParams | None = None) -> list[RequestOutput]:
    return llm.generate(each, params or drawn(), use_tqdm=False)


def check(kind: str, prompt: dict[str, Any], result: RequestOutput, tolerance: float = TOLERANCE) -> None:
    begun, [output] = prompt["prompt_token_ids"], result.outputs
    samples = prompt["multi_modal_data"]["audio"][0]
    want = oracle.logprobs(oracle.build(kind), kind, samples, [*begun, *output.token_ids])[len(begun) - 1 : -1]
    assert output.logprobs is not None
    for place, token in enumerate(output.token_ids):
        assert abs(output.logprobs[place][token].logprob - float(want[place, token])) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_outputs_equal_those_of_transformers(kind: str, device: str, folder: Folder) -> None:
    with LLM(folder(kind), **placed(device), dtype="float32", max_num_seqs=3, debug_checks=True) as llm:
        for prompt, result in zip(prompts(kind), run(llm, prompts(kind)), strict=True):
            check(kind, prompt, result)
            assert len({*result.outputs[0].token_ids}) > 3  # so that places matter
        assert llm.engine.scheduler.figures().pages_used == 0  # type: ignore[attr-defined]


def test_rows_of_a_large_step_attend_in_passes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross, "MOST_ROWS", 3)  # of 5 to 10 tokens
    with LLM(folder("multilingual"), device="cpu", dtype="float32", max_num_seqs=3, debug_checks=True) as llm:
        for prompt, result in zip(prompts("multilingual"), run(llm, prompts("multilingual")), strict=True):
            check("multilingual", prompt, result)


@pytest.mark.parametrize("bands", [80, 128])
def test_spectra_and_filters_equal_those_of_transformers(bands: int) -> None:
    """To the rounding of float32: logarithms over 4 of sums of some hundred squares, where loud and faint are mixed."""
    theirs = oracle.WhisperFeatureExtractor(feature_size=bands)
    filters_FB = mel_filters(bands)
    np.testing.assert_allclose(filters_FB, theirs.mel_filters.T, rtol=1e-5, atol=1e-9)
    ops = Ops(Platform(device_type="cpu"))
    for samples in (*oracle.sounds(3, 30.0), np.zeros(480_000, np.float32)):
        want = theirs(samples, sampling_rate=oracle.RATE, return_tensors="np").input_features
        whole = np.pad(samples, (0, 480_000 - len(samples)))
        given = torch.from_numpy(whole)[None], torch.from_numpy(filters_FB)
        assert np.abs(ops.log_mel(*given).numpy() - want).max() < 2e-4
        assert np.abs(ops.log_mel(*given).numpy() - want).mean() < 2e-6


@torch.inference_mode()
def test_logprobs_are_no_worse_than_transformers_in_bfloat16(folder: Folder) -> None:
    kind, errors = "multilingual", []
    exact = type(oracle.build(kind)).from_pretrained(folder(kind)).eval()
    for parameter in exact.parameters():
        parameter.copy_(parameter.bfloat16())
    theirs = type(exact).from_pretrained(folder(kind)).eval().bfloat16()
    with LLM(folder(kind), device="cpu", dtype="bfloat16", max_num_seqs=3) as llm:
        for prompt, result in zip(prompts(kind), run(llm, prompts(kind), drawn(12)), strict=True):
            [output] = result.outputs
            begun, samples = prompt["prompt_token_ids"], prompt["multi_modal_data"]["audio"][0]
            decoded = [*begun, *output.token_ids]
            want, other = (
                oracle.logprobs(each, kind, samples, decoded)[len(begun) - 1 : -1] for each in (exact, theirs)
            )
            taken = torch.tensor(output.token_ids)[:, None]
            assert output.logprobs is not None
            ours = torch.tensor([output.logprobs[n][t].logprob for n, t in enumerate(output.token_ids)])
            pair = (ours[:, None], other.gather(1, taken))
            errors.append([(each - want.gather(1, taken)).square().mean().item() for each in pair])
    ours_off, theirs_off = torch.tensor(errors).mean(0).sqrt().tolist()
    assert ours_off < 1.5 * theirs_off  # some 60 numbers, of which either spreads by a tenth


def encoder_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of windows whenever the encoder runs."""
    decoder: Any = llm.assembly.worker.runner.decoder  # type: ignore[attr-defined]
    found: list[int] = []
    inner = decoder.encoder.stem.forward
    monkeypatch.setattr(
        decoder.encoder.stem, "forward", lambda samples: (found.append(len(samples)), inner(samples))[1]
    )
    return found


def test_a_second_request_on_the_same_sound_runs_no_encoder(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.reset_prefix_cache()
    ran, [first, other, *_] = encoder_runs(llm, monkeypatch), prompts("multilingual")
    [before] = run(llm, [first])
    assert sum(ran) == 1
    again = {**first, "prompt_token_ids": start("multilingual", "fr", "translate")}
    results = run(llm, [first, again, other, first])
    assert sum(ran) == 2
    assert results[0].outputs[0].token_ids == before.outputs[0].token_ids == results[3].outputs[0].token_ids
    for prompt, result in zip((first, again, other, first), results, strict=True):
        check("multilingual", prompt, result)
    [salted] = run(llm, [{**first, "cache_salt": "another"}])
    assert sum(ran) == 3
    assert salted.outputs[0].token_ids == before.outputs[0].token_ids
    llm.reset_prefix_cache()
    run(llm, [first])
    assert sum(ran) == 4


@pytest.mark.thorough
def test_many_requests_take_turns_in_a_small_cache_and_are_preempted(folder: Folder) -> None:
    """The pages hold a few of the requests at once; those that lose theirs find their sound, or encode again."""
    kind = "multilingual"
    each = [prompts(kind, 6)[n % 6] for n in range(14)]
    with LLM(
        folder(kind), device="cpu", dtype="float32", max_num_seqs=6, block_size=8, kv_cache_memory=560_000,
        debug_checks=True,
    ) as llm:  # fmt: skip
        results = run(llm, each, drawn(56))
        scheduler: Any = llm.engine.scheduler  # type: ignore[attr-defined]
        assert sum(scheduler.preemptions.values()) > 0
        assert scheduler.figures().pages_used == 0
        cache = scheduler.cache
        assert cache.sounds._blocks.keys() <= {*cache.sounds._names.values()}
    for prompt, result in zip(each, results, strict=True):
        check(kind, prompt, result)


def test_failed_steps_leave_no_sound_to_be_found(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "multilingual"
    with LLM(folder(kind), device="cpu", dtype="float32", max_num_seqs=4, debug_checks=True) as llm:
        decoder: Any = llm.assembly.worker.runner.decoder  # type: ignore[attr-defined]
        inner, calls = decoder.encoder.stem.forward, []

        def fails_once(samples: torch.Tensor) -> torch.Tensor:
            calls.append(len(samples))
            if len(calls) == 1:
                raise RuntimeError("made to fail")
            found: torch.Tensor = inner(samples)
            return found

        monkeypatch.setattr(decoder.encoder.stem, "forward", fails_once)
        given = [prompts(kind)[0], prompts(kind)[0]]
        for prompt, result in zip(given, run(llm, given), strict=True):
            check(kind, prompt, result)


def test_prompts_are_spelled_as_vllm_does(llm: LLM) -> None:
    kind, [plain, *_] = "multilingual", prompts("multilingual")
    sound = plain["multi_modal_data"]
    text = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
    spelled = [
        {"prompt": text, "multi_modal_data": sound},
        {"encoder_prompt": {"prompt": "", "multi_modal_data": sound}, "decoder_prompt": text},
        {
            "encoder_prompt": {"multi_modal_data": sound},
            "decoder_prompt": {"prompt_token_ids": plain["prompt_token_ids"]},
        },
        {"prompt": text, "multi_modal_data": {"audio": [sound["audio"]]}},
    ]
    wanted = run(llm, [plain])[0]
    for result in run(llm, spelled):
        assert result.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert result.prompt_token_ids == plain["prompt_token_ids"]
    [begun] = run(llm, [{"prompt": "", "multi_modal_data": sound}])
    check(kind, {**plain, "prompt_token_ids": start(kind)}, begun)


def test_sounds_come_in_other_rates_types_and_channels(llm: LLM) -> None:
    [plain, *_] = prompts("multilingual")
    samples = plain["multi_modal_data"]["audio"][0]
    [wanted] = run(llm, [plain])
    as_given = [
        ((samples * 32767).round().astype(np.int16), oracle.RATE),
        (np.stack((samples, samples)), oracle.RATE),
        (np.stack((samples, samples), axis=1).astype(np.float64), oracle.RATE),
    ]
    for audio in as_given:
        [result] = run(llm, [{**plain, "multi_modal_data": {"audio": audio}}])
        assert result.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_what_cannot_be_is_refused_by_name(llm: LLM, folder: Folder) -> None:
    tokens, sound = start("multilingual"), np.ones(100, np.float32)
    for wrong, match in (
        ({"prompt_token_ids": tokens}, "reads sounds"),
        ("w5", "reads sounds"),
        ({"prompt_token_ids": tokens, "multi_modal_data": {"image": sound}}, "reads sounds"),
        ({"prompt_token_ids": tokens, "multi_modal_data": {"audio": (sound, 7)}}, "a rate from 1000"),
        ({"prompt_token_ids": tokens, "multi_modal_data": {"audio": ("x", 16_000)}}, "got str"),
        ({"prompt_token_ids": tokens, "multi_modal_data": {"audio": (sound[:0], 16_000)}}, "an array of numbers"),
        ({"prompt_token_ids": tokens, "multi_modal_data": {"audio": (sound * np.nan, 16_000)}}, "not finite"),
        ({"prompt_token_ids": tokens, "multi_modal_data": {"audio": np.ones(16_001)}}, "1.0 s, and this model reads 1"),
        ({"encoder_prompt": "w5"}, "reads sounds"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            run(llm, [wrong])
    with pytest.raises(InvalidConfig, match="max_num_batched_tokens is 49, and a window of sound takes 50"):
        LLM(folder("multilingual"), device="cpu", max_num_batched_tokens=49)


@pytest.mark.parametrize("name", whisper_configs.EVERY)
def test_published_models_hold_exactly_the_tensors_transformers_would(name: str) -> None:
    """Biases of keys are in no file; the output layer is the table."""
    config = whisper_configs.EVERY[name]
    ours = model_config(config)
    with torch.device("meta"):
        theirs = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**config))
    stored = {name: list(tensor.shape) for name, tensor in theirs.state_dict().items() if name != "proj_out.weight"}
    views = checkpoint_views(empty_decoder(ours.spec), ours.weights)
    assert {name: view.shape for name, view in views.items() if not name.endswith("k_proj.bias")} == stored


def test_every_parameter_is_counted_once(llm: LLM) -> None:
    """Biases of keys, which no Whisper has, are zeros that are held."""
    spec = llm.assembly.model.spec
    assert spec.encoder is not None
    attentions = len(spec.encoder.layers) + len(spec.layers)
    wanted = sum(each.numel() for each in oracle.build("multilingual").parameters())
    assert parameters(spec).total == wanted + attentions * spec.hidden_size
    ops = step_ops(spec, StepShape([4], [4], 1, encoded=[50]), dtype="float32")
    assert [op.count for op in ops if op.name == f"{ENCODER}conv1"] == [1]
