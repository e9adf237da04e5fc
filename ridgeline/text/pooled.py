"""From texts to requests of a model that pools, and from its vectors to results. Names and fields are vLLM's.

Legend:
    M  width of a vector
    Q  tokens of a query
    D  tokens of a document
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.embeds import Inserted, named_within
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.specs.pooling import TOKENWISE, PoolingParams, PoolingSpec, Side, checked
from ridgeline.text.arguments import integers, short
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer

T = TypeVar("T")

NOTHING_DRAWN = SamplingParams(temperature=0, max_tokens=1)  # stands for the parameters of drawing tokens

TINY = 1e-12  # the least length that a vector is divided by

# The prompt that Qwen3-Reranker was trained on, around a pair
RERANKER_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANKER_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
RERANKER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANKER_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Encoded(NamedTuple):
    """A prompt as token ids. text: as it came, if it was one text. second_text, inserted: as in
    `core.plan.request.Request`."""

    ids: list[int]
    text: str | None = None
    second_text: int = 0
    inserted: tuple[Inserted, ...] = ()


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class PoolingOutput:
    """The vector of a prompt, or those of its tokens, as a tensor of torch."""

    data: Any


@dataclass(frozen=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PooledRequestOutput(Generic[T]):
    """The result of a prompt."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]): ...


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]): ...


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]): ...


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]): ...


@dataclass(frozen=True)
class RerankResult:
    """A document and how relevant it is. index: its place in the list that was given."""

    index: int
    document: str
    relevance_score: float


