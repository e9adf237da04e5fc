"""The first DeepSeek-MoE as its authors publish it (modeling_deepseek.py of deepseek-ai/deepseek-moe-16b-base), in
plain torch and from the description alone. transformers has no class of it.

Legend:
    B  sequences
    S  tokens of a sequence
    H  heads
    G  key/value heads
    D  head width
    M  model width
    T  tokens
    E  experts
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "attention_bias": False,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "tie_word_embeddings": False,
}


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        width, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.theta, self.head_dim, bias = config.rope_theta, width // self.heads, config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)

    def forward(self, x_BSM: Tensor) -> Tensor:
        q_BHSD = self.rotated(self.q_proj(x_BSM).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        k_BGSD = self.rotated(self.k_proj(x_BSM).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2))
        v_BGSD = self.v_proj(x_BSM).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        k_BHSD, v_BHSD = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k_BGSD, v_BGSD))
        scores_BHSS = q_BHSD @ k_BHSD.transpose(-1, -2) / self.head_dim**0.5
        later_SS = torch.ones(x_BSM.shape[1], x_BSM.shape[1], dtype=torch.bool).triu(1)
        weights_BHSS = scores_BHSS.masked_fill(later_SS, -torch.inf).float().softmax(-1).to(x_BSM.dtype)
        return self.o_proj((weights_BHSS @ v_BHSD).transpose(1, 2).flatten(2))

    def rotated(self, x_BHSD: Tensor) -> Tensor:
        half = self.head_dim // 2
        angles = torch.arange(x_BHSD.shape[2])[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos().to(x_BHSD.dtype), angles.sin().to(x_BHSD.dtype)
        first, second = x_BHSD[..., :half], x_BHSD[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Every expert computes every token; those that were not chosen count nothing."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.top_k, self.normed = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(width, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, inner) for _ in range(config.n_routed_experts))
        count = config.n_shared_experts
        self.shared_experts = MLP(width, inner * count) if count is not None else None

    def forward(self, x_BSM: Tensor) -> Tensor:
        scores = self.gate(x_BSM).softmax(-1)
        chosen = scores.topk(self.top_k, dim=-1)
        weights = chosen.values
        if self.top_k > 1 and self.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weight_BSE = torch.zeros_like(scores).scatter(-1, chosen.indices, weights)
        y_BSM = sum(weight_BSE[..., e, None] * expert(x_BSM) for e, expert in enumerate(self.experts))
        return y_BSM if self.shared_experts is None else y_BSM + self.shared_experts(x_BSM)


class Layer(nn.Module):
    def __init__(self, config: SimpleNamespace, index: int) -> None:
        super().__init__()
        sparse = (
            config.n_routed_experts is not None
            and index >= config.first_k_dense_replace
            and index % config.moe_layer_freq == 0
        )
        self.self_attn = Attention(config)
        self.mlp = MoE(config) if sparse else MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSM: Tensor) -> Tensor:
        x_BSM = x_BSM + self.self_attn(self.input_layernorm(x_BSM))
        return x_BSM + self.mlp(self.post_attention_layernorm(x_BSM))


class Model(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSM = self.embed_tokens(ids_BS)
        for layer in self.layers:
            x_BSM = layer(x_BSM)
        return self.norm(x_BSM)


class DeepseekForCausalLM(nn.Module):
    """The model, with the parts of transformers' interface that the tests use."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.values = {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", **values}
        self.config = config = Config(**{**DEFAULTS, **self.values})
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids_BS: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(ids_BS)))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.values))
        save_file(self.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
