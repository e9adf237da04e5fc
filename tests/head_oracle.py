"""Heads that draft, as their papers describe them: whole sequences, no cache, and plain torch.

Each class makes a checkpoint of random numbers in the form in which such heads are published, and drafts greedily.

Legend:
    N  tokens
    M  model width
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

EPS, THETA = 1e-5, 10000.0
Draft = tuple[int, ...]  # drafts one behind the other


def norm(x_NM: Tensor, weight_M: Tensor, eps: float = EPS) -> Tensor:
    return x_NM * torch.rsqrt(x_NM.square().mean(-1, keepdim=True) + eps) * weight_M


def rotated(x: Tensor, theta: float = THETA) -> Tensor:
    """Rotate the heads [N, heads, width] of the positions 0 … N - 1."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(x: Tensor, of: Callable[[str], Tensor], heads: int, kv_heads: int) -> Tensor:
    q, k, v = (linear(x, of(f"self_attn.{name}_proj.weight")).unflatten(-1, (-1, Head.head_dim)) for name in "qkv")
    q, k = rotated(q), rotated(k)
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    return linear(mixed, of("self_attn.o_proj.weight"))


def mlp(x: Tensor, of: Callable[[str], Tensor]) -> Tensor:
    up = linear(x, of("mlp.up_proj.weight"))
    return linear(silu(linear(x, of("mlp.gate_proj.weight"))) * up, of("mlp.down_proj.weight"))


class Target:
    """A transformers model of which heads read the hidden states."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.embedding, self.output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self._known: dict[tuple[int, ...], list[Tensor]] = {}  # states by tokens: tests ask for those of the same texts

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> list[Tensor]:
        """The outputs of all layers, the last one's behind the final norm: [N, M] each."""
        key = tuple(tokens)
        if key not in self._known:
            found = self.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
            self._known[key] = [state[0] for state in found.hidden_states[1:]]
        return self._known[key]


