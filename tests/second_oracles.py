"""Mixers in plain torch, token by token and in float64, written from the papers that describe them: second oracles, so
that a mistake of transformers cannot become one of ours.

Each function returns what a mixer makes of one sequence. It takes the tensors of the mixer by their names in a
checkpoint, and the entries of config.json. `swapped` puts them in place of the mixers of a transformers model, whose
other parts stay; `repair` mends what is known to be wrong in the transformers at hand.

Legend:
    T  tokens of the sequence
    M  model width
    C  channels
    H  heads
    G  groups of heads
    P  width of a head's values
    S  width of a state, and of a head's keys
    R  rotated numbers of a head
    X  columns of a projection
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
Config = Any  # the config of a transformers model
Mixer = Callable[[Weights, Config, Tensor], Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def rms(x: Tensor, eps: float, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def causal_conv(x_TC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None) -> Tensor:
    """Every output is a weighted sum of its channel's last K inputs, of which the newest has the last weight."""
    length = weight_C1K.shape[-1]
    past = torch.cat((x_TC.new_zeros(length - 1, x_TC.shape[1]), x_TC))
    y_TC = sum(past[k : k + len(x_TC)] * weight_C1K[:, 0, k] for k in range(length))
    assert isinstance(y_TC, Tensor)
    return y_TC if bias_C is None else y_TC + bias_C


def grouped_norm(y_TC: Tensor, z_TC: Tensor, weight_C: Tensor, eps: float, groups: int, before_gate: bool) -> Tensor:
    """`RMSNormGated` of mamba_ssm: the columns of every group have a norm of their own."""
    y_TC = y_TC if before_gate else y_TC * F.silu(z_TC)
    y_TC = rms(y_TC.unflatten(-1, (groups, -1)), eps).flatten(-2) * weight_C
    return y_TC * F.silu(z_TC) if before_gate else y_TC


# ---- state spaces ---------------------------------------------------------------------------------------------------


def mamba(w: Weights, c: Config, x_TM: Tensor) -> Tensor:
    """Algorithm 2 of Mamba (arXiv 2312.00752). Jamba (2403.19887) and Falcon Mamba (2410.05355) norm r, b and c."""
    x_TC, z_TC = linear(w, "in_proj", x_TM).chunk(2, dim=-1)
    x_TC = F.silu(causal_conv(x_TC, w["conv1d.weight"], w.get("conv1d.bias")))
    rate_CS = -w["A_log"].exp()
    states = rate_CS.shape[1]
    r_TX, b_TS, c_TS = linear(w, "x_proj", x_TC).split((w["dt_proj.weight"].shape[1], states, states), dim=-1)
    if "dt_layernorm.weight" in w:
        r_TX, b_TS, c_TS = (
            rms(each, c.rms_norm_eps, w[f"{name}_layernorm.weight"])
            for name, each in (("dt", r_TX), ("b", b_TS), ("c", c_TS))
        )
    elif c.model_type == "falcon_mamba":
        r_TX, b_TS, c_TS = (rms(each, c.mixer_rms_eps) for each in (r_TX, b_TS, c_TS))
    dt_TC = F.softplus(linear(w, "dt_proj", r_TX))
    h_CS, y_TC = torch.zeros_like(rate_CS), torch.empty_like(x_TC)
    for t in range(len(x_TC)):
        dt_C1 = dt_TC[t, :, None]
        h_CS = (dt_C1 * rate_CS).exp() * h_CS + dt_C1 * b_TS[t] * x_TC[t, :, None]
        y_TC[t] = h_CS @ c_TS[t] + w["D"] * x_TC[t]
    return linear(w, "out_proj", y_TC * F.silu(z_TC))