class Encoder:
    """Makes token ids of texts, within a model's limits.

    prompts: texts that go before others, by the name of their use. default_prompt: the name of the one that goes before
        all if no other is named.
    template: the chat template, which a reranker's pairs go through if it has the roles of query and document.
    sides: the form of queries and of documents, for late interaction.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: PoolingSpec,
        max_model_len: int,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
        template: ChatTemplate | None = None,
        sides: tuple[Side, Side] = (Side(), Side()),
    ) -> None:
        self.sides = sides
        skipped = (tokenizer.id_of(word) for word in sides[1].skipped)
        self._skipped = frozenset(i for i in skipped if i is not None)
        self.tokenizer, self.spec, self.max_model_len = tokenizer, spec, max_model_len
        self.prompts, self._default = dict(prompts or {}), default_prompt
        source = template.source if template is not None else None
        self._template = template if source and "query" in source and "document" in source else None

    def prompt(self, name: str | None, text: str | None = None) -> str:
        """Return the text that goes before all texts of a call. Raise InvalidRequest for a name that is not known."""
        if text is not None:
            return text
        name = name or self._default
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise InvalidRequest(f"prompt_name is {short(name)}; the model's prompts are {known}.", param="prompt_name")
        return self.prompts[name]

    def room(self, params: PoolingParams) -> int | None:
        """Return the number of tokens of a prompt that count; None: all of them. Raise InvalidRequest."""
        return room(params, self.max_model_len)

    def one(self, text: str, params: PoolingParams, *, add_special_tokens: bool = True) -> Encoded:
        """Return a text's tokens. What is cut off lies at the end, before the special tokens there, or at the
        beginning."""
        return Encoded(self._cut(text, None, params, add_special_tokens)[0], text)

    def side(self, text: str, which: Literal["query", "document"], params: PoolingParams) -> Encoded:
        """Return the tokens of a query or a document for late interaction, cut to as many as count."""
        side = self.sides[which == "document"]
        marker = self.tokenizer.id_of(side.marker) if side.marker else None
        most = min(each for each in (side.most, self.room(params), self.max_model_len) if each is not None)
        cut = replace(params, truncate_prompt_tokens=max(1, most - (marker is not None)))
        before = self.prompts.get(which, "") if self.prompts else ""
        ids = self.one(before + text, cut).ids
        return Encoded(ids if marker is None else [*ids[:1], marker, *ids[1:]], text)

    def late_similarity(self, query_QM: np.ndarray, document_DM: np.ndarray, document_ids: Sequence[int]) -> float:
        """Return the sum, over the tokens of a query, of the largest product with a token of the document (MaxSim,
        Khattab and Zaharia, arXiv 2004.12832), among those that count."""
        counts_D = np.array([i not in self._skipped for i in document_ids])
        if not counts_D.any():
            return 0.0
        return float((query_QM @ document_DM[counts_D].T).max(axis=1).sum())

    def pair(
        self,
        query: str,
        document: str,
        params: PoolingParams,
        *,
        instruction: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Encoded:
        """Return the tokens of a pair, as the model compares it. template_kwargs: what its template gets besides; an
        instruction among these wins."""
        extra: dict[str, Any] = ({} if instruction is None else {"instruction": instruction}) | dict(
            template_kwargs or {}
        )
        if self._template is not None:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            text = self._template.render(messages, add_generation_prompt=True, **extra)
            return Encoded(_kept(self.tokenizer.encode(text, add_special_tokens=False), self.room(params), params))
        if extra.keys() - {"instruction"}:
            raise InvalidRequest(
                "this model's pairs go through no template; leave chat_template_kwargs out.",
                param="chat_template_kwargs",
            )
        if self.spec.difference:
            return Encoded(self._asked(query, document, extra.get("instruction") or RERANKER_INSTRUCTION, params))
        if extra:
            raise InvalidRequest("this model takes no instruction with a pair; leave it out.", param="instruction")
        return Encoded(*self._cut(query, document, params, True))

    def _asked(self, query: str, document: str, instruction: str, params: PoolingParams) -> list[int]:
        """Return the question whether a document answers a query. Only the pair is cut."""
        pair = RERANKER_PAIR.format(instruction=instruction, query=query, document=document)
        begin, middle, end = (
            self.tokenizer.encode(text, add_special_tokens=False) for text in (RERANKER_BEGIN, pair, RERANKER_END)
        )
        room = self.room(params)
        left = None if room is None else max(0, room - len(begin) - len(end))
        return [*begin, *_kept(middle, left, params), *end]

    def _cut(self, text: str, second: str | None, params: PoolingParams, special: bool) -> tuple[list[int], None, int]:
        """Return the ids of one text or two, None, and where the second begins if the tokenizer tells them apart."""
        room = self.room(params)
        if room is None and second is None:
            return self.tokenizer.encode(text, special), None, 0
        side = params.truncation_side or "right"
        ids, second_text = self.tokenizer.encode_within(text, second, room, add_special_tokens=special, side=side)
        return ids, None, second_text


def _kept(ids: list[int], most: int | None, params: PoolingParams) -> list[int]:
    """Return so many of the tokens, from the side that is kept."""
    if most is None or len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if params.truncation_side == "left" else ids[:most]


def room(params: PoolingParams, max_model_len: int) -> int | None:
    """Return the number of tokens of a prompt that count; None: all of them. Raise InvalidRequest."""
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {wanted}, and the model takes {max_model_len}; lower it, or give -1.",
            param="truncate_prompt_tokens",
        )
    return max_model_len if wanted == -1 else wanted


def listed_tokens(ids: object, params: PoolingParams, max_model_len: int) -> Encoded:
    """Return a prompt that came as token ids. Raise InvalidRequest."""
    try:
        return Encoded(_kept(integers(ids), room(params, max_model_len), params))
    except TypeError:
        raise InvalidRequest(
            f"a prompt is a string or {{'prompt_token_ids': [whole numbers]}}, got {short(ids)}.", param="prompt"
        ) from None


def pooling_request(
    request_id: str,
    encoded: Encoded,
    params: PoolingParams,
    spec: PoolingSpec,
    *,
    priority: int = 0,
    cache_salt: str = "",
) -> Request:
    """Return the request that the engine runs. Raise InvalidRequest for what the model cannot do."""
    task, ids, inserted = checked(params, spec), tuple(encoded.ids), encoded.inserted
    if spec.task in TOKENWISE and spec.apart and not inserted:
        raise InvalidRequest("this server makes vectors of pictures and sounds alone; send one.", param="prompt")
    if inserted and spec.apart and task != spec.task:
        raise InvalidRequest(
            f"a picture has one vector here, so {task} is not for pictures; use {spec.task}.", param="task"
        )
    if not inserted:
        ids += (spec.filler,) * (spec.filled - len(ids))
    return Request(
        id=request_id,
        prompt_token_ids=ids,
        params=NOTHING_DRAWN,
        seed=0,
        max_total_tokens=len(ids),
        cache_salt=cache_salt,
        priority=priority,
        task=task,
        whole=spec.runs_whole(task),
        second_text=encoded.second_text if spec.token_types > 1 else 0,
        inserted=named_within(inserted, cache_salt),
    )


def finished(raw_M: np.ndarray, params: PoolingParams, spec: PoolingSpec, ids: Sequence[int]) -> np.ndarray:
    """Return a request's result: the device's vector (or vectors, one below the other) cut, normalised, or made
    probabilities. float32. ids: the prompt's tokens."""
    x_M = raw_M.astype(np.float32)
    if spec.only_token is not None:
        x_M = x_M[np.asarray(ids) == spec.only_token]
    if spec.embeds:
        x_M = x_M[..., : params.dimensions]
        wanted = spec.normalize if params.use_activation is None else params.use_activation
        return x_M / np.maximum(np.linalg.norm(x_M, axis=-1, keepdims=True), TINY) if wanted else x_M
    if params.use_activation is False or spec.activation == "none":
        return x_M
    if spec.activation == "sigmoid":
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-x_M))
    e_M = np.exp(x_M - x_M.max(axis=-1, keepdims=True))
    return e_M / e_M.sum(axis=-1, keepdims=True)


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of the angle between two embeddings."""
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), TINY))


def check_scores(spec: PoolingSpec) -> None:
    """Raise InvalidRequest if a model cannot score pairs: a classifier with several labels, or of tokens."""
    if spec.task == "token_classify":
        raise InvalidRequest("this model gives rewards to tokens and compares no texts; use pooling.", param="model")
    if spec.task == "classify" and spec.width != 1:
        raise InvalidRequest(
            f"this model has {spec.width} labels, and pairs are scored by models with one; use classify.", param="model"
        )


def paired(queries: Sequence[Any], documents: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return one query with every document, or each query with its own. Raise InvalidRequest."""
    if not queries or not documents:
        raise InvalidRequest("there is nothing to score; give at least one text on each side.", param="text_2")
    if len(queries) == 1:
        return [(queries[0], document) for document in documents]
    if len(queries) != len(documents):
        raise InvalidRequest(
            f"there are {len(queries)} texts on one side and {len(documents)} on the other; give one, or as many.",
            param="text_2",
        )
    return list(zip(queries, documents, strict=True))
