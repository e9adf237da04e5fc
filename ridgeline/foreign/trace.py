"""A class of transformers as its calls of the attention interface show it: its forward runs once, on a device that
holds no numbers. All that attention does besides is refused by name.

Legend:
    T  tokens
    H  query heads
    G  key/value heads
    D  width of a query and a key
    E  width of a value
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.foreign.classes import ForeignClass, offline, said
from ridgeline.foreign.interface import TRACE, traced
from ridgeline.foreign.masks import Mask, MaskFunction, mask_of

TOKENS = 8

# What the interface is given and what changes nothing in what we compute
IDLE = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "past_key_values", "output_attentions", "use_cache"}
    | {"output_hidden_states", "return_dict", "layer_idx", "deterministic", "output_router_logits", "logits_to_keep"}
)


OWN = "it has an attention of its own, which does not go through transformers' attention interface"

# What the names of kinds of layers say that are no attention of ours
OTHER_KINDS = {
    **dict.fromkeys(("linear", "mamba", "recurrent", "conv", "delta", "lstm", "rwkv"), "recurrent"),
    **dict.fromkeys(("chunked", "compressed", "block", "hash"), "attention over chunks or summaries of the tokens"),
}


class Call(NamedTuple):
    """One module's call of the attention interface.

    sinks: the name of the parameter with a logit per head that takes part in the softmax.
    """

    module: str
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None


class Traced(NamedTuple):
    """The findings of a trace.

    body: the name of the module that the class gives the tokens to, and whose output it scores.
    parameters: all of them, tied ones once.
    tied: the output layer has the embedding's table.
    """

    calls: tuple[Call, ...]
    body: str
    vocabulary: int
    width: int
    parameters: int
    tied: bool
    context: int


def trace(found: ForeignClass) -> Traced:
    """Return the facts of a class's computation. Raise ModelLoadError if it is nothing that we can run."""
    context = context_of(found)
    if getattr(found.config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{found.name} attends to an encoder's output (cross-attention), which is not supported.")
    check_kinds(found)
    recorder = _Recorder(found.name, context)
    with offline(), traced(recorder, recorder.make_mask), unchanged_globals(found):
        model = empty_model(found)
        recorder.names = {id(module): name for name, module in model.named_modules()}
        recorder.sinks = {id(parameter): name for name, parameter in model.named_parameters()}
        bodies = _Bodies(model)
        logits = _run(found, model)
    check_layers(found, recorder.calls)
    body, width = bodies.outermost(found)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    return Traced(
        calls=tuple(recorder.calls),
        body=body,
        vocabulary=logits.shape[-1],
        width=width,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tied=head is None or head.weight is embed.weight,
        context=context,
    )


class _Bodies:
    """The modules of a model that return hidden states, in the order in which they end."""

    def __init__(self, model: Any) -> None:
        self.model, self.found = model, dict[str, int]()
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(partial(self._seen, name))

    def _seen(self, name: str, module: Any, given: object, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, Tensor) and hidden.ndim == 3:
            self.found[name] = hidden.shape[-1]

    def outermost(self, found: ForeignClass) -> tuple[str, int]:
        """Return the name of the module that the model itself calls, and the width of what it returns."""
        if not self.found:
            raise ModelLoadError(f"{found.name} has no body whose hidden states it scores.")
        name, width = list(self.found.items())[-1]
        taken = inspect.signature(self.model.get_submodule(name).forward).parameters
        if "position_ids" not in taken:
            raise ModelLoadError(
                f"{found.name} takes no positions (position_ids), so tokens of several requests cannot be told apart."
            )
        return name, width


def empty_model(found: ForeignClass, implementation: str = TRACE, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the class with its modules on a device that holds no numbers. In bfloat16 all products run."""
    try:
        with torch.device("meta"):
            config = copy.deepcopy(found.config)
            return found.model._from_config(config, dtype=dtype, attn_implementation=implementation).eval()
    except KeyError as error:
        raise ModelLoadError(
            f"{found.name} cannot be built from config.json: {OWN if TRACE in error.args else said(error)}."
        ) from error
    except Exception as error:  # whatever a class finds wrong with a stranger's config
        raise ModelLoadError(f"{found.name} cannot be built from config.json ({said(error)}).") from error


@torch.no_grad()
def _run(found: ForeignClass, model: Any) -> Tensor:
    """Return the scores of a few tokens, which have no values."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    try:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except ModelLoadError:
        raise
    except Exception as error:  # a class that looks at values, or does not go through the interface as it should
        raise ModelLoadError(
            f"{found.name} cannot be followed without its weights: its forward asks for values ({said(error)})."
        ) from error


def context_of(found: ForeignClass) -> int:
    """Return the longest context that the checkpoint was made for. Raise ModelLoadError if its config does not say."""
    text = found.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ModelLoadError(
        f"{found.name}'s config.json does not say how long a context may be (max_position_embeddings)."
    )


class _Recorder:
    """An `interface.Attends` that remembers how it was called."""

    def __init__(self, name: str, context: int) -> None:
        self.name, self.context = name, context
        self.calls: list[Call] = []
        self.names: dict[int, str] = {}
        self.sinks: dict[int, str] = {}
        self._masks: list[tuple[Tensor, Mask]] = []  # and what they are; kept, so that ids stay theirs

    def make_mask(self, *_: object, mask_function: MaskFunction, device: object = None, **__: object) -> Tensor:
        try:
            mask = mask_of(mask_function, self.context)
        except Exception as error:
            raise self._refused(f"a mask of its own, which cannot be told apart ({said(error)})") from error
        if mask is None:
            raise self._refused("a mask that is neither causal nor a window")
        made = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
        self._masks.append((made, mask))
        return made

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor:
        where = self.names.get(id(module), type(module).__name__)
        if query.ndim != 4 or key.ndim != 4 or value.ndim != 4 or key.shape[1] != value.shape[1]:
            raise self._refused(f"heads of the shapes {list(query.shape)}, {list(key.shape)}", where)
        if len(query) != 1 or not query.shape[2] == key.shape[2] == value.shape[2] == TOKENS:
            raise self._refused("keys of other tokens than its queries (cross-attention)", where)
        if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
            raise self._refused(f"queries {list(query.shape)} that do not go with keys {list(key.shape)}", where)
        options = dict(options)
        window = self._window(mask, options.pop("sliding_window", None), where)
        scale, softcap, sinks = self._softmax(query, options, where)
        for name, given in options.items():
            if name not in IDLE and given is not None and given is not False:
                raise self._refused(f"{name}, an argument of its attention that we do not know", where)
        shape = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        self.calls.append(Call(where, *shape, scale, window, softcap, sinks))
        return query.new_empty(1, TOKENS, query.shape[1], value.shape[3])

    def _window(self, mask: object, window: object, where: str) -> int | None:
        found = next((what for made, what in self._masks if made is mask), None)
        if found is None:
            raise self._refused(
                "no mask of transformers' own making" if mask is None else "a mask that it makes itself", where
            )
        if isinstance(window, int) and window < self.context and window != found.window:
            raise self._refused(f"a mask with the window {found.window} and the window {window} beside it", where)
        return found.window

    def _softmax(self, query: Tensor, options: dict[str, Any], where: str) -> tuple[float, float | None, str | None]:
        """Return scale, soft cap, and the parameter with the sinks, and take them out of the options."""
        scale, softcap, sinks = (options.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
        if options.pop("dropout", 0.0) not in (0, 0.0, None):
            raise self._refused("dropout", where)
        if options.pop("is_causal", True) is False:
            raise self._refused("queries that see the tokens behind them", where)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        for name, number in (("scale", scale), ("soft cap", softcap)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
                raise self._refused(f"a {name} that is no number of the config", where)
        if sinks is not None and id(sinks) not in self.sinks:
            raise self._refused("sinks that are no parameter", where)
        return float(scale), None if not softcap else float(softcap), None if sinks is None else self.sinks[id(sinks)]

    def _refused(self, what: str, where: str = "") -> ModelLoadError:
        return ModelLoadError(f"{self.name} cannot run with our attention: {where or 'it'} has {what}.")


def check_kinds(found: ForeignClass) -> None:
    """Raise ModelLoadError if the config names layers that keep a state of another kind than keys and values of all
    tokens or of a window."""
    text = found.config.get_text_config(decoder=True)
    for name in ("layer_types", "layers_block_type", "block_types"):
        for kind in getattr(text, name, None) or ():
            if isinstance(kind, str) and (word := next((word for word in OTHER_KINDS if word in kind), None)):
                raise ModelLoadError(
                    f"{found.name} has layers of the kind {kind!r}, which are {OTHER_KINDS[word]}; only layers of "
                    "attention over all tokens or a window run through transformers' modules."
                )


def check_layers(found: ForeignClass, calls: list[Call]) -> None:
    """Raise ModelLoadError unless every layer attends once, and through the interface."""
    if not calls:
        raise ModelLoadError(f"{found.name} cannot run with our attention: {OWN}.")
    if again := [name for name, times in Counter(call.module for call in calls).items() if times > 1]:
        raise ModelLoadError(
            f"{found.name} runs {again[0]} more than once for a token, so it attends over its own output."
        )


@contextmanager
def unchanged_globals(found: ForeignClass) -> Iterator[None]:
    """Raise ModelLoadError if a class changes what all models of the process share: torch's defaults, or the variables
    of its own file."""

    def seen() -> dict[str, object]:
        file = vars(sys.modules[found.model.__module__])
        return {
            **{
                f"{found.model.__module__}.{name}": id(value)
                for name, value in file.items()
                if name != "__warningregistry__"
            },
            "torch's default dtype": torch.get_default_dtype(),
            "torch's default device": torch.get_default_device(),
            "torch's grad mode": torch.is_grad_enabled(),
            "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
            "torch's float32 precision": torch.get_float32_matmul_precision(),
        }

    before = seen()
    try:
        yield
    finally:  # also behind another error, which may follow from it: with another precision scores differ on some CPUs
        if changed := [name for name, value in seen().items() if before.get(name, value) != value]:
            raise ModelLoadError(f"{found.name} changes {changed[0]}, which all models of this process share.")
