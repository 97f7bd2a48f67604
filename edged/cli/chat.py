"""The commands `edged chat`, a conversation in the terminal whose feedback trains the model, and `edged ask`."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import json_option, user_option, with_client
from edged.cli.output import echo, print_json
from edged.cli.status import beliefs, held
from edged.cli.teach import path_of, told
from edged.client.client import Client, DaemonError, Refused

ROUTE = "/v1/chat/completions"
HELP = """\
/up, /down     the last answer was good, or not
/edit [TEXT]   the answer should have been TEXT; without TEXT an editor opens
/regen         answer again; what you accept then wins over what you did not want
/pick          two candidates to choose from
/new           start a new conversation
/pace [off]    show answers word by word; off: as they are made
/help, /quit   or Ctrl-D"""
CANDIDATES = 2
PATIENCE_S = 2.0
"""Seconds that the prompt waits for new feedback to be trained on."""
_ASK_S = 0.1
_max_tokens_option = click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
_temperature_option = click.option(
    "--temperature", type=click.FloatRange(0.0, 2.0), help="0 always gives the likeliest answer."
)


@click.command()
@user_option
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@_max_tokens_option
@_temperature_option
@with_client
def chat(client: Client, user: str | None, **options: Any) -> None:
    """Talk with the model and tell it what you prefer.

    /up, /down, /edit, /regen and /pick give feedback on the last answer; /help lists all commands.
    """
    conversation = Conversation(client, user=user, **options)
    model = client.get("/v1/status")["model"]["name"]
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing for input())

        base = f"the base model {model}; --user NAME makes it learn from you"
        whose = f"{user}'s adapter of {model}" if user else base
        echo(f"{whose}. /help lists the commands.", dim=True)
    for item in client.get("/v1/adapters")["adapters"]:
        if item["adapter"] == user and (waiting := held(item)):
            echo(waiting, dim=True)
    if user:
        # Who may not teach is not told.
        with contextlib.suppress(Refused):
            if wanted := told(client.get(path_of(user))):
                echo(wanted, dim=True)
    for line in _lines():
        if not conversation.handle(line):
            break


@click.command()
@click.argument("prompt")
@user_option
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@_max_tokens_option
@_temperature_option
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@json_option
@with_client
def ask(client: Client, prompt: str, as_json: bool, **options: Any) -> None:
    """Print the answer to PROMPT as it is generated.

    PROMPT "-" reads standard input. With --json: the API's chat.completion object, whose id feedback can name.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise DaemonError("the prompt is empty")
    body = _request(**options)
    body["messages"].append({"role": "user", "content": text})
    if as_json:
        return print_json(client.post(ROUTE, body))
    for event in client.events(ROUTE, {**body, "stream": True}):
        for choice in event["choices"]:
            echo(choice["delta"].get("content") or "", nl=False)
    return echo()


