"""pydantic-ai's agent with a tool."""

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

asked: list[str] = []
model = OpenAIChatModel("qwen", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))
agent = Agent(model)


@agent.tool_plain
def weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "23 degrees"


print(json.dumps({"answers": [agent.run_sync("What is the weather?").output], "asked": asked}))
