"""openai-agents with its chat model: a run that calls a tool twice, streamed or not."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

asked: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "23 degrees"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    agent = Agent(name="a", tools=[weather], model=OpenAIChatCompletionsModel(model="qwen", openai_client=client))
    whole = await Runner.run(agent, "What is the weather?")
    streamed = Runner.run_streamed(agent, "What is the weather?")
    async for _ in streamed.stream_events():
        pass
    print(json.dumps({"asked": asked, "answers": [whole.final_output, streamed.final_output]}))


asyncio.run(main())
