"""The state of one API server: the settings, the engines' clients, and the tokenizer with all that turns text into
tokens and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.media.bounds import MediaBounds
from ridgeline.media.layout import Processor, VideoProcessor
from ridgeline.media.pool import Decoders
from ridgeline.serving.errors import BadRequest, Unavailable
from ridgeline.serving.generation.admission import Admission
from ridgeline.serving.generation.beam_run import BeamRun
from ridgeline.serving.generation.engine_client import EngineClient
from ridgeline.serving.generation.pooling import pooling_facts
from ridgeline.serving.generation.replicas import Replicas
from ridgeline.serving.generation.service import Run, Service
from ridgeline.serving.generation_defaults import GenerationDefaults
from ridgeline.serving.grammars.checks import GrammarChecks
from ridgeline.serving.kept.kept import Kept
from ridgeline.serving.media import MediaReader
from ridgeline.serving.observed.inferences import Inferences
from ridgeline.serving.observed.watchdog import Watchdog
from ridgeline.serving.repository.folder import served_models
from ridgeline.serving.repository.models import ServedModel
from ridgeline.serving.stored.store import Store
from ridgeline.text.arguments import short
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.media_folder import FolderProcessors
from ridgeline.text.parsers.choose import Forms, choose
from ridgeline.text.pooled import Encoder
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.modules import read_prompts, read_sides

MOST_TEMPLATES = 64  # of adapters' own that are kept

logger = logging.getLogger(__name__)


@dataclass
class ApiServer:
    """An API server. `names` are what clients may call the model, and answers carry the first. `folder` is the
    model's. `forms` are those of its tool calls and its reasoning. `kept` are answers that may be asked for again, and
    `served` the models that KServe's clients see, with the figures of their `inferences`. `beside` are the API servers
    of all models of this process, this one among them; they have the devices in turn. `given_adapters` are names
    of adapters that the server was started with. `files` are those that clients uploaded, and `media` reads pictures,
    video and sound. `processor` says what stands in a prompt for them."""

    config: ServeConfig
    names: tuple[str, ...]
    folder: Path
    client: Replicas
    service: Service
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    grammar_checks: GrammarChecks
    defaults: GenerationDefaults
    started: float = field(default_factory=time.time)
    watchdog: Watchdog = field(default_factory=Watchdog)
    forms: Forms = field(default_factory=Forms)
    kept: Kept = field(default_factory=Kept)
    served: Mapping[str, ServedModel] = field(default_factory=dict)
    given_adapters: tuple[str, ...] = ()
    inferences: Inferences = field(default_factory=Inferences)
    files: Store | None = None
    media: MediaReader = field(default_factory=lambda: MediaReader(ServeConfig()))
    processors: FolderProcessors | None = None
    beside: tuple[ApiServer, ...] = ()
    _templates: dict[tuple[str, str], ChatTemplate] = field(default_factory=dict)  # of adapters' folders

    def __post_init__(self) -> None:
        self.beside = (self,)

    @cached_property
    def sounds(self) -> Decoders:
        """The decoders of files of sound, in processes of their own."""
        config = self.config
        return Decoders(MediaBounds(file_bytes=config.audio_file_bytes, sound_seconds=config.audio_seconds))

    @classmethod
    def build_all(cls, config: ServeConfig, models: Sequence[NamedModel], name: str, place: int) -> list[ApiServer]:
        """Return one API server for each model, as `build`. They keep their answers together."""
        built = [cls.build(config, model, name, place) for model in models]
        for api in built:
            api.beside, api.kept, api.watchdog = tuple(built), built[0].kept, built[0].watchdog
            api.media, api.files = built[0].media, built[0].files
        return built

    @classmethod
    def build(cls, config: ServeConfig, model: NamedModel, name: str, place: int = 1) -> ApiServer:
        """Return an API server for a model and its engines. `name` is unlike any other API server's, and `place` is its
        number among them.

        Raise RidgelineError if the model's texts cannot be used.
        """
        folder, names = Path(model.folder), model.names
        texts = Path(str(config.engine.get("tokenizer") or folder))
        tokenizer = Tokenizer.from_folder(texts)
        engines = [EngineClient(path, name, buffer=config.stream_buffer) for path in model.sockets]
        client = Replicas(engines)
        share = config.api_server_count
        bounds = -(-config.max_queue_requests // share), -(-config.max_queue_tokens // share)
        admission = Admission(*bounds, priority_floor=config.priority_floor)
        defaults = GenerationDefaults.of(config.generation_config, folder, config.override_generation_config)
        service = Service(client, tokenizer, admission, eos_ids=defaults.eos_ids)
        service.beam_run, service.keeps_apart = BeamRun, config.prefix_sharing == "tenant"
        if config.otlp_endpoint is not None:
            service.on_end = _tracing(config.otlp_endpoint, names[0], name)
        template = _chat_template(config.chat_template, texts, tokenizer.special_tokens)
        files = None if config.batch_dir is None else Store(Path(config.batch_dir), config.batch_dir_bytes)
        forms = choose(config.tool_call_parser, config.reasoning_parser, template.sources, tokenizer.added)
        if forms.tools is None and config.tool_call_parser == "auto" and place == 1 and template.mentions("tools"):
            logger.warning(
                "the chat template of %s takes tools, and in none of the known forms: calls in answers are left as "
                "text unless a request forces them; --tool-call-parser names a form.",
                names[0],
            )
        return cls(
            config=config,
            names=names,
            folder=folder,
            client=client,
            service=service,
            tokenizer=tokenizer,
            chat_template=template,
            grammar_checks=GrammarChecks(config.grammar_timeout, tokenizer.added, tokenizer.vocab_size),
            defaults=defaults,
            forms=forms,
            kept=Kept(place, share, Path(model.sockets[0]).parent, config.max_stored_responses),
            served=served_models(config.model_repository, (*names, *(each.name for each in model.adapters))),
            given_adapters=tuple(each.name for each in model.adapters),
            files=files,
            media=MediaReader(config, files),
            processors=FolderProcessors.of(texts, tokenizer, config.mm_processor_kwargs),
        )

    @property
    def processor(self) -> Processor | None:
        """The processor of pictures, with the operator's settings."""
        return None if self.processors is None else self.processors.plain

    def adjusted_processor(self, options: object) -> Processor:
        """Return the processor with a request's `mm_processor_kwargs`. Raise InvalidRequest."""
        assert self.processors is not None
        return self.processors.adjusted(options)

    @property
    def modalities(self) -> tuple[str, ...]:
        """The kinds of media that the model takes: image, video, audio."""
        facts = self.client.known
        if facts is None or self.processor is None or not facts.modalities:
            return ()
        videos = "image" in facts.modalities and isinstance(self.processor, VideoProcessor)
        return *facts.modalities, *(("video",) if videos else ())

    def media_width(self, kind: str) -> int:
        """The numbers of a vector of a picture or a sound that comes as vectors; 0: it may not."""
        facts = self.client.known
        return 0 if facts is None or self.processor is None else facts.media_widths[kind == "audio"]

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that stand for the model with an adapter, as the engines last told."""
        facts = self.client.known
        return self.given_adapters if facts is None else tuple(each.name for each in facts.adapters)

    @property
    def all_names(self) -> tuple[str, ...]:
        """All that clients may call the model, with an adapter or without one."""
        return *self.names, *self.adapters

    def adapter(self, name: str | None) -> UsedAdapter | None:
        """Return the adapter that a client names as its model, or None for the model itself. Raise Unavailable while no
        engine has told of it."""
        if name not in self.adapters:
            return None
        found = next((each for each in self.service.facts().adapters if each.name == name), None)
        if found is None:
            raise Unavailable(f"the adapter {name} is not loaded; try again soon.", retry_after=5)
        return UsedAdapter(found.number, found.key)

    def template_of(self, name: str | None) -> ChatTemplate:
        """Return the template of what a client names as its model: the one in an adapter's folder, unless the operator
        gave one for all, or the model's. Raise BadRequest for one that cannot be read."""
        known = self.client.known
        found = next((each for each in known.adapters if each.name == name), None) if known is not None else None
        if found is None or self.config.chat_template is not None:
            return self.chat_template
        if (place := (found.folder, found.key)) not in self._templates:
            try:
                template = self.chat_template.of_adapter(Path(found.folder))
            except ModelLoadError as error:
                raise BadRequest(f"the adapter's chat template cannot be used: {error}", param="model") from error
            if len(self._templates) >= MOST_TEMPLATES:
                self._templates.clear()
            self._templates[place] = template
        return self._templates[place]

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of texts for a model that pools. Raise Unavailable while no engine has told of it, and
        BadRequest for a model that generates."""
        facts = self.service.facts()
        prompts, default = read_prompts(self.folder)
        return Encoder(
            self.tokenizer,
            pooling_facts(self.service),
            facts.max_model_len,
            prompts=prompts,
            default_prompt=default,
            template=self.chat_template,
            sides=read_sides(self.folder),
        )

    @property
    def healthy(self) -> bool:
        """True if an engine is there and was not given up."""
        return self.illness is None

    @property
    def illness(self) -> str | None:
        """The reason why requests should not come here, or None while one engine works, or could if it were woken
        up."""
        ill = self.client.illnesses()
        if len(ill) == len(self.client.engines):
            return "; ".join(ill)
        return self._kept_out if self.client.asleep else None

    @property
    def _kept_out(self) -> str | None:
        """The reason why a model that sleeps cannot have the devices: one that has them does not work, and so does not
        give them to others either. None if there is no such model."""
        others = [each for each in self.beside if each is not self and each.client.facts and not each.client.asleep]
        ill = {each.names[0]: each.client.illnesses() for each in others}
        return next((f"{name} has the devices, but {'; '.join(why)}" for name, why in ill.items() if why), None)

    @property
    def unready(self) -> str | None:
        """The reason why requests for this model should not be sent here now, or None. One of several models may sleep,
        because requests wake it up."""
        if self.service.admission.draining:
            return "the server is shutting down"
        if (illness := self.illness) is not None or len(self.beside) > 1:
            return illness
        if (starting := self.client.starting) is not None:
            return starting
        if self.client.asleep:
            return "the engine is asleep; POST /wake_up wakes it up"
        return "the engine is paused; POST /resume lets it go on" if self.client.paused else None

    @property
    def unready_at_all(self) -> str | None:
        """The same for whatever model."""
        reasons = {each.names[0]: each.unready for each in self.beside}
        if None in reasons.values():
            return None
        told = set(reasons.values())
        return told.pop() if len(told) == 1 else "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _tracing(endpoint: str, model: str, instance: str) -> Callable[[Run, BaseException | None], None]:
    try:
        from ridgeline.serving.observed.tracing import observer  # belongs to an extra, and is slow to import
    except ImportError as error:
        raise InvalidConfig(f"--otlp-endpoint needs `pip install ridgeline[otel]` ({error}).") from error
    return observer(endpoint, model, instance)


def _chat_template(given: str | None, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Return the template that the operator gave, as a file or as its text, or else the folder's own."""
    if given is None:
        return ChatTemplate.from_folder(folder, special_tokens)
    try:
        source = given if any(mark in given for mark in ("{%", "{{")) else Path(given).read_text()
        template = ChatTemplate(source, special_tokens)
        template.render([{"role": "user", "content": "?"}])
    except (OSError, UnicodeDecodeError, InvalidRequest) as error:
        raise InvalidConfig(f"the chat template {short(given)} cannot be used ({error}).") from error
    return template
