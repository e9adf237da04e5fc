"""The offline API: `LLM(model).generate(prompts)`, with vLLM's names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.assembly import Assembly, assemble
from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.core.plan.embeds import embeds_width, media_widths
from ridgeline.core.plan.rank_waits import RankWaits
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.sleep import KINDS, Kind
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.vllm_arguments import BEAMS, CHATS, METHODS, PROMPTS, SCORES, takes_vllms
from ridgeline.core.settings.vllm_flags import of_keywords
from ridgeline.core.specs.pooling import PoolingParams, PoolingSpec, Task
from ridgeline.core.timeline import Timeline, now
from ridgeline.kernels.base.cost import Headroom
from ridgeline.kernels.base.sounds import RATE
from ridgeline.models.config import Config, ModelConfig, sampling_defaults
from ridgeline.offline.adapters import Adapters, LoRARequest, OfflineAdapters, listed_adapters
from ridgeline.offline.beam_rounds import run_rounds
from ridgeline.offline.jobs import Job, JobMaker, Params, Prompt, StreamOutput, TextPrompt, TokensPrompt
from ridgeline.offline.media import SETTINGS, callers_media
from ridgeline.offline.pooling import Pooled, PoolingRuns, outputs, reranked, scored_output, with_options
from ridgeline.offline.running import RunningJobs
from ridgeline.offline.speech import Transcripts, heard, recogniser_of, speech_options
from ridgeline.progress import LoadingBar
from ridgeline.text.arguments import listed_params, listed_priorities, listed_prompts, short
from ridgeline.text.beams import BeamSearch, BeamSearchParams
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.continuations import continued, listed_continuations, score_of, scoring_params
from ridgeline.text.media_folder import FolderProcessors
from ridgeline.text.media_prompt import MediaPrompt, prompt_with
from ridgeline.text.outputs import RequestOutput
from ridgeline.text.pooled import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Encoder,
    PoolingOutput,
    PoolingRequestOutput,
    RerankResult,
)
from ridgeline.text.requests import RequestLimits, sampling_overrides
from ridgeline.text.speech.recogniser import SpeechOptions, SpokenText
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL, NO_DEFAULTS, generation_file, resolve_tokenizer
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.live import LiveWeights
from ridgeline.weights.modules import read_prompts, read_sides
from ridgeline.worker.early import Early
from ridgeline.worker.local import LocalWorker

__all__ = ["LLM", "Params", "Prompt", "StreamOutput", "TextPrompt", "TokensPrompt"]

logger = logging.getLogger(__name__)

IMPORTED = now()
SHUT_DOWN = "this LLM has been shut down; build a new one."


class LLM:
    """A model, loaded to run prompts on it, many at a time.

    `model` is a folder, a hub id, or empty for the embedded model. Keyword arguments are the fields of
    `core.settings.config.LLMConfig`, or vLLM's: of those (core/settings/vllm_flags.py) some have no effect here, which
    is logged, and others are refused. Raise InvalidConfig or ModelLoadError, each with one sentence.
    """

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        self.timeline = Timeline.of_process(IMPORTED)
        self._media = {name: options.pop(name) for name in SETTINGS if name in options}
        kept, lines = of_keywords(options, frozenset(field.name for field in dataclasses.fields(LLMConfig)))
        for line in lines:
            logger.warning("%s", line)
        self.config = LLMConfig(model=model, **kept)
        self._asleep = 0  # the level
        self.weight_version = 0  # times that the weights were replaced
        self._load()

    def _load(self) -> None:
        """Load the model and make what stands around it."""
        self._live: LiveWeights | None = None  # where weights lie, which takes 30 ms to find
        overrides = sampling_overrides(self.config.override_generation_config or {})
        early = Early(self.config)
        with ThreadPoolExecutor(1, "ridgeline-tokenizer") as thread:
            folder = self._tokenizer_folder()
            reading = None if folder is None else thread.submit(Tokenizer.from_folder, folder)
            try:
                with LoadingBar() as bar:
                    self.assembly: Assembly = assemble(self.config, bar, timeline=self.timeline, early=early)
            finally:
                early.end()
            logger.info("%s", self.assembly.memory)
            self.engine = self.assembly.engine
            texts = None if self.config.skip_tokenizer_init else resolve_tokenizer(self.assembly.folder, self.config)
            with self.timeline.stage("tokenizer"):
                if reading is not None and texts == folder:
                    tokenizer: Tokenizer | None = reading.result()
                else:
                    tokenizer = None if texts is None else Tokenizer.from_folder(texts)
        self._chat_template = ChatTemplate.from_folder(texts, tokenizer.special_tokens) if texts and tokenizer else None
        model_config = self.assembly.model
        self._default_params = _default_params(model_config, self.config.generation_config, overrides)
        limits = RequestLimits(
            max_model_len=self.engine.config.max_model_len,
            vocab_size=model_config.spec.vocab_size,
            # Some chat models name their end-of-turn token in the tokenizer's files only.
            eos_ids=frozenset(model_config.eos_token_ids).union(tokenizer.eos_ids if tokenizer else ()),
            max_logprobs=self.config.max_logprobs,
            embeds_width=embeds_width(self.config.enable_prompt_embeds, model_config.spec),
            decoder_start=model_config.spec.decoder_start,
            stem=None if model_config.spec.encoder is None else model_config.spec.encoder.stem,
        )
        self._tokenizer = tokenizer
        widths = media_widths(self.config.enable_mm_embeds, model_config.spec)
        media = callers_media(self._media, self._processors(tokenizer), widths)
        self._jobs = JobMaker(self.engine, tokenizer, limits, self.config.seed, media)
        self._running = RunningJobs(self.engine)
        self._adapters = OfflineAdapters(self.assembly.worker)
        self._pooling = self._pooling_runs(model_config.spec.pooling)
        self._is_shut_down = False
        logger.info("ready after %s", self.timeline)

    def _tokenizer_folder(self) -> Path | None:
        """Return the folder whose tokenizer can be read beside the weights, because it needs no download. To read it
        takes half a second, in which a thread leaves Python's lock to others."""
        named = self.config.tokenizer or self.config.model or EMBEDDED_MODEL
        if self.config.skip_tokenizer_init or not isinstance(named, str | Path):
            return None
        folder = Path(named)
        with suppress(OSError):  # a name that no path can have is refused where the model is looked for
            return folder if (folder / "tokenizer.json").is_file() else None
        return None

    # ---- what a user calls ------------------------------------------------------------------------------------

    @takes_vllms(PROMPTS)
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete every prompt and return the results in the order of the prompts.

        `sampling_params` is one for all, one for each prompt, or None for the model's own defaults. `lora_request` is
        an adapter for all, or one (or None) for each prompt. `use_tqdm` shows progress. Raise InvalidRequest, before
        anything runs, if a prompt or its parameters are wrong.
        """
        listed = self._jobs.read(listed_prompts(prompts))
        every, ranks = self._params_for(len(listed), sampling_params), listed_priorities(priority, len(listed))
        adapters = [None] * len(listed) if lora_request is None else self._adapters_for(len(listed), lora_request)
        jobs = [
            self._make(prompt, params, priority=rank, cache_salt=cache_salt, adapter=adapter)
            for prompt, params, rank, adapter in zip(listed, every, ranks, adapters, strict=True)
        ]
        return self._running.finish(jobs, use_tqdm=use_tqdm)

    @takes_vllms(SCORES)
    def score(
        self,
        prompts: Any,
        continuations: Any,
        *,
        use_tqdm: bool = True,
        cache_salt: str = "",
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[Any]:
        """Return scores of pairs.

        A model that generates scores continuations: for every prompt there is a list of them, as text or token ids, and
        the result is a list of `Score`s, the log-likelihoods. All run together. What prompts have in common runs once,
        up to the last full cache block.

        A model that pools scores pairs of texts, one prompt with every continuation or each with its own, as vLLM's
        `score` does: a reranker reads both at once, and of embeddings it is the cosine. The result is a list of
        `ScoringRequestOutput`s. `instruction` says what a reranker looks for, where it takes one. `lora_request` is an
        adapter for all.

        Raise InvalidRequest.
        """
        [adapter] = self._adapters_for(1, lora_request)
        if self._pooling is not None:
            params, how = pooling_params or PoolingParams(), partial(self._pooling.score, instruction=instruction)
            scored = how(prompts, continuations, params, use_tqdm=use_tqdm, salt=cache_salt, adapter=adapter)
            return [scored_output(ran, score) for ran, score in scored]
        if pooling_params is not None or instruction is not None:
            raise InvalidRequest(
                "this model generates, and scores take no pooling_params or instruction then; leave them out.",
                param="pooling_params",
            )
        contexts = [self._jobs.encode(prompt) for prompt in listed_prompts(prompts)]
        listed = listed_continuations(continuations, len(contexts))
        pairs = [
            [continued(context, continuation, self._tokenizer) for continuation in each]
            for context, each in zip(contexts, listed, strict=True)
        ]
        jobs = [
            self._make({"prompt_token_ids": tokens}, scoring_params(start), cache_salt=cache_salt, adapter=adapter)
            for each in pairs
            for tokens, start in each
        ]
        results = iter(self._running.finish(jobs, use_tqdm=use_tqdm))
        return [[score_of(next(results), start) for _, start in each] for each in pairs]

    @takes_vllms(PROMPTS)
    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: Task | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput]:
        """Return the outputs of a pooling model as tensors: a vector for each prompt, or with the tasks token_embed and
        token_classify one for each of its tokens. Raise InvalidRequest."""
        options = {"task": pooling_task, "truncate_prompt_tokens": truncate_prompt_tokens}
        found = self._pool(prompts, pooling_params, options, use_tqdm=use_tqdm, lora=lora_request)
        return outputs(PoolingRequestOutput, found, lambda vector: PoolingOutput(torch.from_numpy(vector)))

    @takes_vllms(PROMPTS)
    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of every prompt. `prompt`, or the model's own text with the name `prompt_name`, goes
        before each. Raise InvalidRequest."""
        options = {"task": "embed", "truncate_prompt_tokens": truncate_prompt_tokens, "dimensions": dimensions}
        named = prompt_name, prompt
        found = self._pool(prompts, pooling_params, options, use_tqdm=use_tqdm, named=named, lora=lora_request)
        return outputs(EmbeddingRequestOutput, found, lambda vector: EmbeddingOutput(vector.tolist()))

    @takes_vllms(PROMPTS)
    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of a classifier's labels for every prompt. Raise InvalidRequest."""
        options = {"task": "classify", "truncate_prompt_tokens": truncate_prompt_tokens}
        found = self._pool(prompts, pooling_params, options, use_tqdm=use_tqdm, lora=lora_request)
        return outputs(ClassificationRequestOutput, found, lambda vector: ClassificationOutput(vector.tolist()))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[RerankResult]:
        """Return documents by their relevance to the query, the most relevant first, `top_n` of them at most. Raise
        InvalidRequest."""
        listed = list(documents)
        options: dict[str, Any] = {"pooling_params": pooling_params, "lora_request": lora_request}
        outputs = self.score(query, listed, use_tqdm=use_tqdm, instruction=instruction, **options)
        return reranked(listed, [output.outputs.score for output in outputs], top_n)

    @takes_vllms(BEAMS)
    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        *,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """Return the `beam_width` best sequences after every prompt, the best first, as transformers finds them.

        Each step of a beam is a request for one token whose prompt is the beam so far, and the prefix cache holds all
        of it but the last token. What beams have in common is held once, except its last block, which is copied. The
        beams of all prompts run together. Raise InvalidRequest.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"beam_search takes BeamSearchParams, got {short(params)}.", param="params")
        if self._jobs.limits.decoder_start:
            raise InvalidRequest("beam_search is not for models with an encoder yet; use generate.", param="prompts")
        found = [self._search(prompt, params) for prompt in listed_prompts(prompts)]
        [adapter] = self._adapters_for(1, lora_request)
        run_rounds(
            found,
            lambda tokens, step: self._make({"prompt_token_ids": tokens}, step, cache_salt=cache_salt, adapter=adapter),
            lambda jobs: self._running.finish(jobs, use_tqdm=False),
        )
        return [search.fill(result, self._tokenizer) for search, result in found]

    def _search(self, prompt: Prompt, params: BeamSearchParams) -> tuple[BeamSearch, RequestOutput]:
        text, ids = self._jobs.encode(prompt)
        room = self._jobs.limits.max_model_len - len(ids)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._jobs.limits.eos_ids)}
        search = BeamSearch(params, stop_ids, min(params.max_tokens, room))
        return search, RequestOutput(str(self._jobs.count), text, ids, [])

    @takes_vllms(CHATS)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several, through the model's chat template or
        another. With `continue_final_message` (and no `add_generation_prompt`) the last message is gone on with."""
        many = isinstance(messages, (list, tuple)) and bool(messages) and not isinstance(messages[0], Mapping)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true; leave one out.",
                param="continue_final_message",
            )
        options = (chat_template_kwargs or {}) | {"chat_template": chat_template, "tools": tools}
        options |= {"continue_final_message": continue_final_message, "mm_processor_kwargs": mm_processor_kwargs}
        if not continue_final_message:
            options["add_generation_prompt"] = add_generation_prompt
        listed = self._jobs.opened(messages if many else [messages], mm_processor_kwargs)
        adapters = listed_adapters(lora_request, len(listed))
        prompts = [
            self.chat_prompt(conversation, **options, lora_request=adapter)
            for conversation, adapter in zip(listed, adapters, strict=True)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, lora_request=lora_request)

    def _processors(self, tokenizer: Tokenizer | None) -> FolderProcessors | None:
        """Return the processors of pictures, for a model that sees them."""
        spec = self.assembly.model.spec
        if tokenizer is None or not any(spec.media_widths):
            return None
        return FolderProcessors.of(self.assembly.folder, tokenizer, self._media.get("mm_processor_kwargs"))

    def chat_prompt(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        lora_request: LoRARequest | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> TokensPrompt | MediaPrompt:
        """Return a conversation as the prompt that the model was trained to continue, or an adapter if its folder has a
        template of its own."""
        if self._chat_template is None:
            raise InvalidRequest("chat needs the tokenizer; build LLM without skip_tokenizer_init.", param="messages")
        template = self._chat_template if chat_template is None else self._chat_template.with_source(chat_template)
        if chat_template is None and isinstance(lora_request, LoRARequest):
            template = template.of_adapter(Path(lora_request.lora_path))
        media = self._jobs.media
        processor = media.processor(mm_processor_kwargs) if mm_processor_kwargs else None
        messages, items = media.with_items(messages, processor)
        if items:
            processor = processor or media.processor()
            return prompt_with(
                template,
                self.get_tokenizer(),
                processor,
                messages,
                items,
                open_ended=continue_final_message,
                **options,
            )
        rendered = template.render_open if continue_final_message else template.render
        text = rendered(messages, **options)
        return {"prompt_token_ids": self.get_tokenizer().encode(text, add_special_tokens=False)}

    def transcribe(
        self, audio: Any, *, options: SpeechOptions | None = None, cache_salt: str = "", **wishes: Any
    ) -> SpokenText:
        """Return the text that is spoken in a sound: a path, the bytes of a file, or (samples, rate). wishes: fields of
        SpeechOptions, if `options` are not given. Raise InvalidRequest."""
        self._check_running()
        found = SpokenText("", 0.0)
        samples_N = heard(audio)
        found.seconds = len(samples_N) / RATE
        for _ in self._transcripts().segments(samples_N, options or speech_options(wishes), found, cache_salt):
            pass
        return found

    def _transcripts(self) -> Transcripts:
        stem = self._jobs.limits.stem
        if stem is None:
            raise InvalidRequest("this model reads no sounds; load one that transcribes.", param="audio")
        most = self._jobs.limits.max_model_len
        recogniser = recogniser_of(self.get_tokenizer(), self.assembly.folder, stem, most)
        return Transcripts(recogniser, self._jobs, lambda jobs: self._running.finish(jobs, use_tqdm=False))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[StreamOutput]:
        """Complete one prompt and yield text as soon as it is certain. If the loop is left early, the request is
        aborted."""
        [params] = self._params_for(1, sampling_params)
        if params.num_drawn > params.n:
            raise InvalidRequest("best_of chooses when all have ended, so it cannot be streamed.", param="best_of")
        [adapter] = self._adapters_for(1, lora_request)
        return self._running.run([self._make(prompt, params, adapter=adapter)])

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, which says for vLLM's methods what to use."""
        if (why := METHODS.get(name)) is not None:
            raise AttributeError(f"{name} is not here: {why}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def reset_prefix_cache(self) -> bool:
        """Let no later prompt find anything of what was cached."""
        self._check_running()
        self.engine.forget_prefixes()
        return True

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Replace weights in place by tensors with the checkpoint's names and shapes, and return the new version, which
        later outputs name. Those that are not given stay. Nothing is found in the prefix cache afterwards.

        Raise InvalidRequest while outputs are under way, and InvalidConfig, before any number changes, for tensors that
        are not this model's and for models whose weights are held in another form.
        """
        self._check_running()
        worker = self.assembly.worker
        if self._running.any:
            raise InvalidRequest("outputs are under way, and their weights cannot change; finish them first.")
        if not isinstance(worker, LocalWorker) or self.config.kv_disk is not None:
            raise InvalidConfig(
                "weights are replaced on one device and without kv_disk, whose blocks outlive them; build a new LLM."
            )
        for name in ("enable_lora_factors", "enable_lora_vocabulary"):
            if getattr(self.config, name):
                raise InvalidConfig(f"adapters of {name} hold numbers that follow from the weights; build a new LLM.")
        if self._live is None:
            self._live = LiveWeights(worker.runner.decoder, self.assembly.model.weights)
        self._live.check(tensors)
        try:
            self._live.replace(tensors)
        except Exception:  # there may be a mixture of both
            self.shutdown()
            raise
        self.weight_version += 1
        self.engine.renew_weights(str(self.weight_version))
        return self.weight_version

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise InvalidRequest if there is none."""
        return self._jobs.tokenizer

    def expert_load(self) -> np.ndarray:
        """Return the number of tokens that each expert got since the model was loaded: int64 [layers with experts,
        experts]. While prompts run the counts may be some steps old. A model without experts has no rows. Raise
        InvalidRequest while the model is asleep and after `shutdown`."""
        self._check_running()
        load = self.assembly.worker.figures().experts
        return np.zeros((0, 0), np.int64) if load is None else load.total_LE

    def rank_waits(self) -> list[RankWaits]:
        """Return the waits of all ranks: for others, and caused by each. The list is empty without `rank_trace_dir`."""
        return [] if self._is_shut_down or self._asleep else list(self.assembly.worker.figures().waits)

    @property
    def last_run(self) -> Headroom:
        """The step time of the newest generate or stream that ended, beside its limit."""
        return self._running.last_run

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that generation_config.json recommends, or else `SamplingParams()`."""
        return self._default_params

    @property
    def is_sleeping(self) -> bool:
        """True from `sleep` until `wake_up` has brought everything back."""
        return self._asleep > 0

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake_up`.

        At level 1 a GPU's weights are kept in the host's memory, which needs `enable_sleep_mode`, and the cache is
        lost; outputs that are under way go on afterwards. At level 2 everything goes, and waking up loads the model
        again. Raise InvalidConfig if that cannot be done, and InvalidRequest after `shutdown`.
        """
        if level not in (1, 2):
            raise InvalidConfig(f"level must be 1 (keep the weights) or 2 (keep nothing), got {level!r}.")
        if self._is_shut_down:
            raise InvalidRequest(SHUT_DOWN)
        if self._asleep == 2:
            return
        if self._asleep and level == 2:
            raise InvalidConfig("the model sleeps at level 1; wake it up first.")
        if level == 2 and self._running.any:
            raise InvalidConfig("outputs are under way, which level 2 would lose; finish them first, or take level 1.")
        self._running.settle()
        self._live = None  # it holds the weights, which are to go
        try:
            if level == 1:
                self.engine.sleep()
            else:
                self.engine.shutdown()
        except InvalidConfig:
            self.engine.resume()
            raise
        self._asleep = level

    def wake_up(self, tags: Sequence[Kind] | None = None) -> None:
        """Bring back what `sleep` gave away, or some of it: "weights" or "kv_cache". Raise InvalidConfig if others have
        taken the memory."""
        wanted = KINDS if tags is None else tuple(tags)
        if unknown := [tag for tag in wanted if tag not in KINDS]:
            raise InvalidConfig(f"there is no tag {unknown[0]!r}; known: {', '.join(KINDS)}.")
        if self._asleep == 2:
            self.timeline = Timeline()
            self._load()
            self._asleep = 0
            self.weight_version += self.weight_version > 0  # those of the files are there again
        elif self._asleep:
            self.engine.wake(wanted)
            if not self.engine.asleep:
                self.engine.resume()
                self._asleep = 0

    def shutdown(self) -> None:
        """Stop the worker. The object cannot be used afterwards."""
        self._live = None  # it holds the weights, which are to go
        if self._asleep != 2 and not self._is_shut_down:
            self.engine.shutdown()
        self._is_shut_down = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- pooling ----------------------------------------------------------------------------------------------

    def _pooling_runs(self, spec: PoolingSpec | None) -> PoolingRuns | None:
        if spec is None:
            return None
        encoder = None
        if self._tokenizer is not None:
            prompts, default = read_prompts(self.assembly.folder)
            length, template = self.engine.config.max_model_len, self._chat_template
            encoder = Encoder(
                self._tokenizer,
                spec,
                length,
                prompts=prompts,
                default_prompt=default,
                template=template,
                sides=read_sides(self.assembly.folder),
            )
        return PoolingRuns(self.engine, spec, encoder, self._jobs.media)

    def _pool(
        self,
        prompts: Any,
        params: Any,
        options: Mapping[str, Any],
        *,
        use_tqdm: bool,
        named: tuple[str | None, str | None] = (None, None),
        lora: Adapters = None,
    ) -> list[Pooled]:
        """Run prompts on a model that pools. Options that are not None replace those of the parameters."""
        if self._pooling is None:
            raise InvalidRequest("this model generates; load it with runner='pooling'.", param="model")
        self._check_running()
        name, before = named
        if name is None and before is None and self._tokenizer is None:
            before = ""
        if before is None:
            before = self._pooling.encoder.prompt(name)
        given = {option: value for option, value in options.items() if value is not None}
        params, listed = with_options(params, given), listed_prompts(prompts)
        adapters = None if lora is None else self._adapters_for(len(listed), lora)
        return self._pooling.embed(listed, params, before=before, use_tqdm=use_tqdm, adapters=adapters)

    # ---- from prompts to requests -----------------------------------------------------------------------------

    def _params_for(self, num_prompts: int, params: Params) -> Sequence[SamplingParams]:
        return listed_params(self._default_params if params is None else params, num_prompts)

    def _adapters_for(self, num_prompts: int, given: Any) -> list[UsedAdapter | None]:
        """Return the adapter of each prompt, loaded."""
        self._check_running()
        return [self._adapters.use(each) for each in listed_adapters(given, num_prompts)]

    def _make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: UsedAdapter | None = None,
    ) -> Job:
        self._check_running()
        job = self._jobs.make(prompt, params, priority=priority, cache_salt=cache_salt, adapter=adapter)
        job.result.weight_version = self.weight_version
        return job

    def _check_running(self) -> None:
        if self._asleep:
            raise InvalidRequest("the model is asleep; call wake_up() first.")
        if self._is_shut_down:
            raise InvalidRequest(SHUT_DOWN)


def _default_params(model: ModelConfig, source: str, overrides: Mapping[str, Any]) -> SamplingParams:
    """Return the recommended parameters: those of `source` (as `LLMConfig.generation_config`), over which `overrides`
    win. Raise ModelLoadError if generation_config.json has impossible ones."""
    found = dict(model.sampling_defaults) if source == "auto" else _recommended(source)
    given = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in overrides.items()}
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ModelLoadError(f"generation_config.json is wrong: {error}") from error
    return SamplingParams(**(found | given))


def _recommended(source: str) -> dict[str, float]:
    return {} if source in NO_DEFAULTS else sampling_defaults(Config(read_json(generation_file(source))))
