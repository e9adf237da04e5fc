"""Graphs that are divided over ranks give what one device gives, with the collectives that hands would insert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.compiler.graph import OpGraph, TensorType
from ridgeline.compiler.passes.canonicalize import canonicalize
from ridgeline.compiler.passes.fuse import fuse
from ridgeline.compiler.sharding.collectives import MeshCollective
from ridgeline.compiler.sharding.decoders import TracedAxis, divisions, inputs_of, traced_decoder
from ridgeline.compiler.sharding.layout import MeshShape, layout_of, part_of_rank
from ridgeline.compiler.sharding.overlap import overlapped
from ridgeline.compiler.sharding.partition import ShardedGraph
from ridgeline.compiler.sharding.passes import ShardingSteps, sharded
from ridgeline.compiler.sharding.products import divided
from ridgeline.compiler.sharding.reshard import moved, steps
from ridgeline.compiler.sharding.run import assembled, simulated
from ridgeline.compiler.sharding.trace import TracedModule, exported, traced_gradients, traced_module
from ridgeline.core.errors import InvalidConfig
from ridgeline.parallel.mesh import Mesh
from tests.parallel.divided import TOKENS, loaded, logits
from tests.parallel.threads import on_ranks

MEGATRON = {"*up.weight": "tp,-", "*up.bias": "tp", "*down.weight": "-,tp"}


class Block(nn.Module):
    """Attention over few key heads and a feed-forward, with residuals. marked: the residual stream is annotated."""

    def __init__(self, marked: str | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(64, 32)
        self.up, self.down, self.marked = nn.Linear(32, 64), nn.Linear(64, 32), marked

    def forward(self, x: Tensor) -> Tensor:
        n = F.rms_norm(x, (32,))
        q, k, v = (each(n).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        if self.marked is not None:
            x = divided(x, self.marked)
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (32,)))))


def kinds(made: ShardedGraph) -> Counter[str]:
    return Counter(each.kind for _, each in made.collectives())


def run(traced: TracedModule, made: ShardedGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole outputs of all ranks."""
    named = {**traced.constants, **{f"input {at}": each for at, each in enumerate(inputs)}}
    outputs = zip(*simulated(made, [named[name] for name in traced.names]), strict=True)
    return [
        assembled(parts, layout, made.mesh)
        for parts, layout in zip(outputs, made.promised, strict=True)
        if layout is not None
    ]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(1.0, float(want.detach().abs().max())))


def test_every_layout_leads_to_every_other() -> None:
    mesh, x = MeshShape.parsed("dp=2,tp=4"), torch.arange(16 * 32).view(16, 32)
    layouts = []
    for text in product(("-", "dp", "tp", "dp+tp", "tp:8/8", "dp+tp:8/8", "dp:8/16/8"), repeat=2):
        try:
            layouts.append(layout_of(",".join(text), x.shape, mesh))
        except InvalidConfig:
            continue
    assert len(layouts) > 12
    for has, needs in product(layouts, layouts):
        parts = [part_of_rank(x, has, rank, mesh) for rank in range(8)]
        for step, _ in steps(TensorType((16, 32), x.dtype), has, needs, mesh):
            made = list(parts)
            for group in mesh.groups(step.axis):
                if isinstance(step, MeshCollective):
                    together = step.together([parts[rank] for rank in group])
                else:
                    together = [step.at((at, len(group)), parts[rank]) for at, rank in enumerate(group)]
                for rank, part in zip(group, together, strict=True):
                    made[rank] = part
            parts = made
        for rank in range(8):
            assert torch.equal(parts[rank], part_of_rank(x, needs, rank, mesh)), (has, needs)


def test_bytes_are_those_of_rings() -> None:
    mesh, type = MeshShape.parsed("tp=4"), TensorType((64, 8), torch.float32)
    whole, rows, columns = (layout_of(text, type.shape, mesh) for text in ("-,-", "tp,-", "-,tp"))
    assert moved(type, whole, rows, mesh) == 0
    assert moved(type, rows, whole, mesh) == 3 * 512
    assert moved(type, rows, columns, mesh) == 3 * 512 // 4


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2"])
def test_an_mlp_and_an_attention_block_have_one_sum_each(mesh: str) -> None:
    torch.manual_seed(0)
    module, x = Block(), torch.randn(2, 16, 32)
    traced = traced_module(module, [x])
    few = {"q.weight": "tp,-", "up.weight": "tp,-"}  # the others follow
    if mesh.startswith("dp"):
        few["input 0"] = "dp,-,-"
    made = sharded(traced, MeshShape.parsed(mesh), few, ["dp,-,-" if "input 0" in few else None])
    close(run(traced, made, [x])[0], module(x))
    assert kinds(made) == {"all_reduce": 2}
    for name, text in (("k.weight", "(tp, -)"), ("o.weight", "(-, tp)"), ("down.weight", "(-, tp)"), ("o.bias", "(-)")):
        assert str(made.layouts[traced.named()[name]]) == text


