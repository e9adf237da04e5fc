"""A model as data: a list of layers, each a mixer and a feed-forward.

`models/<arch>.py` turns a Hugging Face `config.json` into a `ModelSpec`; `layers/decoder.py` turns a `ModelSpec`
into a network. Nothing here knows torch, so the planner and the cost model read the same description.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, Self

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.cache_layout import CacheGroup, group_layers
from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.norm import NormSpec as NormSpec
from ridgeline.core.specs.pooling import PoolingSpec
from ridgeline.core.specs.state import ChunkedKVSpec, CrossKVSpec, KVSpec, PassingSpec, SeenKVSpec, StateSpec
from ridgeline.core.specs.stem import SoundStem
from ridgeline.kernels.base.kv_format import KVFormat

if TYPE_CHECKING:
    from ridgeline.core.specs.listener import ListenerSpec
    from ridgeline.core.specs.tower import TowerSpec


RopeNumber = float | str | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """A rotary position embedding of the first `rotary_dim` elements of each head, which rotates halves (NeoX order).

    scaling: None, or "rope_type" and the numbers of that type, as `layers/rotary.py` expects them.
    axes: of each pair that rotates, the axis by which it does: 0 for time, 1 for rows and 2 for columns of a picture
        (M-RoPE). A word has one position on all three. (): there is one axis.
    """

    theta: float
    rotary_dim: int
    scaling: tuple[tuple[str, RopeNumber], ...] | None = None
    axes: tuple[int, ...] = ()


class Product(NamedTuple):
    """A matrix product of a layer.

    copies: how many matrices of this shape there are (experts). 0: an earlier layer holds the one that is used.
    used: how many of them a token is multiplied with.
    """

    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1


Products = dict[str, Product]  # in order


class Growth(NamedTuple):
    """The growth of queries with their positions, by 1 + beta · ln(1 + floor((position + offset) / original)), so that
    attention stays as sharp over long contexts (Ministral 3; Llama 4, with an offset of 1)."""

    beta: float
    original: int
    offset: int = 0


class Relative(NamedTuple):
    """Learned numbers that are added to the scores by the distance of a key from its query (Raffel et al., arXiv
    1910.10683): each head has one for each of `buckets` ranges of distances, and all layers share them. Half of the
    ranges are those of keys behind the query. Of the others the first half are single distances, and those beyond grow
    with the logarithm up to `distance`, from where on all are one range.

    causal: no key lies behind its query, and all ranges are those of the others.
    single: all ranges are single distances, from -distance to distance - 1, and those beyond count as the nearest.
    own: the number of the one layer that has these numbers; None: all layers share them.
    """

    buckets: int
    distance: int
    causal: bool = False
    single: bool = False
    own: int | None = None


class Disentangled(NamedTuple):
    """Learned vectors of distances between queries and keys, which all layers project as they project tokens (He et
    al., arXiv 2006.03654). Distances up to half of `buckets` have a vector each, and those beyond share others by the
    logarithm up to `distance`. eps: that of the vectors' LayerNorm."""

    buckets: int
    distance: int
    eps: float


class Sines(NamedTuple):
    """A table of positions that is computed (Vaswani et al., arXiv 1706.03762): row p holds the sines of p ·
    10000^(-i / steps), then their cosines. Its width is even."""

    steps: float


class OutputRules(NamedTuple):
    """The rules of a checkpoint for every output, as transformers' generate reads them.

    bad_words: token ids that never come in this order (`bad_words_ids`).
    last: one of these tokens is the last one that an output has room for (`forced_eos_token_id`).
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    last: tuple[int, ...] = ()


NO_RULES = OutputRules()


class MixerSpec(Protocol):
    """The part of a layer that moves information between tokens. Specs are hashable data, and equal ones are counted
    together.

    kind: names the module that computes it (`layers/kinds.py`) and its cost (`perf/parts.py`).
    """

    kind: ClassVar[str]

    @property
    def rope(self) -> RopeSpec | None:
        """The rotation whose table of angles the mixer reads."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states that the mixer keeps between steps, no two of them equal. It is called with what serves them: that
        of the only one, or a tuple of several, keys and values first."""

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        """The mixer's own norms, each with its width."""

    @property
    def vectors(self) -> int:
        """The number of parameters that belong to neither products nor norms."""

    @property
    def scratch(self) -> int:
        """The numbers per token that lie between the mixer's first product and its last."""

    @property
    def summed(self) -> tuple[int, ...]:
        """The numbers per token of every sum over ranks before the mixer's own result, if ranks divide it."""

    def products(self, width: int) -> Products:
        """Return the mixer's matrix products in a model of this width."""

    def part(self, ranks: Ranks) -> Self:
        """Return the spec of one rank, if ranks divide the mixer. Raise InvalidConfig if they cannot."""


