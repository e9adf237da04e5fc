"""A mixture of experts: a router, the experts' stacked weights, and an expert that all tokens share.

Legend:
    T  tokens of the step
    M  model width
    E  experts
    K  experts of a token
    P  pairs of a token and one of its experts, T · K, sorted by expert
    F  an expert's inner width
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import NormSpec
from ridgeline.kernels.gemm.route.op import Router, Routes
from ridgeline.layers.build import Build
from ridgeline.layers.expert_cache import ExpertCache, wanted
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import feed_forward
from ridgeline.layers.norm import Norm, summed_norm
from ridgeline.parallel.axis import ALONE, Deferred
from ridgeline.parallel.exchange import Combined, Exchange
from ridgeline.quantization.experts import ExpertWeights, StackedWeights, held_experts, prepare_experts
from ridgeline.quantization.held import Filling, empty

Addend = Tensor | Callable[[], Tensor | None] | None  # what is added to the experts' sums, or what computes it


class ExpertStack(nn.Module):
    """One matrix of every expert, or several of them fused.

    parts: the rows of each fused projection of one expert. The weight is [experts, sum(parts), inputs].
    weight: the parameter that is loaded and trained. It is None once another form has taken its place.
    fillings: the tensors that are loaded instead, if the scheme keeps the form of the files.
    matrices: the form that multiplies; it is set by `prepare` if there are such tensors.
    on_host: the weight stays in the host's memory, as it was loaded, and other code multiplies.
    below: the matrices stay in the host's memory, and other code places them on the device (`streamed.py`).
    """

    weight: nn.Parameter | None
    fillings: Sequence[Filling]
    matrices: ExpertWeights

    def __init__(
        self, experts: int, inputs: int, parts: tuple[int, ...], bias: bool, build: Build, *, on_host: bool = False
    ) -> None:
        super().__init__()
        self.parts, self.on_host, self.below = parts, on_host, build.below
        self.ops, self.scheme, self.dtype = build.ops, build.scheme, build.dtype
        held, self.inputs, self.weight = self.scheme.held, inputs, None
        rows = parts if len(held) == len(parts) else (sum(parts),)  # of one tensor that holds all parts
        self.fillings = empty(held, rows, inputs, build.dtype, build.loading_device, experts)
        if not held:
            self.weight = build.parameter(experts, sum(parts), inputs, on_host=on_host or build.below)
            self.matrices = StackedWeights(build.ops, self.weight)
        self.bias = build.parameter(experts, sum(parts), on_host=on_host) if bias else None

    def prepare(self) -> None:
        """Hold the loaded weights in the form of their scheme. If that is another form, the parameter is let go."""
        if self.fillings:
            self.matrices, self.fillings = held_experts(self.ops, self.fillings[0], self.dtype), ()
        if self.weight is None or self.on_host or (self.below and self.scheme.name == "plain"):
            return
        loaded = StackedWeights(self.ops, self.weight)
        self.matrices = prepare_experts(loaded, self.scheme, gated=len(self.parts) == 2)
        if self.matrices is not loaded:
            self.weight = None

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weights if they are not a parameter, otherwise 0."""
        if self.fillings:
            return sum(filling.nbytes for filling in self.fillings)
        return self.matrices.nbytes if self.weight is None else 0


class OwnNorms(nn.Module):
    """The norms of a mixture whose parts have their own: before the router, before and after the experts, and after the
    shared expert.

    scaled_M: the router's weight times M^-0.5, once the weights are loaded.
    """

    scaled_M: Tensor | None

    def __init__(self, spec: NormSpec, width: int, build: Build) -> None:
        super().__init__()
        self.router_norm, self.pre_norm, self.post_norm, self.shared_norm = (Norm(spec, width, build) for _ in range(4))
        self.scaled_M = None

    def router_weight(self) -> Tensor:
        """Return the weight of the router's norm, float32."""
        weight_M = self.router_norm.weight
        return weight_M.float() * len(weight_M) ** -0.5 if self.scaled_M is None else self.scaled_M


