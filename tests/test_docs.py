"""The pages are right where a program can check: links, files, modules, commands, flags and targets of make exist.

docs/growth.md writes files that are planned in italics, and all others as code, as other pages do.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ridgeline.cli import app
from ridgeline.core.settings.vllm_flags import FLAGS

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "ridgeline", ROOT / "ridgeline_bench")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.md")])
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md", *(ROOT / "docs" / "log").glob("*.md")}
TODAY = [page for page in PAGES if page not in HISTORY]  # history may name what was there once
GROWTH = ROOT / "docs" / "growth.md"
PROGRAMS = [folder.name for folder in ROOT.iterdir() if folder.is_dir() and any(folder.glob("*.py"))]
COMMANDS = typer.main.get_command(app)
ENDINGS = ("py", "sh", "md", "svg", "cpp", "h", "txt", "jsonl", "toml", "yaml")  # of files that pages name
SERVICE = "ridgeline.v1"  # a package of protobuf, not of Python
VLLM_FLAGS = {f"--{name}" for name in FLAGS}
FOREIGN_FLAGS = {  # of other programs
    "--secret",  # sky
    *("--build-arg", "--from-literal"),  # docker, kubectl
    *("--context-parallel-size", "--cp-comm-type"),  # Megatron-Core
    *("--speculative-eagle-topk", "--speculative-num-draft-tokens"),  # SGLang
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
page_of_today = pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def prose_and_code(page: Path) -> tuple[list[str], list[str]]:
    """Return the lines outside fences and those inside."""
    kinds: tuple[list[str], list[str]] = [], []
    fenced = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        else:
            kinds[fenced].append(line)
    return kinds


@cache
def spans(page: Path) -> list[str]:
    """Return the page's code: each span of its prose, and each line of its fences."""
    prose, code = prose_and_code(page)
    shown = "\n".join(code).replace("\\\n", " ").splitlines()
    return [*(span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", "\n".join(prose))), *shown]


@cache
def anchors(page: Path) -> set[str]:
    return {anchor_of(line.lstrip("#").strip()) for line in prose_and_code(page)[0] if line.startswith("#")}


def anchor_of(heading: str) -> str:
    """Return the name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """Yield the words behind every `program` that the page shows."""
    for span in spans(page):
        span = re.sub(r"\s#.*", "", span)
        if found := re.match(rf"\s*(?:\w+=\S+ )*(?:\.venv/bin/)?{program} (.*)", span):
            yield shlex.split(found[1])


def flags_of(command: Any) -> set[str]:
    """Return the flags of a command and of all below it."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(flags_of(below) for below in getattr(command, "commands", {}).values()))


def source_of(module: str) -> str:
    """Return the text of a module of ours and of the scripts that it imports, which define its flags."""
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    imported = re.findall(rf"^from ({module.split('.')[0]}[\w.]*) import", text, re.MULTILINE)
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in imported]
    return text + "".join(file.read_text() for file in files if file.is_file())


def flags_in(text: str) -> set[str]:
    """Return the flags that a script has in quotes, or as the options of `asked`."""
    called = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    options = [option for call in called if ast.unparse(call.func) == "asked" for option in call.keywords]
    own = {"--" + option.arg.replace("_", "-") for option in options if option.arg}
    return own | set(re.findall(r"""["'](--[a-z][\w-]*)["']""", text))


@cache
def flags_of_scripts() -> set[str]:
    """Return the flags of every command: ours, vLLM's that ours reads, and those that scripts and tests define."""
    scripts = [path for name in PROGRAMS if name != "ridgeline" for path in ROOT.glob(f"{name}/**/*.py")]
    return flags_of(COMMANDS) | VLLM_FLAGS | {flag for path in scripts for flag in flags_in(path.read_text())}


@cache
def tree() -> frozenset[str]:
    """Return the paths of all files and folders of ours from the root."""
    found = [path for name in ("docs", "deploy", *PROGRAMS) for path in [ROOT / name, *ROOT.glob(f"{name}/**/*")]]
    return frozenset(
        str(path.relative_to(ROOT)) for path in [*found, *ROOT.iterdir()] if "__pycache__" not in path.parts
    )


@cache
def bases() -> tuple[str, ...]:
    """Return the prefixes that a page may leave out of a path: the package, its folders, and theirs."""
    return ("", *(f"{path}/" for path in tree() if re.fullmatch(r"ridgeline(_bench)?(/\w+){0,2}", path)))


def is_there(path: str) -> bool:
    """Return True if a file or folder has that path. A name alone may be in any folder; `<op>` and `*` are any name."""
    path = path.rstrip("/")
    if re.search(r"[*<]", path):
        form = re.compile(r"(?:.*/)?" + re.sub(r"<\w+>|\*", "[^/]+", path.replace(".", r"\.")))
        return any(form.fullmatch(each) for each in tree())
    if "/" in path:
        return any(base + path in tree() for base in bases())
    return any(each == path or each.endswith(f"/{path}") for each in tree())


def paths(page: Path) -> set[str]:
    """Return the files and folders of ours that a page names, not routes, repositories or what a run writes."""
    words = {word for span in spans(page) for word in span.split()}
    files = {word for word in words if re.fullmatch(r"[\w<>*./-]*[\w>*]\.py", word)}
    inside = re.compile(rf"([\w<>*-]+)(?:/[\w<>*-]+)*(?:/[\w<>*-]*|/[\w<>*.-]+\.(?:{'|'.join(ENDINGS)}))")
    return files | {word for word in words if (found := inside.fullmatch(word)) and found[1] in rooms()}


@cache
def rooms() -> set[str]:
    """Return the folders that a path may begin with."""
    return {
        "docs",
        "deploy",
        *PROGRAMS,
        *(folder.name for package in PACKAGES for folder in package.iterdir() if folder.is_dir()),
    }


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    local = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    local += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in local:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@page_of_today
def test_files_and_folders_that_are_named_are_there(page: Path) -> None:
    assert [path for path in sorted(paths(page)) if not is_there(path)] == []


def test_growth_has_in_italics_what_is_not_there_yet() -> None:
    planned = re.findall(r"(?<![\w*])\*([\w<>./-]+/[\w<>.-]*)\*(?![\w*])", GROWTH.read_text())
    assert len(planned) > 10
    assert [path for path in planned if is_there(path)] == []


@page_of_today
def test_modules_and_their_names_are_there(page: Path) -> None:
    """`ridgeline.core.plan.step.Worker`, `core.plan.step.Worker` and `core/plan/step.Worker` are one name."""
    for span in spans(page):
        for name in re.findall(r"(?<![\w./-])[a-z_]+(?:[./]\w+)+(?![\w./(-])", span):
            parts = re.split(r"[./]", name)
            if "." in name and parts[0] in rooms() and parts[-1] not in ENDINGS and not name.startswith(SERVICE):
                assert names_something(parts), name


def names_something(parts: list[str]) -> bool:
    """Return True if the parts lead to a module, or to one and a name in it."""
    for base in (ROOT, *PACKAGES):
        for count in range(len(parts), 0, -1):
            path = base.joinpath(*parts[:count])
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if file.is_file() or path.is_dir():
                text = file.read_text() if file.is_file() else ""
                return all(re.search(rf"\b{part}\b", text) for part in parts[count:])
    return False


@page_of_today
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    for words in commands(page, "ridgeline"):
        command: Any = COMMANDS
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"ridgeline … {words[0]}"
            command, words = command.commands[words[0]], words[1:]
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= flags_of(command) | {"--help"}, words


@page_of_today
def test_scripts_and_their_options_are_there(page: Path) -> None:
    for words in commands(page, "python -m"):
        if words[0].split(".")[0] in PROGRAMS:
            assert is_there(f"{words[0].replace('.', '/')}.py"), words[0]
            source = source_of(words[0])
            missing = [w for w in words if w.startswith("--") and w not in source and w not in flags_in(source)]
            assert missing == [], words


@page_of_today
def test_flags_that_are_named_are_some_commands(page: Path) -> None:
    named = {flag for span in spans(page) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    assert sorted(named - flags_of_scripts() - FOREIGN_FLAGS) == []


@page_of_today
def test_targets_of_make_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in commands(page, "make") for word in words if "=" not in word}
    assert named <= targets


@every_page
def test_prose_is_wrapped(page: Path) -> None:
    free = ("|", "    ", "  <")  # tables, code, HTML
    long = [line for line in prose_and_code(page)[0] if len(line) > 100 and not line.startswith(free)]
    assert [line for line in long if "](http" not in line] == []


@page_of_today
def test_sentences_have_at_most_40_words(page: Path) -> None:
    """Tables apart. An empty line ends a sentence, and so does a colon."""
    lines = [line or "." for line in prose_and_code(page)[0] if not line.startswith("|")]
    sentences = re.split(r"(?<=[.:;])\s+", " ".join(lines))
    assert [each for each in sentences if len(each.split()) > 40] == []


@page_of_today
def test_pages_speak_of_requests_clients_and_processes_not_of_people(page: Path) -> None:
    people = re.compile(r"\b(nobody|somebody|everybody|anybody|whoever|whom)\b", re.IGNORECASE)
    assert [line for line in prose_and_code(page)[0] if people.search(line)] == []


def test_commands_are_found() -> None:
    found = [words[0] for words in commands(ROOT / "README.md", "ridgeline")]
    assert {"generate", "serve", "plan", "bench"} <= set(found)


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "ridgeline").iterdir() if path.is_dir()))
def test_docstrings_begin_with_what_the_thing_does_or_is(room: str) -> None:
    """A fragment such as "Of the row." leaves out its subject, and "Return how many …" is "Return the number of …"."""
    odd = re.compile(r"((Return )?(what|whether|how|where|who)|Of|Which)\b", re.IGNORECASE)
    found = []
    for path in sorted((ROOT / "ridgeline" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and odd.match(ast.get_docstring(node) or ""):
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert found == []
