"""The `llm` tool with `-T`'s functions, streamed as it does by default."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
about = {"model_id": "edged", "model_name": "qwen", "api_base": sys.argv[1], "supports_tools": True}
(folder / "extra-openai-models.yaml").write_text(f"- {json.dumps(about)}\n")
(folder / "keys.json").write_text(json.dumps({"openai": "none"}))
code = f"""
def weather(city: str) -> str:
    "The weather of a city."
    open({str(folder / "asked")!r}, "a").write(city + "\\n")
    return "23 degrees"
"""
command = [str(Path(sys.executable).parent / "llm"), "-m", "edged", "--functions", code, "What is the weather?"]
done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LLM_USER_PATH": str(folder)})
assert done.returncode == 0, done.stderr
answer = done.stdout.strip().removeprefix("Let me see. ")
print(json.dumps({"asked": (folder / "asked").read_text().split(), "answers": [answer]}))
