"""The agent as a graph of LangGraph: pip install langgraph langchain-openai"""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from environments.agents import plain

calculate = tool(description="Compute an expression.")(plain.calculate)


def run(task: dict, base_url: str, api_key: str) -> float:
    model = ChatOpenAI(model="picorl", base_url=base_url, api_key=api_key).bind_tools([calculate])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([calculate]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    opening = {"messages": [("user", task["question"])]}
    result = graph.compile().invoke(opening, {"recursion_limit": 6})
    return float(f"<answer>{task['answer']}</answer>" in result["messages"][-1].content)