class Head:
    """What heads of attention have in common. A subclass says what a pass makes of pairs."""

    heads, kv_heads, head_dim, intermediate = 4, 2, 32, 96
    method = ""

    def __init__(self, target: Target, seed: int = 0, taps: tuple[int, ...] = (0, 1, 2)) -> None:
        self.taps = taps
        self.target, self.width = target, target.config.hidden_size
        self.vocabulary = target.config.vocab_size
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def random(self, *shape: int) -> Tensor:
        spread = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        found = torch.randn(*shape, generator=self._generator) * spread
        return 1 + 0.1 * found if len(shape) == 1 else found

    def layer(self, prefix: str, inputs: int) -> None:
        width, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, shape in {
            "self_attn.q_proj": (q, inputs), "self_attn.k_proj": (kv, inputs), "self_attn.v_proj": (kv, inputs),
            "self_attn.o_proj": (width, q), "mlp.gate_proj": (self.intermediate, width),
            "mlp.up_proj": (self.intermediate, width), "mlp.down_proj": (width, self.intermediate),
            "post_attention_layernorm": (width,),
        }.items():  # fmt: skip
            self.tensors[f"{prefix}{name}.weight"] = self.random(*shape)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 512,
        }

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder

    def of(self, prefix: str) -> Callable[[str], Tensor]:
        return lambda name: self.tensors[prefix + name]

    def features(self, states: Sequence[Tensor]) -> Tensor:
        return states[-1]

    def output(self, embedded_NM: Tensor, feature_NM: Tensor) -> Tensor:
        """What takes the place of the features of the next tokens."""
        raise NotImplementedError

    def scores(self, output_NM: Tensor) -> Tensor:
        return linear(output_NM, self.target.output)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that are drafted behind these."""
        known, features = list(tokens), self.features(self.target.states(tokens[:-1]))
        for _ in range(count):
            found = self.output(self.target.embedding[known[1:]], features)[-1:]
            known.append(int(self.scores(found)[0].argmax()))
            features = torch.cat((features, found))
        return known[len(tokens) :]

    @torch.no_grad()
    def following(self, tokens: Sequence[int]) -> Callable[[Draft], Tensor]:
        """A function from drafts behind these tokens to the scores of what follows the last of them."""
        features = self.features(self.target.states(tokens[:-1]))

        @cache  # siblings follow the same drafts
        @torch.no_grad()
        def found(path: Draft) -> Tensor:
            known, own = list(tokens), features
            for token in path:
                own = torch.cat((own, self.output(self.target.embedding[known[1:]], own)[-1:]))
                known.append(token)
            return self.scores(self.output(self.target.embedding[known[1:]], own)[-1:])[0]

        return found

    def static_tree(self, tokens: Sequence[int], paths: Sequence[Draft]) -> set[Draft]:
        """The drafts of a tree of ranks, each with those before it."""
        following, drafted = self.following(tokens), dict[Draft, Draft]({(): ()})
        for path in sorted(paths, key=len):
            before = drafted[path[:-1]]
            drafted[path] = (*before, int(following(before).argsort(descending=True)[path[-1]]))
        return {drafted[path] for path in paths}

    def dynamic_tree(self, tokens: Sequence[int], depth: int, width: int, nodes: int) -> set[Draft]:
        """The drafts of EAGLE-2 (arXiv 2406.16858, section 4): expanded by width, then ranked again."""
        following, layer, all_found = self.following(tokens), [((), 0.0)], list[tuple[Draft, float]]()
        for _ in range(depth):
            found = list[tuple[Draft, float]]()
            for path, value in layer:
                logprobs = following(path).log_softmax(-1)
                best = logprobs.argsort(descending=True)[:width].tolist()
                found += [((*path, token), value + float(logprobs[token])) for token in best]
            all_found += found
            layer = sorted(found, key=lambda each: -each[1])[:width]
        return {path for path, _ in sorted(all_found, key=lambda each: -each[1])[:nodes]}


class Eagle(Head):
    method = "eagle"

    def make(self) -> None:
        self.layer("layers.0.", self.width)
        self.tensors["fc.weight"], self.tensors["fc.bias"] = (
            self.random(self.width, 2 * self.width), 0.1 * self.random(self.width),
        )  # fmt: skip
        self.tensors["embed_tokens.weight"] = self.target.embedding.detach().clone()

    def output(self, embedded_NM: Tensor, feature_NM: Tensor) -> Tensor:
        of = self.of("layers.0.")
        x = linear(torch.cat((embedded_NM, feature_NM), -1), self.tensors["fc.weight"], self.tensors["fc.bias"])
        x = x + attention(x, of, self.heads, self.kv_heads)
        return x + mlp(norm(x, of("post_attention_layernorm.weight")), of)


class Eagle3(Head):
    method = "eagle3"
    narrow = 0  # tokens that it scores; 0: all, by the target's matrix

    def make(self) -> None:
        self.layer("midlayer.", 2 * self.width)
        for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
            self.tensors[f"{name}.weight"] = self.random(self.width)
        self.tensors["fc.weight"] = self.random(self.width, len(self.taps) * self.width)
        if self.narrow:
            chosen = torch.randperm(self.vocabulary, generator=self._generator)[: self.narrow].sort().values
            self.tensors["d2t"] = chosen - torch.arange(self.narrow)
            self.tensors["t2d"] = torch.zeros(self.vocabulary, dtype=torch.bool).index_fill_(0, chosen, True)
            self.tensors["lm_head.weight"] = self.random(self.narrow, self.width)

    @property
    def config(self) -> dict[str, Any]:
        own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": self.narrow or self.vocabulary}
        return {**super().config, **own, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps)}}

    def features(self, states: Sequence[Tensor]) -> Tensor:
        return linear(torch.cat([states[tap] for tap in self.taps], -1), self.tensors["fc.weight"])

    def output(self, embedded_NM: Tensor, feature_NM: Tensor) -> Tensor:
        of = self.of("midlayer.")
        both = norm(embedded_NM, of("input_layernorm.weight")), norm(feature_NM, of("hidden_norm.weight"))
        x = feature_NM + attention(torch.cat(both, -1), of, self.heads, self.kv_heads)
        return x + mlp(norm(x, of("post_attention_layernorm.weight")), of)

    def scores(self, output_NM: Tensor) -> Tensor:
        x = norm(output_NM, self.tensors["norm.weight"])
        if not self.narrow:
            return linear(x, self.target.output)
        found = torch.full((len(x), self.vocabulary), float("-inf"))
        found[:, torch.arange(self.narrow) + self.tensors["d2t"]] = linear(x, self.tensors["lm_head.weight"])
        return found


class NarrowEagle3(Eagle3):
    narrow = 90


class Medusa(Head):
    method = "medusa"
    count = 4
    own = True

    def make(self) -> None:
        for head in range(self.count):
            self.tensors[f"{head}.0.linear.weight"] = self.random(self.width, self.width)
            self.tensors[f"{head}.0.linear.bias"] = 0.1 * self.random(self.width)
            if self.own:
                self.tensors[f"{head}.1.weight"] = self.random(self.vocabulary, self.width)

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": "medusa", "medusa_num_heads": self.count, "medusa_num_layers": 1}

    @torch.no_grad()
    def following(self, tokens: Sequence[int]) -> Callable[[Draft], Tensor]:
        x, of = self.target.states(tokens[:-1])[-1][-1], self.tensors

        @torch.no_grad()
        def found(path: Draft) -> Tensor:
            head = len(path)
            h = x + silu(linear(x, of[f"{head}.0.linear.weight"], of[f"{head}.0.linear.bias"]))
            return linear(h, of[f"{head}.1.weight"] if self.own else self.target.output)

        return found

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        following = self.following(tokens)
        return [int(following((0,) * head).argmax()) for head in range(count)]


class SharedMedusa(Medusa):
    own = False


class DFlash(Head):
    """arXiv 2602.06036, section 3, as z-lab publishes its heads. The block has one place for each draft that a step
    verifies at most, and the last token's in front."""

    method = "dflash"
    layers, block, places = 2, 8, 4
    first = 1  # of the places that are scored
    windows: tuple[int | None, ...] = (None, None)

    @property
    def mask(self) -> int:
        return self.vocabulary - 2

    def make(self) -> None:
        for index in range(self.layers):
            prefix = f"layers.{index}."
            self.layer(prefix, self.width)
            self.tensors[f"{prefix}input_layernorm.weight"] = self.random(self.width)
            for name in "qk":
                self.tensors[f"{prefix}self_attn.{name}_norm.weight"] = self.random(self.head_dim)
        for name in ("norm", "hidden_norm"):
            self.tensors[f"{name}.weight"] = self.random(self.width)
        self.tensors["fc.weight"] = self.random(self.width, len(self.taps) * self.width)

    @property
    def config(self) -> dict[str, Any]:
        own = {"target_layer_ids": list(self.taps), "mask_token_id": self.mask}
        kinds = ["full_attention" if window is None else "sliding_attention" for window in self.windows]
        shape = {"num_hidden_layers": self.layers, "block_size": self.block, "num_target_layers": 4}
        about = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "layer_types": kinds}
        window = next((window for window in self.windows if window is not None), None)
        return {**super().config, **shape, **about, "sliding_window": window, "dflash_config": own}

    def context(self, tokens: Sequence[int]) -> Tensor:
        states = self.target.states(tokens)
        joined = linear(torch.cat([states[tap] for tap in self.taps], -1), self.tensors["fc.weight"])
        return norm(joined, self.tensors["hidden_norm.weight"])

    def attended(self, x_BM: Tensor, context_NM: Tensor, of: Callable[[str], Tensor], window: int | None) -> Tensor:
        both = torch.cat((context_NM, x_BM))
        q, k, v = (
            linear(both, of(f"self_attn.{name}_proj.weight")).unflatten(-1, (-1, self.head_dim)) for name in "qkv"
        )
        q, k = norm(q, of("self_attn.q_norm.weight")), norm(k, of("self_attn.k_norm.weight"))
        q, k = rotated(q)[len(context_NM) :], rotated(k)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.head_dim**-0.5
        if window is not None:  # such layers are causal
            i, j = torch.arange(len(both))[len(context_NM) :, None], torch.arange(len(both))[None]
            scores = scores.masked_fill((j > i) | (j <= i - window), float("-inf"))
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        return linear(mixed, of("self_attn.o_proj.weight"))

    def embedded(self, tokens: list[int]) -> Tensor:
        found: Tensor = self.target.embedding[tokens]
        return found

    @torch.no_grad()
    def outputs(self, tokens: Sequence[int]) -> Tensor:
        """What is scored of the block behind these tokens."""
        context = self.context(tokens[:-1])
        x = self.embedded([tokens[-1], *[self.mask] * (self.places - 1)])
        for index, window in enumerate(self.windows):
            of = self.of(f"layers.{index}.")
            x = x + self.attended(norm(x, of("input_layernorm.weight")), context, of, window)
            x = x + mlp(norm(x, of("post_attention_layernorm.weight")), of)
        return norm(x, self.tensors["norm.weight"])[self.first :]

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        found: list[int] = self.scores(self.outputs(tokens)).argmax(-1).tolist()
        return found[:count]