class Copies(nn.Module):
    """The slots of experts that lie on several ranks: slot s of rank r has the number r · slots + s.

    Legend:
        J  the most copies of an expert: one on each rank
    """

    slot_EJ: Tensor
    count_E: Tensor

    def __init__(self, placed: Sequence[Sequence[int]], experts: int, device: torch.device) -> None:
        super().__init__()
        self._experts, self._most = experts, len(placed)
        self._expert_S = [expert for each in placed for expert in each]
        self.slots = len(self._expert_S)
        for name, table in zip(("slot_EJ", "count_E"), self._tables(), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def take(self, takes: Sequence[tuple[int, int]]) -> None:
        """Let slots take the experts of other slots, all at once. The tables stay where they are."""
        before_S = list(self._expert_S)
        for slot, source in takes:
            self._expert_S[slot] = before_S[source]
        for table, changed in zip((self.slot_EJ, self.count_E), self._tables(), strict=True):
            table.copy_(changed.pin_memory() if table.is_cuda else changed, non_blocking=True)  # no host waits for it

    def _tables(self) -> tuple[Tensor, Tensor]:
        slots: list[list[int]] = [[] for _ in range(self._experts)]
        for number, expert in enumerate(self._expert_S):
            slots[expert].append(number)
        rows = [[*each, *[self.slots] * (self._most - len(each))] for each in slots]
        rows.append([self.slots] * self._most)  # of no expert
        return torch.tensor(rows, dtype=torch.int32), torch.tensor([*map(len, slots), 1], dtype=torch.int32)

    def chosen(self, expert_TK: Tensor, n_TM: Tensor) -> Tensor:
        """Return the slots of the tokens' experts. A token's bits choose among copies, so that its sum, whose order
        follows from the ranks, does not depend on the tokens beside it."""
        bits_T8 = n_TM[:, :8].contiguous().view(torch.int16 if n_TM.element_size() == 2 else torch.int32)
        number_T1 = bits_T8.long().sum(1, keepdim=True)
        expert_TK = expert_TK.long()
        copy_TK = (number_T1 + expert_TK) % self.count_E[expert_TK]
        return self.slot_EJ[expert_TK, copy_TK]


class Experts(nn.Module):
    """The feed-forward of an `ExpertsSpec`.

    tally_E: int64, how many tokens each expert has got since the engine began.
    """

    tally_E: Tensor

    def __init__(self, spec: ExpertsSpec, width: int, build: Build) -> None:
        super().__init__()
        how = spec.routing
        self.spec, self.ops = spec, build.ops
        self.router = build.parameter(how.experts, width)
        self.router_bias = build.parameter(how.experts) if how.bias else None
        self.correction = build.parameter(how.experts, dtype=torch.float32) if how.correction else None
        if self.correction is not None:
            self.correction.requires_grad_(False)  # choices have no gradient, so its training has a rule of its own
        self.expert_scale = build.parameter(how.experts) if how.expert_scale else None
        self.slots = build.expert_cache if build.expert_cache < spec.stacked else 0
        inner, outer, on_host = spec.intermediate_size, spec.latent or width, self.slots > 0
        self.gate_up = ExpertStack(spec.stacked, outer, spec.fused, spec.bias, build.within("gate_up"), on_host=on_host)
        self.down = ExpertStack(spec.stacked, inner, (outer,), spec.bias, build.within("down"), on_host=on_host)
        self.latent_in = self.latent_out = None
        if spec.latent is not None:
            self.latent_in = Linear(width, (outer,), False, build.within("latent_in"))
            self.latent_out = Linear(outer, (width,), False, build.within("latent_out"))
        self.cache: ExpertCache | None = None
        self.following: tuple[tuple[Experts, Norm | None], ...] = ()  # not a module, since it is no part of this one
        self.tp, self.sums, self.pending = build.mesh.tp, build.sums, build.pending
        self.exchange = build.mesh.exchange
        apart = replace(build.within("shared"), pending=ALONE)
        if not spec.own_norms:  # its results are added to the experts', and all of that over the ranks
            apart = replace(apart, sums=Deferred(build.sums))
        self.shared = feed_forward(spec.shared, width, apart) if spec.shared else None
        self.shared_gate = Linear(width, (1,), False, build.within("shared_gate")) if spec.shared_gate else None
        self.norms = OwnNorms(spec.own_norms, width, build) if spec.own_norms else None
        self._held_TM: Tensor | None = None
        self.copies = Copies(spec.placed, how.experts, build.device) if spec.placed else None
        tally_E = torch.zeros(how.experts, dtype=torch.int64, device=build.device)
        self.register_buffer("tally_E", tally_E, persistent=False)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, live_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (what the experts add to the residual, the residual before it): [T, M] each."""
        if self.norms is not None:
            return self._side_by_side(self.norms, norm, x_TM, residual_TM, live_T)
        n_TM, s_TM, routes = self.route(norm, x_TM, residual_TM, live_T)
        if self.spec.late:
            return self._late(n_TM, routes), s_TM
        hides = self.exchange is not None and self.latent_in is None and self.exchange.hides()
        shared_TM = add_TM = None if hides else self._shared(n_TM)
        x_TM = n_TM
        if self.spec.weighs_inputs:
            x_TM = n_TM * routes.weight_TK.to(n_TM.dtype)
            routes = routes._replace(weight_TK=torch.ones_like(routes.weight_TK))
        if self.latent_in is not None:
            x_TM, add_TM = self.latent_in(n_TM), None
        if self.cache is not None:
            y_TM = self._offloaded(self.cache, x_TM, s_TM, routes, add_TM, live_T)
        else:
            y_TM = self._sum(x_TM, routes, partial(self._shared, n_TM) if hides else add_TM)
        if self.latent_out is not None:
            y_TM = self.latent_out(y_TM)
            y_TM = y_TM if shared_TM is None else y_TM + shared_TM
        if self.cache is not None:
            return y_TM, s_TM
        return (y_TM if self.sums.size == 1 else self.sums.all_reduce(y_TM)), s_TM

    def route(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, live_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Routes]:
        """Return (the normalised input, the residual, the tokens' routes)."""
        if self.pending.size > 1:
            n_TM, s_TM = summed_norm(self.pending, self.ops, norm, x_TM, residual_TM)
            return n_TM, s_TM, self._routes(n_TM, None, None, 0.0, live_T)[2]
        if norm is not None and norm.bias is not None:  # a LayerNorm, which no op fuses with the router
            n_TM, before_TM = norm(x_TM, residual_TM)
            return n_TM, before_TM, self._routes(n_TM, None, None, 0.0, live_T)[2]
        weight_M, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self._routes(x_TM, residual_TM, weight_M, eps, live_T)

    def _routes(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor | None, eps: float, live_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Routes]:
        router = Router(self.router, self.router_bias, self.correction, self.expert_scale, self.spec.routing)
        n_TM, s_TM, routes = self.ops.route(x_TM, residual_TM, weight_M, eps, router, live_T, self.tally_E)
        if self.copies is not None:
            routes = routes._replace(expert_TK=self.copies.chosen(routes.expert_TK, n_TM))
        if self.exchange is not None:
            return n_TM, s_TM, routes
        if self.copies is not None:
            routes = self.ops.order_pairs(routes.expert_TK, routes.weight_TK, self.copies.slots)
        if self.spec.held is not None:
            routes = self.ops.route_to_some(routes, self.spec.held * self.tp.rank, self.spec.held)
        return n_TM, s_TM, routes

    def _sum(self, n_TM: Tensor, routes: Routes, add_TM: Addend) -> Tensor:
        """Return the weighted sum over the tokens' experts, plus `add_TM`: of this rank's experts where all ranks have
        all tokens, of all ranks' where each has its own."""
        if self.exchange is not None:
            return self._exchanged(self.exchange, n_TM, routes, add_TM)
        assert not callable(add_TM)
        h_PF = self.gate_up.matrices.gate_up(n_TM, self.gate_up.bias, routes, self.spec.activation)
        return self.down.matrices.down(h_PF, self.down.bias, routes, add_TM)

    def _offloaded(
        self,
        cache: ExpertCache,
        n_TM: Tensor,
        s_TM: Tensor,
        routes: Routes,
        add_TM: Tensor | None,
        live_T: Tensor | None,
    ) -> Tensor:
        """Return the sum where the experts' matrices lie in the host's memory, and begin to copy those that the next
        mixture will probably need."""
        start_E1, count = routes.start_E1, len(routes.start_E1)
        for following, following_norm in self.following:  # read together, since the host waits once
            start_E1 = torch.cat((start_E1, following.guessed(following_norm, s_TM, live_T)))
        start = start_E1.tolist()
        cache.begin(start[:count])
        for following, _ in self.following:
            assert following.cache is not None
            following.cache.foresee(wanted(start[count:]))
        return cache.sum(n_TM, routes, start[:count], add_TM)

    def guessed(self, norm: Norm | None, s_TM: Tensor, live_T: Tensor | None) -> Tensor:
        """Return `start_E1` of the routes that these tokens would take, were they this layer's input."""
        n_TM = s_TM if norm is None else norm(s_TM)[0]
        router = Router(self.router, self.router_bias, self.correction, self.expert_scale, self.spec.routing)
        routes: Routes = self.ops.route(n_TM, None, None, 0.0, router, live_T, None)[2]
        return routes.start_E1

    def _exchanged(self, exchange: Exchange, n_TM: Tensor, routes: Routes, add_TM: Addend) -> Tensor:
        """Send tokens to the ranks of their experts, compute those that came, and return the sums that came back.

        add_TM: if it has yet to be computed, that is done while results are on their way, and while ranks with more of
            the tokens still multiply.
        """
        if (whole := self._in_one_launch(exchange, n_TM, routes)) is not None:
            return whole(add_TM() if callable(add_TM) else add_TM)
        held = self.spec.stacked
        arrived = exchange.dispatch(n_TM, routes.expert_TK, routes.weight_TK, held)
        own = self.ops.order_pairs(arrived.expert_NK, arrived.weight_NK, held)
        h_PF = self.gate_up.matrices.gate_up(arrived.x_NM, self.gate_up.bias, own, self.spec.activation)
        y_NM = self.down.matrices.down(h_PF, self.down.bias, own, None)
        if not callable(add_TM):
            return exchange.combine(y_NM, arrived, add_TM)
        added = exchange.begin_combine(y_NM, arrived)
        return added(add_TM())

    def _in_one_launch(self, exchange: Exchange, n_TM: Tensor, routes: Routes) -> Combined | None:
        """Return a function for the sums, if the exchange has one launch for them and the matrices are plain."""
        stacks = [each.matrices for each in (self.gate_up, self.down) if each.bias is None]
        weights = [each.weight for each in stacks if isinstance(each, StackedWeights)]
        if len(weights) < 2 or self.copies is not None or self.ops.deterministic:  # copies' pairs are in no order
            return None
        up, down = weights
        if not isinstance(up, Tensor) or not isinstance(down, Tensor):
            return None
        return exchange.in_one_launch(n_TM, routes, (up, down), self.spec.activation)

    def lend(self) -> None:
        """Compute what other ranks' tokens want of this rank's experts, in a step in which it has no tokens itself."""
        assert self.exchange is not None
        used, inputs = self.spec.routing.top_k, self.gate_up.inputs
        expert_TK = torch.empty(0, used, dtype=torch.int32, device=self.router.device)
        start_E1 = torch.zeros(self.spec.routing.experts + 1, dtype=torch.int32, device=self.router.device)
        nothing = Routes(expert_TK, expert_TK.float(), expert_TK.flatten(), expert_TK, start_E1)
        self._exchanged(self.exchange, self.router.new_empty(0, inputs), nothing, None)

    def _side_by_side(
        self, norms: OwnNorms, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, live_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert self.shared is not None
        y_TM, s_TM = self.shared(norm, x_TM, residual_TM)
        _, _, routes = self._routes(s_TM, None, norms.router_weight(), norms.router_norm.eps, live_T)
        z_TM = self._sum(norms.pre_norm(s_TM)[0], routes, None)
        return norms.shared_norm(y_TM)[0] + norms.post_norm(self.sums.all_reduce(z_TM))[0], s_TM

    def _late(self, n_TM: Tensor, routes: Routes) -> Tensor:
        """Return the shared expert's output, and keep the others' for `take`."""
        spec, first, add_TM = self.spec, self.spec.routing.experts - self.spec.idle, None
        if spec.idle:
            idle_TK = (routes.expert_TK >= first) & (routes.expert_TK < spec.routing.experts)
            weight_T1 = torch.where(idle_TK, routes.weight_TK, 0).sum(1, keepdim=True)
            if self.tp.rank == 0:  # added up, it must count once
                add_TM = (n_TM * weight_T1).to(n_TM.dtype)
            routes = self.ops.route_to_some(routes, 0, first)
        self._held_TM = self.sums.all_reduce(self._sum(n_TM, routes, add_TM))
        shared_TM = self._shared(n_TM)
        assert shared_TM is not None
        return self.sums.all_reduce(shared_TM)

    def take(self) -> Tensor | None:
        """Return the addend behind the next layer, once; None if this one did not run."""
        held_TM, self._held_TM = self._held_TM, None
        return held_TM

    def prepare(self) -> None:
        """Compute once what follows from the loaded weights."""
        if self.tp.rank > 0 and self.spec.held is None:
            self.down.bias = None  # added up, it must count once
        if self.norms is not None:
            self.norms.scaled_M = self.norms.router_weight()
        if self.slots:
            stacks = (self.gate_up.weight, self.gate_up.bias, self.down.weight, self.down.bias)
            self.cache = ExpertCache(stacks, self.slots, self.router.device, self.ops, self.spec.activation)

    def _shared(self, n_TM: Tensor) -> Tensor | None:
        """Return this rank's addend of the shared expert's output, or None."""
        if self.shared is None:
            return None
        y_TM, _ = self.shared(None, n_TM, None)
        if self.shared_gate is None:
            return y_TM
        weight_1M = self.shared_gate.weight
        if weight_1M is None or self.shared_gate.matrix.adapts:  # it has another form
            return y_TM * torch.sigmoid(self.shared_gate(n_TM))
        return self.ops.token_gate(y_TM, n_TM, weight_1M)
