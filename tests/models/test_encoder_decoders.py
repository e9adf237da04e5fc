"""Models whose decoder attends to an encoder's output, against transformers.

In float32 sums of up to 100 terms of order one are compared, through up to 5 layers: 2e-4 of a logprob is some hundred
roundings of a score. In bfloat16 a model must not be further from the exact results of its weights than transformers
is; 1.2 allows for the spread of such errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline.core.plan.request import Request
from ridgeline.models import REFUSED, model_config
from ridgeline.perf.footprint import parameters
from ridgeline.text.outputs import RequestOutput
from ridgeline.weights.loader import checkpoint_views, empty_decoder, read_model_config
from tests import encoder_decoders as oracle
from tests.devices import DEVICES, placed
from tests.models import encoder_decoder_configs

TOLERANCE = 2e-4
LENGTHS = (1, 5, 17, 40, 95)
Folder = Callable[[str], Path]


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, oracle.VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return cache(lambda family: oracle.save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def t5(folder: Folder) -> Iterator[LLM]:
    with LLM(folder("t5"), device="cpu", dtype="float32", max_num_seqs=4, debug_checks=True) as llm:
        yield llm


def greedy(count: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, logprobs=0, ignore_eos=True)


def run(llm: LLM, each: list[Any], params: SamplingParams | None = None) -> list[RequestOutput]:
    given = [{"prompt_token_ids": one} if isinstance(one, list) else one for one in each]
    return llm.generate(given, params or greedy(), use_tqdm=False)


def drawn(count: int = 24) -> SamplingParams:
    """Sampled outputs, which differ from token to token."""
    return SamplingParams(temperature=1.0, seed=7, max_tokens=count, logprobs=0, ignore_eos=True)


def check(
    family: str, encoded: list[int], result: RequestOutput, start: list[int] | None = None, *, likeliest: bool = True
) -> None:
    """Compare tokens and logprobs of an output with the oracle's. likeliest: the tokens are."""
    [output] = result.outputs
    start = start or oracle.start(family)
    want = oracle.logprobs(oracle.build(family), encoded, [*start, *output.token_ids])[len(start) - 1 : -1]
    assert output.logprobs is not None
    for place, token in enumerate(output.token_ids):
        assert not likeliest or want[place, token] >= want[place].max() - TOLERANCE
        assert abs(output.logprobs[place][token].logprob - float(want[place, token])) < TOLERANCE


