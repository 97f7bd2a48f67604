"""LlamaIndex' OpenAILike with function calling: a call, its result, the answer; plain and streamed."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

asked: list[str] = []


def weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "23 degrees"


about = {"api_base": sys.argv[1], "api_key": "none", "is_chat_model": True, "is_function_calling_model": True}
model = OpenAILike(model="qwen", additional_kwargs={"user": "ann"}, **about)
tool = FunctionTool.from_defaults(weather)
answers = []
for stream in (False, True):
    history = [ChatMessage(role="user", content="What is the weather?")]
    asks = {"chat_history": history, "allow_parallel_tool_calls": True}
    said = list(model.stream_chat_with_tools([tool], **asks))[-1] if stream else model.chat_with_tools([tool], **asks)
    calls = model.get_tool_calls_from_response(said)
    history.append(said.message)
    for call in calls:
        about = {"tool_call_id": call.tool_id}
        history.append(ChatMessage(role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs=about))
    answers.append(model.chat_with_tools([tool], chat_history=history).message.content)
print(json.dumps({"asked": asked, "answers": answers}))