def mamba2(w: Weights, c: Config, x_TM: Tensor) -> Tensor:
    """State space duality as its recurrence (arXiv 2405.21060), in the order of mamba_ssm's `Mamba2`."""
    groups, eps, (least, most) = mamba2_numbers(c)
    heads, inner = len(w["A_log"]), w["out_proj.weight"].shape[1]
    shared = (len(w["conv1d.weight"]) - inner) // 2
    zxbcdt_TX = linear(w, "in_proj", x_TM * getattr(c, "ssm_in_multiplier", 1.0))
    columns = inner, inner, shared, shared, heads
    factors = getattr(c, "ssm_multipliers", (1.0,) * 5)  # of Falcon-H1
    zxbcdt_TX = torch.cat([f * each for f, each in zip(factors, zxbcdt_TX.split(columns, -1), strict=True)], dim=-1)
    z_TC, xbc_TX, dt_TH = zxbcdt_TX.split((inner, inner + 2 * shared, heads), dim=-1)
    xbc_TX = F.silu(causal_conv(xbc_TX, w["conv1d.weight"], w.get("conv1d.bias")))
    x_TC, b_TX, c_TX = xbc_TX.split((inner, shared, shared), dim=-1)
    x_THP = x_TC.unflatten(-1, (heads, -1))
    b_THS, c_THS = (each.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=1) for each in (b_TX, c_TX))
    dt_TH = F.softplus(dt_TH + w["dt_bias"]).clamp(least, most)
    decay_TH = (-w["A_log"].exp() * dt_TH).exp()
    h_HPS, y_THP = x_THP.new_zeros(heads, x_THP.shape[2], b_THS.shape[2]), torch.empty_like(x_THP)
    for t in range(len(x_TM)):
        added_HPS = torch.einsum("hp,hs->hps", dt_TH[t, :, None] * x_THP[t], b_THS[t])
        h_HPS = decay_TH[t, :, None, None] * h_HPS + added_HPS
        y_THP[t] = torch.einsum("hps,hs->hp", h_HPS, c_THS[t]) + w["D"][:, None] * x_THP[t]
    y_TC = y_THP.flatten(1)
    if "norm.weight" not in w:
        return linear(w, "out_proj", y_TC * F.silu(z_TC))
    before = getattr(c, "mamba_norm_before_gate", False)
    return linear(w, "out_proj", grouped_norm(y_TC, z_TC, w["norm.weight"], eps, groups, before))


def mamba2_numbers(c: Config) -> tuple[int, float, tuple[float, float]]:
    """Return (groups, eps of the norm, bounds of a token's step), which every family names differently."""
    if c.model_type == "zamba2":
        return c.mamba_ngroups, 1e-5, (c.time_step_min, math.inf)
    if c.model_type == "nemotron_h":
        return c.n_groups, c.layer_norm_epsilon, (c.time_step_min, math.inf)
    if c.model_type == "mamba2":
        return c.n_groups, c.layer_norm_epsilon, c.time_step_limit
    return c.mamba_n_groups, c.rms_norm_eps, c.time_step_limit


# ---- delta rules ----------------------------------------------------------------------------------------------------


def delta_rule(q_THS: Tensor, k_THS: Tensor, v_THP: Tensor, decay_THS: Tensor, beta_TH: Tensor) -> Tensor:
    """s ← diag(decay) s; s ← s + β k (v - k·s)ᵀ; o = q·s (arXiv 2412.06464; by channel in 2510.26692)."""
    q_THS, k_THS = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q_THS, k_THS))
    s_HSP, o_THP = v_THP.new_zeros(*k_THS.shape[1:], v_THP.shape[2]), torch.empty_like(v_THP)
    for t in range(len(q_THS)):
        s_HSP = decay_THS[t, :, :, None] * s_HSP
        missing_HP = v_THP[t] - torch.einsum("hsp,hs->hp", s_HSP, k_THS[t])
        s_HSP = s_HSP + torch.einsum("hs,hp->hsp", k_THS[t], beta_TH[t, :, None] * missing_HP)
        o_THP[t] = torch.einsum("hsp,hs->hp", s_HSP, q_THS[t])
    return o_THP / q_THS.shape[2] ** 0.5


