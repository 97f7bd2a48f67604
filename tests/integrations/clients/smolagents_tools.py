"""smolagents' ToolCallingAgent, plain and streamed: it asks for a call in every step (`tool_choice` "required")."""

import json
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

asked: list[str] = []


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Where.
    """
    asked.append(city)
    return "23 degrees"


for stream in (False, True):
    model = OpenAIModel("qwen", api_base=sys.argv[1], api_key="none")
    agent = ToolCallingAgent([weather], model, stream_outputs=stream, verbosity_level=0, max_steps=1)
    steps = list(agent.run("What is the weather?", stream=True))
    assert steps
print(json.dumps({"asked": asked}))