def test_tokens_that_are_divided_between_the_products_make_sums_to_scatters() -> None:
    torch.manual_seed(0)
    module, x = Block("-,tp,-"), torch.randn(2, 8, 32)
    traced = traced_module(module, [x])
    weights = {"[qkv].weight": "tp,-", "o.weight": "-,tp", **MEGATRON}
    made = sharded(traced, MeshShape.parsed("tp=4"), {**weights, "input 0": "-,tp,-"}, ["-,tp,-"])
    close(run(traced, made, [x])[0], module(x))
    assert kinds(made) == {"all_gather": 2, "reduce_scatter": 2}


def test_an_annotation_that_needs_another_division_gets_an_exchange() -> None:
    torch.manual_seed(0)
    module, x = Block("-,-,tp"), torch.randn(2, 16, 32)
    traced = traced_module(module, [x])
    made = sharded(traced, MeshShape.parsed("tp=4"), {"input 0": "-,tp,-"}, ["-,tp,-"])
    close(run(traced, made, [x])[0], module(x))
    assert kinds(made)["all_to_all"] >= 1


def test_two_sums_that_meet_become_one() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16, False)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.a(x) + 0.5 * self.b(x))

    torch.manual_seed(0)
    module, x, found = Parallel(), torch.randn(3, 4, 16), ShardingSteps()
    traced = traced_module(module, [x])
    made = sharded(traced, MeshShape.parsed("tp=2"), {"*.0.weight": "tp,-"}, steps=found)
    close(run(traced, made, [x])[0], module(x))
    assert (kinds(found.graphs["partition"]), kinds(made)) == ({"all_reduce": 2}, {"all_reduce": 1})


def test_a_sum_of_which_a_part_is_taken_is_scattered() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(16, 8, False)

        def forward(self, x: Tensor) -> Tensor:
            return divided(divided(self.w(x), "-,-"), "tp,-") * 2

    module, x, found = Taken(), torch.randn(4, 16), ShardingSteps()
    traced = traced_module(module, [x])
    made = sharded(traced, MeshShape.parsed("tp=2"), {"w.weight": "-,tp"}, ["tp,-"], found)
    close(run(traced, made, [x])[0], module(x))
    assert (kinds(found.graphs["partition"]), kinds(made)) == ({"all_reduce": 1}, {"reduce_scatter": 1})


def test_gradients_are_summed_where_data_or_matrices_are_divided() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(24, 32), Block(), nn.Linear(32, 24, False)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            scores = self.head(self.block(self.embed(ids)))
            return (scores.logsumexp(-1) - scores.gather(-1, labels[..., None])[..., 0]).mean()

    torch.manual_seed(0)
    module, ids, labels = Loss(), torch.randint(24, (4, 8)), torch.randint(24, (4, 8))
    loss = module(ids, labels)
    want = [loss, *torch.autograd.grad(loss, list(module.parameters()))]
    traced = traced_gradients(module, [ids, labels])
    weights = {"*q.weight": "tp,-", "*k.weight": "tp,-", "*v.weight": "tp,-", "*o.weight": "-,tp", **MEGATRON}
    weights |= {"*.q.bias": "tp", "*.k.bias": "tp", "*.v.bias": "tp", "head.weight": "tp,-", "embed.weight": "tp,-"}

    def told(name: str) -> str | None:
        return next((text for pattern, text in weights.items() if fnmatchcase(name, pattern)), None)

    names = [name for name, _ in module.named_parameters()]
    data = {"input 0": "dp,-", "input 1": "dp,-"}
    for mesh, asked in (("dp=2", data), ("tp=2", weights), ("dp=2,tp=2", {**weights, **data})):
        outputs = [None, *(told(name) for name in names)] if "tp" in mesh else []
        made = sharded(traced, MeshShape.parsed(mesh), asked, outputs)
        for got, wanted in zip(run(traced, made, [ids, labels]), want, strict=True):
            close(got, wanted)
        over = Counter((each.axis, each.how) for _, each in made.collectives())
        assert set(kinds(made)) == {"all_reduce"}
        assert over["dp", "sum"] == (len(want) if "dp" in mesh else 0)
        # forwards: the table, two pairs and three numbers a token; backwards: two pairs and the scores' input
        assert (over["tp", "sum"], over["tp", "amax"]) == ((8, 1) if "tp" in mesh else (0, 0))