def gated_delta(w: Weights, c: Config, x_TM: Tensor) -> Tensor:
    """Gated DeltaNet as Qwen3-Next and Qwen3.5 have it: several value heads to a key head, a gate behind the norm."""
    keys, values, width = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim
    each = values // keys
    if "in_proj_qkvz.weight" in w:  # head of keys by head of keys
        qkvz_TGX = linear(w, "in_proj_qkvz", x_TM).unflatten(-1, (keys, -1))
        wide = each * c.linear_value_head_dim
        q_TX, k_TX, v_TX, z_TX = (part.flatten(1) for part in qkvz_TGX.split((width, width, wide, wide), dim=-1))
        b_TH, a_TH = (part.flatten(1) for part in linear(w, "in_proj_ba", x_TM).unflatten(-1, (keys, -1)).chunk(2, -1))
        qkv_TX = torch.cat((q_TX, k_TX, v_TX), dim=-1)
    else:
        qkv_TX, z_TX, b_TH, a_TH = (linear(w, f"in_proj_{name}", x_TM) for name in ("qkv", "z", "b", "a"))
    qkv_TX = F.silu(causal_conv(qkv_TX, w["conv1d.weight"], None))
    q_TX, k_TX, v_TX = qkv_TX.split((keys * width, keys * width, qkv_TX.shape[1] - 2 * keys * width), dim=-1)
    q_THS, k_THS = (part.unflatten(-1, (keys, -1)).repeat_interleave(each, dim=1) for part in (q_TX, k_TX))
    decay_TH1 = (-w["A_log"].exp() * F.softplus(a_TH + w["dt_bias"])).exp()[..., None]
    v_THP = v_TX.unflatten(-1, (values, -1))
    o_THP = delta_rule(q_THS, k_THS, v_THP, decay_TH1.expand_as(q_THS), b_TH.sigmoid())
    o_THP = rms(o_THP, c.rms_norm_eps, w["norm.weight"]) * F.silu(z_TX.unflatten(-1, (values, -1)))
    return linear(w, "out_proj", o_THP.flatten(1))


def kimi_delta(w: Weights, c: Config, x_TM: Tensor) -> Tensor:
    """Kimi Delta Attention (arXiv 2510.26692): every channel of a key is forgotten at a rate of its own."""
    heads = w["b_proj.weight"].shape[0]
    qkv_TX = torch.cat([linear(w, f"{name}_proj", x_TM) for name in "qkv"], dim=-1)
    qkv_TX = F.silu(causal_conv(qkv_TX, w["conv1d.weight"], None))
    q_THS, k_THS, v_THP = (part.unflatten(-1, (heads, -1)) for part in qkv_TX.chunk(3, dim=-1))
    a_TX = linear(w, "forget_gate.f_b_proj", linear(w, "forget_gate.f_a_proj", x_TM)) + w["forget_gate.dt_bias"]
    rate_H1 = w["forget_gate.A_log"].flatten()[:, None].exp()
    decay_THS = (-rate_H1 * F.softplus(a_TX).unflatten(-1, (heads, -1))).exp()
    o_THP = delta_rule(q_THS, k_THS, v_THP, decay_THS, linear(w, "b_proj", x_TM).sigmoid())
    gate_TX = linear(w, "g_b_proj", linear(w, "g_a_proj", x_TM)).sigmoid()
    return linear(w, "o_proj", rms(o_THP, c.rms_norm_eps, w["o_norm.weight"]).flatten(1) * gate_TX)


# ---- latent attention -----------------------------------------------------------------------------------------------

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says, as in the authors' code


