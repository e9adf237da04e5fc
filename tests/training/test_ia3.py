"""IA3 that is trained here has PEFT's gradients, and is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.training.ia3 import Ia3, Vector
from tests.training.test_tuned import TinyModel, close, examples, opened, runs_of, their_nats

pytest.importorskip("peft")

from peft import PeftModel

from tests import tiny_models

FAMILIES = {
    "llama": "all-linear",
    "gpt2": ("c_attn", "mlp.c_proj"),  # stored transposed, with biases
    "falcon_h1": ("k_proj", "v_proj", "down_proj"),  # outputs are multiplied
}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_vectors_are_pefts(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model(family)
    decoder, model = opened(folder)
    ia3 = Ia3(decoder, model, FAMILIES[family])
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ia3.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    ia3.export(tmp_path, str(folder))
    theirs = PeftModel.from_pretrained(tiny_models.build(family).double(), tmp_path, is_trainable=True).double()
    their_loss = their_nats(theirs, examples())
    their_loss.backward()
    loss = runs_of(decoder).nats(examples())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(gradients) == len(ia3.maps)
    for name, vector in ia3.maps.items():
        assert isinstance(vector, Vector)
        wanted = gradients[f"base_model.model.{name.replace('/', '.')}.ia3_l"]
        assert wanted is not None
        assert vector.factor.grad is not None
        ours = wanted.flatten()
        if not vector.of_inputs:
            place = vector.place
            ours = place.in_our_order(wanted)[:, 0]
            ours = ours if place.factor_O is None else ours / place.factor_O
        close(vector.factor.grad, ours, name)
    if family != "llama":
        return
    [example] = examples(1)
    with torch.no_grad():
        logprobs = theirs(torch.tensor([example.tokens])).logits[0, :-1].log_softmax(-1)
    prompts: Any = [{"prompt_token_ids": list(example.tokens)}]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    with LLM(
        folder, dtype="float32", device="cpu", skip_tokenizer_init=True, enable_lora=True, enable_lora_factors=True
    ) as llm:
        [output] = llm.generate(prompts, params, lora_request=LoRARequest("a", 1, tmp_path), use_tqdm=False)
    assert output.prompt_logprobs is not None
    for place, (token, reported) in enumerate(zip(example.tokens[1:], output.prompt_logprobs[1:], strict=True)):
        assert reported is not None
        assert reported[token].logprob == pytest.approx(float(logprobs[place, token]), abs=2e-4)


def test_a_model_without_the_usual_modules_needs_targets(tiny_model: TinyModel) -> None:
    with pytest.raises(InvalidConfig, match="is called k_proj; it has c_attn"):
        Ia3(*opened(tiny_model("gpt2")), "all-linear")
