"""A tower as data: the network that turns patches of pictures into vectors, which stand in the place of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.core.specs.model import Activation, LayerSpec, MLPSpec, NormSpec, Product, RopeSpec


@dataclass(frozen=True, kw_only=True)
class ProjectorSpec:
    """The map from a tower's patches to vectors as wide as the model: [norm →] merge x merge patches joined [→ norm] →
    linear → activation → linear.

    merge: the patches of a square that become one vector are merge x merge. They follow each other.
    joined: how they become one. "beside": they lie side by side. "mean": their average is taken. "map": a linear map
        without bias takes them back to the tower's width, behind the norm. Its inputs are the patches' first numbers,
        then their second ones, and so on.
    standardized: what is joined is multiplied by the root of the tower's width, then shifted and multiplied by learned
        vectors.
    norm: None: there is none. norm_merged: it normalizes the merged patches together.
    hidden: the width between the two linear maps; 0: there is one map, and no activation.
    bias: the maps have biases.
    absent: there is no map: vectors stay as they are.
    """

    outputs: int
    merge: int = 1
    joined: Literal["beside", "mean", "map"] = "beside"
    standardized: bool = False
    norm: NormSpec | None = None
    norm_merged: bool = False
    hidden: int = 0
    activation: Activation = "gelu"
    bias: bool = True
    absent: bool = False

    def products(self, width: int) -> list[Product]:
        """Return the matrix products of a vector, for a tower of this width."""
        if self.absent:
            return []
        inputs = self.inputs(width)
        first = [Product(width * self.merge**2, width)] if self.joined == "map" else []
        if not self.hidden:
            return [*first, Product(inputs, self.outputs, self.bias)]
        return [*first, Product(inputs, self.hidden, self.bias), Product(self.hidden, self.outputs, self.bias)]

    def made(self, patches: int, views: int) -> int:
        """Return the number of vectors that are made of so many views with so many patches together."""
        return patches // self.merge**2

    @property
    def vectors(self) -> int:
        """The number of further parameters, which belong neither to products nor to the norm."""
        return 0

    def inputs(self, width: int) -> int:
        """Return the inputs of the first map that has an activation behind it."""
        return width * self.merge**2 if self.joined == "beside" else width

    def norm_width(self, width: int) -> int:
        """Return the width of the norm; 0: there is none."""
        return 0 if self.norm is None else width * (self.merge**2 if self.norm_merged and self.joined != "mean" else 1)


@dataclass(frozen=True, kw_only=True)
class GatedProjectorSpec(ProjectorSpec):
    """Merged patches → linear with biases → linear → norm → GELU → gated feed-forward. From the first map on vectors
    have `outputs` numbers.

    hidden, activation: of the feed-forward.
    """

    def products(self, width: int) -> list[Product]:
        first, second = Product(width * self.merge**2, self.outputs, True), Product(self.outputs, self.outputs)
        return [first, second, Product(self.outputs, 2 * self.hidden), Product(self.hidden, self.outputs)]

    def norm_width(self, width: int) -> int:
        return self.outputs


@dataclass(frozen=True, kw_only=True)
class PoolerSpec:
    """The map from a view's patches to one vector, before the projector: its class token, or what a learned query
    attends to among the patches, x, with x + mlp(norm(x)) behind it (Zhai et al., arXiv 2106.04560).

    heads: of that query; 0: the class token is the vector.
    """

    heads: int = 0
    norm: NormSpec | None = None
    mlp: MLPSpec | None = None

    def products(self, width: int) -> list[Product]:
        """Return the matrix products, for a tower of this width."""
        if self.mlp is None:
            return []
        return [Product(width, 3 * width, True), Product(width, width, True), *self.mlp.products(width).values()]

    def vectors(self, width: int) -> int:
        """Return the number of parameters that belong to no products."""
        return 0 if self.mlp is None else 3 * width


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """A learned table of positions, one for each cell of a square grid of side x side patches.

    fit: how patches of a view get them. "own": every view has the grid's own shape. "corners": values lie between those
        of the grid, whose corners lie on the view's corners (bilinear). "means": the cells' edges lie on the view's
        instead, and a value is the mean of all cells that it covers. "nearest": the same edges, and a patch takes the
        value of the cell that its corner lies in. "cubic": the same edges, and values of a bicubic curve through 4 x 4
        cells. "axes": there is no grid but two tables of `side` rows, one for columns and one for lines, whose rows are
        added up.
    """

    side: int
    fit: Literal["own", "corners", "means", "nearest", "cubic", "axes"] = "own"

    @property
    def any_shape(self) -> bool:
        """True if views have any shape."""
        return self.fit != "own"


@dataclass(frozen=True, kw_only=True)
class MiddleMerge:
    """The place in a tower behind which squares of patches become one each, after they have seen each other alone:
    their mean + projector(their numbers side by side).

    behind: the number of the layer before it. layer: in which a square's patches see each other. projector: back to the
        tower's width.
    """

    behind: int
    layer: LayerSpec
    projector: ProjectorSpec


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """A tower of layers whose patches see each other both ways, within a view or a frame of it.

    width: of the layers. patch_width: the numbers of a patch (`kernels.pictures.views.Patching.width`).
    class_token: one more vector stands before the patches of each view, and is left out behind the last layer.
    grid: the learned positions; None: there are none.
    rope_apart: of a head's frequencies, rows take the even ones and columns the odd ones; otherwise both take the same.
    embed_norm: normalizes embedded patches. patch_norm: before their positions. final_norm: behind the last layer.
    clipped: the layers' linear maps clip their inputs and outputs to learned bounds, four of each projection.
    window: patches see those in the same square of so many merged patches to a side. 0: all of their view's frame.
    whole: the layers in which they see all of the frame nevertheless.
    projector: the map to the model's vectors.
    pooler: what makes one vector of each view, which is the embedding of a picture; None: patches become vectors.
    middle: between layers, what makes fewer of the patches; None: nothing does.
    newline: there is a vector that ends lines of patches, or a picture's last view.
    ends: the number of learned rows, as wide as the tower, that the projector maps like averaged patches. The last
        vector ends lines; the processor places the others.
    covered: patches that lie wholly outside of their picture are seen by none, and have the first position.
    deep: layers behind which further projectors read, whose vectors are added behind the decoder's first layers
        (DeepStack, arXiv 2406.04334). deep_projector: theirs.
    """

    width: int
    patch_width: int
    layers: tuple[LayerSpec, ...]
    projector: ProjectorSpec
    pooler: PoolerSpec | None = None
    patch_bias: bool = False
    class_token: bool = False
    grid: GridSpec | None = None
    rope_apart: bool = False
    embed_norm: NormSpec | None = None
    patch_norm: NormSpec | None = None
    final_norm: NormSpec | None = None
    clipped: bool = False
    window: int = 0
    whole: tuple[int, ...] = ()
    middle: MiddleMerge | None = None
    newline: bool = False
    ends: int = 0
    covered: bool = False
    deep: tuple[int, ...] = ()
    deep_projector: ProjectorSpec | None = None

    @property
    def rope(self) -> RopeSpec | None:
        """The rotation of queries and keys by row and column, in all layers; None: there is none. The first half of a
        head's pairs rotate by the patch's row and the others by its column."""
        return self.layers[0].attention.rope if self.layers else None

    @property
    def every_layer(self) -> tuple[LayerSpec, ...]:
        """All layers, in their order."""
        return self.layers

    @property
    def read(self) -> int:
        """The numbers of a patch that the projector gets."""
        return self.width

    def rows_of(self, views: Sequence[int]) -> list[int]:
        """Return the places that see each other, in views of so many patches each."""
        return [each + self.class_token for each in views]

    @property
    def merge(self) -> int:
        """The side of a square of patches that becomes one vector. A square's patches follow each other."""
        return self.projector.merge * (1 if self.middle is None else self.middle.projector.merge)

    @property
    def outputs(self) -> int:
        """The numbers of a vector with those that are added behind layers."""
        return self.projector.outputs * (1 + len(self.deep))

    @property
    def rows(self) -> int:
        """Rows of the table of positions."""
        if self.grid is None:
            return 0
        return 2 * self.grid.side if self.grid.fit == "axes" else self.grid.side**2 + self.class_token

    @property
    def projectors(self) -> Iterator[ProjectorSpec]:
        """All projectors."""
        yield self.projector
        for _ in self.deep:
            assert self.deep_projector is not None
            yield self.deep_projector

    @property
    def patch_flops(self) -> int:
        """The floating-point operations of a patch's matrix products."""
        each = [sum(p.inputs * p.outputs for p in layer.products(self.width).values()) for layer in self.layers]
        projected = sum(p.inputs * p.outputs for own in self.projectors for p in own.products(self.width))
        total = self.patch_width * self.width + projected // self.merge**2
        if (middle := self.middle) is None:
            return 2 * (total + sum(each))
        squares = middle.projector.merge**2
        total += sum(each[: middle.behind + 1]) + sum(each[middle.behind + 1 :]) // squares
        total += sum(p.inputs * p.outputs for p in middle.layer.products(self.width).values())
        return 2 * (total + sum(p.inputs * p.outputs for p in middle.projector.products(self.width)) // squares)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        layers, projectors = list(self.layers), list(self.projectors)
        norms = []
        if self.middle is not None:
            layers, projectors = [*layers, self.middle.layer], [*projectors, self.middle.projector]
            norms.append((self.middle.layer.norm, -self.width))  # one of its parts is absent
        products = [p for layer in layers for p in layer.products(self.width).values()]
        products += [p for own in projectors for p in own.products(self.width)]
        products += [] if self.pooler is None else self.pooler.products(self.width)
        products.append(Product(self.patch_width, self.width, self.patch_bias))
        total = sum(p.outputs * (p.inputs + p.bias) for p in products)
        norms += [(layer.norm, (4 if layer.norms == "both" else 2) * self.width) for layer in layers]
        norms += [(norm, width) for layer in layers for norm, width in layer.mixer.norms]
        norms += [
            (norm, self.width) for norm in (self.patch_norm, self.embed_norm, self.final_norm) if norm is not None
        ]
        norms += [(own.norm, own.norm_width(self.width)) for own in projectors if own.norm is not None]
        weighted = [(norm, width) for norm, width in norms if not norm.weightless]
        total += sum(width * (2 if norm.kind == "layer" and not norm.biasless else 1) for norm, width in weighted)
        total += 2 * self.width * sum(own.standardized for own in self.projectors)
        total += 2 * self.width * sum(layer.scaled for layer in self.layers)
        total += 4 * self.clipped * sum(6 + layer.mlp.gated for layer in self.layers)
        total += 0 if self.pooler is None else self.pooler.vectors(self.width)
        total += sum(own.vectors for own in self.projectors)
        return total + self.width * (self.rows + self.class_token + self.ends) + self.newline * self.projector.outputs

    def scratch(self) -> int:
        """Return the numbers per patch that lie between two layers, at most."""
        widest = max((max(layer.mixer.scratch, layer.feed_forward.scratch) for layer in self.layers), default=0)
        middle = [] if self.middle is None else [self.middle.projector]
        projected = max(3 * own.hidden // own.merge**2 + own.outputs for own in (*self.projectors, *middle))
        return self.patch_width + 4 * self.width + max(widest, projected)
