"""Mixers of linear attention and of RWKV that no library has: against what their papers say, token by token in float64.

The models run in the whole engine too: whatever the settings, a request's tokens are those of the whole sequence at
once. float32 arithmetic on numbers of order one: 1e-4 is a hundred roundings of sums of some dozen terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline import LLM, SamplingParams
from ridgeline.core.specs.linear import DeltaAttentionSpec
from ridgeline.core.specs.model import LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of, rows_of
from ridgeline.kernels.step.op import StepMetadata
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseStates, FreshRows
from ridgeline.models import model_config
from ridgeline.training.objective import training_decoder
from ridgeline.training.optimizer import initialize
from ridgeline.weights.loader import export_checkpoint
from ridgeline.worker.state.passes import pass_by_pass
from ridgeline.worker.state.states import DeviceRows

CPU = torch.device("cpu")
NORM = NormSpec(eps=1e-5)
KIMI = DeltaAttentionSpec(heads=3, head_dim=16, length=4, rank=8, norm=NORM)
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "gla": {**COMMON, "architectures": ["GatedLinearAttentionForCausalLM"], "gate_low_rank_dim": 4},
    "retnet": {**COMMON, "architectures": ["RetNetForCausalLM"], "value_dim": 24},
}


def filled(decoder: Decoder) -> Decoder:
    """Random parameters, wide enough for every part to show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.3 if parameter.ndim >= 2 else 0.2, generator=generator)
    return decoder


def weights_of(decoder: Decoder, index: int) -> dict[str, Tensor]:
    prefix = f"layers.{index}.mixer."
    return {n.removeprefix(prefix): p.double() for n, p in decoder.named_parameters() if n.startswith(prefix)}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def linear_attention(spec: ModelSpec, w: dict[str, Tensor], x_TM: Tensor) -> Tensor:
    """Gated linear attention and retention of one sequence, by their recurrences."""
    mixer: Any = spec.layers[0].mixer
    q, k, v, z, *low = (
        y.unflatten(-1, (-1, y.shape[-1])) for y in (x_TM @ w["linear_in.weight"].T).split(mixer.projected, 1)
    )
    q, k, v, z = (y[:, 0].unflatten(-1, (mixer.heads, -1)) for y in (q, k, v, z))
    if mixer.rope is not None:
        angle = torch.arange(len(x_TM)).double()[:, None, None] * 10000.0 ** -(
            torch.arange(0, mixer.key_dim, 2) / mixer.key_dim
        )
        q, k = (
            torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
            for a, b in (y.chunk(2, -1) for y in (q, k))
        )
        left = (1 - 2.0 ** -(5 + torch.arange(mixer.heads).double()))[None, :, None].expand_as(k)
    else:
        gate = low[0][:, 0] @ w["decay.weight"].T + w["decay.bias"]
        left = (gate.sigmoid() ** (1 / 16)).unflatten(-1, (mixer.heads, -1))
    state, out = torch.zeros(mixer.heads, mixer.key_dim, mixer.value_dim).double(), []
    for token in range(len(x_TM)):
        state = left[token, :, :, None] * state + k[token, :, :, None] * v[token, :, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[token]) * mixer.key_dim**-0.5)
    return (rms(torch.stack(out), w["norm.weight"]) * F.silu(z)).flatten(1) @ w["out.weight"].T


def delta_attention(w: dict[str, Tensor], x_TM: Tensor) -> Tensor:
    """Kimi's delta attention of one sequence, by its recurrence."""
    heads, size = KIMI.heads, KIMI.size
    qkv, of_a, of_z, b = (x_TM @ w["delta_in.weight"].T).split((3 * size, KIMI.rank, KIMI.rank, heads), 1)
    padded = F.pad(qkv.T, (KIMI.length - 1, 0))
    qkv = F.silu(F.conv1d(padded, w["conv.weight"], groups=3 * size).T)
    q, k, v, a, z = (
        y.unflatten(-1, (heads, -1))
        for y in (*qkv.split(size, 1), of_a @ w["decay.weight"].T, of_z @ w["gate.weight"].T)
    )
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    left = (-w["log_rate"].exp().view(heads, 1) * F.softplus(a + w["dt_bias"].unflatten(0, (heads, -1)))).exp()
    state, out = torch.zeros(heads, KIMI.head_dim, KIMI.head_dim).double(), []
    for token in range(len(x_TM)):
        state = left[token, :, :, None] * state
        moved = b[token].sigmoid()[:, None] * (v[token] - torch.einsum("hkv,hk->hv", state, k[token]))
        state = state + k[token, :, :, None] * moved[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[token]) * KIMI.head_dim**-0.5)
    return (rms(torch.stack(out), w["norm.weight"]) * z.sigmoid()).flatten(1) @ w["out.weight"].T


