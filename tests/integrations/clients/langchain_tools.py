"""LangChain's ChatOpenAI with `bind_tools`: a call, its result, the answer; plain and streamed."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

asked: list[str] = []


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "23 degrees"


model = ChatOpenAI(base_url=sys.argv[1], api_key="none", model="qwen").bind_tools([weather])  # type: ignore[arg-type]
answers = []
for stream in (False, True):
    messages = [HumanMessage("What is the weather?")]
    if stream:
        said = None
        for chunk in model.stream(messages):
            said = chunk if said is None else said + chunk
    else:
        said = model.invoke(messages)
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in said.tool_calls]
    answers.append(model.invoke([*messages, said, *results]).content)
print(json.dumps({"asked": asked, "answers": answers}))
