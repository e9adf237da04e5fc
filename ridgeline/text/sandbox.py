"""A Jinja2 environment for templates that came with a model, with no way out and with bounds on time and size.

It runs in a child process with limits of its own; `renderer` is its entrance.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SIZE = 8 * 2**20  # characters of a text, items of a list, or bits of a number
MAX_SECONDS = 5.0  # an ordinary conversation takes a millisecond
MAX_WORDS = 1000  # characters of a template's own message when it fails
WIDTH_TAKERS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice"})


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers offers to chat templates, with bounds.

    Each bound has a sentence that names it. The time of one rendering is checked in every loop iteration, call and
    filter. The size is checked before `+`, `*`, `**`, `%`, `~`, a block of output, a format, `replace`, `join` or one
    of WIDTH_TAKERS makes something, and after any other call or filter. `range` has Jinja's own bound of 100 000, and
    there is no `lipsum`.

    The rest (the text of a value that holds another many times, the sum of all values alive at once) is bounded by the
    process that this runs in (core/confined.py).
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[GenerationTag, loopcontrols]
        )
        self._clock = threading.local()  # one rendering at a time per thread
        self._compiled = functools.lru_cache(maxsize=16)(self.from_string)
        self.filters = {n: self._bounded(n, function) for n, function in (self.filters | {"tojson": to_json}).items()}
        del self.globals["lipsum"]  # endless words, which no template needs
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template. Raise whatever it raises, and TemplateError if it breaks a bound."""
        self._clock.deadline = time.monotonic() + MAX_SECONDS
        return self._compiled(source).render(variables)

    def tick(self) -> bool:
        """Check the time. Every loop iteration calls this."""
        if time.monotonic() > getattr(self._clock, "deadline", float("inf")):
            raise TemplateError(f"it ran for more than {MAX_SECONDS:g} seconds")
        return True

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of the template, a macro or a block."""
        total, kept = 0, []
        for piece in pieces:
            total += len(piece)
            check_size(total)
            kept.append(piece)
        return "".join(kept)

    def join_text(self, values: Iterable[object]) -> str:
        """Do the work of the `~` operator."""
        return self.concat(map(str, values))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Do every call in a template."""
        __self.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        check_growth(getattr(method, "__name__", ""), getattr(method, "__self__", None), [*args, *kwargs.values()])
        return checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do the work of the operators named in `intercepted_binops`."""
        check_size(_largest_result(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Instrument().visit(source), *args, **kwargs)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))  # some filters get their context before the value

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            subject, *values = [*args[first:], *kwargs.values()] or [None]
            check_growth(name, subject, values)
            return checked(function(*args, **kwargs))

        return bounded


def renderer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that a child of `Confined` runs: {source, variables} → {text}, or {kind, words} of an
    error."""
    sandbox = TemplateSandbox()

    @functools.lru_cache(maxsize=16)
    def takes_parts(source: str) -> bool:
        return looks_into_parts(sandbox, source)

    def render(asked: dict[str, Any]) -> dict[str, Any]:
        source, variables = asked["source"], asked["variables"]
        try:
            if not takes_parts(source):
                variables["messages"] = [with_plain_content(message) for message in variables["messages"]]
            try:
                return {"text": sandbox.render(source, variables)}
            except TypeError:  # DeepSeek's templates put arguments to text by `+`
                spelled = [with_spelled_arguments(message) for message in variables["messages"]]
                if spelled == variables["messages"]:
                    raise
                return {"text": sandbox.render(source, variables | {"messages": spelled})}
        except TemplateSyntaxError as error:
            return {"kind": "syntax", "words": f"{(error.message or '')[:MAX_WORDS]} (line {error.lineno})"}
        except TemplateError as error:
            return {"kind": "refusal", "words": str(error)[:MAX_WORDS]}
        except MemoryError:
            raise
        except Exception as error:  # a template is a program and can fail like one
            return {"kind": "failure", "words": f"{type(error).__name__}: {str(error)[:MAX_WORDS]}"}

    return render


def looks_into_parts(sandbox: TemplateSandbox, source: str) -> bool:
    """Return True if the template reads `.text` or `["text"]` of anything."""
    try:
        tree = sandbox.parse(source)
    except TemplateError:
        return False
    by_name = any(node.attr == "text" for node in tree.find_all(nodes.Getattr))
    keys = [node.arg for node in tree.find_all(nodes.Getitem)]
    return by_name or any(isinstance(key, nodes.Const) and key.value == "text" for key in keys)


def with_spelled_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text, as OpenAI has them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    spelled = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            call = call | {"function": function | {"arguments": arguments}}
        spelled.append(call)
    return message | {"tool_calls": spelled}


def with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with one string as content, for templates written for text alone, which do not expect
    parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "\n".join(part["text"] for part in content)}


class Instrument(NodeTransformer):
    """A transformer of templates that adds a tick to every loop and sends `~` through a call."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        if node.test is not None:  # `for x in y if test` may never reach its body
            node.test = nodes.And(tick, node.test)
        else:
            node.body.insert(0, nodes.ExprStmt(tick))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join_text"), [nodes.List(node.nodes)], [], None, None)


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training. Inference needs only its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads it as a plain set)

    def parse(self, parser: Parser) -> nodes.Scope:
        scope = nodes.Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


def raise_exception(message: str) -> None:
    """Refuse a conversation, on behalf of the template."""
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own `tojson` escapes HTML, which would reach the model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateError(f"it made a value larger than {MAX_SIZE} characters")


def check_growth(name: str, subject: object, values: list[Any]) -> None:
    """Refuse what a method or filter would make if it is too large. `subject` is the value it is called on."""
    if name in WIDTH_TAKERS:
        check_size(_largest(values))
    elif name in ("format", "format_map") and isinstance(subject, str):
        check_size(max((int(digits) for digits in re.findall(r"\d{7,18}", subject)), default=0))
        if re.search(r"\*|:[^{}:]*\{", subject):  # widths come from the values
            check_size(_largest(values))
    elif name == "join":
        check_size(_size(subject) * max(map(_size, values), default=0))
    elif name == "replace" and len(values) > 1 and isinstance(subject, str):
        check_size(_size(subject) // max(1, _size(values[0])) * _size(values[1]))


def _largest(values: list[Any]) -> int:
    flat = (each for value in values for each in (value if isinstance(value, (list, tuple)) else (value,)))
    return max((abs(each) for each in flat if isinstance(each, int)), default=0)


def checked(result: Any) -> Any:
    check_size(_size(result))
    return result


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, range)) else 0


def _largest_result(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound on the result's size before the work is done."""
    if operator == "%" and isinstance(left, str):
        check_growth("format", left, [right])
        return 0
    if operator == "**":
        return _size(left) * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
    if operator == "*" and isinstance(left, int) != isinstance(right, int):
        count, sequence = (left, right) if isinstance(left, int) else (right, left)
        return _size(sequence) * max(count, 0)
    return _size(left) + _size(right)