def latent(w: Weights, c: Config, x_TM: Tensor) -> Tensor:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), keys and values written out."""
    rope, heads = c.qk_rope_head_dim, c.num_attention_heads
    hidden_TT = torch.ones(len(x_TM), len(x_TM), dtype=torch.bool).triu(1)
    if "q_proj.weight" in w:
        q_TX = linear(w, "q_proj", x_TM)
    else:
        made_of_TX = rms(linear(w, "q_a_proj", x_TM), LATENT_EPS, w["q_a_layernorm.weight"])
        q_TX = linear(w, "q_b_proj", made_of_TX)
        if "indexer.wk.weight" in w:
            hidden_TT = ~chosen(w, c, x_TM, made_of_TX)
    q_THS = q_TX.unflatten(-1, (heads, -1))
    latent_TX, shared_TR = linear(w, "kv_a_proj_with_mqa", x_TM).tensor_split((c.kv_lora_rank,), dim=-1)
    kv_THX = linear(w, "kv_b_proj", rms(latent_TX, LATENT_EPS, w["kv_a_layernorm.weight"])).unflatten(-1, (heads, -1))
    k_THS, v_THP = kv_THX.tensor_split((c.qk_nope_head_dim,), dim=-1)
    q_THR, k_T1R, scale = q_THS[..., -rope:], shared_TR[:, None], q_THS.shape[2] ** -0.5
    if c.model_type != "kimi_linear":  # which has no positions
        q_THR, k_T1R = (rotated(c, each) for each in (q_THR, k_T1R))
        scale *= yarn_scale(c.rope_parameters, "mscale_all_dim") ** 2
    q_THS = torch.cat((q_THS[..., :-rope], q_THR), dim=-1)
    k_THS = torch.cat((k_THS, k_T1R.expand(-1, heads, -1)), dim=-1)
    scores_HTT = torch.einsum("ths,uhs->htu", q_THS, k_THS) * scale
    shares_HTT = scores_HTT.masked_fill(hidden_TT, -math.inf).softmax(-1)
    return linear(w, "o_proj", torch.einsum("htu,uhp->thp", shares_HTT, v_THP).flatten(1))


def chosen(w: Weights, c: Config, x_TM: Tensor, made_of_TX: Tensor) -> Tensor:
    """True where a token attends to another: the lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, equation 1),
    whose first numbers rotate in halves."""
    rope, centred_TS = c.qk_rope_head_dim, linear(w, "indexer.wk", x_TM)
    centred_TS = centred_TS - centred_TS.mean(-1, keepdim=True)
    k_TS = rms(centred_TS, 1e-6, w["indexer.k_norm.weight"]) + w["indexer.k_norm.bias"]
    q_THS = linear(w, "indexer.wq_b", made_of_TX).unflatten(-1, (c.index_n_heads, -1))
    halves = type("Halves", (), {"model_type": "", "rope_interleave": False, "rope_parameters": c.rope_parameters})
    q_THS, k_T1S = (
        torch.cat((rotated(halves, each[..., :rope]), each[..., rope:]), dim=-1) for each in (q_THS, k_TS[:, None])
    )
    weights_TH, found_TT = linear(w, "indexer.weights_proj", x_TM), torch.zeros(len(x_TM), len(x_TM), dtype=torch.bool)
    for token in range(len(x_TM)):
        scores = [float(weights_TH[token] @ (q_THS[token] @ k_T1S[past, 0]).relu()) for past in range(token + 1)]
        best = sorted(range(token + 1), key=lambda past: -scores[past])
        found_TT[token, best[: c.index_topk]] = True
    return found_TT


def rotated(c: Config, x_THR: Tensor) -> Tensor:
    """Pairs of numbers that lie side by side are rotated, or those half a head apart (arXiv 2104.09864)."""
    apart = c.model_type == "minicpm3" or not getattr(c, "rope_interleave", True)
    half = x_THR.shape[-1] // 2
    first, second = (x_THR[..., :half], x_THR[..., half:]) if apart else (x_THR[..., ::2], x_THR[..., 1::2])
    angles_T1R = torch.arange(len(x_THR), dtype=x_THR.dtype)[:, None, None] * frequencies(c.rope_parameters, 2 * half)
    size = yarn_scale(c.rope_parameters, "mscale") / yarn_scale(c.rope_parameters, "mscale_all_dim")
    cos, sin = angles_T1R.cos() * size, angles_T1R.sin() * size
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def frequencies(rope: Mapping[str, Any], width: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): what turns often within the context of pretraining stays, what turns seldom
    is slowed down by the factor, and a ramp lies between."""
    number_R = torch.arange(width // 2, dtype=torch.float64)
    plain_R = rope["rope_theta"] ** (-2 * number_R / width)
    if rope["rope_type"] == "default":
        return plain_R

    def number_of(turns: float) -> float:
        """Return the number of the pair that turns so often within the context of pretraining."""
        ratio = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(rope["rope_theta"]))

    low, high = (
        max(math.floor(number_of(rope["beta_fast"])), 0),
        min(math.ceil(number_of(rope["beta_slow"])), width - 1),
    )
    slowed_R = ((number_R - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain_R * (1 - slowed_R) + plain_R / rope["factor"] * slowed_R


def yarn_scale(rope: Mapping[str, Any], name: str) -> float:
    """0.1 m ln(factor) + 1, as DeepSeek's models have it, or 1 without YaRN."""
    if rope["rope_type"] != "yarn" or rope["factor"] <= 1:
        return 1.0
    return 0.1 * rope.get(name, 0.0) * math.log(rope["factor"]) + 1.0


# ---- short convolutions, and RWKV -----------------------------------------------------------------------------------


def short_conv(w: Weights, c: Config, x_TM: Tensor) -> Tensor:
    """LFM2's (arXiv 2511.23404): a gate before the convolution, and one behind it."""
    b_TM, c_TM, x_TM = linear(w, "in_proj", x_TM).chunk(3, dim=-1)
    return linear(w, "out_proj", c_TM * causal_conv(b_TM * x_TM, w["conv.weight"], w.get("conv.bias")))


def rwkv4(w: Weights, c: Config, x_TM: Tensor) -> Tensor:
    """Time mixing of RWKV-4 (arXiv 2305.13048, equations 11 to 16), its sums written out as they stand."""
    before_TM = torch.cat((torch.zeros_like(x_TM[:1]), x_TM[:-1]))
    mixes = {name: w[f"time_mix_{name}"].flatten() for name in ("key", "value", "receptance")}
    k_TC, v_TC, r_TC = (linear(w, name, mix_M * x_TM + (1 - mix_M) * before_TM) for name, mix_M in mixes.items())
    decay_C, first_C = w["time_decay"].exp(), w["time_first"]
    top_C, bottom_C, y_TC = torch.zeros_like(k_TC[0]), torch.zeros_like(k_TC[0]), torch.empty_like(k_TC)
    for t in range(len(x_TM)):
        own_C = (first_C + k_TC[t]).exp()
        y_TC[t] = (top_C + own_C * v_TC[t]) / (bottom_C + own_C)
        top_C = top_C * (-decay_C).exp() + k_TC[t].exp() * v_TC[t]
        bottom_C = bottom_C * (-decay_C).exp() + k_TC[t].exp()
    return linear(w, "output", r_TC.sigmoid() * y_TC)


# ---- in place of transformers' --------------------------------------------------------------------------------------

MIXERS: dict[str, Mixer] = {  # by the class that transformers has for it
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), mamba),
    **dict.fromkeys(("Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), mamba2),
    **dict.fromkeys(("Zamba2MambaMixer", "FalconH1Mixer"), mamba2),
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), gated_delta),
    "KimiLinearDeltaAttention": kimi_delta,
    **dict.fromkeys(("DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention"), latent),
    "DeepseekV32Attention": latent,
    **dict.fromkeys(("YoutuAttention", "MiniCPM3Attention", "KimiLinearAttention"), latent),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), short_conv),
    "RwkvSelfAttention": rwkv4,
}


