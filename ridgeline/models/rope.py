"""The rotary embedding of a checkpoint, in either spelling and with any of the scalings that lengthen its context.

The spellings are `rope_theta` and `rope_scaling`, or `rope_parameters` with all of it, as a whole or one per layer
type.
"""

from __future__ import annotations

import math

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import Growth, RopeNumber, RopeSpec
from ridgeline.models.config import LAYER_TYPES, MAX_INTEGER, Config, wrong

SCALINGS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_ORIGINAL = "original_max_position_embeddings"

Scaling = dict[str, RopeNumber]


def rope(config: Config, head_dim: int, layer_type: str = "full_attention") -> RopeSpec:
    """Return the rotary embedding. Raise ModelLoadError for an unknown scaling, or one that lacks its numbers."""
    parameters = _parameters(config, layer_type)
    theta = (parameters if "rope_theta" in parameters else config).number("rope_theta")
    partial = parameters if "partial_rotary_factor" in parameters else config
    rotary_dim = int(head_dim * partial.number("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelLoadError(
            f"config.json rotates {rotary_dim} of {head_dim} head dimensions; it must be an even share."
        )
    kind = _kind(parameters)
    if kind == "proportional":  # the share counts pairs, and those that do not rotate keep their places
        share = 2 * int(head_dim * partial.number("partial_rotary_factor", 1.0) // 2)
        numbers: Scaling = {"rope_type": kind, "factor": parameters.number("factor", 1.0), "rotated": float(share)}
        return RopeSpec(theta=theta, rotary_dim=head_dim, scaling=tuple(numbers.items()))
    if kind == "yarn" and theta <= 1:
        raise wrong("rope_theta", theta, "above 1 for rotary scaling yarn")
    if kind == "dynamic" and rotary_dim == 2:
        raise ModelLoadError("config.json rotates 2 dimensions of a head; rotary scaling dynamic needs more.")
    scaling = None if kind == "default" else tuple(_scaling(kind, config, parameters, rotary_dim).items())
    return RopeSpec(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def axes(config: Config, pairs: int) -> tuple[int, ...]:
    """Return the axis by which each pair of a head rotates, by `mrope_section`: the first pairs by time, then those by
    rows and by columns; or, with `mrope_interleaved`, every third pair by rows and every third by columns, as far as
    there are so many."""
    parameters = _parameters(config, "full_attention")
    sections = tuple(int(each) for each in parameters.numbers("mrope_section", 3))
    if min(sections) < 0 or sum(sections) != pairs:
        raise wrong("mrope_section", list(sections), f"three numbers of pairs, {pairs} together")
    if not (parameters.raw("mrope_interleaved") or False):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(pair % 3 if pair % 3 and pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))


def context(config: Config) -> int:
    """Return the longest context that the checkpoint was made for. Scalings by a factor lengthen the one that it
    names."""
    positions, parameters = config.integer("max_position_embeddings"), _parameters(config, "full_attention")
    match _kind(parameters):
        case "linear" | "dynamic":
            return _lengthened(positions, parameters)
        case "yarn" if "factor" in parameters:
            return _lengthened(_original(config, parameters), parameters)
    return positions


def growth(config: Config) -> Growth | None:
    """Return the growth of queries with their positions, if `llama_4_scaling_beta` says so."""
    parameters = _parameters(config, "full_attention")
    if "llama_4_scaling_beta" not in parameters:
        return None
    return Growth(parameters.number("llama_4_scaling_beta"), _original(config, parameters))


def score_scale(config: Config) -> float:
    """Return the factor of scores in models with latent attention that were lengthened with `mscale_all_dim`."""
    parameters = _parameters(config, "full_attention")
    if _kind(parameters) == "default" or not parameters.raw("mscale_all_dim"):
        return 1.0
    return _magnitude(_stretch(config, parameters), parameters.number("mscale_all_dim")) ** 2


def _lengthened(positions: int, parameters: Config) -> int:
    factor = parameters.number("factor")
    length = int(positions * factor)
    if not 0 < length <= MAX_INTEGER:
        raise wrong("factor", factor, f"such that a context of {positions} becomes one of 1 to {MAX_INTEGER} tokens")
    return length


def _parameters(config: Config, layer_type: str) -> Config:
    parameters = config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    if any(kind in parameters for kind in LAYER_TYPES):
        return parameters.section(layer_type, required=True)
    return parameters


def _kind(parameters: Config) -> str:
    kind = parameters.raw("rope_type") or parameters.raw("type") or "default"
    # Names in first checkpoints of Phi-3 and Qwen2-VL
    kind = {"su": "longrope", "mrope": "default"}.get(str(kind), kind)
    if not isinstance(kind, str) or kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ModelLoadError(f"rotary scaling {kind!r} in config.json is not supported; known: {known}.")
    return str(kind)


def _scaling(kind: str, config: Config, parameters: Config, rotary_dim: int) -> Scaling:
    """Return the scaling with every number that the table needs."""
    numbers: Scaling = {"rope_type": kind}
    if kind in ("linear", "dynamic", "llama3"):
        numbers["factor"] = parameters.number("factor")
    if kind == "dynamic":
        numbers[_ORIGINAL] = float(config.integer("max_position_embeddings"))
    elif kind != "linear":
        numbers[_ORIGINAL] = float(_original(config, parameters))
    if kind == "llama3":
        low, high = (
            numbers.setdefault(name, parameters.number(name)) for name in ("low_freq_factor", "high_freq_factor")
        )
        if low >= high:  # type: ignore[operator]
            raise wrong("low_freq_factor", low, "below high_freq_factor")
    elif kind == "yarn":
        numbers |= _yarn(config, parameters)
    elif kind == "longrope":
        numbers |= _longrope(config, parameters, rotary_dim)
    return numbers


def _yarn(config: Config, parameters: Config) -> Scaling:
    factor = _stretch(config, parameters)
    by_factor = _magnitude(factor, 1.0)
    if parameters.raw("mscale") and parameters.raw("mscale_all_dim"):
        by_factor = _magnitude(factor, parameters.number("mscale"))
        by_factor /= _magnitude(factor, parameters.number("mscale_all_dim"))
    return {
        "factor": factor,
        "attention_factor": parameters.number("attention_factor", by_factor),
        "beta_fast": parameters.number("beta_fast", 32.0),
        "beta_slow": parameters.number("beta_slow", 1.0),
        "truncate": float(parameters.boolean("truncate") if "truncate" in parameters else True),
    }


def _longrope(config: Config, parameters: Config, rotary_dim: int) -> Scaling:
    original, factor = _original(config, parameters), _stretch(config, parameters)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    magnitude = parameters.number("attention_factor", magnitude)
    return {
        "short_magnitude": parameters.number("short_mscale", magnitude),  # Phi-3.5-MoE has these
        "long_magnitude": parameters.number("long_mscale", magnitude),
        "short_factor": parameters.numbers("short_factor", rotary_dim // 2),
        "long_factor": parameters.numbers("long_factor", rotary_dim // 2),
    }


def _magnitude(factor: float, mscale: float) -> float:
    """Return the factor that makes up for longer contexts in the softmax's temperature (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _stretch(config: Config, parameters: Config) -> float:
    """Return `factor`, or how much longer the context is than that of pretraining."""
    return parameters.number("factor", config.integer("max_position_embeddings") / _original(config, parameters))


def _original(config: Config, parameters: Config) -> int:
    """Return the context of pretraining."""
    for place in (parameters, config):
        if _ORIGINAL in place:
            return place.integer(_ORIGINAL, at_least=2)
    return config.integer("max_position_embeddings", at_least=2)
