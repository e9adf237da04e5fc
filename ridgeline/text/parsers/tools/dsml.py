"""Tool calls in the form of DeepSeek V3.2 and V4, which says of each argument whether it is a string or JSON:

<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

import re
from dataclasses import replace

from ridgeline.text.parsers.calls import WRAPPER, Tools, unwrapped
from ridgeline.text.parsers.forms import ToolForm
from ridgeline.text.parsers.scanner import Reading
from ridgeline.text.parsers.xml import ANY, QUOTES, XmlParser, XmlTags

MARK = "｜DSML｜"
NAMED = re.compile(r'"(?P<name>[^"]*)"(?:\s+string="(?P<string>true|false)")?')


FIRST = f'{{"{WRAPPER}": '


class DsmlParser(XmlParser):
    form = XmlTags(
        open=f"<{MARK}function_calls>",
        close=f"</{MARK}function_calls>",
        call=f"<{MARK}invoke name=",
        call_end=f"</{MARK}invoke>",
        name_end=">",
        key=f"<{MARK}parameter name=",
        key_end=">",
        value_end=f"</{MARK}parameter>",
    )

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._held: list[str] | None = None  # arguments of a call that may be taken out of `arguments`
        self._name = ""

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._name = name
        super().begin(name, call_id)

    def arguments(self, text: str) -> None:
        if self._held is None and text == FIRST and self.wraps(self._name):
            self._held = []
        if self._held is None:
            super().arguments(text)
        else:
            self._held.append(text)

    def _call(self, opened: str) -> Reading[str | None]:
        tag = yield from super()._call(opened)
        if self._held is not None:
            held, self._held = "".join(self._held), None
            super().arguments(unwrapped(held))
        return tag

    def named(self, key: str) -> tuple[str, frozenset[str] | None]:
        found = NAMED.fullmatch(key)
        if found is None:
            return key.strip(QUOTES), None
        types = {"true": frozenset({"string"}), "false": ANY - {"string"}}
        return found["name"], types.get(found["string"])


class DsmlV4Parser(DsmlParser):
    form = replace(DsmlParser.form, open=f"<{MARK}tool_calls>", close=f"</{MARK}tool_calls>")


def _form(name: str, parser: type[DsmlParser]) -> ToolForm:
    tags = (parser.form.open, parser.form.close)
    return ToolForm(
        name=name, parser=parser, known_by=(tags[:1], (MARK, tags[0][7:])), tags=(*tags, MARK), opens=tags[:1]
    )


V32, V4 = _form("deepseek_v32", DsmlParser), _form("deepseek_v4", DsmlV4Parser)