@pytest.mark.few(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_outputs_equal_those_of_transformers(family: str, device: str, folder: Folder) -> None:
    with LLM(folder(family), **placed(device), dtype="float32", max_num_seqs=3, debug_checks=True) as llm:
        for encoded, result in zip(prompts(), run(llm, prompts()), strict=True):
            check(family, encoded, result, likeliest=family not in oracle.GENERATION)
        for encoded, result in zip(prompts(), run(llm, prompts(), drawn()), strict=True):
            check(family, encoded, result, likeliest=False)
            assert len({*result.outputs[0].token_ids}) > 3  # so that places matter
        assert llm.engine.scheduler.figures().pages_used == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", oracle.GENERATION)
def test_outputs_begin_end_and_do_without_what_generation_configs_say(family: str, folder: Folder) -> None:
    """transformers' own loop gives the same tokens, also where the output ends at its limit."""
    theirs, begun = oracle.build(family), oracle.start(family)
    params = SamplingParams(temperature=0, max_tokens=14)
    with LLM(folder(family), device="cpu", dtype="float32", max_num_seqs=3, debug_checks=True) as llm:
        for encoded, result in zip(prompts(), run(llm, prompts(), params), strict=True):
            [output] = result.outputs
            most = 14 + len(begun) - 1  # theirs counts the forced one
            want = theirs.generate(torch.tensor([encoded]), max_new_tokens=most, do_sample=False, num_beams=1)
            assert [*begun, *output.token_ids] == want[0].tolist()
            limited = bool(theirs.generation_config.forced_eos_token_id)
            assert output.finish_reason == ("stop" if limited else "length")
        if limited:
            whole = run(llm, prompts(), SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
            ends = {each.outputs[0].token_ids[-1] for each in whole}
            assert ends != {theirs.generation_config.forced_eos_token_id}


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["t5", "bart", "marian", "m2m100"])
@torch.inference_mode()
def test_logprobs_are_no_worse_than_transformers_in_bfloat16(family: str, device: str, folder: Folder) -> None:
    exact = type(oracle.build(family)).from_pretrained(folder(family)).eval()
    for parameter in exact.parameters():
        parameter.copy_(parameter.bfloat16())
    theirs = type(exact).from_pretrained(folder(family)).eval().bfloat16()  # which leaves no part in float32
    errors = []
    with LLM(folder(family), **placed(device), dtype="bfloat16", max_num_seqs=3) as llm:
        for encoded, result in zip(prompts(), run(llm, prompts(), drawn(12)), strict=True):
            [output] = result.outputs
            decoded, start = [*oracle.start(family), *output.token_ids], len(oracle.start(family))
            want, other = (oracle.logprobs(each, encoded, decoded)[start - 1 : -1] for each in (exact, theirs))
            taken = torch.tensor(output.token_ids)[:, None]
            ours = torch.tensor([output.logprobs[n][t].logprob for n, t in enumerate(output.token_ids)])
            pair = (ours[:, None], other.gather(1, taken))
            errors.append([(each - want.gather(1, taken)).square().mean().item() for each in pair])
    ours_off, theirs_off = torch.tensor(errors).mean(0).sqrt().tolist()
    # A GPU draws other tokens than the CPU for which 1.2 was found: half as much again allows for the spread of some 60
    assert ours_off < (1.2 if device == "cpu" else 1.5) * theirs_off


@pytest.mark.dealt
def test_many_requests_take_turns_in_a_small_cache_and_are_preempted(folder: Folder) -> None:
    """The pages hold a few of the requests at once, and those that lose theirs encode again."""
    each = prompts(tuple(3 + 7 * n % 60 for n in range(16)), seed=3)
    with LLM(
        folder("t5"), device="cpu", dtype="float32", max_num_seqs=6, block_size=8, max_model_len=80,
        kv_cache_memory=650_000, debug_checks=True,
    ) as llm:  # fmt: skip
        results = run(llm, each, drawn(60))
        scheduler: Any = llm.engine.scheduler  # type: ignore[attr-defined]
        assert sum(scheduler.preemptions.values()) > 0
        assert scheduler.figures().pages_used == 0
    for encoded, result in zip(each, results, strict=True):
        check("t5", encoded, result, likeliest=False)


def test_encoder_inputs_wait_for_a_step_that_has_room(folder: Folder) -> None:
    """Steps run 40 tokens of encoder inputs, so they read one at a time; none is cut."""
    with LLM(folder("bart"), device="cpu", dtype="float32", max_num_batched_tokens=40, max_num_seqs=4) as llm:
        each = prompts((40, 39, 30, 1, 25))
        for encoded, result in zip(each, run(llm, each), strict=True):
            check("bart", encoded, result)
        with pytest.raises(InvalidRequest, match="the prompt has 41 tokens and the encoder takes 40 at most"):
            run(llm, prompts((41,)))


def test_long_encoder_inputs_do_not_hold_up_requests_that_decode_all_at_once(folder: Folder) -> None:
    """Beside a row that decodes only one input runs that alone takes longer than a step should."""
    with LLM(folder("t5"), device="cpu", dtype="float32", max_num_seqs=8, itl_target=0.001) as llm:
        engine: Any = llm.engine
        for number in range(7):
            encoder_ids = tuple(prompts((90,))[0])
            engine.add(
                Request(
                    id=f"{number}", prompt_token_ids=(0,), encoder_ids=encoder_ids, params=greedy(40), seed=0,
                    max_total_tokens=41,
                )
            )  # fmt: skip
            if not number:
                for _ in range(4):
                    engine.step()
        encoded = []
        while engine.has_work:
            engine.step()
            plan = engine.last_plan
            encoded.append(sum(bool(span.encoded) for span in plan.spans) if plan is not None else 0)
        assert sum(encoded) == 6
        assert max(encoded) == 1


def test_an_aborted_request_leaves_nothing(t5: LLM) -> None:
    engine: Any = t5.engine
    for number in range(3):
        engine.add(
            Request(
                id=f"{number}", prompt_token_ids=(0,), encoder_ids=tuple(prompts()[2]), params=greedy(), seed=0,
                max_total_tokens=60,
            )
        )  # fmt: skip
    for _ in range(4):
        engine.step()
    for number in range(3):
        assert engine.abort(f"{number}")
    while engine.has_work:
        engine.step()
    assert engine.scheduler.figures().pages_used == 0
    [result] = run(t5, [prompts()[3]])
    check("t5", prompts()[3], result)


def test_texts_are_the_encoders_input(t5: LLM) -> None:
    """The tokenizer puts the end behind the text, as T5's does."""
    words = " ".join(f"w{number}" for number in prompts()[2])
    spelled, listed = run(t5, [words, [*prompts()[2], 1]])
    assert spelled.outputs[0].token_ids == listed.outputs[0].token_ids
    assert spelled.prompt_token_ids == [*prompts()[2], 1]
    assert spelled.outputs[0].text.split()[0].startswith("w")


def test_a_decoder_prompt_is_what_the_output_follows(t5: LLM) -> None:
    encoded, begun = prompts()[2], [9, 40, 41, 7]
    pair = {"encoder_prompt": {"prompt_token_ids": encoded}, "decoder_prompt": {"prompt_token_ids": begun}}
    plain = {"encoder_prompt": {"prompt_token_ids": encoded}, "decoder_prompt": None}
    with_start = {"encoder_prompt": {"prompt_token_ids": encoded}, "decoder_prompt": {"prompt_token_ids": [0, *begun]}}
    one, two, three = run(t5, [pair, plain, with_start])
    check("t5", encoded, one, [0, *begun])
    check("t5", encoded, two)
    assert one.outputs[0].token_ids == three.outputs[0].token_ids


def test_a_decoder_prompt_as_text_gets_no_end_behind_it(t5: LLM) -> None:
    results = [
        run(t5, [{"encoder_prompt": "w5 w6", "decoder_prompt": begun}])[0].outputs[0].token_ids
        for begun in ("w9 w40", {"prompt": "w9 w40"}, {"prompt_token_ids": [9, 40]})
    ]
    assert results[0] == results[1] == results[2]


def test_several_completions_and_penalties_see_the_output_alone(t5: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
    [result] = run(t5, [prompts()[1]], params)
    assert len({tuple(each.token_ids) for each in result.outputs}) == 3
    [again] = run(t5, [prompts()[1]], params)
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in result.outputs]
    [once] = run(t5, [prompts()[1]], SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1e6))
    assert len({*once.outputs[0].token_ids}) == len(once.outputs[0].token_ids)


