"""The policy's numbers are those of an engine that is deterministic, bit for bit, and its gradients those of training.

Gradients: float32 on sums of some hundred products: 1e-4 of the largest is some hundred roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.ops import DETERMINISTIC
from ridgeline.training import policy as policy_module
from ridgeline.training.conversations import Example
from ridgeline.training.learnt import FullWeights, MergedLora
from ridgeline.training.lora import Lora, LoraConfig
from ridgeline.training.objective import training_decoder
from ridgeline.training.policy import TrainedPolicy
from ridgeline.training.tuned import PackRunner
from ridgeline.weights.loader import load_weights, read_model_config

TinyModel = Callable[[str], Path]
CPU = torch.device("cpu")
# Norms of heads, windows with caps and other norms, biases with slopes, learned positions and LayerNorm
FAMILIES = ("qwen3", "gemma2", "bloom", "mixed")
PROMPTS = [[5, 6, 7], [9] * 20, list(range(3, 40)), [11, 4]]


def policy_of(folder: Path) -> TrainedPolicy:
    model = read_model_config(folder)
    policy = TrainedPolicy(model.spec, torch.float32, CPU)
    policy.check_loaded()
    load_weights(policy.decoder, folder, model.weights)
    return policy


def drawn(folder: Path, **options: object) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, answers and log-probabilities."""
    with LLM(folder, dtype="float32", device="cpu", deterministic=True, skip_tokenizer_init=True, **options) as llm:
        params = [SamplingParams(n=3, max_tokens=24, logprobs=0, seed=i, detokenize=False) for i in range(len(PROMPTS))]
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    found = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for one in output.outputs:
            assert one.logprobs is not None
            logprobs = [one.logprobs.logprob(i) or 0.0 for i in range(len(one.token_ids))]  # type: ignore[attr-defined]
            found.append((prompt, list(one.token_ids), logprobs))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_have_the_rollout_s_bits(tiny_model: TinyModel, family: str) -> None:
    """However requests were cut into steps."""
    folder = tiny_model(family)
    answers = drawn(folder)
    assert answers == drawn(folder, max_num_batched_tokens=13, max_num_seqs=5)
    policy = policy_of(folder)
    with torch.no_grad():
        scored = policy.score([(prompt, answer) for prompt, answer, _ in answers])
    assert torch.equal(scored.logprob_N, torch.tensor([each for *_, own in answers for each in own]))
    for prompt, answer, own in answers[:2]:  # alone
        assert policy.score([(prompt, answer)]).logprob_N.tolist() == own


