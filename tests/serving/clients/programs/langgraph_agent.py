"""An agent of LangGraph that edits a file by its tools. Argument: the task."""

from __future__ import annotations

import sys
from pathlib import Path

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph  # type: ignore[import-not-found, unused-ignore]
from langgraph.prebuilt import ToolNode, tools_condition  # type: ignore[import-not-found, unused-ignore]


@tool
def read_file(path: str) -> str:
    """Return the text of a file."""
    return Path(path).read_text()


@tool
def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file by another."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "done"


TOOLS = [read_file, edit_file]
model = ChatOpenAI(model="scripted", streaming=True, stream_usage=True).bind_tools(TOOLS)
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode(TOOLS))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
print(graph.compile().invoke({"messages": [HumanMessage(sys.argv[1])]})["messages"][-1].content)
