"""Names that pages use: links, files, folders, modules, commands with their options, flags and targets of make.

docs/growth.md writes files that are planned in italics, and all others as code, as other pages do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.core.settings.vllm_flags import FLAGS
from ridgeline_bench.scripts.evidence.commands import ROOT, commands, in_docstring, problem, ridgeline
from ridgeline_bench.scripts.jobs import read_jobs

PACKAGES = (ROOT / "ridgeline", ROOT / "ridgeline_bench")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.md")])
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md", *(ROOT / "docs" / "log").glob("*.md")}
TODAY = [page for page in PAGES if page not in HISTORY]  # history may name what was there once
PROGRAMS = [folder.name for folder in ROOT.iterdir() if folder.is_dir() and any(folder.glob("*.py"))]
ENDINGS = (
    "py",
    "sh",
    "md",
    "svg",
    "png",
    "cpp",
    "cu",
    "cuh",
    "gdb",
    "h",
    "txt",
    "jsonl",
    "toml",
    "yaml",
)  # of files
SERVICE = "ridgeline.v1"  # a package of protobuf, not of Python
VLLM_FLAGS = {f"--{name}" for name in FLAGS}
FOREIGN_FLAGS = {  # of other programs
    "--secret",  # sky
    *("--build-arg", "--from-literal"),  # docker, kubectl
    "--nproc-per-node",  # torchrun
    *("--cli-input-json", "--experiment-name", "--package-file"),  # aws, kfp
    *("--context-parallel-size", "--cp-comm-type"),  # Megatron-Core
    "--args",  # cuda-gdb
    *("--speculative-eagle-topk", "--speculative-num-draft-tokens"),  # SGLang
}


def problems(page: Path) -> Iterator[str]:
    """Yield what a page says that is not so, in one sentence each."""
    yield from broken_links(page)
    if page in HISTORY:
        return
    yield from (f"{path} is not there" for path in sorted(paths(page)) if not is_there(path))
    yield from (f"{name} is no module of ours, nor a name in one" for name in missing_names(page))
    yield from wrong_commands(page)
    yield from (f"no command has the flag {flag}" for flag in sorted(flags(page) - known_flags() - FOREIGN_FLAGS))
    yield from (f"make has no target {target}" for target in sorted(targets(page) - known_targets()))


@cache
def prose_and_code(page: Path) -> tuple[list[str], list[str]]:
    """Return the lines outside fences and those inside. Lines with a deep margin are code too."""
    kinds: tuple[list[str], list[str]] = [], []
    fenced = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        else:
            kinds[fenced].append(line)
    return kinds


@cache
def shown(page: Path) -> list[str]:
    """Return the lines of the page's blocks of code, those that go on in the next line in one piece."""
    prose, code = prose_and_code(page)
    return "\n".join([*code, *(line for line in prose if line.startswith("    "))]).replace("\\\n", " ").splitlines()


@cache
def quoted(page: Path) -> list[str]:
    """Return the pieces of code in the page's sentences and tables."""
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", "\n".join(prose_and_code(page)[0]))]


def spans(page: Path) -> list[str]:
    """Return all of the page's code."""
    return [*quoted(page), *shown(page)]


# ---- links ----------------------------------------------------------------------------------------------------------


@cache
def anchors(page: Path) -> set[str]:
    return {anchor_of(line.lstrip("#").strip()) for line in prose_and_code(page)[0] if line.startswith("#")}


def anchor_of(heading: str) -> str:
    """Return the name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(page: Path) -> Iterator[str]:
    text = page.read_text()
    local = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    local += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in local:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"the link {link} leads nowhere"


# ---- files and modules ----------------------------------------------------------------------------------------------


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


def missing_names(page: Path) -> Iterator[str]:
    """`ridgeline.core.plan.step.Worker`, `core.plan.step.Worker` and `core/plan/step.Worker` are one name. A group of
    entry points is none."""
    for span in spans(page):
        for name in re.findall(r"(?<![\w./-])(?<!entry-points\.\")[a-z_]+(?:[./]\w+)+(?![\w./(-])", span):
            parts = re.split(r"[./]", name)
            ours = "." in name and parts[0] in rooms() and parts[-1] not in ENDINGS and not name.startswith(SERVICE)
            if ours and not names_something(parts):
                yield name


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


# ---- commands and flags ---------------------------------------------------------------------------------------------


def wrong_commands(page: Path) -> Iterator[str]:
    """Yield each command that its own parser does not take, and why."""
    for texts, whole in ((shown(page), True), (quoted(page), False)):
        for text in texts:
            for command in commands(text):
                if told := problem(command, whole=whole):
                    yield f"`{command}`: {' '.join(told.split())}"


def wrong_commands_of_scripts() -> Iterator[str]:
    """Yield the same for the commands that modules show in their own texts, and for those of queues of jobs."""
    for path in sorted(path for name in PROGRAMS for path in ROOT.glob(f"{name}/**/*.py")):
        for command in in_docstring(ast.get_docstring(ast.parse(path.read_text())) or ""):
            if told := problem(command, whole=True):
                yield f"{path.relative_to(ROOT)} shows `{command}`: {' '.join(told.split())}"
    for queue in sorted((ROOT / "benchmarks").glob("*.txt")):
        for job in read_jobs(queue):
            for command in commands(job.command.replace("$OUT", "out")):
                if told := problem(command, whole=True):
                    yield f"{queue.relative_to(ROOT)}, job {job.name}: {' '.join(told.split())}"


def flags(page: Path) -> set[str]:
    return {flag for span in spans(page) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}


@cache
def known_flags() -> set[str]:
    """Return the flags of every command: ours, vLLM's that ours reads, and those that scripts and tests define."""
    scripts = [path for name in PROGRAMS if name != "ridgeline" for path in ROOT.glob(f"{name}/**/*.py")]
    return flags_of(ridgeline()) | VLLM_FLAGS | {flag for path in scripts for flag in flags_in(path.read_text())}


def flags_of(command: Any) -> set[str]:
    """Return the flags of a command and of all below it."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(flags_of(below) for below in getattr(command, "commands", {}).values()))


def flags_in(text: str) -> set[str]:
    """Return the flags that a script has in quotes, or as the options of `asked`."""
    nodes = ast.walk(ast.parse(text)) if "asked(" in text else ()
    called = [node for node in nodes if isinstance(node, ast.Call)]
    options = [option for call in called if ast.unparse(call.func) == "asked" for option in call.keywords]
    own = {"--" + option.arg.replace("_", "-") for option in options if option.arg}
    return own | set(re.findall(r"""["'](--[a-z][\w-]*)["']""", text))


def targets(page: Path) -> set[str]:
    """Return the targets of `make` that the page names."""
    called = [found[1].split() for span in spans(page) if (found := re.match(r"\s*make ([^#]*)", span))]
    return {word for words in called for word in words if "=" not in word}


@cache
def known_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