def whole(decoder: Decoder, mixers: Callable[[dict[str, Tensor], Tensor], Tensor], tokens: list[int]) -> Tensor:
    """The scores of every token of a model with plain feed-forwards."""
    p = {name: x.double() for name, x in decoder.named_parameters()}
    x = p["embed.weight"][tokens]
    for index in range(len(decoder.layers)):
        layer = f"layers.{index}"
        x = x + mixers(weights_of(decoder, index), rms(x, p[f"{layer}.mixer_norm.weight"]))
        gate, up = (rms(x, p[f"{layer}.feed_forward_norm.weight"]) @ p[f"{layer}.feed_forward.gate_up.weight"].T).chunk(
            2, 1
        )
        x = x + (F.silu(gate) * up) @ p[f"{layer}.feed_forward.down.weight"].T
    return rms(x, p["final_norm.weight"]) @ p["unembed.weight"].T


def logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    states = DenseStates(decoder.whole, 1, len(tokens), torch.float32, CPU)
    return decoder.logits(decoder(torch.tensor(tokens), torch.arange(len(tokens)), states))


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Path]:
    """A random model, and its folder."""
    import json

    from safetensors.torch import save_file

    config, folder = CONFIGS[request.param], tmp_path_factory.mktemp(request.param)
    decoder = filled(training_decoder(model_config(config).spec, torch.float32, CPU))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(export_checkpoint(decoder, model_config(config).weights), folder / "model.safetensors")
    return decoder, folder


PROMPTS = ([5], list(range(20, 97)), [7, 11, 13, 17, 19, 23, 29, 31, 37], [7, 11, 13, 17, 19, 23, 29, 31, 40, 41])


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_model_is_its_paper_s_and_what_was_trained_loads(model: tuple[Decoder, Path], drafts: int) -> None:
    decoder, folder = model
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "debug_checks": True}
    if drafts:
        lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        settings["speculative_config"] = {**lookup, "num_speculative_tokens": drafts}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(folder, max_num_batched_tokens=24, block_size=4, max_num_seqs=3, **settings) as llm:
        prompts = [list(prompt) for prompt in PROMPTS]
        for _ in range(2):
            results = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
            for prompt, result in zip(prompts, results, strict=True):
                [output] = result.outputs
                tokens = [*prompt, *output.token_ids]
                wanted = whole(decoder, lambda w, x: linear_attention(decoder.whole, w, x), tokens).log_softmax(-1)
                for place, entry in enumerate(output.logprobs or ()):
                    [(token, reported)] = entry.items()
                    at = wanted[len(prompt) - 1 + place]
                    assert reported.logprob == pytest.approx(at[token].item(), abs=1e-4)
                    assert at[token] >= at.amax() - 1e-4
            prompts = [[*p, *result.outputs[0].token_ids, 9] for p, result in zip(prompts, results, strict=True)]
        assert any(result.num_cached_tokens for result in results)


def test_a_model_learns(model: tuple[Decoder, Path]) -> None:
    """All parameters have gradients, and a step along them lowers the loss."""
    decoder = training_decoder(model[0].whole, torch.float32, CPU)
    initialize(decoder, 2, seed=0)
    tokens = [(7 * n) % 50 + 5 for n in range(40)]
    losses = []
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-2)
    for _ in range(6):
        loss = F.cross_entropy(logits(decoder, tokens[:-1]), torch.tensor(tokens[1:]))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5


