"""The reader of a chat's answer, by what the model writes and what the request asks for."""

from __future__ import annotations

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.tools import forces_calls, reads_calls
from ridgeline.text.parsers.reader import AnswerReader
from ridgeline.text.parsers.tools.hermes import HermesParser


def parser_for(api: ApiServer, body: ChatBody, prompt: str | None) -> AnswerReader:
    """Return the reader of one choice. `prompt` is the text that the model continues."""
    if not reads_calls(api.config, body):
        return AnswerReader()
    most = 1 if body.parallel_tool_calls is False else None
    return AnswerReader([HermesParser()], most=most, forced=forces_calls(body))