class WindowedDFlash(DFlash):
    windows = (6, None)


class DSpark(DFlash):
    """DeepSpec's form: each place scores the token behind it, and a Markov head adds what the token before says."""

    method = "dspark"
    places, first, rank = 3, 0, 8
    kind = "vanilla"
    least, reads_markov = 0.0, True  # of the confidence head: the probability below which a draft ends the block's

    def make(self) -> None:
        super().make()
        self.tensors["markov_head.markov_w1.weight"] = self.random(self.vocabulary, self.rank)
        self.tensors["markov_head.markov_w2.weight"] = 3 * self.random(self.vocabulary, self.rank)
        shape = {"gated": (self.rank, self.width + self.rank), "rnn": (3 * self.rank, self.width + 2 * self.rank)}
        if self.kind in shape:
            name = "gate_proj" if self.kind == "gated" else "joint_proj"
            self.tensors[f"markov_head.{name}.weight"] = 2 * self.random(*shape[self.kind])
            self.tensors[f"markov_head.{name}.bias"] = self.random(shape[self.kind][0]) - 1
        self.tensors["embed_tokens.weight"] = self.target.embedding.detach().clone()
        self.tensors["lm_head.weight"] = self.target.output.detach().clone()
        self.tensors["confidence_head.proj.weight"] = self.random(1, self.width + self.rank * self.reads_markov)
        if self.reads_markov:  # so that both forms are tried
            self.tensors["confidence_head.proj.bias"] = self.random(1) - 1

    @property
    def config(self) -> dict[str, Any]:
        config = super().config
        own = {"architectures": ["Qwen3DSparkModel"], "markov_rank": self.rank, "markov_head_type": self.kind}
        flags = {"enable_confidence_head": True, "confidence_head_with_markov": self.reads_markov, "num_anchors": 8}
        return {**config, **config.pop("dflash_config"), **own, **flags}

    def sure(self, x_M: Tensor, before: int) -> float:
        """DeepSpec's confidence head: the probability that the draft of a place is right, if those before it are."""
        row = self.tensors["markov_head.markov_w1.weight"][before]
        read = torch.cat((x_M, row)) if self.reads_markov else x_M
        bias = self.tensors.get("confidence_head.proj.bias")
        return float(linear(read, self.tensors["confidence_head.proj.weight"], bias).sigmoid())

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        of, known, state = (lambda name: self.tensors[f"markov_head.{name}"]), [tokens[-1]], torch.zeros(self.rank)
        for x in self.outputs(tokens)[:count]:
            if self.sure(x, known[-1]) < self.least:
                break
            row = of("markov_w1.weight")[known[-1]]
            if self.kind == "gated":
                row = row * linear(torch.cat((x, row)), of("gate_proj.weight"), of("gate_proj.bias")).sigmoid()
            if self.kind == "rnn":
                joint = linear(torch.cat((state, row, x)), of("joint_proj.weight"), of("joint_proj.bias"))
                gate, candidate, row = (
                    joint[: self.rank],
                    joint[self.rank : 2 * self.rank],
                    joint[2 * self.rank :].tanh(),
                )
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            known.append(int((self.scores(x[None])[0] + linear(row, of("markov_w2.weight"))).argmax()))
        return known[1:]