# Classes whose norm spans all channels, whatever the groups, and the first version of transformers in which it does not
UNGROUPED = dict.fromkeys(("Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer"), Version("5.23.0"))


def is_wrong(module: nn.Module) -> bool:
    """Return True if the installed transformers is known to compute this mixer wrongly."""
    right_from = UNGROUPED.get(type(module).__name__)
    return right_from is not None and Version(transformers.__version__) < right_from and module.n_groups > 1


def repair(model: nn.Module) -> None:
    """Let the norms of groups be those of this file where transformers' are wrong, so that the model can be an oracle
    in every version."""

    def grouped(groups: int, norm: Any, args: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        y_BTC, z_BTC = args
        y = grouped_norm(y_BTC.float(), z_BTC.float(), norm.weight.float(), norm.variance_epsilon, groups, False)
        return y.to(y_BTC.dtype)

    for module in model.modules():
        if is_wrong(module):
            module.norm.register_forward_hook(partial(grouped, module.n_groups))


@contextmanager
def swapped(model: nn.Module) -> Iterator[list[str]]:
    """Put second oracles in the place of a model's mixers. Yield the names of those that ran."""
    ran: list[str] = []

    def replaced(name: str, mixer: Mixer, module: nn.Module, args: tuple, kwargs: dict[str, Any], theirs: Any) -> Any:
        x_BTM = args[0] if args else kwargs["hidden_states" if "hidden_states" in kwargs else "hidden"]
        weights = {own: tensor.double() for own, tensor in module.named_parameters()}
        rows = [mixer(weights, model.config, x_TM.double()) for x_TM in x_BTM]  # type: ignore[union-attr]
        ran.append(name)
        y_BTM = torch.stack(rows).to(x_BTM.dtype)
        return (y_BTM, *theirs[1:]) if isinstance(theirs, tuple) else y_BTM

    hooks = [
        module.register_forward_hook(partial(replaced, name, MIXERS[type(module).__name__]), with_kwargs=True)
        for name, module in model.named_modules()
        if type(module).__name__ in MIXERS
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()
