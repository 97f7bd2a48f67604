"""openai-agents with the model that it takes by default, of the Responses API: a run that calls a tool twice."""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

asked: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "23 degrees"


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
    agent = Agent(name="a", tools=[weather], model="qwen")
    whole = await Runner.run(agent, "What is the weather?")
    streamed = Runner.run_streamed(agent, "What is the weather?")
    async for _ in streamed.stream_events():
        pass
    print(json.dumps({"asked": asked, "answers": [whole.final_output, streamed.final_output]}))


asyncio.run(main())