def called(graph: OpGraph) -> Counter[tuple[str, tuple[tuple[int, ...], ...]]]:
    """The products and attentions of a graph with their shapes, and its kernels of numbers. By hand there is one more,
    for the places of ids in a part of a table."""
    found: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
    for node in fuse(canonicalize(graph)).nodes:
        if node.op == "fused" and node.result.tensor.dtype.is_floating_point:
            found[str(node.attributes["body"]), node.attributes["domain"]] += 1
        name = str(node.attributes.get("target"))
        if "mm" in name or "product" in name or "attention" in name:
            found[name, tuple(value.tensor.shape for value in node.values)] += 1
    return found


@pytest.mark.parametrize(("family", "tp"), [("llama", 2), ("qwen3", 2), ("gpt2", 4)])
def test_a_decoder_is_divided_as_by_hand(family: str, tp: int, tiny_model: Callable[[str], Path]) -> None:
    """The same scores as the layers' own tensor parallelism, the same collectives, kernels and products."""
    folder = tiny_model(family)
    decoder, at = loaded(folder, Mesh()), torch.arange(len(TOKENS))
    spec, mesh = decoder.whole, MeshShape.parsed(f"tp={tp}")
    traced = traced_decoder(spec, len(TOKENS))
    made = sharded(traced, mesh, divisions(spec, tp, "tp"))
    scores = simulated(made, inputs_of(traced, decoder, [TOKENS, at]))
    for (got,), want in zip(scores, on_ranks(tp, lambda axis: logits(folder, Mesh(tp=axis))), strict=True):
        close(got, want)
    close(scores[0][0], logits(folder, Mesh()))

    by_hand = traced_decoder(spec, len(TOKENS), mesh=Mesh(tp=TracedAxis(0, tp, "tp"))).graph
    told = [node.attributes.get("target") for node in by_hand.nodes]
    assert kinds(made) == Counter(each.kind for each in told if isinstance(each, MeshCollective))
    assert made.unknown == ()
    if family != "gpt2":  # there biases are added before the sum by hand
        ours, theirs = called(canonicalize(made.graph)), called(by_hand)
        assert ours == theirs
        assert sum(ours.values()) > 20


@pytest.mark.dealt
def test_a_decoder_of_transformers_is_divided_by_a_few_annotations() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)).eval()
    ids = torch.arange(32).view(2, 16)

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = exported(model, [ids], use_cache=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits

    few = {"*.q_proj.weight": "tp,-", "*.gate_proj.weight": "tp,-", "*embed_tokens*": "tp,-", "*lm_head*": "tp,-"}
    traced = traced_module(Scores(), [ids])
    for mesh, more in (("tp=4", {}), ("dp=2,tp=2", {"input 0": "dp,-"})):
        made = sharded(traced, MeshShape.parsed(mesh), {**few, **more}, ["dp,-,-" if more else None])
        close(run(traced, made, [ids])[0], model(ids).logits)
        assert kinds(made) == {"all_reduce": 3, "all_gather": 1}


def test_what_does_not_wait_is_computed_meanwhile() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16, False), nn.Linear(16, 16, False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(self.a(x)) * torch.exp(self.b(torch.sin(y)))

    torch.manual_seed(0)
    module, given = Apart(), [torch.randn(4, 16), torch.randn(4, 16)]
    traced = traced_module(module, given)
    made = sharded(traced, MeshShape.parsed("tp=2"), {"a.weight": "-,tp"})
    [(collective, between)] = overlapped(made.graph)
    assert collective.kind == "all_reduce"
    assert between >= 3
    close(run(traced, made, given)[0], module(*given))


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"up.weight": "tp"}, "2 dimensions, and the annotation 1"),
        ({"up.weight": "xp,-"}, "no axis 'xp'; it has dp, tp"),
        ({"up.weight": "tp,tp"}, "names an axis twice"),
        ({"up.weight": "tp:30/34,-"}, "4 ranks do not divide 30/34"),
        ({"up.weight": "tp:30/30,-"}, "60 together, and the dimension 64"),
        ({"down.weight": "tp+dp,-"}, "stand in the mesh's order, dp, tp"),
        ({"input 0": "tp,-,-"}, "4 ranks do not divide 2"),
        ({"left.weight": "tp,-"}, "no tensor is called 'left.weight'"),
    ],
)
def test_annotations_that_do_not_fit_are_refused(annotations: dict[str, str], said: str) -> None:
    traced = traced_module(Block(), [torch.randn(2, 16, 32)])
    with pytest.raises(InvalidConfig, match=said):
        sharded(traced, MeshShape.parsed("dp=1,tp=4"), annotations)


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=2", "tp=x"])
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="is no mesh"):
        MeshShape.parsed(text)
