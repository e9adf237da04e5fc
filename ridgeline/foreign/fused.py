"""Modules of a class of transformers whose work ops of ours do in fewer launches: norms, gated feed-forwards, and
products of one input.

A module is taken for what it computes, not for its name: a copy of it with small random weights in float32 must give
what the op gives, to a few roundings. What is not recognised stays as it is. The model's own modules and weights are
not changed: only the `forward` of the instances is, and `SwappedModules.left_out` brings their own back.

Legend:
    T  tokens
    I  inputs
    O  outputs
    M  normalised width
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.ops import Ops

EXACT = 1e-5  # of the largest number: some dozen roundings of float32
GATES = ("silu", "gelu", "gelu_tanh")  # that products apply behind themselves
SMALL = 8, 24  # inputs and outputs of the feed-forwards that are compared

Forward = Callable[..., Any]


class SwappedModules:
    """The modules that run otherwise. Each has its own `forward`, and ours in its place."""

    def __init__(self) -> None:
        self._ours: list[tuple[Any, Forward]] = []
        self.joined: list[JoinedProducts] = []

    def __len__(self) -> int:
        return len(self._ours)

    def add(self, module: nn.Module, forward: Forward) -> None:
        self._ours = [(each, ours) for each, ours in self._ours if each is not module]
        self._ours.append((module, forward))
        module.forward = forward

    def has(self, module: nn.Module) -> bool:
        return any(each is module for each, _ in self._ours)

    def give_back(self, modules: Iterable[nn.Module]) -> None:
        """Give these modules their own `forward` back, for good."""
        for module in modules:
            if self.has(module):
                vars(module).pop("forward", None)
                self._ours = [(each, ours) for each, ours in self._ours if each is not module]

    def drop(self) -> None:
        """Give all modules their own `forward` back, for good."""
        for module, _ in self._ours:
            vars(module).pop("forward", None)
        self._ours, self.joined = [], []

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Let all modules run as their class does meanwhile."""
        ours = self._ours
        for module, _ in ours:
            vars(module).pop("forward", None)
        try:
            yield
        finally:
            for module, forward in ours:
                module.forward = forward


class RmsNorm(NamedTuple):
    """An RMSNorm as the op has it. weight_M: the factors: those of the module, plus the offset."""

    weight_M: Tensor
    eps: float
    offset: int

    def of(self, ops: Ops, x_TM: Tensor) -> Tensor:
        return ops.rms_norm(x_TM, None, self.weight_M, self.eps)[0]


def close(found: Any, expected: Any) -> bool:
    """Return True if two float32 tensors are the same but for roundings."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    apart = (found.float() - expected.float()).abs().max()
    return bool(apart <= EXACT * expected.float().abs().max().clamp(min=1))


def drawn(device: torch.device, *sizes: int, seed: int = 0) -> Tensor:
    """Return normal numbers in float32, the same on every call and device."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(device)


