"""A mixture of experts as data: how a token chooses its experts, and what an expert is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import Bounded, MLPSpec, NormSpec, Product, Products
from ridgeline.kernels.base.routing import UNGATED as UNGATED
from ridgeline.kernels.base.routing import RoutingSpec as RoutingSpec


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A feed-forward of experts, each of which is a gated MLP: down(act(gate(x)) * up(x)). The output is the sum of the
    chosen experts' outputs, each times its weight, and of the shared expert's.

    An activation in UNGATED makes experts plain MLPs, down(act(up(x))). What is called gate_up is then up alone.

    intermediate_size: F of one expert.
    activation: one of the gated activations of `kernels/small/activation`, or one in UNGATED.
    bias: gate, up and down have biases.
    shared: an MLP that every token runs.
    shared_gate: the shared expert's output is multiplied by the sigmoid of one more product (Qwen2-MoE).
    weighs_inputs: the weight of the only expert of a token multiplies its input, not its output (Llama 4).
    idle: so many of the experts, the last ones, compute nothing: they return their input (LongCat).
    late: what experts return is added behind the next layer, and what the shared one does here (LongCat).
    latent: the width of the experts' inputs and outputs, if two more products lie between these and the model's.
    held: of how many experts a rank holds the matrices, if ranks divide the experts; None: of all.
    placed: the experts of each rank, `held` each, where some have copies on several ranks; None: each rank has the next
        `held` experts.
    sources: how many ranks' tokens come to these experts, if ranks have tokens of their own.
    own_norms: the layer's norm is that of the shared expert alone. Router and experts have norms of their own, of which
        the router's multiplies by M^-0.5 too, and experts and shared expert each have one for what they add (Gemma 4).
    """

    kind: ClassVar[str] = "experts"
    routing: RoutingSpec
    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped", "relu2"] | Bounded = "silu"
    bias: bool = False
    shared: MLPSpec | None = None
    shared_gate: bool = False
    weighs_inputs: bool = False
    idle: int = 0
    late: bool = False
    latent: int | None = None
    held: int | None = None
    placed: tuple[tuple[int, ...], ...] | None = None
    sources: int = 1
    own_norms: NormSpec | None = None

    @property
    def scratch(self) -> int:
        """The numbers per token between the first product and the last."""
        pairs = 4 * self.sources * self.routing.top_k * self.intermediate_size
        return pairs + 2 * (self.latent or 0) + 4 * self.routing.experts + (self.shared.scratch if self.shared else 0)

    @property
    def fused(self) -> tuple[int, ...]:
        """The outputs of the parts of an expert's first matrix: gate and up, or up."""
        return (self.intermediate_size,) * (1 if self.activation in UNGATED else 2)

    @property
    def stacked(self) -> int:
        """The experts whose matrices lie here."""
        return self.routing.experts - self.idle if self.held is None else self.held

    def experts_of(self, rank: int) -> Sequence[int]:
        """Return the experts whose matrices a rank holds, in the order in which they lie there."""
        if self.placed is not None:
            return self.placed[rank]
        return range(self.stacked * rank, self.stacked * (rank + 1))

    def products(self, width: int) -> Products:
        routing, size = self.routing, self.intermediate_size
        found: Products = {"router": Product(width, routing.experts, routing.bias)}
        if self.shared is not None:
            found |= {f"shared.{name}": product for name, product in self.shared.products(width).items()}
        if self.shared_gate:
            found["shared_gate"] = Product(width, 1)
        outer = self.latent or width
        if self.latent is not None:
            found |= {"latent_in": Product(width, outer), "latent_out": Product(outer, width)}
        found["gate_up"] = Product(outer, sum(self.fused), self.bias, copies=self.stacked, used=routing.top_k)
        found["down"] = Product(size, outer, self.bias, copies=self.stacked, used=routing.top_k)
        return found

    def part(self, ranks: Ranks) -> ExpertsSpec:
        """Return the spec of one rank: a part of every expert, or all of those that it holds."""
        shared = None if self.shared is None else self.shared.part(ranks)
        if self.held is not None:
            return replace(self, shared=shared)
        columns = ranks.part("columns of an expert", self.intermediate_size)
        return replace(self, intermediate_size=columns, shared=shared)
