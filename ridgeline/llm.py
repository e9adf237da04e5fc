"""The offline API: `LLM(model).generate(prompts)`, with vLLM's names."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ridgeline.assembly import Assembly, assemble
from ridgeline.core.config import LLMConfig
from ridgeline.core.cost import Headroom
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.request import Request, RequestStats, SamplingParams
from ridgeline.progress import BatchBar, LoadingBar
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.completion import Completion
from ridgeline.text.outputs import CompletionOutput, RequestOutput
from ridgeline.text.requests import RequestLimits, derive_seed, make_requests
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
        self._limits = RequestLimits(
            max_model_len=self.engine.config.max_model_len,
            vocab_size=model_config.spec.vocab_size,
            # Some chat models name their end-of-turn token in the tokenizer's files only.
            eos_ids=frozenset(model_config.eos_token_ids).union(tokenizer.eos_ids if tokenizer else ()),
        )
        self._running: dict[str, tuple[Job, Completion]] = {}  # by engine request id
        self._stats: dict[str, RequestStats] = {}
        self._num_requests = 0
        self.last_run = Headroom()  # step time of the newest generate or stream that ended, beside its limit

    # ---- what a user calls ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
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
        listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        every = self._params_for(listed, sampling_params)
        ranks = priority or [0] * len(listed)
        jobs = [
            self._prepare(prompt, params, priority=rank, cache_salt=cache_salt)
            for prompt, params, rank in zip(listed, every, ranks, strict=True)
        ]
        with BatchBar(sum(len(job.result.outputs) for job in jobs), shown=use_tqdm) as bar:
            for piece in self._run(jobs):
                bar.advance(len(piece.token_ids), finished=piece.completion.finished)
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
        many = bool(messages) and not isinstance(messages[0], Mapping)
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
        return self._run([self._prepare(prompt, self._params_for([prompt], sampling_params)[0])])

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(
                "this LLM was built with skip_tokenizer_init; give prompts as token ids.", param="prompt"
            )
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else `SamplingParams()`."""
        return SamplingParams(**self.assembly.model.sampling_defaults)  # type: ignore[arg-type]

    def shutdown(self) -> None:
        """Stop the worker. The object cannot be used afterwards."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- from prompts to requests -----------------------------------------------------------------------------

    def _params_for(self, prompts: Sequence[Prompt], params: Params) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"there are {len(prompts)} prompts but {len(params)} sampling_params; give one each.")
        return params

    def _prepare(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, cache_salt: str = "") -> Job:
        text, ids = self._encode(prompt)
        if self._tokenizer is None and params.stop_strings:
            raise InvalidRequest("stop strings need the tokenizer; use stop_token_ids.", param="stop")
        if params.stop_strings and not params.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids.", param="stop")
        self._num_requests += 1
        requests = make_requests(
            str(self._num_requests),
            ids,
            params,
            self._limits,
            seed=derive_seed(self.config.seed, self._num_requests),
            priority=priority,
            cache_salt=cache_salt,
        )
        for request in requests:
            self.engine.check(request)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        result = RequestOutput(str(self._num_requests), text, ids, outputs)
        completions = [
            Completion(request, output, result, self._tokenizer)
            for request, output in zip(requests, outputs, strict=True)
        ]
        return Job(result, completions, deque())

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise InvalidRequest(
                f"a prompt is a string or {{'prompt_token_ids': [whole numbers]}}, got {str(prompt)[:80]!r}.",
                param="prompt",
            )
        return None, list(ids)

    # ---- running ----------------------------------------------------------------------------------------------

    def _run(self, jobs: Sequence[Job]) -> Iterator[StreamOutput]:
        """Step the engine until these jobs are done. Whatever is left when the caller leaves is aborted.

        Several runs may be under way at once (streams read in turn): whoever steps delivers to all.
        """
        before = self.engine.headroom
        for job in jobs:
            for completion in job.completions:
                self.engine.add(completion.request)
                self._running[completion.request.id] = job, completion
        try:
            while True:
                for job in jobs:
                    while job.inbox:
                        yield job.inbox.popleft()
                if all(job.done for job in jobs):
                    return
                self._step()
        finally:
            for completion in (c for job in jobs for c in job.completions if not c.output.finished):
                completion.output.finish_reason = "abort"
                self._close(completion)
            self.last_run = self.engine.headroom.since(before)

    def _step(self) -> None:
        for event in self.engine.step():
            job, completion = self._running.get(event.request_id, (None, None))
            if job is None or completion is None:
                continue  # it ended in the meantime, and a token was still under way
            text = completion.take(event)
            if completion.output.finished:
                self._close(completion)
            ids = [event.token_id] if event.token_id >= 0 else []
            job.inbox.append(StreamOutput(text, ids, completion.output, job.result))

    def _close(self, completion: Completion) -> None:
        """The completion has ended. If it was a stop string that ended it, the engine learns of it here."""
        request_id = completion.request.id
        del self._running[request_id]
        self.engine.abort(request_id, completion.abort_at)
        completion.output.metrics = self._stats.pop(request_id)

    def _note_stats(self, request: Request, stats: RequestStats) -> None:
        self._stats[request.id] = stats