def test_an_output_ends_with_the_models_end(t5: LLM) -> None:
    [result] = run(t5, [prompts()[1]], SamplingParams(temperature=0, max_tokens=40, logit_bias={1: 100}))
    assert result.outputs[0].finish_reason == "stop"


def test_the_shared_table_is_counted_once(t5: LLM) -> None:
    spec = t5.assembly.model.spec
    assert parameters(spec).total == sum(each.numel() for each in oracle.build("t5").parameters())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(options: dict[str, Any], named: str, folder: Folder) -> None:
    with pytest.raises(InvalidConfig, match=f"{named}.*encoder|encoder.*{named}"):
        LLM(folder("t5"), device="cpu", **options)


@pytest.mark.parametrize(
    ("params", "named"),
    [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"guidance_scale": 2.0}, "guidance_scale")],
)
def test_parameters_that_cannot_be_are_refused_by_name(params: dict[str, Any], named: str, t5: LLM) -> None:
    with pytest.raises(InvalidRequest, match=named):
        run(t5, [prompts()[0]], SamplingParams(**params))


def test_prompts_that_cannot_be_are_refused(t5: LLM) -> None:
    for wrong, match in (
        ({"encoder_prompt": "w5", "decoder_prompt": {"prompt_token_ids": []}}, "decoder_prompt is empty"),
        ({"encoder_prompt": "w5", "cache_salt": "a"}, "may have decoder_prompt besides"),
        ({"encoder_prompt": "w5", "decoder_prompt": {"prompt": "w6", "mm_data": {"a": 1}}}, "mm_data"),
        ({"prompt_token_ids": [5] * 97}, "the encoder takes 96 at most"),
        ({"prompt_token_ids": [oracle.VOCAB]}, "outside the vocabulary"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            run(t5, [wrong])
    with pytest.raises(InvalidRequest, match="template"):
        t5.chat([{"role": "user", "content": "w5"}])


@pytest.mark.parametrize("config", encoder_decoder_configs.EVERY, ids=lambda config: config["model_type"])
def test_published_models_hold_exactly_the_tensors_transformers_would(config: dict[str, Any]) -> None:
    """An output layer of T5's own is among them, as published files have it."""
    ours = model_config(config)
    with torch.device("meta"):
        theirs = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    stored = {name: list(tensor.shape) for name, tensor in theirs.state_dict().items()}
    views = checkpoint_views(empty_decoder(ours.spec), ours.weights)
    spare = (*ours.spec.unused, "final_logits_bias", *(["lm_head."] if ours.spec.tie_word_embeddings else []))
    wanted = {name: shape for name, shape in stored.items() if name in views or not name.startswith(spare)}
    assert {name: view.shape for name, view in views.items()} == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_run_in_no_way_is_refused_by_name_with_the_reason(name: str, tmp_path: Path) -> None:
    """The decoders among them too, inside checkpoints with a tower for images."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "pegasus_x"}))
    for impl in ("auto", "ridgeline"):
        with pytest.raises(ModelLoadError, match=f"{name} does not run here: .*{REFUSED[name][:20]}"):
            read_model_config(tmp_path, impl=impl)


def test_a_translator_with_two_vocabularies_is_refused() -> None:
    config = {"architectures": ["MarianMTModel"], "share_encoder_decoder_embeddings": False}
    with pytest.raises(ModelLoadError, match=r"share_encoder_decoder_embeddings .* one tokenizer"):
        model_config(config)


def test_a_folder_that_does_not_say_how_outputs_begin_is_refused(folder: Folder, tmp_path: Path) -> None:
    config = json.loads((folder("t5") / "config.json").read_text())
    del config["decoder_start_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="decoder_start_token_id"):
        LLM(tmp_path, device="cpu")
