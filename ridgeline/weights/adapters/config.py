"""adapter_config.json of PEFT: what of it is followed, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.formats.json_file import read_json

MOST_ENTRIES = 65_536  # of a list or a table: every module of a large mixture may have its own
MOST_LETTERS = 1024  # of a name or an expression
MOST_ALPHA = 1e6  # hundreds are usual
ALL_LINEAR = "all-linear"

# Entries that change nothing when the adapter runs
MOST_BYTES = 1 << 22  # of the config: patterns may name each module of a large mixture
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
}
_OF_IA3 = {"feedforward_modules", "init_ia3_weights"}  # the tensors' shapes say which ones multiply inputs
_REPLACED = {"bias", "modules_to_save"}  # they say which tensors the file has whole
_READ = {
    *("alpha_pattern", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type", "r"),
    *("rank_pattern", "target_modules", "target_parameters", "trainable_token_indices", "use_rslora"),
}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The entries that say which modules an adapter changes, and by how much.

    targets: the ends of modules' names, or an expression for all of a name. excluded: likewise.
    layers: the only layers that are adapted; None: all. layer_patterns: expressions for what stands in front of a
        layer's number; none: any name.
    ranks, alphas: by an expression for the end of a module's name, where these are not `rank` and `alpha`.
    ia3: modules have one vector each, which multiplies their inputs or their outputs (Liu et al., arXiv 2205.05638).
        There are no ranks and scales then.
    dora: every output has a magnitude, for which the norm of its row of the adapted weight is exchanged (Liu et al.,
        arXiv 2402.09353).
    parameters: the ends of the names of parameters that hold all experts' matrices.
    tokens: by the end of a module's name, the tokens whose rows the adapter has whole; "": of the tokens' table.
    biased: the second matrix of each module has a bias, which the scale multiplies too.
    rooted: scales are alpha / sqrt(rank) (Kalajdzievski, arXiv 2312.03732) instead of alpha / rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str = ()
    layers: frozenset[int] | None = None
    layer_patterns: tuple[str, ...] = ()
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    parameters: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rooted: bool = False
    ia3: bool = False
    dora: bool = False
    biased: bool = False

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of an adapted module's product."""
        return alpha / (sqrt(rank) if self.rooted else rank)


def read_adapter_config(
    folder: Path, most_rank: int, *, factors: bool = False, replaces: bool = False
) -> AdapterConfig:
    """Return the config of an adapter's folder. Raise ModelLoadError if it is missing or damaged, asks for something
    that is not here, or for a larger rank. factors: IA3 and DoRA are served. replaces: tensors of the model may be
    replaced, which adapters that are served cannot do."""
    path = folder / "adapter_config.json"
    if path.exists() and (not path.is_file() or path.stat().st_size > MOST_BYTES):
        raise ModelLoadError(f"{path} is no file of at most {MOST_BYTES:,} bytes; give the one that PEFT saved.")
    found = read_json(path, required=True)
    kind = found.get("peft_type")
    if kind != "LORA" and not (kind == "IA3" and factors):
        served = "only LORA and IA3 are" if factors else "only LORA is"
        also = "set enable_lora_factors, or " if kind == "IA3" else ""
        raise ModelLoadError(
            f"{path} has peft_type {_short(kind)}, and {served} served here; {also}merge it into the model by PEFT."
        )
    biased = _REPLACED if factors else set[str]()  # whole biases are addends of outputs
    if factors and kind == "LORA":
        biased = biased | {"lora_bias"}
    known = _HARMLESS | _READ | biased | (_OF_IA3 if kind == "IA3" else set()) | (_REPLACED if replaces else set())
    if (dora := found.get("use_dora") or False) is True and kind == "LORA":
        if not factors:
            raise ModelLoadError(f"{path} sets use_dora; set enable_lora_factors, or merge it into the model by PEFT.")
        known |= {"use_dora"}
    wanted = [name for name in sorted(found) if name not in known and _asks(name, found[name])]
    if wanted:
        raise ModelLoadError(
            f"{path} sets {_short(wanted[0])[1:-1]} to {_short(found[wanted[0]])}, which adapters have not here; "
            "merge the adapter into the model's weights, or train it without."
        )
    rank, alpha = _whole(found, "r", path), _number(found.get("lora_alpha", 8), "lora_alpha", path)
    ranks = {name: _rank(value, f"rank_pattern of {name}", path) for name, value in _table(found, "rank_pattern", path)}
    alphas = {
        name: _number(value, f"alpha_pattern of {name}", path) for name, value in _table(found, "alpha_pattern", path)
    }
    if (largest := max([rank, *ranks.values()])) > most_rank:
        raise ModelLoadError(f"{path} has rank {_short(largest)}, above max_lora_rank {most_rank}; raise that.")
    if not isinstance(rooted := found.get("use_rslora") or False, bool):
        raise ModelLoadError(f"{path} has use_rslora {_short(rooted)}, which must be true or false; mend it.")
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        targets=_names(found, "target_modules", path, needed=not found.get("target_parameters")),
        parameters=_listed(_names(found, "target_parameters", path)),
        tokens=_tokens(found, path),
        excluded=_names(found, "exclude_modules", path),
        layers=_layers(found, path),
        layer_patterns=_listed(_names(found, "layers_pattern", path)),
        ranks=ranks,
        alphas=alphas,
        rooted=rooted,
        ia3=kind == "IA3",
        dora=dora,
        biased=bool(found.get("lora_bias")),
    )


