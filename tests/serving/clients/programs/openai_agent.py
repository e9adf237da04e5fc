"""An agent of openai-agents that edits a file by its tools. Arguments: responses or chat, the task."""

from __future__ import annotations

import sys
from pathlib import Path

from agents import (  # type: ignore[import-not-found, unused-ignore]
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)


@function_tool
def read_file(path: str) -> str:
    """Return the text of a file.

    Args:
        path: where the file is.
    """
    return Path(path).read_text()


@function_tool
def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: where the file is.
        old: the text that is there.
        new: the text that takes its place.
    """
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "done"


set_tracing_disabled(True)
set_default_openai_api("responses" if sys.argv[1] == "responses" else "chat_completions")
agent = Agent(name="editor", instructions="You edit files.", tools=[read_file, edit_file], model="scripted")
print(Runner.run_sync(agent, sys.argv[2]).final_output)
