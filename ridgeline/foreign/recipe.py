"""The modules of a class that ops of ours replace. They are found on a model with weights, and replaced in any model of
the class: also in one that holds no numbers, for which kernels are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.foreign.fused import (
    GatedParts,
    ProductRecorder,
    SwappedModules,
    gated_parts_of,
    norm_with,
    rms_norms,
    swap_feed_forward,
    swap_norm,
    swap_products,
)
from ridgeline.foreign.rotated import AngleRecorder, AttentionCall, deferred, forward_without_rotation, with_norms
from ridgeline.kernels.ops import Ops
from ridgeline.layers.heads import Heads


class NormFound(NamedTuple):
    name: str
    eps: float
    offset: int


class FeedForwardFound(NamedTuple):
    """gate, up, down: the names of its products."""

    name: str
    gate: str
    up: str
    down: str
    kind: str


class AttentionFound(NamedTuple):
    """An attention whose rotation is left to ours. norms: the names of those of queries and keys that are too, or none.

    table: the number of its table of angles, which has so many rows and columns.
    """

    name: str
    norms: tuple[str, ...]
    table: int
    rows: int
    columns: int


class FusionRecipe(NamedTuple):
    """All that is replaced, by the names of the modules. products: those of one input together."""

    norms: tuple[NormFound, ...] = ()
    feed_forwards: tuple[FeedForwardFound, ...] = ()
    attentions: tuple[AttentionFound, ...] = ()
    products: tuple[tuple[str, ...], ...] = ()


class RecipeFinder:
    """Looks at one forward of a model, and finds what ops of ours compute as well.

    tables_ZY: the tables of angles of the recipe's attentions.
    """

    tables_ZY: list[Tensor]

    def __init__(self, model: nn.Module, attentions: Sequence[str], positions_T: Tensor) -> None:
        self._model, self._attentions, self._positions_T = model, attentions, positions_T
        self._products = ProductRecorder(model, len(positions_T))
        self._angles = AngleRecorder(model, positions_T[None])
        self._calls: dict[int, AttentionCall] = {}
        modules = [model.get_submodule(name) for name in attentions]
        self._hooks = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in modules]

    def _note(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._calls[id(module)] = AttentionCall(module, given, named, self._positions_T)

    def end(self) -> None:
        """Stop looking."""
        self._products.end()
        self._angles.end()
        for hook in self._hooks:
            hook.remove()

    @property
    def products(self) -> dict[str, nn.Linear]:
        """The linear modules that ran once, for all tokens, by their names."""
        ran = self._products.ran
        named = self._model.named_modules()
        return {name: module for name, module in named if isinstance(module, nn.Linear) and id(module) in ran}

    @torch.no_grad()
    def recipe(self, ops: Ops, heads: Sequence[Heads | None], rows: int) -> FusionRecipe:
        """Return the findings. heads: of the attentions, without norms and rotation; None: those that keep theirs.
        rows: of tables of angles."""
        model, names = self._model, {id(module): name for name, module in self._model.named_modules()}
        norms, ran, taken = rms_norms(model, ops), self._products.ran, set[int]()
        by_id = {id(model.get_submodule(name)): norm for name, norm in norms.items()}
        self.tables_ZY, attentions, feed_forwards = [], [], []
        for name, own in zip(self._attentions, heads, strict=True):
            call = self._calls.get(id(model.get_submodule(name)))
            if call is None or own is None or (found := deferred(call, own, by_id, self._angles, rows)) is None:
                continue
            table_ZY = found.table_ZY
            number = next((at for at, each in enumerate(self.tables_ZY) if each is table_ZY), len(self.tables_ZY))
            self.tables_ZY += [table_ZY] if number == len(self.tables_ZY) else []
            left = tuple(names[id(each)] for each in found.norms)
            attentions.append(AttentionFound(name, left, number, *table_ZY.shape))
        for name, module in model.named_modules():
            parts = gated_parts_of(module, ops)
            if parts is not None and (own_products := {id(each) for each in parts[:3]}) <= ran:
                taken |= own_products
                gate, up, down = (names[id(each)] for each in parts[:3])
                feed_forwards.append(FeedForwardFound(name, gate, up, down, parts.kind))
        rest = ([names[id(each)] for each in group if id(each) not in taken] for group in self._products.together())
        return FusionRecipe(
            tuple(NormFound(name, norm.eps, norm.offset) for name, norm in norms.items()),
            tuple(feed_forwards),
            tuple(attentions),
            tuple(tuple(group) for group in rest if group),
        )


def apply(
    recipe: FusionRecipe, model: Any, heads: dict[str, Heads], tables_ZY: Sequence[Tensor], ops: Ops
) -> SwappedModules:
    """Replace what a recipe names. heads: of the attentions by their names; those whose rotation is left to ours get
    it here."""
    swaps, module_of = SwappedModules(), model.get_submodule
    norms = {each.name: norm_with(module_of(each.name), each.eps, each.offset) for each in recipe.norms}
    for name, norm in norms.items():
        swap_norm(module_of(name), norm, ops, swaps)
    for attention in recipe.attentions:
        own = heads[attention.name]._replace(cos_sin_ZY=tables_ZY[attention.table])
        heads[attention.name] = with_norms(own, *(norms[name] for name in attention.norms))
        swaps.add(module_of(attention.name), forward_without_rotation(module_of(attention.name)))
        for name in attention.norms:
            swaps.add(module_of(name), _same)
    for found in recipe.feed_forwards:
        gate, up, down = (module_of(name) for name in (found.gate, found.up, found.down))
        swap_feed_forward(module_of(found.name), GatedParts(gate, up, down, found.kind), ops, swaps)
    for group in recipe.products:
        swap_products([module_of(name) for name in group], ops, swaps)
    return swaps


def _same(x: Tensor) -> Tensor:
    return x
