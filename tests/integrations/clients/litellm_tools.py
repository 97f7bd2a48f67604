"""LiteLLM as a library with tools: a call, its result, the answer; plain and streamed."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is looked up in the web
import litellm

about = {"model": "openai/qwen", "api_base": sys.argv[1], "api_key": "none"}
about |= {"user": "ann", "allowed_openai_params": ["user"]}
tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
asked, answers = [], []
for stream in (False, True):
    messages = [{"role": "user", "content": "What is the weather?"}]
    said = litellm.completion(messages=messages, tools=tools, stream=stream, **about)
    if stream:
        said = litellm.stream_chunk_builder(list(said), messages=messages)
    message = said.choices[0].message
    asked += [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "23 degrees"} for call in message.tool_calls]
    after = litellm.completion(messages=[*messages, message.model_dump(), *results], tools=tools, **about)
    answers.append(after.choices[0].message.content)
print(json.dumps({"asked": asked, "answers": answers}))
