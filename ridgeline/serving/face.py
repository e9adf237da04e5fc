"""What one face holds: the settings, the engine's client, and what turns text into tokens and back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.core.serving import ServeConfig
from ridgeline.serving.admission import Admission
from ridgeline.serving.engine_client import EngineClient
from ridgeline.serving.generation import Service
from ridgeline.serving.recent import RecentRequests
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer


@dataclass
class Face:
    """names: what clients may call the model, the first being the one that answers carry. folder: of the model."""

    config: ServeConfig
    names: tuple[str, ...]
    folder: Path
    client: EngineClient
    service: Service
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    recent: RecentRequests
    started: float = field(default_factory=time.time)

    @classmethod
    def build(cls, config: ServeConfig, folder: Path, names: tuple[str, ...], socket: str, name: str) -> Face:
        """socket: the engine's. name: this face's, unlike any other's."""
        tokenizer = Tokenizer.from_folder(folder)
        client = EngineClient(socket, name, buffer=config.stream_buffer)
        share = config.api_server_count
        admission = Admission(-(-config.max_queue_requests // share), -(-config.max_queue_tokens // share))
        template = (
            ChatTemplate(Path(config.chat_template).read_text(), tokenizer.special_tokens)
            if config.chat_template
            else ChatTemplate.from_folder(folder, tokenizer.special_tokens)
        )
        return cls(
            config=config,
            names=names,
            folder=folder,
            client=client,
            service=Service(client, tokenizer, admission),
            tokenizer=tokenizer,
            chat_template=template,
            recent=RecentRequests(),
        )

    @property
    def healthy(self) -> bool:
        """An engine is there, and, while requests run, steps end."""
        client = self.client
        if client.facts is None:
            return False
        return client.num_open == 0 or time.monotonic() - client.last_heard < self.config.step_timeout