def _asks(name: str, value: Any) -> bool:
    """Return True unless an entry is at a value that asks for nothing."""
    return not (value is None or value is False or value in ("", [], {}) or (name == "bias" and value == "none"))


def _whole(found: Mapping[str, Any], name: str, path: Path) -> int:
    return _rank(found.get(name, 8), name, path)


def _rank(value: Any, name: str, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{path} has {name[:99]} {_short(value)}, which must be a whole number from 1; mend it.")
    return value


def _number(value: Any, name: str, path: Path) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= MOST_ALPHA:
        raise ModelLoadError(
            f"{path} has {name[:99]} {_short(value)}, which must be a number, up to a million; mend it."
        )
    return float(value)


def _table(found: Mapping[str, Any], name: str, path: Path) -> list[tuple[str, Any]]:
    value = found.get(name) or {}
    if not isinstance(value, dict) or len(value) > MOST_ENTRIES or any(len(key) > MOST_LETTERS for key in value):
        raise ModelLoadError(f"{path} has {name} {_short(value)}, which must be an object of modules' names; mend it.")
    return list(value.items())


def _names(found: Mapping[str, Any], name: str, path: Path, *, needed: bool = False) -> tuple[str, ...] | str:
    value = found.get(name)
    if value is None and not needed:
        return ()
    several: list[Any] = value if isinstance(value, list) and len(value) <= MOST_ENTRIES else [value]
    if not all(isinstance(each, str) and len(each) <= MOST_LETTERS for each in several):
        raise ModelLoadError(
            f"{path} has {name} {_short(value)}, which must be a list of modules' names or an expression of up to "
            f"{MOST_LETTERS} characters; mend it."
        )
    return tuple(value) if isinstance(value, list) else str(value)


def _listed(names: Sequence[str] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _layers(found: Mapping[str, Any], path: Path) -> frozenset[int] | None:
    value = found.get("layers_to_transform")
    if value is None or value == []:
        return None
    listed: list[Any] = value if isinstance(value, list) else [value]
    if len(listed) > MOST_ENTRIES or not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise ModelLoadError(f"{path} has layers_to_transform {_short(value)}, which must be layers' numbers; mend it.")
    return frozenset(listed)


def _tokens(found: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    value = found.get("trainable_token_indices") or {}
    listed: dict[str, Any] = value if isinstance(value, dict) else {"": value}
    for name, each in listed.items():
        whole = isinstance(each, list) and len(each) <= MOST_ENTRIES
        whole = whole and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in each)
        if not whole or len(set(each)) < len(each) or len(name) > MOST_LETTERS:
            raise ModelLoadError(
                f"{path} has trainable_token_indices {_short(value)}, which must be numbers of tokens, each once, or "
                "an object of such by modules' names; mend it."
            )
    return {name: tuple(each) for name, each in listed.items() if each}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