def rms_norm_of(module: nn.Module, ops: Ops) -> RmsNorm | None:
    """Return a module as an RMSNorm, or None if it is none."""
    eps = next(
        (getattr(module, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(module, name)), None
    )
    weight = dict(module.named_parameters()).get("weight")
    if weight is None or weight.ndim != 1 or len(list(module.parameters())) > 1 or not isinstance(eps, float):
        return None
    copied, weight_M = with_drawn_weight(module, weight)
    x_3M = drawn(weight.device, 3, len(weight), seed=1) * torch.tensor([[0.01], [1.0], [30.0]], device=weight.device)
    try:
        found = copied(x_3M)
        own = module(x_3M[None].to(weight.dtype))
    except Exception:  # whatever a class does with rows like these
        return None
    if not isinstance(own, Tensor) or own.dtype != weight.dtype:
        return None
    for offset in (0, 1):
        if close(found, ops.rms_norm(x_3M, None, weight_M + offset, eps)[0]):
            return norm_with(module, eps, offset)
    return None


def with_drawn_weight(module: nn.Module, like_M: Tensor, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """Return a copy of a norm with a drawn weight in float32, and that weight."""
    copied, weight_M = copy.copy(module), drawn(like_M.device, len(like_M), seed=seed)
    vars(copied).pop("forward", None)
    vars(copied)["_parameters"] = {"weight": nn.Parameter(weight_M, requires_grad=False)}
    return copied, weight_M


def rms_norms(model: nn.Module, ops: Ops) -> dict[str, RmsNorm]:
    """Return the RMSNorms of a model by the names of their modules."""
    leaves = ((name, module) for name, module in model.named_modules() if not list(module.children()))
    return {name: norm for name, module in leaves if (norm := rms_norm_of(module, ops)) is not None}


def norm_with(module: nn.Module, eps: float, offset: int) -> RmsNorm:
    """Return a module that is known to be an RMSNorm as the op has it."""
    weight_M = module.get_parameter("weight").detach()
    return RmsNorm(weight_M.float() + offset if offset else weight_M, eps, offset)


def swap_norm(module: nn.Module, norm: RmsNorm, ops: Ops, swaps: SwappedModules) -> None:
    """Let the op compute what an RMSNorm does."""
    swaps.add(module, partial(_normed, ops, norm, module.forward))


def _normed(ops: Ops, norm: RmsNorm, own: Forward, x: Tensor) -> Tensor:
    if x.stride(-1) != 1:
        return own(x)
    if x.ndim == 4 and len(x) == 1:
        return norm.of(ops, x[0])[None]
    return norm.of(ops, x)


class GatedParts(NamedTuple):
    """The products of a feed-forward down(act(gate(x)) * up(x)). kind: the activation."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    kind: str


def gated_parts_of(module: nn.Module, ops: Ops) -> GatedParts | None:
    """Return a module as a gated feed-forward, or None if it is none."""
    products = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
    rest = [each for name, each in module.named_children() if name not in products]
    if len(products) != 3 or module._parameters or any(list(each.parameters()) for each in rest):
        return None
    for names in permutations(products):
        gate, up, down = (products[name] for name in names)
        alike = gate.weight.shape == up.weight.shape == down.weight.T.shape and (gate.bias is None) == (up.bias is None)
        if alike and (kind := _gate_of(module, names, ops)):
            return GatedParts(gate, up, down, kind)
    return None


@torch.no_grad()
def _gate_of(module: nn.Module, names: Sequence[str], ops: Ops) -> str:
    """Return the activation of a feed-forward with these products, "" if it computes something else."""
    inputs, outputs = SMALL
    copied, device = copy.copy(module), next(module.parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        small = [nn.Linear(*sizes) for sizes in ((inputs, outputs), (inputs, outputs), (outputs, inputs))]
    small = [each.to(device) for each in small]
    vars(copied)["_modules"] = {**module._modules, **dict(zip(names, small, strict=True))}
    x_TI = 3 * drawn(device, 5, inputs)
    try:
        found = copied(x_TI[None])
    except Exception:  # whatever a class does with other widths
        return ""
    both = torch.cat((small[0](x_TI), small[1](x_TI)), dim=1)
    for kind in GATES:
        if close(found, small[2](ops.gated_activation(both, kind))[None]):
            return kind
    return ""


def swap_feed_forward(module: nn.Module, parts: GatedParts, ops: Ops, swaps: SwappedModules) -> None:
    """Let one product with its gate, and one behind it, compute what a gated feed-forward does."""
    weight_OI, bias_O = joined((parts.gate, parts.up))
    swaps.add(module, partial(_fed, ops, weight_OI, Epilogue(bias_O, parts.kind), parts.down))


def _fed(ops: Ops, weight_OI: Tensor, epilogue: Epilogue, down: nn.Linear, x: Tensor) -> Tensor:
    y_TO, _ = ops.norm_linear(Operand(_flat(x)), weight_OI, epilogue)
    return ops.linear(y_TO, down.weight, down.bias).view(*x.shape[:-1], -1)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@torch.no_grad()
def joined(products: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights and biases of several products behind one another. Theirs become views of these."""
    weight_OI = torch.cat([each.weight for each in products])
    bias_O = None if products[0].bias is None else torch.cat([each.bias for each in products])
    sizes = [each.out_features for each in products]
    for index, each in enumerate(products):
        each.weight.data = weight_OI.split(sizes)[index]
        if bias_O is not None:
            each.bias.data = bias_O.split(sizes)[index]
    return weight_OI, bias_O


class JoinedProducts:
    """Products of one input, of which the first one that is asked for computes all. Each takes its part once."""

    def __init__(self, products: Sequence[nn.Linear], ops: Ops) -> None:
        self._linear, self._products = ops.linear, products
        self._weight_OI, self._bias_O = joined(products)
        self._sizes = [each.out_features for each in products]
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        if x is not self._input or index not in self._parts:
            y_TO = self._linear(_flat(x), self._weight_OI, self._bias_O)
            self._input = x
            self._parts = dict(enumerate(y_TO.view(*x.shape[:-1], -1).split(self._sizes, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part

    def forget(self) -> None:
        """Let go of what nobody took."""
        self._input, self._parts = None, {}


class ProductRecorder:
    """The products of a model as one forward runs them: which have the same input.

    ran: the identities of products that ran once, for all tokens.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._tokens = tokens
        self._seen: list[tuple[nn.Linear, Tensor]] = []  # with their inputs, so that identities stay theirs
        linear = [module for module in model.modules() if type(module) is nn.Linear]
        self._hooks = [module.register_forward_pre_hook(self._note) for module in linear]

    def _note(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        if len(given) == 1 and isinstance(given[0], Tensor):
            self._seen.append((module, given[0]))  # type: ignore[arg-type]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def ran(self) -> set[int]:
        return {id(module) for module, _ in self._once()}

    def _once(self) -> list[tuple[nn.Linear, Tensor]]:
        times: dict[int, int] = {}
        for module, _ in self._seen:
            times[id(module)] = times.get(id(module), 0) + 1
        return [
            (module, x)
            for module, x in self._seen
            if times[id(module)] == 1 and x.numel() == self._tokens * x.shape[-1] and x.dtype == module.weight.dtype
        ]

    def together(self) -> list[list[nn.Linear]]:
        """Return the products by their input, in the order in which they ran."""
        groups: list[tuple[Tensor, list[nn.Linear]]] = []
        for module, x in self._once():
            if groups and groups[-1][0] is x and (groups[-1][1][0].bias is None) == (module.bias is None):
                groups[-1][1].append(module)
            else:
                groups.append((x, [module]))
        return [modules for _, modules in groups]


def swap_products(group: Sequence[nn.Linear], ops: Ops, swaps: SwappedModules) -> None:
    """Let the op compute products of one input at once."""
    if len(group) == 1:
        swaps.add(group[0], partial(_product, ops, group[0]))
        return
    products = JoinedProducts(group, ops)
    swaps.joined.append(products)
    for index, each in enumerate(group):
        swaps.add(each, partial(products.part, index))


def _product(ops: Ops, module: nn.Linear, x: Tensor) -> Tensor:
    return ops.linear(_flat(x), module.weight, module.bias).view(*x.shape[:-1], -1)