class FeedForwardSpec(Protocol):
    """The part of a layer that computes on each token alone. Its members mean the same as those of `MixerSpec`."""

    kind: ClassVar[str]

    @property
    def scratch(self) -> int: ...

    def products(self, width: int) -> Products: ...

    def part(self, ranks: Ranks) -> Self: ...


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention, with or without grouped queries. `scale` multiplies q·k before the softmax.

    qk_norm: the norm of queries and keys. It normalizes each head by itself, or with qk_norm_whole all heads together.
    qk_norm_apart: it normalizes each head by itself, and each has its own weights and biases.
    qk_norm_behind: that norm comes behind the rotation (Hunyuan).
    growth: how queries grow with their positions; None: not.
    bidirectional: a query sees the tokens behind it too. Then nothing is kept between steps, and all tokens of a row
        are in one step.
    ahead: a query of a picture sees all of the picture, also what lies behind it (`ModelSpec.both_ways`).
    window: how many tokens a query sees, itself included; None: all before it. Of bidirectional attention it is so many
        to either side.
    chunk: a query sees only keys since the last position that this number divides; None: it sees further. It excludes
        `window` and `bidirectional`.
    softcap: scores x become softcap · tanh(x / softcap).
    alibi: each head's scores fall linearly with distance (Press et al., arXiv 2108.12409).
    relative: what is added to scores by the distance of keys; None: nothing.
    disentangled: scores have products with vectors of the distance too; None: not. This excludes `relative`.
    relative_owner: this layer's module holds these numbers or vectors, which all layers use (or this one alone).
    grid: scores have products with learned vectors of the distance in rows, and in columns, of places in windows of so
        many to a side; 0: they have none.
    sinks: each head has a learned logit that takes part in the softmax and carries no value.
    v_norm: values are divided by their root mean square head by head, as queries and keys are, but without a weight.
    values_are_keys: there is no projection to values. They are the keys' projection, before its norm and rotation.
    output_gate: what is attended is multiplied by the sigmoid of one more projection, which is as wide.
    head_gates: each head's result is multiplied by the sigmoid of one more number, which is projected.
    value_dim: the width of a head's values, if it is less than that of queries and keys. The cache holds them filled up
        with zeros.
    multiplier: that of the output.
    borrows: the number of an earlier layer, to whose keys and values it attends; it projects queries alone. None: it
        has its own.
    kv_format: how keys and values are cached.
    """

    kind: ClassVar[str] = "attention"
    summed: ClassVar[tuple[()]] = ()
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_whole: bool = False
    qk_norm_apart: bool = False
    qk_norm_behind: bool = False
    growth: Growth | None = None
    rope: RopeSpec | None = None
    bidirectional: bool = False
    ahead: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    alibi: bool = False
    relative: Relative | None = None
    disentangled: Disentangled | None = None
    relative_owner: bool = False
    grid: int = 0
    sinks: bool = False
    v_norm: bool = False
    values_are_keys: bool = False
    output_gate: bool = False
    head_gates: bool = False
    value_dim: int | None = None
    multiplier: float = 1.0
    borrows: int | None = None
    kv_format: KVFormat = field(default_factory=KVFormat)

    @property
    def state(self) -> KVSpec:
        heads, width, form = self.num_kv_heads, self.head_dim, self.kv_format
        if self.chunk is not None:
            return ChunkedKVSpec(num_kv_heads=heads, head_dim=width, chunk=self.chunk, format=form)
        return KVSpec(num_kv_heads=heads, head_dim=width, window=self.window, format=form)

    @property
    def states(self) -> tuple[KVSpec] | tuple[PassingSpec] | tuple[()]:
        if self.borrows is not None:
            return ()
        return (PassingSpec(),) if self.bidirectional else (self.state,)

    @property
    def vectors(self) -> int:
        table = self.relative.buckets if self.relative is not None and self.relative_owner else 0
        apart = 2 * self.disentangled.buckets + 2 if self.disentangled is not None and self.relative_owner else 0
        places = 2 * (2 * self.grid - 1) if self.grid else 0
        return self.num_heads * (self.sinks + table + apart * self.head_dim) + places * self.head_dim

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        if self.qk_norm is None:
            return ()
        every = self.qk_norm_whole or self.qk_norm_apart
        widths = (self.q_size, self.kv_size) if every else (self.head_dim, self.head_dim)
        return tuple((self.qk_norm, width) for width in (widths if self.borrows is None else widths[:1]))

    @property
    def scratch(self) -> int:
        return self.q_size * (2 if self.output_gate else 1) + sum(self.projected)

    def products(self, width: int) -> Products:
        return {
            "qkv": Product(width, sum(self.projected), self.qkv_bias),
            "out": Product(self.out_size, width, self.out_bias),
        }

    def part(self, ranks: Ranks) -> AttentionSpec:
        heads = ranks.part("attention heads", self.num_heads)
        kv_heads = ranks.part_or_copy("key/value heads", self.num_kv_heads)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths of the parts of the fused projection: queries (behind their gates, if there are any), keys, values
        unless they are the keys, and the heads' gates."""
        queries = self.q_size * (2 if self.output_gate else 1)
        if self.borrows is not None:
            return (queries,)
        values = () if self.values_are_keys else (self.num_kv_heads * (self.value_dim or self.head_dim),)
        return (queries, self.kv_size, *values, *((self.num_heads,) if self.head_gates else ()))

    @property
    def out_size(self) -> int:
        """The inputs of the output's product."""
        return self.num_heads * (self.value_dim or self.head_dim)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec:
    """Attention to an encoder's output, whose keys and values are made once for each request.

    attention: its heads, norms, projections and scale; queries see all keys.
    pictures: the most keys of a picture, if keys are those of pictures. Then a token sees those of the pictures before
        it (`core/plan/crossed.py`), and without any it passes through the layer unchanged. 0: they are not.
    read_width: the width of the encoder's output; 0: that of the model.
    """

    kind: ClassVar[str] = "cross_attention"
    rope: ClassVar[None] = None
    vectors: ClassVar[int] = 0
    summed: ClassVar[tuple[()]] = ()
    attention: AttentionSpec
    pictures: int = 0
    read_width: int = 0

    @property
    def states(self) -> tuple[CrossKVSpec]:
        own, kind = self.attention, SeenKVSpec if self.pictures else CrossKVSpec
        return (kind(num_kv_heads=own.num_kv_heads, head_dim=own.head_dim, format=own.kv_format),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        return self.attention.norms

    @property
    def scratch(self) -> int:
        return 2 * self.attention.q_size

    def products(self, width: int) -> Products:
        """Return the products of a step, and with no use those that run once for a request."""
        own = self.attention
        return {
            "q": Product(width, own.q_size, own.qkv_bias),
            "kv": Product(self.read_width or width, 2 * own.kv_size, own.qkv_bias, used=0),
            "out": Product(own.q_size, width, own.out_bias),
        }

    def part(self, ranks: Ranks) -> Self:
        """Return the spec of one rank."""
        return replace(self, attention=self.attention.part(ranks))


def attention_of(mixer: MixerSpec) -> AttentionSpec | None:
    """Return the attention that a mixer is or has as its part `attention`; None if it has none."""
    found = mixer if isinstance(mixer, AttentionSpec) else getattr(mixer, "attention", None)
    return found if isinstance(found, AttentionSpec) else None


def lender_of(mixer: MixerSpec) -> int | None:
    """Return the number of the earlier layer whose keys, or choice of tokens, a mixer takes; None if it has its own."""
    attention = attention_of(mixer)
    found: int | None = getattr(mixer, "chooser", None) if attention is None else attention.borrows
    return found


Bounded = Literal["silu_clamped_7", "silu_clamped_16"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"] | Bounded
BothWays = Literal["pictures", "prompt"]


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A feed-forward, either gated, `down(act(gate(x)) * up(x))`, or plain, `down(act(up(x)))`.

    activation: one of those of `kernels/small/activation`; or, in a plain one, "xielu", which has two learned numbers.
    first_biasless: with bias, only `down` has one.
    multipliers: those of gate(x) and of the output, in a gated one.
    sparsity: about so large a share of gate(x) becomes 0: what is below mean + standard deviation · Φ⁻¹(sparsity) of a
        token's numbers, which is taken from all of them (Gemma 3n).
    """

    kind: ClassVar[str] = "mlp"
    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    first_biasless: bool = False
    multipliers: tuple[float, float] = (1.0, 1.0)
    sparsity: float = 0.0

    @property
    def first_bias(self) -> bool:
        """True if the first product has a bias."""
        return self.bias and not self.first_biasless

    @property
    def scratch(self) -> int:
        return 3 * self.intermediate_size

    def products(self, width: int) -> Products:
        first, outputs = ("gate_up", 2 * self.intermediate_size) if self.gated else ("up", self.intermediate_size)
        return {
            first: Product(width, outputs, self.first_bias),
            "down": Product(self.intermediate_size, width, self.bias),
        }

    def part(self, ranks: Ranks) -> MLPSpec:
        return replace(self, intermediate_size=ranks.part("feed-forward columns", self.intermediate_size))


@dataclass(frozen=True)
class Absent:
    """A part that a layer does not have: it computes nothing, and has no norm before it."""

    kind: ClassVar[str] = "absent"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    states: ClassVar[tuple[()]] = ()
    norms: ClassVar[tuple[()]] = ()
    vectors: ClassVar[int] = 0
    scratch: ClassVar[int] = 0

    def __reduce__(self) -> str:
        """Let a copy, in another process too, be `ABSENT` itself: layers ask whether they have that."""
        return "ABSENT"

    def products(self, width: int) -> Products:
        """Return none."""
        return {}

    def part(self, ranks: Ranks) -> Absent:
        """Return it as it is."""
        return self


ABSENT = Absent()


@dataclass(frozen=True, kw_only=True)
class LayerInputsSpec:
    """The inputs of single layers: besides the residual, each layer gets `width` numbers of its own for every token.
    They are made of the token's embedding and of one more table.

    rows: of that table, here. known: of the whole table; tokens beyond it have the first row.
    given: the row of tokens that come as vectors.
    norm: of what is made of the embedding.
    activation: of what a layer multiplies its input with.
    """

    width: int
    rows: int
    known: int
    norm: NormSpec
    activation: Activation
    given: int = 0


@dataclass(frozen=True, kw_only=True)
class StreamsSpec:
    """Several residual streams, of which layers run one and correct the others (AltUp, arXiv 2301.13310). Beside
    attention there is an addend of low rank (LAuReL, arXiv 2411.07501).

    active: the stream that layers run.
    rank: of that addend.
    scaled: what a layer makes of its own input begins with the corrected stream times a vector.
    """

    count: int
    active: int
    rank: int
    scaled: bool


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A mixer and a feed-forward, each of which is added to the residual x. One of the two may be `ABSENT`.

    norms: the place of the norms. "before" means x += f(norm(x)), "after" means x += norm(f(x)), "both" means both.
        "around" means x = norm(x + f(x)), with f(x) multiplied as below.
        "feed_forward" means "before" for the feed-forward, and the mixer has none.
    parallel: the feed-forward sees the same x as the mixer.
    one_norm: the norm before the mixer is that before the feed-forward too.
    residual_multiplier: multiplies what either part adds.
    scalar: a learned number multiplies the residual after both parts.
    scaled: learned numbers, one for each place of x, multiply what either part adds.
    gated: the hyperbolic tangent of one learned number multiplies what the mixer adds, and that of another what the
        feed-forward adds (Flamingo, arXiv 2204.14198).
    embedded: the mixer's last argument is the tokens as they were embedded.
    inputs: the layer has an input of its own, which is added behind both parts; None: it has not.
    late_addend: what the experts of the layer before return is added behind this one.
    streams: there are several residuals, and it has inputs too; None: there is one.
    same_as: the number of an earlier layer whose weights this one has; None: it has its own.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norms: Literal["before", "after", "both", "around", "feed_forward"] = "before"
    parallel: bool = False
    one_norm: bool = False
    residual_multiplier: float = 1.0
    scalar: bool = False
    scaled: bool = False
    gated: bool = False
    embedded: bool = False
    inputs: LayerInputsSpec | None = None
    streams: StreamsSpec | None = None
    late_addend: bool = False
    same_as: int | None = None

    @property
    def attention(self) -> AttentionSpec:
        """The layer's attention, for callers that need its heads. Raises InvalidConfig if it has none."""
        if (found := attention_of(self.mixer)) is None:
            raise InvalidConfig(f"this needs layers of attention, and one has a mixer of the kind {self.mixer.kind!r}.")
        return found

    @property
    def mlp(self) -> MLPSpec:
        """The feed-forward, for callers that need its width. Raises InvalidConfig if it is not an MLP."""
        if not isinstance(self.feed_forward, MLPSpec):
            raise InvalidConfig(
                f"this needs plain feed-forwards, and a layer has one of the kind {self.feed_forward.kind!r}."
            )
        return self.feed_forward

    def products(self, width: int) -> Products:
        """Return the matrix products of both parts."""
        found = {**self.mixer.products(width), **self.feed_forward.products(width)}
        if self.inputs is not None:
            found |= {
                "input_gate": Product(width, self.inputs.width),
                "input_project": Product(self.inputs.width, width),
            }
        if self.streams is not None:
            found |= {"laurel_in": Product(width, self.streams.rank), "laurel_out": Product(self.streams.rank, width)}
        return found


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """The place of some consecutive layers in a model whose layers are divided between the stages of a pipeline.

    start: the number of the first of them in the model.
    first: tokens are embedded here. Other stages get the output of the stage before.
    last: tokens are scored here.
    depths: every kind of state in the model, with the most layers of it that a stage has.
    embedded: stages hand on the tokens as they were embedded too, since there are layers that need them.
    copied: beginnings of names of parameters here that are a copy of an earlier stage's, each with the name's beginning
        in the whole model.
    """

    start: int
    first: bool
    last: bool
    depths: tuple[tuple[StateSpec, int], ...]
    embedded: bool = False
    copied: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that decides the shape of the computation.

    max_position_embeddings: the longest context that runs: mostly the one that the checkpoint was made for.
    learned_positions: rows of a learned position table that is added to the embedding (GPT-2 has one); 0: no such
        table.
    position_offset: the row of that table that the first token gets.
    sines: how that table is computed; None: it is learned.
    token_types: rows of a table of token types, which is added as well (`core.specs.pooling.SECOND_TEXT`); 0: no such
    table.
    embedding_multiplier: multiplies the embedded tokens.
    embed_width: the width of these tables, if it is not the model's: a linear map with a bias follows them and their
        norm. 0: they are as wide as the model.
    embed_norm: normalizes the sum of these tables' rows before the first layer.
    final_norm: the norm behind the last layer, unless that has its norms "around".
    pooling: what is made of the hidden states, in place of tokens; None: the model generates.
    unembed_bias: the output layer has a bias.
    logits_multiplier: multiplies the scores.
    logits_softcap: bounds the scores after that: x becomes cap · tanh(x / cap).
    unwritten: tokens that are read and never written, whose scores are minus infinity.
    unused: beginnings of the names of tensors that checkpoints hold and this network does not use.
    encoder: the model that reads the encoder input, to whose output layers of cross attention attend; None: there is
        none. Its tokens have the rows of this model's embedding table.
    stem: what the inputs are made by, in place of a table of tokens; None: of tokens.
    decoder_start: the tokens that an output follows, if the request names no others. Only models with an encoder have
        them.
    tower: what turns pictures into vectors that stand in the place of tokens, or that layers of cross attention see;
        None: there are only tokens.
    both_ways: the tokens that see each other both ways, in layers whose attention is `ahead`: those of a picture, or of
        the whole prompt. They always run in one step. None: none do.
    listener: what turns sounds into such vectors; None: it hears none.
    elsewhere: the numbers of a vector of a picture, and of a sound, which a tower or a listener makes that is not here.
        0: there is none.
    extra_rows: rows of the embedding table behind those of the vocabulary: of tokens that are only read.
    picture_row: the row of the token that stands for a picture which layers of cross attention see.
    output_rules: what holds for every output. Only those of models with an encoder are read.
    stage: the place of these layers in a pipeline; None: they are all of the model's.
    senses_only: there are a tower or a listener alone, and neither layers nor a table of tokens.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    learned_positions: int = 0
    position_offset: int = 0
    sines: Sines | None = None
    token_types: int = 0
    embedding_multiplier: float = 1.0
    embed_width: int = 0
    embed_norm: NormSpec | None = None
    unembed_bias: bool = False
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    unwritten: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()
    pooling: PoolingSpec | None = None
    encoder: ModelSpec | None = None
    stem: SoundStem | None = None
    decoder_start: tuple[int, ...] = ()
    output_rules: OutputRules = NO_RULES
    tower: TowerSpec | None = None
    both_ways: BothWays | None = None
    listener: ListenerSpec | None = None
    elsewhere: tuple[int, int] = (0, 0)
    extra_rows: int = 0
    picture_row: int = 0
    stage: StageSpec | None = None
    senses_only: bool = False

    @cached_property
    def layer_inputs(self) -> LayerInputsSpec | None:
        """The inputs of single layers, if they have some. All layers then have them."""
        return self.layers[0].inputs if self.layers else None

    @cached_property
    def streams(self) -> StreamsSpec | None:
        """The residual streams, if there are several."""
        return self.layers[0].streams if self.layers else None

    @cached_property
    def embeds(self) -> bool:
        """True if tokens are embedded here."""
        return self.stem is None and (self.stage is None or self.stage.first)

    @cached_property
    def handed_width(self) -> int:
        """The numbers per token that stages hand on."""
        return self.hidden_size * (2 if self.stage is not None and self.stage.embedded else 1)

    @cached_property
    def scores(self) -> bool:
        """True if tokens are scored here."""
        if self.pooling is not None:
            return bool(self.pooling.tokens)
        return self.stage is None or self.stage.last

    @cached_property
    def sees_behind(self) -> bool:
        """True if tokens see those behind them, so that all of a prompt runs in one step."""
        found = (attention_of(layer.mixer) for layer in self.layers)
        return any(each is not None and each.bidirectional for each in found)

    @property
    def media_widths(self) -> tuple[int, int]:
        """The numbers of a vector that stands for a part of a picture, and of a sound; 0: none does."""
        seen = self.elsewhere[0] if self.tower is None else self.tower.outputs
        return seen, self.elsewhere[1] if self.listener is None else self.listener.outputs

    @cached_property
    def crosses(self) -> int:
        """The most keys of a picture in layers of cross attention; 0: no layer sees pictures."""
        found = (layer.mixer.pictures for layer in self.layers if isinstance(layer.mixer, CrossAttentionSpec))
        return max(found, default=0)

    @property
    def most_crossed(self) -> int:
        """The most places that the keys of a request's pictures may take: those of eight large ones."""
        return 8 * self.crosses

    @cached_property
    def ends_normed(self) -> bool:
        """True if the final norm is there."""
        return not self.layers or self.layers[-1].norms != "around"

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        if self.senses_only:  # no layer has a state, and blocks stand for what may be under way
            return (CacheGroup(spec=PassingSpec(), layers=(), spare=1),)
        groups = group_layers([layer.mixer.states for layer in self.layers])
        if self.stage is None:
            return groups
        own = {group.spec: group.layers for group in groups}
        found = ((spec, own.get(spec, ()), depth) for spec, depth in self.stage.depths)
        return tuple(CacheGroup(spec=spec, layers=layers, spare=depth - len(layers)) for spec, layers, depth in found)

    def with_kv_format(self, wanted: KVFormat) -> ModelSpec:
        """Return the model with its keys and values cached in this format. Layers for which the checkpoint brings
        scales keep them, if it is their dtype that is wanted. Raises InvalidConfig for heads that the format cannot
        hold."""
        if wanted.dtype is None:
            return self
        return replace(self, layers=tuple(_cached_as(layer, wanted) for layer in self.layers))


def with_draft(model: ModelSpec, draft: ModelSpec | None) -> ModelSpec:
    """Return the model with the layers of a draft model behind its own, as cache and states number them."""
    return model if draft is None else replace(model, layers=model.layers + draft.layers)


def _cached_as(layer: LayerSpec, wanted: KVFormat) -> LayerSpec:
    attention = attention_of(layer.mixer)
    if (own := getattr(layer.mixer, "with_cache_format", None)) is not None:  # latents and their index
        return replace(layer, mixer=own(wanted))
    if attention is None or attention.kv_format.dtype == wanted.dtype:
        return layer
    if wanted.quantized and attention.head_dim % 2:
        raise InvalidConfig(
            f"kv_cache_dtype {wanted.dtype} needs heads of even width, and this model's have "
            f"{attention.head_dim}; use auto."
        )
    return with_attention(layer, replace(attention, kv_format=wanted))


def with_attention(layer: LayerSpec, attention: AttentionSpec) -> LayerSpec:
    """Return the layer with another attention in place of its own."""
    if isinstance(layer.mixer, AttentionSpec):
        return replace(layer, mixer=attention)
    return replace(layer, mixer=replace(layer.mixer, attention=attention))  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint tensor that becomes a parameter of the decoder, or a part of one.

    transpose: it is stored as [in, out] (GPT-2's Conv1D), or as a stack of such, and we keep [out, in].
    heads: it is stored head by head, so many heads, each with its rows of several projections. We keep all rows of the
        first projection, then all of the second, and so on.
    shares: the rows of each of these projections in a head, as they are stored. Their ratios count.
    backwards: we keep the last projection first.
    interleaved: it has so many heads, in each of which two rows that rotate as a pair are neighbours. We keep all first
        halves, then all second halves.
    rotated: so many rows of each of these heads rotate, and those behind them keep their places (None: all rotate).
    axes: it has so many heads, in each of which half of the pairs rotate by columns and the others by rows, as two
        halves each. We keep the first halves of rows and columns, then the second ones.
    turns: it holds queries, keys and values one after the other, of so many heads each. In those of queries and keys
        pairs rotate by columns and by rows in turn, and a pair's two rows are neighbours. We keep them as for axes.
    alternating: it is a stack of fused pairs whose outputs alternate (gate, up, gate, up, …). We keep all gates of a
        pair, then all ups.
    complete: it is a norm's weight to which no offset must be added (see NormSpec.offset).
    row: so many dimensions of size 1 stand before its own: a vector that is stored as a matrix of one row has 1. With
        a kernel such ones stand behind it too.
    columns: it is a vector that is stored as a matrix of so many columns, or a matrix whose rows lie in a grid of so
        many columns.
    kernel: it is a matrix that is stored as the kernel of a convolution, whose last dimensions these are; (): it is a
        matrix.
    scalar: it is one number without dimensions.
    stacked: it holds this part of every expert, one after the other. Others hold one expert's.
    zeros: files leave it out, and it is so many zeros.
    """

    name: str
    transpose: bool = False
    heads: int | None = None
    shares: tuple[int, ...] = (1, 1, 1)
    backwards: bool = False
    interleaved: int | None = None
    rotated: int | None = None
    axes: int | None = None
    turns: int | None = None
    alternating: bool = False
    complete: bool = False
    row: int = 0
    columns: int = 0
    kernel: tuple[int, ...] = ()
    scalar: bool = False
    stacked: bool = False
    zeros: int = 0


# Decoder parameter name → checkpoint tensors, one below the other (q, k, v → qkv; gate, up → gate_up). Of experts, all
# tensors of the first come before those of the second, unless they are stacked.
WeightMap = dict[str, tuple[Source, ...]]