class GatedDSpark(DSpark):
    kind = "gated"


class RecurrentDSpark(DSpark):
    kind = "rnn"


class SureDSpark(DSpark):
    """Its confidence head has no bias, as DeepSeek-V4's, and reads the outputs alone."""

    reads_markov = False


HEADS = (Eagle, Eagle3, NarrowEagle3, Medusa, SharedMedusa, DFlash, WindowedDFlash, DSpark)


class Mtp(Head):
    """The layer behind the last of a GLM-4.5, whose block is transformers' own. The checkpoint is the whole model's."""

    method = "mtp"
    axes: tuple[int, ...] = (1, -1)  # of positions

    def __init__(self, model: Any) -> None:
        """model: has the layer for multi-token prediction as its last one, which is taken away from it."""
        self.block, self.rotary = model.model.layers[-1], model.model.rotary_emb
        model.model.layers = model.model.layers[:-1]
        super().__init__(Target(model))

    def make(self) -> None:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.tensors[name + ".weight"] = self.random(self.width)
        self.tensors["eh_proj.weight"] = self.random(self.width, 2 * self.width)
        self.tensors["shared_head.head.weight"] = self.random(self.vocabulary, self.width)

    def output(self, embedded_NM: Tensor, feature_NM: Tensor) -> Tensor:
        of, eps = self.tensors, self.target.config.rms_norm_eps
        both = norm(embedded_NM, of["enorm.weight"], eps), norm(feature_NM, of["hnorm.weight"], eps)
        return self.ran(linear(torch.cat(both, -1), of["eh_proj.weight"]))

    def ran(self, x_NM: Tensor) -> Tensor:
        """What the block makes of whole sequences."""
        mask = torch.full((len(x_NM), len(x_NM)), float("-inf")).triu(1)[None, None]
        angles = self.rotary(x_NM[None], torch.arange(len(x_NM)).expand(self.axes))
        found = self.block(x_NM[None], attention_mask=mask, position_embeddings=angles)
        return (found[0] if isinstance(found, tuple) else found)[0]

    def scores(self, output_NM: Tensor) -> Tensor:
        normed = norm(output_NM, self.tensors["shared_head.norm.weight"], self.target.config.rms_norm_eps)
        return linear(normed, self.tensors["shared_head.head.weight"])


class QwenMtp(Mtp):
    """The layer of a Qwen3.5, of which the model has one of full attention as its last. Norms' weights are stored less
    one."""

    axes = (3, 1, -1)  # the text's, thrice

    def make(self) -> None:
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.tensors[f"mtp.{name}.weight"] = self.random(self.width) - 1
        self.tensors["mtp.fc.weight"] = self.random(self.width, 2 * self.width)
        for name, tensor in self.block.state_dict().items():
            self.tensors[f"mtp.layers.0.{name}"] = tensor.clone()

    def output(self, embedded_NM: Tensor, feature_NM: Tensor) -> Tensor:
        of, eps = self.tensors, self.target.config.rms_norm_eps
        names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
        both = [norm(x, 1 + of[name], eps) for x, name in zip((embedded_NM, feature_NM), names, strict=True)]
        x = self.ran(linear(torch.cat(both, -1), of["mtp.fc.weight"]))
        return norm(x, 1 + of["mtp.norm.weight"], eps)

    def scores(self, output_NM: Tensor) -> Tensor:
        return linear(output_NM, self.target.output)


class QwenNextMtp(QwenMtp):
    """The layer of a Qwen3-Next, which has experts. Positions have one axis."""

    axes = (1, -1)