@pytest.fixture(scope="module")
def kimi() -> Decoder:
    layer = LayerSpec(mixer=KIMI, feed_forward=MLPSpec(intermediate_size=40), norm=NORM)
    spec = ModelSpec(
        architecture="", vocab_size=64, hidden_size=32, layers=(layer,) * 2, final_norm=NORM, max_position_embeddings=99
    )
    return filled(Decoder(spec, Ops(Platform.of(CPU)), dtype=torch.float32, device=CPU))


def test_delta_attention_is_the_papers_whole_and_in_pieces(kimi: Decoder) -> None:
    tokens = torch.randint(64, (83,), generator=torch.Generator().manual_seed(1))
    wanted = whole(kimi, delta_attention, tokens.tolist())
    with torch.inference_mode():
        torch.testing.assert_close(logits(kimi, tokens.tolist()).double(), wanted, rtol=0, atol=1e-4)
        parts = [
            [torch.full((5, *part.shape), torch.nan) for part in layer.mixer.states[0].parts]
            for layer in kimi.spec.layers
        ]
        found, first = [], 0
        for length in (1, 30, 1, 1, 50):
            metadata = metadata_of([length], CPU, fresh=(0,) if first == 0 else ())
            metadata = replace(metadata, writes_R=metadata.reads_R)

            class States(list[FreshRows]):
                live_T = None

            states = States(FreshRows(tuple(each), metadata) for each in parts)
            hidden = kimi(tokens[first : first + length], torch.arange(first, first + length), states)
            found.append(kimi.logits(hidden))
            first += length
        torch.testing.assert_close(torch.cat(found).double(), wanted, rtol=0, atol=1e-4)


def test_delta_attention_leaves_the_state_behind_every_draft(kimi: Decoder) -> None:
    """It is that of steps of one token."""
    tokens = torch.randint(64, (24,), generator=torch.Generator().manual_seed(2))
    prompt, rest = tokens[:20], tokens[20:]

    def run(each: list[list[Tensor]], ids_T: Tensor, first: int, metadata: ScanMetadata) -> Tensor:
        class States(list[FreshRows]):
            live_T = None

        states = States(FreshRows(tuple(parts), metadata) for parts in each)
        return kimi.logits(kimi(ids_T, torch.arange(first, first + len(ids_T)), states))

    def found(start_R1: Tensor, *_: object) -> StepMetadata:
        one = torch.ones(1, dtype=torch.int64)
        return StepMetadata(one, one, torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int32), 0 * one)

    with torch.inference_mode():
        plain = [[torch.zeros(5, *part.shape) for part in layer.mixer.states[0].parts] for layer in kimi.spec.layers]
        run(plain, prompt, 0, replace(metadata_of([20], CPU, fresh=(0,)), writes_R=torch.ones(1, dtype=torch.int64)))
        verified = [[part.clone() for part in parts] for parts in plain]
        rows = DeviceRows(
            slots_R=torch.zeros(1, dtype=torch.int32), start_R1=torch.tensor([0, 4], dtype=torch.int32),
            kv_len_R=torch.tensor([24]), last_R=torch.tensor([3]), num_tokens=4, tokens_each=4, verifies=True,
        )  # fmt: skip
        logits_TU = run(verified, rest, 20, pass_by_pass(rows, found, torch.tensor([2, 3, 4])))
        for place in range(4):
            one_1U = run(plain, rest[place : place + 1], 20 + place, rows_of([1], [1], CPU))
            torch.testing.assert_close(logits_TU[place], one_1U[0], rtol=0, atol=1e-5)
            for mine, theirs in zip(chain.from_iterable(verified), chain.from_iterable(plain), strict=True):
                torch.testing.assert_close(mine[1 + place], theirs[1], rtol=0, atol=1e-5)


def test_delta_attention_can_be_trained(kimi: Decoder) -> None:
    decoder = training_decoder(kimi.whole, torch.float32, CPU)
    filled(decoder)
    logits(decoder, list(range(20))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.parameters())
