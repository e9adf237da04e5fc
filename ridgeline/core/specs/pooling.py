"""Pooling: models that end with vectors instead of tokens, and what a request may ask of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.settings.vllm_arguments import POOLING, with_vllms_fields

Kind = Literal["last", "mean", "cls", "max", "sum"]
Task = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify")
TOKENWISE = ("token_embed", "token_classify")  # tasks that give a vector for every token

# A token id with this bit belongs to the second text of a pair: models with token types embed that as well
SECOND_TEXT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A linear map behind the pooling, with what follows it: norm(activation(map(x))).

    biasless: the map has no bias. tied: its matrix is the table of tokens.
    norm_eps: the number that a LayerNorm adds to the variance; None: there is no norm. norm_biasless: it has no bias.
    """

    outputs: int
    biasless: bool = False
    tied: bool = False
    activation: Literal["none", "tanh", "gelu", "gelu_tanh", "silu", "relu", "log1p_relu", "log1p_log1p_relu"] = "none"
    norm_eps: float | None = None
    norm_biasless: bool = False


@dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """The pooling of a prompt's hidden states to a vector.

    kind: which of them make the vector: the last token's, the first token's ("cls"), or the mean of all;
        or of each number behind the maps the largest ("max") or the sum over all tokens.
    task: what the vector is: an embedding, or scores of labels; or that there are only vectors of tokens. Texts are
        compared by embeddings of their tokens then (late interaction), and such scores are rewards.
    width: the numbers of a vector.
    head: the maps behind the pooling, in order.
    whole: a prompt runs in one step, since tokens see those behind them or the mean needs them all.
    normalize: an embedding gets the length 1.
    activation: what makes probabilities of scores.
    labels: their names.
    tokens: scores are those of these tokens as the next one, by the output layer. difference: of two tokens there is
        one score, the second's less the first's.
    dimensions: the lengths that embeddings may be cut to; None: any, since the config names none.
    only_token: of the vectors of tokens only those at this token are given; None: all are.
    token_types: rows of the table of token types. Where there are several, the second text of a pair has type 1.
    apart: a prompt is a text or one picture, whose vector the tower makes by itself.
    filled, filler: texts are filled up to so many tokens with this one; 0: they are not.
    """

    kind: Kind
    task: Task
    width: int
    head: tuple[HeadSpec, ...] = ()
    whole: bool = True
    normalize: bool = True
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"
    labels: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    difference: bool = False
    dimensions: tuple[int, ...] | None = None
    only_token: int | None = None
    token_types: int = 0
    apart: bool = False
    filled: int = 0
    filler: int = 0

    @property
    def embeds(self) -> bool:
        """True if the vectors are embeddings, and not scores."""
        return self.task in ("embed", "token_embed")

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that requests may name, the model's own first."""
        if self.task in TOKENWISE:
            return (self.task,)
        if self.task == "embed":
            return ("embed", "token_embed")
        return ("classify",) if self.tokens else ("classify", "token_classify")

    def runs_whole(self, task: Task) -> bool:
        """Return True if a prompt with this task must run in one step."""
        return self.whole or task in TOKENWISE


@dataclass(frozen=True)
class Side:
    """The form of queries, or of documents, where texts are compared by the vectors of their tokens.

    marker: the token behind the first one says which side a text is. most: so many of a text's tokens count.
    skipped: tokens whose vectors do not count.
    """

    marker: str = ""
    most: int | None = None
    skipped: tuple[str, ...] = ()


@with_vllms_fields(POOLING)
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """The choices of a pooling request. Names are vLLM's.

    task: "embed", "classify", "token_embed" or "token_classify"; None: what the called method or the model does.
    dimensions: the length that an embedding is cut to, before it is normalised (Kusupati et al., arXiv 2205.13147).
    use_activation: embeddings are normalised, or scores become probabilities; None: as the model says.
    truncate_prompt_tokens: only so many tokens of a prompt count; -1: as many as the model takes.
    truncation_side: where a prompt is cut: "right" keeps its first tokens and "left" its last; None: "right".
    """

    task: Task | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise InvalidRequest(f"unknown task {self.task!r}; use {', '.join(TASKS)}.", param="task")
        self._check_integer("dimensions", 1)
        self._check_integer("truncate_prompt_tokens", -1)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0, which leaves nothing; give at least 1, or -1 for what the model takes.",
                param="truncate_prompt_tokens",
            )
        if not isinstance(self.use_activation, bool | None):
            raise InvalidRequest(
                f"use_activation must be True or False, got {str(self.use_activation)[:80]!r}.", param="use_activation"
            )

        if self.truncation_side not in (None, "left", "right"):
            raise InvalidRequest(
                f"truncation_side is left or right, got {str(self.truncation_side)[:80]!r}.", param="truncation_side"
            )

    def _check_integer(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise InvalidRequest(f"{name} must be a whole number from {least}, got {str(value)[:80]!r}.", param=name)


def checked(params: PoolingParams, spec: PoolingSpec) -> Task:
    """Return the task of a request. Raise InvalidRequest for what the model cannot do."""
    task = params.task or spec.task
    if task not in spec.tasks:
        raise InvalidRequest(f"this model does {' and '.join(spec.tasks)}, and not {task}.", param="task")
    if params.dimensions is None:
        return task
    if not spec.embeds:
        raise InvalidRequest(
            "dimensions cut embeddings, and this model classifies; leave them out.", param="dimensions"
        )
    if params.dimensions > spec.width:
        raise InvalidRequest(
            f"dimensions is {params.dimensions}, and the model's embeddings have {spec.width}; lower it.",
            param="dimensions",
        )
    if spec.dimensions is not None and params.dimensions not in spec.dimensions:
        known = ", ".join(map(str, spec.dimensions))
        raise InvalidRequest(
            f"dimensions is {params.dimensions}, and this model was trained for {known}.", param="dimensions"
        )
    return task
