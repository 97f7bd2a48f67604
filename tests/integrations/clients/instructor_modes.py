"""instructor by its modes: calls, JSON, a schema, and calls of the Responses API."""

import json
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Where the weather is asked for."""

    city: Literal["Paris", "Rome"]
    soon: bool


class Guess(BaseModel):
    """What any object is: under JSON mode the prompt alone has the schema, which the scripted model does not read."""

    city: Literal["Paris", "Rome"] = "Paris"


asked = []
for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none"), mode=mode)
    messages = [{"role": "user", "content": "What is the weather?"}]
    wanted = Guess if mode is instructor.Mode.JSON else Weather
    found = client.chat.completions.create(model="qwen", response_model=wanted, messages=messages, max_retries=0)
    asked.append(found.city)
print(json.dumps({"asked": asked}))
