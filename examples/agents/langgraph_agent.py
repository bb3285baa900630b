"""A graph of LangGraph, a model node and a tool node: a program for `environment.kind: command` (docs/agent-harnesses.md).

ChatOpenAI reads OPENAI_BASE_URL and OPENAI_API_KEY. LangSmith is off unless its variables are set, and a program gets only
the variables that `environment.variables` names.
"""

import json
import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


policy = ChatOpenAI(model="policy").bind_tools([multiply])
graph = StateGraph(MessagesState)
graph.add_node("policy", lambda state: {"messages": [policy.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([multiply]))
graph.add_edge(START, "policy")
graph.add_conditional_edges("policy", tools_condition)
graph.add_edge("tools", "policy")

with open(os.environ["ROUNDHOUSE_TASK"]) as file:
    question = json.load(file)["question"]
state = graph.compile().invoke({"messages": [("user", question)]})
print(state["messages"][-1].content)
