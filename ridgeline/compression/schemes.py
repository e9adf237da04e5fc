"""The schemes, methods and file formats that can be asked for, and which go together. This needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig

ROUNDINGS = {  # the first is the default
    "rtn": "round to the nearest number",
    "gptq": "let later columns make up for the rounding of earlier ones (needs calibration)",
    "hqq": "scales by half-quadratic optimization",
    "llm-int8": "int8 levels, with the columns of outliers in 16 bits (needs calibration)",
}
FOLDINGS = {
    "smoothquant": "factors that make activations easier to round (needs calibration)",
    "awq": "searched factors that protect weights of large activations (needs calibration)",
}
CALIBRATED = ("gptq", "llm-int8", *FOLDINGS)
FORMATS = ("compressed-tensors", "fp8", "gptq", "awq", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class MakeScheme:
    """A scheme by which models are made.

    what: a description.
    formats: the file formats that can hold it; the first is the default.
    methods: those that can make it.
    bits: of a weight, without scales.
    """

    what: str
    formats: tuple[str, ...]
    methods: tuple[str, ...]
    bits: int


_GROUPED = ("rtn", "gptq", "hqq", "awq")
SCHEMES: Mapping[str, MakeScheme] = {
    "fp8": MakeScheme(
        what="E4M3, a scale for each output; activations E4M3, a scale for each token",
        formats=("compressed-tensors",),
        methods=("rtn", "smoothquant", "gptq"),
        bits=8,
    ),
    "fp8-block": MakeScheme(
        what="E4M3, a scale for each 128 by 128 weights; activations E4M3, a scale for each 128 of a token",
        formats=("fp8",),
        methods=("rtn", "smoothquant", "gptq"),
        bits=8,
    ),
    "int8": MakeScheme(
        what="int8, a scale for each output; activations in 16 bits, or with llm-int8 int8 but for outliers",
        formats=("compressed-tensors", "bitsandbytes"),
        methods=("rtn", "gptq", "hqq", "awq", "llm-int8"),
        bits=8,
    ),
    "w8a8": MakeScheme(
        what="int8, a scale for each output; activations int8, a scale for each token",
        formats=("compressed-tensors",),
        methods=("rtn", "smoothquant", "gptq"),
        bits=8,
    ),
    "w8a16": MakeScheme(
        what="8-bit whole numbers in groups", formats=("gptq", "compressed-tensors"), methods=_GROUPED, bits=8
    ),
    "w4a16": MakeScheme(
        what="4-bit whole numbers in groups", formats=("gptq", "compressed-tensors", "awq"), methods=_GROUPED, bits=4
    ),
    "w3a16": MakeScheme(what="3-bit whole numbers in groups", formats=("gptq",), methods=_GROUPED, bits=3),
    "w2a16": MakeScheme(what="2-bit whole numbers in groups", formats=("gptq",), methods=_GROUPED, bits=2),
    "nf4": MakeScheme(
        what="NF4 in blocks of 64", formats=("bitsandbytes",), methods=("rtn", "gptq", "hqq", "awq"), bits=4
    ),
    "mxfp4": MakeScheme(
        what="MXFP4, E2M1 in blocks of 32", formats=("compressed-tensors",), methods=("rtn", "gptq", "awq"), bits=4
    ),
    "nvfp4": MakeScheme(
        what="NVFP4, E2M1 in blocks of 16; activations in 16 bits",
        formats=("compressed-tensors",),
        methods=("rtn", "gptq", "awq"),
        bits=4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class MakeConfig:
    """The wish: what is to be made.

    schemes: names of SCHEMES. Several let `budget` choose one for each linear map.
    method: one of ROUNDINGS and one of FOLDINGS, either alone or joined by "+".
    format: one of FORMATS; None: the scheme's own.
    group: inputs that share a scale, for whole numbers in groups; 0: the whole row.
    symmetric: None: as the format has it (AWQ's files have zeros).
    alpha: SmoothQuant's share of the difficulty that moves to the weights.
    clip: search slabs' ranges that lessen the error.
    ignore: patterns (of fnmatch) of checkpoint modules that stay as they are.
    budget: bytes that the weights may take, of all tensors together.
    min_tokens: an expert that saw fewer tokens for each of its inputs is rounded without calibration.
    """

    schemes: tuple[str, ...] = ("w4a16",)
    method: str = "rtn"
    format: str | None = None
    group: int = 128
    symmetric: bool | None = None
    act_order: bool = False
    static_groups: bool = True
    damping: float = 0.01
    alpha: float = 0.5
    clip: bool = False
    ignore: tuple[str, ...] = ()
    budget: int | None = None
    min_tokens: float = 1.0

    @property
    def rounding(self) -> str:
        return next((part for part in self.method.split("+") if part in ROUNDINGS), "rtn")

    @property
    def folding(self) -> str | None:
        return next((part for part in self.method.split("+") if part in FOLDINGS), None)

    @property
    def calibrated(self) -> bool:
        """True if the method needs a text. A budget's sensitivities do too."""
        return self.clip or self.budget is not None or any(part in CALIBRATED for part in self.method.split("+"))

    @property
    def file_format(self) -> str:
        """The format that is written."""
        if self.format is not None:
            return self.format
        if len(self.schemes) > 1:
            return "compressed-tensors"
        if self.schemes == ("w4a16",) and self.method == "awq":
            return "awq"
        return "bitsandbytes" if self.rounding == "llm-int8" else SCHEMES[self.schemes[0]].formats[0]

    @property
    def zeros(self) -> bool:
        """True if whole numbers in groups have zeros."""
        return self.file_format == "awq" if self.symmetric is None else not self.symmetric

    def check(self) -> None:
        """Raise InvalidConfig for what does not go together, with what does."""
        _check_names(self)
        for scheme in self.schemes:
            _check_scheme(self, scheme)
        if len(self.schemes) > 1 and self.budget is None:
            raise InvalidConfig(f"{len(self.schemes)} schemes were given, but no --budget to choose between them.")
        for name, low, high in (("damping", 0.0, 1.0), ("alpha", 0.0, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidConfig(f"{name} must lie between {low:g} and {high:g}, got {value!r}.")
        if self.group < 0 or self.group % 8:
            raise InvalidConfig(f"a group must be a multiple of 8 inputs, or 0 for whole rows, got {self.group}.")
        if self.act_order and self.rounding != "gptq":
            raise InvalidConfig(f"act-order is an option of the method gptq, and the method is {self.method}.")
        if not self.static_groups and self.file_format != "gptq":
            raise InvalidConfig(f"groups that are not static are held by the format gptq, not by {self.file_format}.")


def _check_names(config: MakeConfig) -> None:
    if unknown := [name for name in config.schemes if name not in SCHEMES]:
        raise InvalidConfig(f"unknown scheme {unknown[0]!r}; known: {', '.join(SCHEMES)}.")
    if len(set(config.schemes)) < len(config.schemes) or not config.schemes:
        raise InvalidConfig(f"schemes must be different ones, got {', '.join(config.schemes) or 'none'}.")
    parts = config.method.split("+")
    if unknown := [part for part in parts if part not in (*ROUNDINGS, *FOLDINGS)]:
        raise InvalidConfig(f"unknown method {unknown[0]!r}; known: {', '.join((*ROUNDINGS, *FOLDINGS))}.")
    if any(sum(part in kinds for part in parts) > 1 for kinds in (ROUNDINGS, FOLDINGS)):
        raise InvalidConfig(
            f"the method {config.method!r} names two of a kind; join one of {', '.join(FOLDINGS)} "
            f"with one of {', '.join(ROUNDINGS)}."
        )
    if config.format is not None and config.format not in FORMATS:
        raise InvalidConfig(f"unknown format {config.format!r}; known: {', '.join(FORMATS)}.")


def _check_scheme(config: MakeConfig, name: str) -> None:
    scheme = SCHEMES[name]
    for part in config.method.split("+"):
        if part not in scheme.methods:
            fitting = [each for each, one in SCHEMES.items() if part in one.methods]
            raise InvalidConfig(
                f"the scheme {name} is not made by {part}; it goes with {', '.join(scheme.methods)}, "
                f"and {part} with {', '.join(fitting)}."
            )
    formats = ("compressed-tensors",) if len(config.schemes) > 1 else scheme.formats
    if config.file_format not in formats or config.file_format not in scheme.formats:
        known = [each for each in formats if each in scheme.formats]
        several = " where schemes are mixed" if len(config.schemes) > 1 else ""
        raise InvalidConfig(
            f"the format {config.file_format} does not hold {name}{several}; use {' or '.join(known)}."
            if known
            else f"the scheme {name} cannot be mixed with others, since compressed-tensors does not hold it."
        )
    if config.file_format == "awq" and not config.zeros:
        raise InvalidConfig("AWQ's files hold zeros; leave --symmetric out, or use the format gptq.")
    if config.rounding == "llm-int8" and config.file_format != "bitsandbytes":
        raise InvalidConfig(f"llm-int8 is written as bitsandbytes, not as {config.file_format}.")
    if name == "int8" and config.file_format == "bitsandbytes" and config.rounding != "llm-int8":
        raise InvalidConfig("int8 is written as bitsandbytes with the method llm-int8 only; use compressed-tensors.")
