"""The programs that act for a user by a model's tool calls: how each is installed, set up and run, and what a model
says to it that changes a file and reads it back.

    python -m tests.serving.clients.agents FOLDER    # installs those that are missing, each in a folder of its own
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.scripted_model import call

URL = "{url}"
TASK = "Change one to two in notes.txt, then read it back."
NOTES, BEFORE, AFTER = "notes.txt", "one\n", "two\n"
LAST = "Done: it says two."
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Script:
    """What the model says in one conversation, by the path of the file. `plain`: to requests without tools."""

    turns: Callable[[str], Sequence[str]]
    plain: Callable[[str], Sequence[str]] = lambda _: ["Notes of a change"]


@dataclass(frozen=True)
class Program:
    """A program, and how it is run.

    package: its name in the registry, and its version. npm: where that is npm's; otherwise it is PyPI's.
    command: in which {bin} is the folder of its commands.
    more: further packages beside it.
    env, files: what it needs to know, and the files that say so by their paths. {home}, {work} and {url} stand there.
    served: the names of the model that it asks for.
    ignored: what the server leaves out by name.
    """

    package: tuple[str, str]
    command: Sequence[str]
    script: Script
    npm: bool = False
    more: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    served: Sequence[str] = ("scripted",)
    ignored: frozenset[str] = frozenset()

    @property
    def folder(self) -> str:
        return f"{self.package[0].replace('/', '_')}-{self.package[1]}"

    def commands(self, root: Path) -> Path:
        """Return the folder of its commands. `root` is where all programs are installed."""
        return root / self.folder / ("node_modules/.bin" if self.npm else "bin")


def _edited(read: str, edit: str, path: str, *names: str) -> Callable[[str], list[str]]:
    """Return the turns of a program whose tools `read` and `edit` take these names of a path, an old and a new text."""
    old, new = names

    def turns(file: str) -> list[str]:
        return [
            "Let me look.\n" + call(read, **{path: file}),
            "I change it now.\n" + call(edit, **{path: file, old: BEFORE.strip(), new: AFTER.strip()}),
            "And I read it back.\n" + call(read, **{path: file}),
            LAST,
        ]

    return turns


PATCH = f"*** Begin Patch\n*** Update File: {NOTES}\n@@\n-one\n+two\n*** End Patch\n"
CODE = (
    f"text(await tools.apply_patch({json.dumps(PATCH)}));\n"
    f"text((await tools.exec_command({{cmd: 'cat {NOTES}'}})).output);\n"
)


def _codex(model: str, script: Script, *ignored: str, more: str = "") -> Program:
    provider = f'[model_providers.ridgeline]\nname = "Ridgeline"\nbase_url = "{URL}/v1"\nwire_api = "responses"\n'
    return Program(
        package=("@openai/codex", "0.171.0"),
        npm=True,
        command=["{bin}/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
        script=script,
        env={"CODEX_HOME": "{home}/codex"},
        files={"{home}/codex/config.toml": f'model = "{model}"\nmodel_provider = "ridgeline"\n{provider}{more}'},
        served=(model,),
        ignored=frozenset({"client_metadata", "include.reasoning.encrypted_content", *ignored}),
    )


def _cline_turns(file: str) -> list[str]:
    read = {"files": [{"path": file}]}
    return [
        "Let me look.\n" + call("read_files", **read),
        "I change it now.\n" + call("editor", path=file, old_text="one", new_text="two"),
        "And I read it back.\n" + call("read_files", **read),
        LAST,
    ]


OPENCODE: dict[str, Any] = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "ridgeline": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Ridgeline",
            "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
            "models": {"scripted": {"name": "scripted"}},
        }
    },
}
OPENAI = {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none"}
TOOLS = Script(_edited("read_file", "edit_file", "path", "old", "new"))
BLOCK = f"{NOTES}\n```\n<<<<<<< SEARCH\none\n=======\ntwo\n>>>>>>> REPLACE\n```\n"
OF_CODEX_CODE = Script(lambda _: ["I change it and read it.\n" + call("functions__exec", input=CODE), LAST])
OF_CODEX = Script(
    lambda _: [
        "I change it now.\n" + call("apply_patch", input=PATCH),
        "And I read it back.\n" + call("exec_command", cmd=f"cat {NOTES}"),
        LAST,
    ]
)
MANY = f'[mcp_servers.many]\ncommand = "python3"\nargs = ["{PROGRAMS / "many_tools.py"}"]\n'
OF_CODEX_SEARCH = Script(
    lambda file: [
        "I search.\n" + call("tool_search", query="work 7", limit=2),
        "I call what I found.\n" + call("mcp__many__tool_7", x="y"),
        *OF_CODEX.turns(file),
    ]
)

AGENTS: dict[str, Program] = {
    "codex": _codex("gpt-5.5", OF_CODEX, "text.verbosity", "tools.web_search"),
    "codex_search": _codex(
        "gpt-5.5", OF_CODEX_SEARCH, "text.verbosity", "tools.web_search", "tools.defer_loading", more=MANY
    ),
    "codex_code": _codex("gpt-6.2-sol", OF_CODEX_CODE, "text.verbosity", "reasoning.context"),
    "claude_code": Program(
        package=("@anthropic-ai/claude-code", "2.1.332"),
        npm=True,
        command=["{bin}/claude", "-p", TASK, "--allowedTools", "Read,Edit"],
        script=Script(_edited("Read", "Edit", "file_path", "old_string", "new_string")),
        env={"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "claude-sonnet-4-5"},
        served=("claude-sonnet-4-5",),
        ignored=frozenset(
            {
                *("context_management", "metadata", "thinking", "thinking.display"),
                *("tools.defer_loading", "x-anthropic-billing-header"),
            }
        ),
    ),
    "opencode": Program(
        package=("opencode-ai", "1.18.33"),
        npm=True,
        command=["{bin}/opencode", "run", "-m", "ridgeline/scripted", TASK],
        script=Script(_edited("read", "edit", "filePath", "oldString", "newString")),
        files={"{work}/opencode.json": json.dumps(OPENCODE)},
        env={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "cline": Program(
        package=("cline", "3.0.65"),
        npm=True,
        command=[
            *("sh", "-c"),
            '"$0" auth -p openai-compatible -k none -m scripted -b "$1" && "$0" --json -t 60 "$2"',
            *("{bin}/cline", f"{URL}/v1", TASK),
        ],
        script=Script(_cline_turns),
    ),
    "aider": Program(
        package=("aider-chat", "0.86.2"),
        command=[
            *("{bin}/aider", "--model", "openai/scripted", "--edit-format", "diff", "--yes-always", "--no-git"),
            *("--no-show-model-warnings", "--analytics-disable", "--no-check-update", "--message", TASK, NOTES),
        ],
        script=Script(lambda _: ["No tools are known."], lambda _: [f"{LAST}\n\n{BLOCK}"]),
        env=OPENAI | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "openai_agents": Program(
        package=("openai-agents", "0.24.0"),
        command=["{bin}/python", str(PROGRAMS / "openai_agent.py"), "responses", TASK],
        script=TOOLS,
        ignored=frozenset({"tools.strict"}),
        env=OPENAI,
    ),
    "openai_agents_chat": Program(
        package=("openai-agents", "0.24.0"),
        command=["{bin}/python", str(PROGRAMS / "openai_agent.py"), "chat", TASK],
        script=TOOLS,
        env=OPENAI,
    ),
    "langgraph": Program(
        package=("langgraph", "1.2.24"),
        more=("langchain-openai==1.7.4",),
        command=["{bin}/python", str(PROGRAMS / "langgraph_agent.py"), TASK],
        script=TOOLS,
        env=OPENAI,
    ),
}


# Ollama's client for JavaScript, which is no agent: it has questions of its own, and no script.
OLLAMA = Program(
    package=("ollama", "0.6.4"),
    npm=True,
    command=["node", str(PROGRAMS / "ollama_client.mjs"), "{bin}/..", URL],
    script=Script(lambda _: []),
)


def install(root: Path, program: Program) -> None:
    """Install a program in a folder of its own, if it is not there."""
    folder, (name, version) = root / program.folder, program.package
    done = folder / ".installed"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if program.npm:
        wanted = [f"{name}@{version}", *program.more]
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *wanted], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        wanted = [f"{name}=={version}", *program.more]
        subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", *quiet, *wanted], check=True)
    done.touch()


def main(root: Path) -> None:
    for program in (*AGENTS.values(), OLLAMA):
        try:
            install(root, program)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"{program.package[0]} was not installed, so its tests are skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