@pytest.mark.thorough
def test_the_kernels_of_a_gpu_give_both_the_same_bits(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the interpreter of Triton, where there is no GPU."""
    pytest.importorskip("triton")
    names = ("rms_norm", "gated_activation", "paged_attention", "embedding")
    kernels = {**DETERMINISTIC, **dict.fromkeys(names, "triton")}
    folder = tiny_model("qwen3")
    params = [SamplingParams(n=2, max_tokens=5, logprobs=0, seed=i, detokenize=False) for i in range(2)]
    prompts = PROMPTS[:2]
    with LLM(folder, dtype="float32", device="cpu", skip_tokenizer_init=True, kernels=kernels) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    answers = [(p, one) for p, each in zip(prompts, outputs, strict=True) for one in each.outputs]
    monkeypatch.setattr(policy_module, "deterministic_ops", lambda platform: kernels)
    policy = policy_of(folder)
    assert policy.decoder.ops.chosen["paged_attention"] == "triton"
    found = policy.score([(prompt, one.token_ids) for prompt, one in answers]).logprob_N
    drawn = [one.logprobs.logprob(i) for _, one in answers for i in range(len(one.token_ids))]  # type: ignore[union-attr]
    assert found.tolist() == drawn
    found.sum().backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_plain_training(tiny_model: TinyModel, family: str) -> None:
    folder = tiny_model(family)
    sequences = [(prompt, answer) for prompt, answer, _ in drawn(folder)]
    policy, model = policy_of(folder), read_model_config(folder)
    policy.score(sequences).logprob_N.sum().backward()
    plain = training_decoder(model.spec, torch.float32, CPU)
    load_weights(plain, folder, model.weights)
    examples = [Example((*p, *a), (*(False for _ in p), *(True for _ in a)), 0) for p, a in sequences]
    PackRunner(plain, autocast=None, chunk=512).logprobs(examples).sum().backward()
    pairs = list(zip(policy.decoder.named_parameters(), plain.parameters(), strict=True))
    assert pairs
    for (name, own), other in pairs:
        if other.grad is None:
            continue
        assert own.grad is not None, name
        assert (own.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max(), name


def test_a_temperature_divides_scores_and_leaves_the_rollouts_bits(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    rolled = drawn(folder)
    sequences, model, policy = [each[:2] for each in rolled], read_model_config(folder), policy_of(folder)
    policy.temperature = 0.7
    found = policy.score(sequences)
    assert found.plain_N.tolist() == [one for *_, logprobs in rolled for one in logprobs]
    found.logprob_N.sum().backward()
    plain = training_decoder(model.spec, torch.float32, CPU)
    load_weights(plain, folder, model.weights)
    examples = [Example((*p, *a), (*(False for _ in p), *(True for _ in a)), 0) for p, a in sequences]
    x_NM, targets_N, _ = PackRunner(plain, autocast=None, chunk=512).normed(examples)
    all_NV = (plain.scored(x_NM) / 0.7).log_softmax(-1)
    wanted_N = all_NV.gather(1, targets_N[:, None])[:, 0]
    wanted_N.sum().backward()
    torch.testing.assert_close(found.logprob_N, wanted_N, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.entropy_N, -(all_NV.exp() * all_NV).sum(-1), rtol=1e-4, atol=1e-4)
    for (name, own), other in zip(policy.decoder.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            assert own.grad is not None, name
            assert (own.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max(), name


def test_a_merged_adapter_has_the_gradients_of_one_beside_the_weights(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3")
    model, config = read_model_config(folder), LoraConfig(rank=3)
    policy, plain = policy_of(folder), training_decoder(model.spec, torch.float32, CPU)
    load_weights(plain, folder, model.weights)
    merged, beside = MergedLora(policy.decoder, model, config, 0), Lora(plain, model, config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one, other in zip(merged.parameters(), beside.parameters(), strict=True):
            one.copy_(0.1 * torch.randn(one.shape, generator=generator))
            other.copy_(one)
    merged.write()
    sequences = [(PROMPTS[2], [8, 9, 10]), (PROMPTS[0], [4] * 7)]
    scored = policy.score(sequences).logprob_N
    scored.sum().backward()
    examples = [Example((*p, *a), (*(False for _ in p), *(True for _ in a)), 0) for p, a in sequences]
    found = PackRunner(plain, autocast=None, chunk=512).logprobs(examples)
    assert torch.allclose(found, torch.stack([each.sum() for each in scored.split([3, 7])]), rtol=1e-4)
    found.sum().backward()
    for one, other in zip(merged.parameters(), beside.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max()
    before = policy.score(sequences).logprob_N.detach()
    with merged.reference():
        assert torch.equal(policy.score(sequences).logprob_N, policy_of(folder).score(sequences).logprob_N)
    assert torch.equal(policy.score(sequences).logprob_N, before)


@pytest.mark.parametrize(
    "wrong", [LoraConfig(dora=True), LoraConfig(dropout=0.1), LoraConfig(targets=("q_proj", "lm_head"))], ids=str
)
def test_adapters_that_rollouts_cannot_run_are_refused(wrong: LoraConfig, tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    with pytest.raises(InvalidConfig, match="rollouts run the weights that learn"):
        MergedLora(policy_of(folder).decoder, read_model_config(folder), wrong, 0)


def test_the_reference_of_an_adapter_that_goes_on_is_the_adapter_as_it_was(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("qwen3")
    model, policy = read_model_config(folder), policy_of(folder)
    first = MergedLora(policy.decoder, model, LoraConfig(rank=3), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in first.parameters():
            one.copy_(0.1 * torch.randn(one.shape, generator=generator))
    first.write()
    first.export(tmp_path, "tiny")
    sequences = [(PROMPTS[2], [8, 9, 10])]
    wanted = policy.score(sequences).logprob_N.detach()
    again = policy_of(folder)
    plain = again.score(sequences).logprob_N.detach()
    second = MergedLora(again.decoder, model, LoraConfig.of_folder(tmp_path), 0)
    torch.testing.assert_close(again.score(sequences).logprob_N.detach(), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, wanted, atol=1e-2)
    with torch.no_grad():
        for one in second.parameters():
            one.mul_(2)
    second.write()
    assert not torch.allclose(again.score(sequences).logprob_N.detach(), wanted, atol=1e-2)
    with second.reference():
        torch.testing.assert_close(again.score(sequences).logprob_N.detach(), wanted, rtol=1e-5, atol=1e-5)


def test_weights_in_16_bits_learn_through_copies(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3")
    model = read_model_config(folder)
    policy = TrainedPolicy(model.spec, torch.bfloat16, CPU)
    load_weights(policy.decoder, folder, model.weights)
    learnt = FullWeights(policy.decoder)
    policy.score([(PROMPTS[0], [4, 5])]).logprob_N.sum().backward()
    masters = dict(learnt.masters.items())
    assert all(each.dtype == torch.float32 and each.grad is not None for each in masters.values())
    weight, master = policy.decoder.layers[0].mixer.out.weight, masters["layers/0/mixer/out/weight"]
    with torch.no_grad():
        master.add_(1.0)
    learnt.write()
    assert torch.equal(weight, master.bfloat16())


@pytest.mark.parametrize("family", ["mixtral", "mamba2"])
def test_other_models_are_refused(tiny_model: TinyModel, family: str) -> None:
    folder = tiny_model(family)
    with pytest.raises(InvalidConfig, match="layers are attention and feed-forwards of one expert"):
        policy_of(folder)
    with pytest.raises(InvalidConfig, match="deterministic on cpu is for"):
        LLM(folder, device="cpu", deterministic=True, skip_tokenizer_init=True)
