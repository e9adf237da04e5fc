"""Gradients of fine-tuning are those of others' float64, however examples are packed, added up or recomputed.

Float32 on sums of some hundred products: 1e-4 of the largest gradient is some hundred roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import PackedCausal
from ridgeline.layers.linear import Linear
from ridgeline.models.config import ModelConfig
from ridgeline.training import lora as lora_module
from ridgeline.training.base import opened as begun
from ridgeline.training.conversations import AnswerPair, Example
from ridgeline.training.cross_entropy import cross_entropy_sum
from ridgeline.training.lora import LearntWeight, Lora, LoraConfig, ThinExperts, ThinMap
from ridgeline.training.objective import training_decoder
from ridgeline.training.preferences import Preferences, dpo_losses, with_reference
from ridgeline.training.tuned import NextTokens, PackRunner, recompute
from ridgeline.weights.adapters.places import expert_places
from ridgeline.weights.adapters.stacks import stacked_pairs
from ridgeline.weights.loader import empty_decoder, export_checkpoint, load_weights, read_model_config

pytest.importorskip("peft")

from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model

from tests import tiny_models

TinyModel = Callable[[str], Path]
CPU = torch.device("cpu")
TOLERANCE = 1e-4
# Fused projections, windows and caps, Conv1D, gates of shared experts, sinks, multipliers and states
FAMILIES: dict[str, Any] = {
    "llama": "all-linear",
    "gemma2": ("q_proj", "down_proj"),
    "gpt2": "all-linear",
    "qwen2_moe": ("o_proj", "shared_expert_gate"),
    "gpt_oss": ("q_proj", "o_proj"),
    "falcon_h1": ("k_proj", "in_proj", "gate_proj"),
}


def examples(count: int = 5, seed: int = 0) -> list[Example]:
    """Examples of unlike lengths, some longer than a window, in each of which some tokens count."""
    draw = Random(seed)
    found = []
    for line in range(count):
        tokens = tuple(draw.randrange(3, 300) for _ in range(draw.randrange(2, 30)))
        counted = (False, *(draw.random() < 0.6 for _ in tokens[2:]), True)
        found.append(Example(tokens, counted, line))
    return found


def opened(folder: Path) -> tuple[Decoder, ModelConfig]:
    model = read_model_config(folder)
    decoder = training_decoder(model.spec, torch.float32, CPU)
    load_weights(decoder, folder, model.weights)
    return decoder, model


def runs_of(decoder: Decoder, chunk: int = 7) -> PackRunner:
    return PackRunner(decoder, autocast=None, chunk=chunk)


def adapted(folder: Path, targets: Any) -> tuple[Decoder, Lora]:
    """Return a decoder with an adapter that is no longer at its beginning."""
    decoder, model = opened(folder)
    lora = Lora(decoder, model, LoraConfig(rank=3, alpha=5, targets=targets), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "up_OR" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return decoder, lora


def their_nats(network: Any, given: list[Example]) -> Tensor:
    """Return the nats of examples, each alone."""
    total = torch.zeros((), dtype=torch.float64)
    for each in given:
        logits = network(torch.tensor([each.tokens])).logits[0, :-1]
        flags = torch.tensor(each.counted[1:])
        total = total + F.cross_entropy(logits[flags], torch.tensor(each.tokens[1:])[flags], reduction="sum")
    return total


def close(found: Tensor, wanted: Tensor, name: str, within: float = TOLERANCE) -> None:
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)
    assert error < within, f"{name}: {error:.1e}"


@pytest.mark.parametrize("linear", [False, True])
def test_cross_entropy_in_parts_has_torchs_gradients(*, linear: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((23, 8), (40, 8)))
    targets = torch.randint(40, (23,), generator=draw)
    found = []
    for parts in (True, False):
        own, matrix = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())

        def scores(part: Tensor, matrix: Tensor = matrix) -> Tensor:
            return part @ matrix.T if linear else 3 * torch.tanh(part @ matrix.T / 3)

        if parts:
            given = matrix if linear else None
            loss = cross_entropy_sum(own, targets, scores, [matrix], chunk=5, matrix_VM=given)
        else:
            loss = F.cross_entropy(scores(own), targets, reduction="sum")
        (loss / 7).backward()
        found.append((loss.detach(), own.grad, matrix.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_are_those_of_peft_with_each_example_alone(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    decoder, lora = adapted(tiny_model(family), FAMILIES[family])
    lora.export(tmp_path, "base")
    base = tiny_models.build(family).double()
    base.config._experts_implementation = "eager"  # the other one multiplies no float64
    theirs = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).double()
    their_loss = their_nats(theirs, examples())
    their_loss.backward()
    loss = runs_of(decoder).nats(examples())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(gradients) == 2 * len(lora.maps)
    for name, thin in lora.maps.items():
        assert isinstance(thin, ThinMap)
        assert thin.down_RI.grad is not None
        assert thin.up_OR.grad is not None
        module = f"base_model.model.{name.replace('/', '.')}"
        close(thin.down_RI.grad, gradients[f"{module}.lora_A.weight"], name)
        ours_OR = thin.place.in_our_order(gradients[f"{module}.lora_B.weight"])
        factor_O = thin.place.factor_O  # outputs are multiplied behind the adapter
        close(thin.up_OR.grad, ours_OR if factor_O is None else ours_OR / factor_O[:, None], name)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", pytest.param("mamba2", marks=pytest.mark.thorough)])
def test_packed_gradients_of_all_weights_are_those_of_transformers(family: str, tiny_model: TinyModel) -> None:
    decoder, model = opened(tiny_model(family))
    runs_of(decoder).nats(examples()).backward()
    theirs = tiny_models.build(family).double()
    theirs.config._experts_implementation = "eager"  # the other one multiplies no float64
    their_nats(theirs, examples()).backward()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    wanted = dict(theirs.named_parameters())
    for name, gradient in export_checkpoint(decoder, model.weights).items():
        their = wanted[name].grad
        assert their is not None
        if name.rpartition(".")[2] != "A_log":  # we train the rate by itself
            close(gradient, their, name)


def gradients(lora: Lora) -> list[Tensor]:
    found = [p.grad.clone() for p in lora.parameters() if p.grad is not None]
    lora.zero_grad()
    return found


def test_packs_one_after_the_other_and_recomputed_layers_change_no_gradient(tiny_model: TinyModel) -> None:
    decoder, lora = adapted(tiny_model("llama"), "all-linear")
    objective = NextTokens(runs_of(decoder), examples())
    objective.sum(range(5)).backward()
    at_once = gradients(lora)
    for pack in ([3], [0, 4], [1, 2]):
        objective.sum(pack).backward()
    for one, other in zip(gradients(lora), at_once, strict=True):
        close(one, other, "added up")
    recompute(decoder)
    objective.sum(range(5)).backward()
    assert all(torch.equal(one, other) for one, other in zip(gradients(lora), at_once, strict=True))


def test_matrices_of_a_map_in_one_product_have_the_gradients_of_products_apart(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (lora_module.JOINED_RANK, 0):
        monkeypatch.setattr(lora_module, "JOINED_RANK", most)
        decoder, lora = adapted(tiny_model("llama"), ("q_proj", "v_proj", "gate_proj", "up_proj"))  # not k_proj
        loss = runs_of(decoder).nats(examples())
        loss.backward()
        learnt = [each.matrix for each in decoder.modules() if isinstance(each, Linear)]
        parts = {len(each.parts(torch.float32).parts) for each in learnt if isinstance(each, LearntWeight)}
        found.append((loss.detach(), gradients(lora), parts))
    (loss, joined, one), (wanted, apart, several) = found
    assert (one, several) == ({1}, {2})
    close(loss, wanted, "loss")
    for got, expected in zip(joined, apart, strict=True):
        close(got, expected, "gradient")


def test_products_follow_matrices_that_change(tiny_model: TinyModel) -> None:
    decoder, lora = adapted(tiny_model("llama"), "all-linear")
    runs = runs_of(decoder)
    with torch.no_grad():
        before, again = runs.nats(examples()), runs.nats(examples())
        next(iter(lora.parameters())).mul_(1.5)
        changed = runs.nats(examples())
    assert torch.equal(before, again)
    assert not torch.equal(before, changed)


def test_recurrent_layers_are_not_recomputed(tiny_model: TinyModel) -> None:
    with pytest.raises(InvalidConfig, match="leave out --recompute"):
        recompute(opened(tiny_model("mamba2"))[0])


def test_no_token_sees_another_example(tiny_model: TinyModel) -> None:
    decoder, _ = adapted(tiny_model("falcon_h1"), ("in_proj",))
    one, other, third = examples(3)
    with torch.no_grad():
        beside = runs_of(decoder).normed([other, one, third])[0][sum(other.counted) :][: sum(one.counted)]
        torch.testing.assert_close(beside, runs_of(decoder).normed([one])[0], rtol=1e-4, atol=1e-4)


def test_an_adapter_has_the_logits_of_peft_and_is_served(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    decoder, lora = adapted(folder, ("q_proj", "v_proj", "down_proj"))
    lora.export(tmp_path, str(folder))
    theirs = PeftModel.from_pretrained(tiny_models.build("llama"), tmp_path)
    [example] = examples(1)
    tokens = torch.tensor(example.tokens)
    with torch.no_grad():
        x_NM, targets_N, _ = runs_of(decoder).normed([example._replace(counted=(False, *[True] * (len(tokens) - 1)))])
        logprobs = decoder.scored(x_NM).log_softmax(-1)
        wanted = theirs(tokens[None]).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=2e-4)
    with LLM(folder, dtype="float32", device="cpu", skip_tokenizer_init=True, enable_lora=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        prompts: Any = [{"prompt_token_ids": list(example.tokens)}]
        [output] = llm.generate(prompts, params, lora_request=LoRARequest("a", 1, tmp_path), use_tqdm=False)
    assert output.prompt_logprobs is not None
    for place, (target, reported) in enumerate(zip(targets_N.tolist(), output.prompt_logprobs[1:], strict=True)):
        assert reported is not None
        assert reported[target].logprob == pytest.approx(float(wanted[place, target]), abs=2e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_new_adapter_is_that_of_get_peft_model(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """The same modules and sizes, the same spread of first numbers, and products of zero; merged back, the model."""
    decoder, model = opened(tiny_model(family))
    lora = Lora(decoder, model, LoraConfig(rank=3, alpha=5), seed=0)
    lora.export(tmp_path, "base")
    ours = {
        name.removesuffix(".weight"): each for name, each in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    base = tiny_models.build(family)
    with torch.no_grad():
        wanted = base(torch.tensor([examples(1)[0].tokens])).logits
    theirs = get_peft_model(base, PeftLoraConfig(r=3, lora_alpha=5, target_modules="all-linear"))
    parameters = {name.removesuffix(".default.weight"): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert {name: each.shape for name, each in ours.items()} == {name: p.shape for name, p in parameters.items()}
    for name, each in ours.items():
        bound = each.shape[1] ** -0.5 if name.endswith("lora_A") else 0.0
        assert each.abs().max() <= bound
        assert parameters[name].detach().abs().max() <= bound
    loaded = PeftModel.from_pretrained(tiny_models.build(family), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.merge_and_unload()(torch.tensor([examples(1)[0].tokens])).logits, wanted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon_h1"])
def test_magnitudes_have_the_gradients_of_peft_and_are_served(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Fused maps, Conv1D and biases, and multipliers behind the magnitudes. PEFT in float64; its norms have no gradient
    either."""
    decoder, model = opened(tiny_model(family))
    config = LoraConfig(rank=3, alpha=5, targets=FAMILIES[family], dora=True)
    lora = Lora(decoder, model, config, seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "up_OR" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
            elif "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=draw))
    lora.export(tmp_path / "adapter", "base")
    base = tiny_models.build(family).double()
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).double()
    their_loss = their_nats(theirs, examples())
    their_loss.backward()
    loss = runs_of(decoder).nats(examples())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(gradients) == 3 * len(lora.maps)
    for name, thin in lora.maps.items():
        assert isinstance(thin, ThinMap)
        assert thin.magnitude_O is not None
        own = [thin.down_RI.grad, thin.up_OR.grad, thin.magnitude_O.grad]
        module = f"base_model.model.{name.replace('/', '.')}"
        down, up, magnitude = (
            gradients[f"{module}.{each}"] for each in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight")
        )
        plain = replace(thin.place, factor_O=None)
        wanted = [down, plain.in_our_order(up), plain.in_our_order(magnitude.flatten()[:, None])[:, 0]]
        for ours, exact in zip(own, wanted, strict=True):
            assert ours is not None
            close(ours, exact, name)
    again, _ = opened(tiny_model(family))
    going_on = LoraConfig.of_folder(tmp_path / "adapter")
    assert going_on.dora
    Lora(again, model, going_on, seed=4)
    assert float(runs_of(again).nats(examples()).detach()) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tables_have_the_gradients_of_peft_and_go_on(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Of two tables, and of one that is both, whose rows are multiplied. The output layer's scores come in parts."""
    targets = ("q_proj", "embed_tokens", "lm_head")
    decoder, lora = adapted(tiny_model(family), targets)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "embed" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    lora.export(tmp_path, "base")
    theirs = PeftModel.from_pretrained(tiny_models.build(family).double(), tmp_path, is_trainable=True).double()
    their_loss = their_nats(theirs, examples())
    their_loss.backward()
    loss = runs_of(decoder).nats(examples())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(gradients) == 2 * len(lora.maps)
    for name, thin in lora.maps.items():
        assert isinstance(thin, ThinMap)
        ends = ("lora_embedding_A", "lora_embedding_B") if "embed" in name else ("lora_A.weight", "lora_B.weight")
        down, up = (gradients[f"base_model.model.{name.replace('/', '.')}.{end}"] for end in ends)
        assert thin.down_RI.grad is not None
        assert thin.up_OR.grad is not None
        close(thin.down_RI.grad, down, name)
        close(thin.up_OR.grad, thin.place.in_our_order(up), name)
    again, model = opened(tiny_model(family))
    Lora(again, model, LoraConfig.of_folder(tmp_path), seed=4)
    assert float(runs_of(again).nats(examples()).detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    for wrong in (LoraConfig(targets=targets, dora=True), LoraConfig(targets=targets, dropout=0.1)):
        with pytest.raises(InvalidConfig, match=r"table of the tokens|output layers"):
            Lora(opened(tiny_model(family))[0], model, wrong, seed=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("stacks", [("gate_up_proj", "down_proj"), ("down_proj",)], ids=" ".join)
def test_experts_have_the_gradients_of_peft_and_go_on(
    stacks: tuple[str, ...], family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Of all matrices and of one."""
    decoder, model = opened(tiny_model(family))
    config = LoraConfig(rank=3, alpha=5, targets=("q_proj", *(f"experts.{each}" for each in stacks)))
    lora = Lora(decoder, model, config, seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "up_" in name.rpartition(".")[2]:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    lora.export(tmp_path, "base")
    base = tiny_models.build(family).double()
    base.config._experts_implementation = "eager"
    theirs = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).double()
    their_loss = their_nats(theirs, examples())
    their_loss.backward()
    loss = runs_of(decoder).nats(examples())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(gradients) == 2 * (len(lora.maps) + len(lora.stacks))
    for name, stack in lora.stacks.items():
        assert isinstance(stack, ThinExperts)
        owner, _, kind = name.replace("/", ".").replace("block_sparse_moe", "mlp").rpartition(".")
        inner = ".base_layer" if len(stacks) > 1 and kind != "down_proj" else ""
        wanted = [gradients[f"base_model.model.{owner}{inner}.lora_{half}.weight"] for half in "AB"]
        own = ThinExperts(stack.place, 3, CPU, torch.Generator())
        own.down_ERI.data, own.up_EOR.data = stack.down_ERI.grad, stack.up_EOR.grad  # type: ignore[assignment]
        for ours, exact in zip(own.in_their_form(), wanted, strict=True):
            close(ours, exact, name)
    again, _ = opened(tiny_model(family))
    Lora(again, model, LoraConfig.of_folder(tmp_path), seed=4)
    assert float(runs_of(again).nats(examples()).detach()) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_matrices_are_read_as_they_are_written(family: str, tiny_model: TinyModel) -> None:
    """Rows of the second family's fused pairs alternate in files."""
    model, draw = read_model_config(tiny_model(family)), torch.Generator().manual_seed(3)
    places = expert_places(empty_decoder(model.spec), model.weights)
    place = next(each for name, each in places.items() if name.endswith("experts.gate_up_proj"))
    thin = ThinExperts(place, 3, CPU, draw)
    thin.up_EOR.data.normal_(generator=draw)
    pairs = list(stacked_pairs(Path("x"), place, *thin.in_their_form()))
    assert torch.equal(torch.cat([pair.up_OR for pair in pairs], 1), thin.up_EOR)
    assert all(torch.equal(pair.down_RI, thin.down_ERI) for pair in pairs)
    assert place.source.alternating == (family == "gpt_oss")


def test_dropout_leaves_each_product_its_own_inputs_in_training_alone(tiny_model: TinyModel) -> None:
    """Numbers follow from the step. What is left out is right on average, and gradients are those of the same mask."""
    decoder, model = opened(tiny_model("llama"))
    lora = Lora(decoder, model, LoraConfig(rank=3, alpha=5, dropout=0.4, targets=("q_proj", "v_proj")), seed=0)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "up_OR" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    runs = runs_of(decoder)

    def nats(step: int | None) -> float:
        if step is None:
            return float(runs.nats(examples()).detach())
        with lora.dropout.of_step(step):
            return float(runs.nats(examples()).detach())

    plain, several = nats(None), [nats(step) for step in range(40)]
    assert nats(3) == several[3]
    assert len({*several}) == 40
    assert plain == nats(None)
    assert abs(sum(several) / 40 - plain) < 4 * torch.tensor(several).std() / 40**0.5 + 1e-3 * plain
    weight = decoder.layers[0].mixer.qkv.matrix
    assert isinstance(weight, LearntWeight)
    x_TI = torch.randn(6, weight.inner.stored.shape[1], requires_grad=True)
    seen: list[Tensor] = []
    weight.dropout.runs = True
    kept = weight.dropout._draw.get_state()
    y_TO = weight.linear(x_TI, None)
    weight.dropout._draw.set_state(kept)
    dense_OI = weight.inner.linear(torch.eye(x_TI.shape[1]), None).T
    wanted_TO = x_TI @ dense_OI.T
    for first, each in sorted(weight.thin.items()):
        mask_TI = (torch.rand(x_TI.shape, generator=weight.dropout._draw) >= 0.4) / 0.6
        seen.append(mask_TI)
        added_TO = weight.scale * (x_TI * mask_TI) @ each.down_RI.T @ each.up_OR.T
        wanted_TO = wanted_TO + F.pad(added_TO, (first, y_TO.shape[1] - first - added_TO.shape[1]))
    weight.dropout.runs = False
    assert not torch.equal(*seen)
    torch.testing.assert_close(y_TO, wanted_TO)
    learn = [x_TI, *(m for _, each in sorted(weight.thin.items()) for m in (each.down_RI, each.up_OR))]
    for ours, exact in zip(
        *(torch.autograd.grad(each.square().sum(), learn) for each in (y_TO, wanted_TO)), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_an_unknown_target_is_refused_with_those_there_are(tiny_model: TinyModel) -> None:
    decoder, model = opened(tiny_model("llama"))
    with pytest.raises(InvalidConfig, match=r"called query; it has down_proj, .*v_proj"):
        Lora(decoder, model, LoraConfig(targets=("q_proj", "query")), seed=0)


def test_dpo_has_the_losses_and_gradients_of_a_float64_reference(tiny_model: TinyModel, tmp_path: Path) -> None:
    decoder, lora = adapted(tiny_model("llama"), "all-linear")
    pairs = [AnswerPair(one, other) for one, other in zip(examples(3), examples(3, seed=1), strict=True)]
    margins = with_reference(runs_of(opened(tiny_model("llama"))[0]), pairs)
    loss = Preferences(runs_of(decoder), margins, beta=0.3).sum(range(3))
    loss.backward()
    lora.export(tmp_path, "base")
    base = tiny_models.build("llama").double()
    wanted = torch.zeros((), dtype=torch.float64)
    theirs = PeftModel.from_pretrained(tiny_models.build("llama").double(), tmp_path, is_trainable=True).double()
    for pair in pairs:
        policy = their_nats(theirs, [pair.rejected]) - their_nats(theirs, [pair.chosen])
        reference = their_nats(base, [pair.rejected]) - their_nats(base, [pair.chosen])
        wanted = wanted - F.logsigmoid(0.3 * (policy - reference.detach()))
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    by_name = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, thin in lora.maps.items():
        gradient = by_name[f"base_model.model.{name.replace('/', '.')}.lora_A.weight"]
        assert gradient is not None
        close(thin.down_RI.grad, gradient, name)  # type: ignore[arg-type]


def test_dpo_begins_at_the_logarithm_of_two() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(
        dpo_losses(zeros + 3, zeros + 1, zeros + 2, 0.1), zeros + torch.tensor(2.0).double().log()
    )


def all_gradients(folder: Path, device: torch.device) -> list[Tensor]:
    model = read_model_config(folder)
    decoder = training_decoder(model.spec, torch.float32, device)
    load_weights(decoder, folder, model.weights)
    runs_of(decoder).nats(examples()).backward()
    return [p.grad.cpu() for p in decoder.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "bloom"])
def test_a_mask_keeps_examples_apart_as_running_them_alone_does(
    family: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    alone = all_gradients(tiny_model(family), CPU)
    monkeypatch.setattr(PackedCausal, "attend", lambda self, *given: self.masked(*given[:3]))
    for one, other in zip(all_gradients(tiny_model(family), CPU), alone, strict=True):
        close(one, other, family)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_training_on_a_gpu_has_the_gradients_of_a_cpu(method: Any, tmp_path: Path) -> None:
    """Kernels of whole packs, of one length and of several, beside the plain ops: bfloat16 through two layers, whose
    weights are small enough for roundings not to grow."""
    network = tiny_models.build("llama", hidden_size=256, intermediate_size=512)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.1 if parameter.ndim > 1 else 1.0)
    network.save_pretrained(tmp_path)
    folder, model = tmp_path, read_model_config(tmp_path)
    for given in (examples(), [Example(tuple(range(3 + i, 35 + i)), (False, *(True,) * 31), i) for i in range(3)]):
        found = []
        for device, dtype in ((CPU, torch.float32), (torch.device("cuda"), torch.bfloat16)):
            decoder = begun(folder, model, method, dtype, device)
            learnt = decoder if method == "full" else Lora(decoder, model, LoraConfig(rank=3), seed=0)
            if method != "full":
                with torch.no_grad():
                    for name, parameter in learnt.named_parameters():
                        parameter.add_(0.05 if "up_OR" in name else 0.0)
            wide = method == "full" and device.type == "cuda"
            runs = PackRunner(decoder, autocast=dtype if wide else None, chunk=29)
            loss = runs.nats(given)
            loss.backward()
            gradients = [p.grad.float().cpu().flatten() for p in learnt.parameters() if p.grad is not None]
            found.append((float(loss.detach()), torch.cat(gradients)))
        (wanted, exact), (loss_there, rounded) = found
        assert loss_there == pytest.approx(wanted, rel=2e-2)
        assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "bloom"])
def test_masks_keep_examples_apart_on_a_gpu(family: str, tiny_model: TinyModel) -> None:
    """TF32 and the kernel's other order: 1e-3 of the largest gradient."""
    alone = all_gradients(tiny_model(family), CPU)
    for one, other in zip(all_gradients(tiny_model(family), torch.device("cuda")), alone, strict=True):
        assert (one - other).abs().max() < 1e-3 * other.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1"])  # the second has multipliers in its weights
def test_training_goes_on_from_an_adapter(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    folder = tiny_model(family)
    _, lora = adapted(folder, "all-linear")
    lora.export(tmp_path / "first", "tiny")
    again, model = opened(folder)
    config = LoraConfig.of_folder(tmp_path / "first")
    assert (config.rank, config.alpha) == (3, 5)
    begun = Lora(again, model, config, seed=9)
    for (name, one), other in zip(lora.named_parameters(), begun.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7, msg=name)
    begun.export(tmp_path / "second", "tiny")
    one, other = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("first", "second"))
    assert one.keys() == other.keys()
    with pytest.raises((InvalidConfig, ModelLoadError), match="this model"):
        Lora(*opened(tiny_model("llama" if family == "falcon_h1" else "falcon_h1")), config, seed=0)  # another model