def _request(system: str | None, user: str | None, **sampling: Any) -> dict[str, Any]:
    """Return a chat request without the question; None values and the model's name are left to the daemon."""
    messages = [{"role": "system", "content": system}] if system else []
    asked = {"messages": messages, "user": user or None, **sampling}
    return {key: value for key, value in asked.items() if value is not None}


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as the daemon stored it."""

    completion_id: str
    choice: int
    text: str


class Conversation:
    """A chat session: messages up to the last question, its answer, and candidates that wait for a pick."""

    def __init__(self, client: Client, system: str | None, user: str | None, **sampling: Any) -> None:
        self._client, self._user = client, user
        self._opening = _request(system, user, **sampling)
        self._smooth = sys.stdout.isatty()
        """Whether answers are shown at a reader's pace."""
        self._open: list[str] = []
        """Ids of feedback that was not settled within PATIENCE_S; its state is polled after every typed line."""
        self._clear()

    def handle(self, line: str) -> bool:
        """Handle one typed line; returns False to end the conversation.

        DaemonErrors are shown and do not end it, nor does Ctrl-C.
        """
        text = line.strip()
        command, _, argument = text.partition(" ")
        try:
            match command:
                case "/quit" | "/exit":
                    return False
                case "/up" | "/down":
                    self._noted(self._feedback(self._last_answer(), command[1:]))
                case "/edit":
                    self._edit(argument.strip())
                case "/regen":
                    self._regenerate()
                case "/pick" if argument:
                    self._pick(argument.strip())
                case "/pick":
                    self._offer()
                case "/pace":
                    self._smooth = argument.strip() != "off"
                    echo("word by word" if self._smooth else "as it is made", dim=True)
                case "/new":
                    self._clear()
                    echo("a new conversation", dim=True)
                case "/help":
                    echo(HELP)
                case _ if self._candidates and text in map(str, range(1, CANDIDATES + 1)):
                    self._pick(text)
                case _ if command.startswith("/"):
                    echo(f'edged: "{command}" is no command: /help lists them', err=True)
                case _ if text:
                    self._say(text)
            self._look_after(0.0)
        except DaemonError as error:
            echo(f"edged: {error}", err=True)
        except KeyboardInterrupt:
            self._client.close()
        return True

    def _clear(self) -> None:
        """Start a new conversation; only the system message stays."""
        self._messages = list(self._opening["messages"])
        self._settle(None)

    def _settle(self, answer: StoredAnswer | None) -> None:
        self._answer = answer
        self._candidates: list[StoredAnswer] = []

    def _last_answer(self) -> StoredAnswer:
        """Return the answer that feedback refers to. Raises DaemonError when there is none."""
        if self._answer is None:
            raise DaemonError("there is no answer yet to give feedback on")
        return self._answer

    def _say(self, text: str) -> None:
        if self._answer is not None:
            self._messages.append({"role": "assistant", "content": self._answer.text})
        self._messages.append({"role": "user", "content": text})
        self._settle(None)
        self._stream()

    def _stream(self) -> None:
        """Generate an answer to the last question and print it as it arrives; Ctrl-C stops the answer alone.

        If the question has no answer at all, it is removed, so that the conversation stays well-formed.
        """
        text, completion_id, reason, chosen_of, edited = "", "", "", 1, False
        body = {**self._opening, "messages": self._messages, "stream": True}
        if self._smooth:
            body["qoe"] = {"deliver": "smooth"}
        try:
            for event in self._client.events(ROUTE, body):
                completion_id = event["id"]
                chosen_of = event.get("edged", {}).get("best_of", chosen_of)
                edited |= event.get("edged", {}).get("edited", False)
                for choice in event["choices"]:
                    reason = choice.get("finish_reason") or reason
                    piece = choice["delta"].get("content") or ""
                    text += piece
                    echo(piece, nl=False)
        except (DaemonError, KeyboardInterrupt) as ended:
            if self._answer is None:
                self._messages.pop()
            if isinstance(ended, DaemonError):
                raise
            self._client.close()
            return echo(" (stopped)", dim=True)
        self._settle(StoredAnswer(completion_id, 0, text))
        notes = ["cut at the token limit"] * (reason == "length") + [f"the best of {chosen_of}"] * (chosen_of > 1)
        notes += ["edited as you do"] * edited
        return echo(f" ({', '.join(notes)})" if notes else "", dim=True)

    def _regenerate(self) -> None:
        """Generate another answer; with a user, send feedback that the last answer was not wanted."""
        answer = self._last_answer()
        if self._user:
            self._feedback(answer, "regenerate")
        self._stream()

    def _edit(self, argument: str) -> None:
        answer = self._last_answer()
        edited = click.edit(answer.text) if not argument and sys.stdin.isatty() else None
        text = argument or (edited or "").strip()
        if not text:
            raise DaemonError("the edited answer is empty, so nothing was sent: /edit TEXT")
        result = self._feedback(answer, "edit", text=text)
        self._answer = replace(answer, text=text)
        self._noted(result)

    def _offer(self) -> None:
        """Generate and show candidates to pick from."""
        self._last_answer()
        response = self._client.post(ROUTE, {**self._opening, "messages": self._messages, "n": CANDIDATES})
        self._candidates = [
            StoredAnswer(response["id"], item["index"], item["message"]["content"] or "")
            for item in response["choices"]
        ]
        for index, candidate in enumerate(self._candidates, 1):
            echo(f"{index}  ", nl=False, bold=True)
            echo(candidate.text)
        echo("1 or 2 chooses; anything else goes on without choosing", dim=True)

    def _pick(self, number: str) -> None:
        """Make candidate `number` (from 1) the answer and send feedback that it was chosen over the others."""
        if not number.isdecimal():
            raise DaemonError(f'"{number}" is no candidate: /pick asks for two, then /pick 1 or /pick 2')
        if not self._candidates:
            raise DaemonError("there are no candidates to pick from: /pick asks for two")
        if not 1 <= int(number) <= len(self._candidates):
            raise DaemonError(f"there is no candidate {number}: choose 1 to {len(self._candidates)}")
        answer = self._candidates[int(number) - 1]
        result = self._feedback(answer, "chosen")
        self._settle(answer)
        self._noted(result)

    def _feedback(self, answer: StoredAnswer, signal: str, **text: str) -> dict[str, Any]:
        if not self._user:
            raise DaemonError("feedback teaches one user's adapter: start with --user NAME")
        about = {"completion_id": answer.completion_id, "choice": answer.choice}
        return self._client.post("/v1/feedback", {**about, "signal": signal, **text})

    def _noted(self, result: dict[str, Any]) -> None:
        pairs = len(result["pair_ids"])
        what = result.get("reason") or (f"{pairs} pair{'s' * (pairs > 1)} to learn from" if pairs else "no pair yet")
        echo(f"noted: {what}", dim=True)
        if pairs:
            self._open.append(result["id"])
            self._look_after(PATIENCE_S)

    def _look_after(self, patience_s: float) -> None:
        """Poll the open feedback and show the outcomes.

        With a positive `patience_s` the latest is awaited that long, and shown even if it is not settled.
        """
        until, feedback, self._open = time.monotonic() + patience_s, self._open, []
        for number, feedback_id in enumerate(feedback, 1):
            latest = patience_s > 0 and number == len(feedback)
            while True:
                found = self._client.get(f"/v1/feedback/{feedback_id}")
                if not latest or found["settled"] or found["blocked"] or time.monotonic() >= until:
                    break
                time.sleep(_ASK_S)
            if not found["settled"]:
                self._open.append(feedback_id)
            if found["settled"] or latest:
                said = "; ".join(dict.fromkeys(pair["text"] for pair in found["pairs"]))
                echo(f"  {said}", dim=True)
        if patience_s and self._user and (line := beliefs(self._client.get(f"/v1/adapters/{quote(self._user)}"))):
            echo(f"  edged believes: {line}", dim=True)


def _lines() -> Iterator[str]:
    """Yield typed lines, or those of a pipe, until end of input or Ctrl-C at the prompt."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            echo()
            return
