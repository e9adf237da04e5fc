"""Rotations and norms of heads, left to our attention where a class's attention does them just before it attends.

A class rotates queries and keys by a function of its file, `apply_rotary_pos_emb`, with cosines and sines that a module
of it makes of positions. The instance's `forward` is copied with another function in that place, which returns what it
is given; our attention then rotates, and normalises heads, in the launch that reads them. The file itself stays as it
is. Each attention is compared in float32: queries, keys and values as the class makes them, beside those of our op.

Legend:
    T  tokens
    H  query heads
    G  key/value heads
    D  head width
    Z  rows of the table of angles, one for each position
    Y  rotated width
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import permutations
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.foreign.fused import RmsNorm, close, drawn, with_drawn_weight
from ridgeline.foreign.interface import CARRIED
from ridgeline.layers.heads import Heads

ROTATE = "apply_rotary_pos_emb"  # the name of the function in transformers' files
MOST_ANGLES, FEWEST = 1 << 26, 32  # numbers of a table and of a row: longer contexts rotate as their class does

Forward = Callable[..., Any]


class DeferredHeads(NamedTuple):
    """The part of an attention that is left to ours: its rotation, and the norms of queries and keys, if any."""

    table_ZY: Tensor
    norms: tuple[nn.Module, ...]


class _HeadsSeen(Exception):
    """Ends a forward where it attends."""


class AngleRecorder:
    """The modules of a model that make cosines and sines, with their inputs and outputs."""

    def __init__(self, model: nn.Module, positions_1T: Tensor) -> None:
        self._positions_1T, self._tables = positions_1T, dict[Any, Tensor | None]()
        self._made: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = []
        rotary = [module for module in model.modules() if "Rotary" in type(module).__name__]
        self._hooks = [module.register_forward_hook(self._note, with_kwargs=True) for module in rotary]

    def _note(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: object) -> None:
        if isinstance(made, tuple) and len(made) == 2 and all(isinstance(each, Tensor) for each in made):
            self._made.append((module, given, named, made))

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def table(self, cos: object, rows: int) -> Tensor | None:
        """Return the table of the op `rope` for the cosines that a module made, or None if there is none."""
        for index, (module, given, named, made) in enumerate(self._made):
            if made[0] is cos:
                if index not in self._tables:
                    self._tables[index] = self._table(module, given, named, rows)
                return self._tables[index]
        return None

    @torch.no_grad()
    def _table(self, module: Any, given: tuple[Any, ...], named: dict[str, Any], rows: int) -> Tensor | None:
        if rows > MOST_ANGLES // FEWEST:
            return None
        positions_1Z = torch.arange(rows, device=self._positions_1T.device)[None]

        def at(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return value.float()  # an input whose dtype the angles get
            return positions_1Z if torch.equal(value, self._positions_1T) else value

        cos, sin = module(*map(at, given), **{name: at(value) for name, value in named.items()})
        if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[:2] != (1, rows) or cos.numel() > MOST_ANGLES:
            return None
        (cos_Zy, other_Zy), (sin_Zy, last_Zy) = cos[0].float().chunk(2, dim=-1), sin[0].float().chunk(2, dim=-1)
        if not torch.equal(cos_Zy, other_Zy) or not torch.equal(sin_Zy, last_Zy):
            return None  # neighbours that rotate into each other, not halves
        return torch.cat((cos_Zy, sin_Zy), dim=-1).contiguous()


class AttentionCall(NamedTuple):
    """A call of an attention module, as it was seen, and the positions of its tokens."""

    module: nn.Module
    given: tuple[Any, ...]
    named: Mapping[str, Any]
    positions_T: Tensor


@torch.no_grad()
def deferred(
    call: AttentionCall, heads: Heads, norms: Mapping[int, RmsNorm], angles: AngleRecorder, rows: int
) -> DeferredHeads | None:
    """Return the part of an attention that ours may do, or None: unless our op makes the same queries, keys and
    values, it does all of it itself. heads: without norms and rotation. rows: of the table of angles."""
    own = inspect.unwrap(type(call.module).forward)
    if not isinstance(own, FunctionType) or not isinstance(own.__globals__.get(ROTATE), FunctionType):
        return None
    width = heads.spec.head_dim
    of_heads = [each for each in call.module.children() if id(each) in norms and len(norms[id(each)].weight_M) == width]
    attempts = [*permutations(of_heads)] if len(of_heads) == 2 else []
    for left in (*attempts, ()):
        try:
            table_ZY = _AttentionTrial(call, own, heads, norms, left).table(angles, rows)
        except Exception:  # whatever a class does with a step of one module
            table_ZY = None
        if table_ZY is not None:
            return DeferredHeads(table_ZY, left)
    return None


def with_norms(heads: Heads, *norms: RmsNorm) -> Heads:
    """Return heads whose queries and keys have these norms, or none."""
    if not norms:
        return heads
    query, key = norms
    if query.eps != key.eps:
        raise ValueError("the op has one epsilon for both")
    return heads._replace(q_norm_D=query.weight_M, k_norm_D=key.weight_M, eps=query.eps)


def forward_without_rotation(module: nn.Module) -> Forward:
    """Return the forward of an attention that leaves its rotation out."""
    own = inspect.unwrap(type(module).forward)
    assert isinstance(own, FunctionType)
    return partial(_with(own, _kept), module)


def _kept(q: Tensor, k: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return q, k


def _with(own: FunctionType, rotate: Forward) -> FunctionType:
    """Return a function with another one in the place of the rotation."""
    names = {**own.__globals__, ROTATE: rotate}
    made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


class _GivenProduct(nn.Module):
    """Stands for a product: numbers of its shape that do not depend on the input."""

    def __init__(self, module: nn.Linear, tokens: int, seed: int) -> None:
        super().__init__()
        self.y_1TO = drawn(module.weight.device, 1, tokens, module.out_features, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.y_1TO


class _AttentionTrial:
    """An attention in float32, with drawn numbers for its products and weights of norms: as the class has it, and with
    rotations and some norms left out.

    left: the norms of queries and of keys that are left to our op; or none.
    """

    def __init__(
        self,
        call: AttentionCall,
        own: FunctionType,
        heads: Heads,
        norms: Mapping[int, RmsNorm],
        left: tuple[nn.Module, ...],
    ) -> None:
        self._call, self._own, self._heads, self._left = call, own, heads, left
        self._norms: dict[int, RmsNorm] = {}  # with the drawn weights
        self._modules: dict[str, nn.Module | None] = {}
        for seed, (name, module) in enumerate(call.module.named_children()):
            self._modules[name] = module
            if type(module) is nn.Linear:
                self._modules[name] = _GivenProduct(module, len(call.positions_T), seed)
            elif (norm := norms.get(id(module))) is not None:
                self._modules[name], weight_M = with_drawn_weight(module, norm.weight_M, seed)
                self._norms[id(module)] = norm._replace(weight_M=weight_M + norm.offset)

    def table(self, angles: AngleRecorder, rows: int) -> Tensor | None:
        """Return the table of angles with which our op makes the same heads, or None if it does not."""
        tables: list[Tensor | None] = []
        rotated: list[Tensor] = []

        def note(q: Tensor, k: Tensor, cos: object, sin: object, *_: object, **__: object) -> tuple[Tensor, Tensor]:
            tables.append(angles.table(cos, rows))
            rotated.extend((q, k))
            return q, k

        names = {name: nn.Identity() for name, each in self._call.module.named_children() if _among(each, self._left)}
        plain = self._heads_of(_with(self._own, note), {**self._modules, **names})
        if len(tables) != 1 or (table_ZY := tables[0]) is None:
            return None
        if plain[0] is not rotated[0] or plain[1] is not rotated[1]:
            return None  # something else happens to them before they attend
        rotation, own_angles = self._own.__globals__[ROTATE], table_ZY[self._call.positions_T][None].chunk(2, dim=-1)
        cos_1TY, sin_1TY = (torch.cat((each, each), dim=-1) for each in own_angles)

        def rotate(q: Tensor, k: Tensor, _: object, __: object, *more: object, **named: object) -> Any:
            return rotation(q, k, cos_1TY, sin_1TY, *more, **named)

        expected = self._heads_of(_with(self._own, rotate), self._modules)
        heads = with_norms(self._heads, *(self._norms[id(each)] for each in self._left))
        heads = heads._replace(cos_sin_ZY=table_ZY)
        qkv_TX = torch.cat([each[0].transpose(0, 1).flatten(1) for each in plain], dim=1)
        found = heads.split(qkv_TX, self._call.positions_T)
        same = (close(one, each[0].transpose(0, 1)) for one, each in zip(found, expected, strict=True))
        return table_ZY if all(same) else None

    def _heads_of(self, forward: FunctionType, modules: Mapping[str, nn.Module | None]) -> tuple[Tensor, ...]:
        """Return the queries, keys and values with which a forward attends: [1, H, T, D] each."""
        copied = copy.copy(self._call.module)
        vars(copied).pop("forward", None)
        vars(copied)["_modules"] = dict(modules)
        setattr(copied, CARRIED, _stop)
        try:
            forward(copied, *map(_wide, self._call.given), **{name: _wide(x) for name, x in self._call.named.items()})
        except _HeadsSeen as seen:
            return seen.args
        raise ValueError("it does not attend")


def _stop(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    raise _HeadsSeen(query, key, value)


def _wide(value: Any) -> Any:
    """Return hidden states in float32, and all else as it is: angles are known by their identity."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _among(module: nn.Module, others: tuple[nn.Module, ...]) -> bool:
    return any(each is module for each in others)
