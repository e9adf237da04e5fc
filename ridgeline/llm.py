"""The offline API: `LLM(model).generate(prompts)`, with vLLM's names."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ridgeline.assembly import Assembly, assemble
from ridgeline.core.config import LLMConfig
from ridgeline.core.cost import Headroom
from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.core.request import Request, RequestStats, SamplingParams
from ridgeline.interrupts import uninterrupted
from ridgeline.models.config import ModelConfig
from ridgeline.progress import LoadingBar, batch_bar
from ridgeline.text.arguments import integers, listed_params, listed_priorities, listed_prompts, short
from ridgeline.text.beams import BeamSearch, BeamSearchParams
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.completion import Completion
from ridgeline.text.continuations import Score, continued, listed_continuations, score_of, scoring_params
from ridgeline.text.outputs import CompletionOutput, RequestOutput
from ridgeline.text.requests import RequestLimits, derive_seed, make_requests, with_spelled_words
from ridgeline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class StreamOutput:
    """A piece of a stream: what is new of one completion, and that completion and its request as they stand."""

    text: str
    token_ids: list[int]
    completion: CompletionOutput
    request: RequestOutput


@dataclass(frozen=True)
class Job:
    """One prompt under way: what will be returned, who fills it, and pieces its caller has not taken yet."""

    params: SamplingParams
    result: RequestOutput
    completions: list[Completion]
    inbox: deque[StreamOutput]

    @property
    def done(self) -> bool:
        return self.result.finished and not self.inbox


class LLM:
    """Loads a model and runs prompts on it, many at a time.

    model: a folder, a hub id, or nothing for the embedded model. Keyword arguments: the fields of
    `core.config.LLMConfig`. Raises InvalidConfig or ModelLoadError, each with one sentence.
    """

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        unknown = options.keys() - {field.name for field in dataclasses.fields(LLMConfig)}
        if unknown:
            raise TypeError(f"LLM() has no argument {', '.join(sorted(unknown))}")
        self.config = LLMConfig(model=model, **options)
        with LoadingBar() as bar:
            self.assembly: Assembly = assemble(self.config, bar)
        logger.info("%s", self.assembly.memory)
        self.engine = self.assembly.engine
        self.engine.on_finish(self._note_stats)
        tokenizer = None if self.config.skip_tokenizer_init else Tokenizer.from_folder(self.assembly.folder)
        self._tokenizer = tokenizer
        self._chat_template = (
            ChatTemplate.from_folder(self.assembly.folder, tokenizer.special_tokens) if tokenizer else None
        )
        model_config = self.assembly.model
        self._default_params = _default_params(model_config)
        self._limits = RequestLimits(
            max_model_len=self.engine.config.max_model_len,
            vocab_size=model_config.spec.vocab_size,
            # Some chat models name their end-of-turn token in the tokenizer's files only.
            eos_ids=frozenset(model_config.eos_token_ids).union(tokenizer.eos_ids if tokenizer else ()),
        )
        self._running: dict[str, tuple[Job, Completion]] = {}  # by engine request id
        self._stats: dict[str, RequestStats] = {}
        self._num_requests = 0
        self._is_shut_down = False
        self.last_run = Headroom()  # step time of the newest generate or stream that ended, beside its limit

    # ---- what a user calls ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        sampling_params: one for all, one per prompt, or None for the model's own defaults. use_tqdm: show progress.
        Raises InvalidRequest, before anything runs, if a prompt or its parameters are wrong.
        """
        listed = listed_prompts(prompts)
        every, ranks = self._params_for(len(listed), sampling_params), listed_priorities(priority, len(listed))
        jobs = [
            self._prepare(prompt, params, priority=rank, cache_salt=cache_salt)
            for prompt, params, rank in zip(listed, every, ranks, strict=True)
        ]
        return self._finish(jobs, use_tqdm=use_tqdm)

    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        continuations: Sequence[Sequence[str | Sequence[int]]],
        *,
        use_tqdm: bool = True,
        cache_salt: str = "",
    ) -> list[list[Score]]:
        """Log-likelihood of each of a prompt's continuations (a list for every prompt; text, or token ids).

        All run together, and what prompts have in common runs once, up to the last full cache block. Raises
        InvalidRequest.
        """
        contexts = [self._encode(prompt) for prompt in listed_prompts(prompts)]
        listed = listed_continuations(continuations, len(contexts))
        pairs = [
            [continued(context, continuation, self._tokenizer) for continuation in each]
            for context, each in zip(contexts, listed, strict=True)
        ]
        jobs = [
            self._prepare({"prompt_token_ids": tokens}, scoring_params(start), cache_salt=cache_salt)
            for each in pairs
            for tokens, start in each
        ]
        results = iter(self._finish(jobs, use_tqdm=use_tqdm))
        return [[score_of(next(results), start) for _, start in each] for each in pairs]

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """The `beam_width` best sequences found after every prompt, best first, as transformers finds them.

        Each step of a beam is a request for one token whose prompt is the beam so far; the prefix cache has all of it
        but the last token. What beams have in common is held once, up to their last block, which is copied. The beams
        of all prompts run together. Raises InvalidRequest.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"beam_search takes BeamSearchParams, got {short(params)}.", param="params")
        found = [self._search(prompt, params) for prompt in listed_prompts(prompts)]
        under_way = found
        while under_way := [(search, result) for search, result in under_way if search.running]:
            jobs = [
                [
                    self._prepare(
                        {"prompt_token_ids": [*result.prompt_token_ids, *beam.tokens]},
                        search.step_params,
                        cache_salt=cache_salt,
                    )
                    for beam in search.running
                ]
                for search, result in under_way
            ]
            self._finish([job for each in jobs for job in each], use_tqdm=False)
            for (search, _), each in zip(under_way, jobs, strict=True):
                search.take([job.result for job in each])
        return [search.fill(result, self._tokenizer) for search, result in found]

    def _search(self, prompt: Prompt, params: BeamSearchParams) -> tuple[BeamSearch, RequestOutput]:
        text, ids = self._encode(prompt)
        room = self._limits.max_model_len - len(ids)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._limits.eos_ids)}
        search = BeamSearch(params, stop_ids, min(params.max_tokens, room))
        return search, RequestOutput(str(self._num_requests), text, ids, [])

    def _finish(self, jobs: Sequence[Job], *, use_tqdm: bool) -> list[RequestOutput]:
        """Run the jobs to their end."""
        num_completions = sum(len(job.result.outputs) for job in jobs)
        with batch_bar(num_completions, shown=use_tqdm) as bar, closing(self._run(jobs)) as pieces:
            for piece in pieces:
                bar.advance(len(piece.token_ids), finished=piece.completion.finished)
        for job in jobs:
            job.result.keep_best(job.params)
        return [job.result for job in jobs]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several, through the model's chat template."""
        many = isinstance(messages, (list, tuple)) and bool(messages) and not isinstance(messages[0], Mapping)
        prompts = [
            self.chat_prompt(
                conversation, add_generation_prompt=add_generation_prompt, tools=tools, **(chat_template_kwargs or {})
            )
            for conversation in (messages if many else [messages])
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Any], **options: Any) -> TokensPrompt:
        """A conversation as the prompt the model was trained to continue."""
        if self._chat_template is None:
            raise InvalidRequest("chat needs the tokenizer; build LLM without skip_tokenizer_init.", param="messages")
        text = self._chat_template.render(messages, **options)
        return {"prompt_token_ids": self.get_tokenizer().encode(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamOutput]:
        """Complete one prompt, yielding text as soon as it is certain. Leaving the loop early aborts the request."""
        [params] = self._params_for(1, sampling_params)
        if params.num_drawn > params.n:
            raise InvalidRequest("best_of chooses when all have ended, so it cannot be streamed.", param="best_of")
        return self._run([self._prepare(prompt, params)])

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(
                "this LLM was built with skip_tokenizer_init; give prompts as token ids.", param="prompt"
            )
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else `SamplingParams()`."""
        return self._default_params

    def shutdown(self) -> None:
        """Stop the worker. The object cannot be used afterwards."""
        self._is_shut_down = True
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- from prompts to requests -----------------------------------------------------------------------------

    def _params_for(self, num_prompts: int, params: Params) -> Sequence[SamplingParams]:
        return listed_params(self._default_params if params is None else params, num_prompts)

    def _prepare(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, cache_salt: str = "") -> Job:
        if self._is_shut_down:
            raise InvalidRequest("this LLM has been shut down; build a new one.")
        if not isinstance(cache_salt, str):
            raise InvalidRequest(f"cache_salt must be a string, got {short(cache_salt)}.", param="cache_salt")
        text, ids = self._encode(prompt)
        if self._tokenizer is None and params.stop_strings:
            raise InvalidRequest("stop strings need the tokenizer; use stop_token_ids.", param="stop")
        if params.stop_strings and not params.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids.", param="stop")
        self._num_requests += 1
        requests = make_requests(
            str(self._num_requests),
            ids,
            with_spelled_words(params, self._tokenizer),
            self._limits,
            seed=derive_seed(self.config.seed, self._num_requests),
            priority=priority,
            cache_salt=cache_salt,
        )
        for request in requests:
            self.engine.check(request)
        outputs = [CompletionOutput(index) for index in range(params.num_drawn)]
        result = RequestOutput(str(self._num_requests), text, ids, outputs)
        completions = [
            Completion(request, output, result, self._tokenizer if params.detokenize else None)
            for request, output in zip(requests, outputs, strict=True)
        ]
        return Job(params, result, completions, deque())

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        try:
            return None, integers(prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None)
        except TypeError:
            raise InvalidRequest(
                f"a prompt is a string or {{'prompt_token_ids': [whole numbers]}}, got {short(prompt)}.", param="prompt"
            ) from None

    # ---- running ----------------------------------------------------------------------------------------------

    def _run(self, jobs: Sequence[Job]) -> Generator[StreamOutput, None, None]:
        """Step the engine until these jobs are done. Whatever is left when the caller leaves is aborted.

        Several runs may be under way at once (streams read in turn): whoever steps delivers to all.
        """
        before = self.engine.headroom
        try:
            with uninterrupted():
                for job in jobs:
                    self._start(job)
                self._step()  # at once: holding Ctrl-C back anew takes time, and this is the way to the first token
            while True:
                for job in jobs:
                    while job.inbox:
                        yield job.inbox.popleft()
                if all(job.done for job in jobs):
                    return
                with uninterrupted():
                    self._step()
        finally:
            with uninterrupted():
                self._leave(jobs)
                self.last_run = self.engine.headroom.since(before)

    def _start(self, job: Job) -> None:
        for completion in job.completions:
            self.engine.add(completion.request)
            self._running[completion.request.id] = job, completion

    def _leave(self, jobs: Sequence[Job]) -> None:
        """Abort what is unfinished; whoever leaves last waits for the plans in flight, so that the engine is idle."""
        for completion in (c for job in jobs for c in job.completions if c.request.id in self._running):
            completion.output.finish_reason = "abort"
            self._close(completion)
        while not self._running and self.engine.has_work:
            self._step()

    def _step(self) -> None:
        """Requests that ended in the meantime may still get what was under way: it is dropped."""
        events, running = self.engine.step(), self._running
        for request_id, token_id in zip(events.ids, events.token_ids, strict=True):
            if request_id in running:
                job, completion = running[request_id]
                self._pass_on(job, completion, completion.take_token(token_id), [token_id])
        for event in events.events:
            if event.request_id in running:
                job, completion = running[event.request_id]
                ids = [event.token_id] if event.token_id >= 0 else []
                self._pass_on(job, completion, completion.take(event), ids)

    def _pass_on(self, job: Job, completion: Completion, text: str, token_ids: list[int]) -> None:
        if completion.output.finished:
            self._close(completion)
        job.inbox.append(StreamOutput(text, token_ids, completion.output, job.result))

    def _close(self, completion: Completion) -> None:
        """The completion has ended. If it was a stop string that ended it, the engine learns of it here."""
        request_id = completion.request.id
        del self._running[request_id]
        self.engine.abort(request_id, completion.abort_at)
        completion.output.metrics = self._stats.pop(request_id)

    def _note_stats(self, request: Request, stats: RequestStats) -> None:
        self._stats[request.id] = stats


def _default_params(model: ModelConfig) -> SamplingParams:
    """Raises ModelLoadError where generation_config.json recommends what cannot be."""
    try:
        return SamplingParams(**model.sampling_defaults)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ModelLoadError(f"generation_config.json is wrong: {error}") from error
