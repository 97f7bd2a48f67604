"""`edged chat`, a conversation in the terminal whose feedback the model learns from, and `edged ask`, one question."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import click

from edged.cli.metrics import held
from edged.cli.options import json_option, user_option, with_client
from edged.cli.output import print_json
from edged.client.client import Client, DaemonError

ROUTE = "/v1/chat/completions"
HELP = """\
/up, /down     the last answer was good, or not
/edit [TEXT]   the answer should have been TEXT; without TEXT an editor opens
/regen         answer again; what you accept then wins over what you did not want
/pick          two candidates to choose from
/new           start a new conversation
/help, /quit   or Ctrl-D"""
CANDIDATES = 2
PATIENCE_S = 2.0
"""How long the prompt waits for what was taught to be learned."""
_ASK_S = 0.1
_max_tokens_option = click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
_temperature_option = click.option(
    "--temperature", type=click.FloatRange(0.0, 2.0), help="0 always gives the likeliest answer."
)


@click.command()
@user_option
@click.option("--system", default="", metavar="TEXT", help="A system message before the conversation.")
@_max_tokens_option
@_temperature_option
@with_client
def chat(client: Client, user: str, **options: Any) -> None:
    """Talk with the model and tell it what you prefer.

    /up, /down, /edit, /regen and /pick give feedback on the last answer; /help lists all commands.
    """
    repl = Repl(Session(client, user, **options))
    model = client.get("/v1/status")["model"]["name"]
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing for input())

        whose = (
            f"{user}'s adapter of {model}" if user else f"the base model {model}; --user NAME makes it learn from you"
        )
        click.secho(f"{whose}. /help lists the commands.", dim=True)
    for item in client.get("/v1/adapters")["adapters"]:
        if item["adapter"] == user and (waiting := held(item)):
            click.secho(waiting, dim=True)
    for line in _lines():
        if not repl.handle(line):
            break


@click.command()
@click.argument("prompt")
@user_option
@click.option("--system", default="", metavar="TEXT", help="A system message before the prompt.")
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
    session = Session(client, **options)
    session.say(text)
    if as_json:
        return print_json(session.candidates(1))
    for piece in session.stream():
        click.echo(piece, nl=False)
    return click.echo()


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as the daemon stored it. `cut` says that it ended at the token limit."""

    completion_id: str
    choice: int
    text: str
    cut: bool = False


class Session:
    """A conversation up to the last question, its answer, and candidates that wait for a pick."""

    def __init__(self, client: Client, user: str, system: str, **sampling: Any) -> None:
        """`sampling` is what the request says of answers; None leaves a choice to the daemon."""
        self.client, self.user = client, user
        self._system, self._sampling = system, sampling
        self.clear()

    def clear(self) -> None:
        """Start over; only the system message stays."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []
        self._settle(None)

    def say(self, text: str) -> None:
        """Add the user's message; the next `stream` or `candidates` answers it."""
        if self.answer is not None:
            self._messages.append({"role": "assistant", "content": self.answer.text})
        self._messages.append({"role": "user", "content": text})
        self._settle(None)

    def stream(self) -> Iterator[str]:
        """Ask for an answer to the last question and yield its text in pieces; afterwards `answer` is set.

        When the iteration is left early, the daemon stops generating; a question without any answer is taken back.
        """
        pieces: list[str] = []
        completion_id, reason = "", ""
        try:
            for event in self.client.events(ROUTE, {**self._body(), "stream": True}):
                completion_id = event["id"]
                for choice in event["choices"]:
                    reason = choice.get("finish_reason") or reason
                    if piece := choice["delta"].get("content"):
                        pieces.append(piece)
                        yield piece
        except BaseException:
            self._take_back()
            raise
        self._settle(StoredAnswer(completion_id, 0, "".join(pieces), reason == "length"))

    def candidates(self, count: int) -> dict[str, Any]:
        """Ask for `count` answers to the last question: the daemon's response object.

        They wait in `open_candidates` for `pick`.
        """
        try:
            response = self.client.post(ROUTE, {**self._body(), "n": count})
        except BaseException:
            self._take_back()
            raise
        self.open_candidates = [
            StoredAnswer(
                response["id"], item["index"], item["message"]["content"] or "", item["finish_reason"] == "length"
            )
            for item in response["choices"]
        ]
        return response

    def pick(self, number: int) -> dict[str, Any]:
        """Choose candidate `number` (from 1): it becomes the answer, and the others are rejected in its favour."""
        if not 1 <= number <= len(self.open_candidates):
            raise DaemonError(f"there is no candidate {number}: choose 1 to {len(self.open_candidates)}")
        answer = self.open_candidates[number - 1]
        result = self._feedback(answer, "chosen")
        self._settle(answer)
        return result

    def rate(self, signal: str, text: str | None = None) -> dict[str, Any]:
        """Feedback on the last answer: "up", "down", or "edit" with the `text` that it should have been."""
        result = self._feedback(self.last_answer(), signal, text)
        if text is not None:
            self.answer = replace(self.last_answer(), text=text)
        return result

    def regenerate(self) -> None:
        """Report that the last answer was not wanted (when there is a user to learn for); `stream` then replaces it."""
        answer = self.last_answer()
        if self.user:
            self._feedback(answer, "regenerate")

    def last_answer(self) -> StoredAnswer:
        """The answer that feedback is about. Raises DaemonError when there is none."""
        if self.answer is None:
            raise DaemonError("there is no answer yet to give feedback on")
        return self.answer

    def _settle(self, answer: StoredAnswer | None) -> None:
        self.answer = answer
        self.open_candidates: list[StoredAnswer] = []

    def _take_back(self) -> None:
        """Drop a question that got no answer, so that the conversation stays well-formed."""
        if self.answer is None:
            self._messages.pop()

    def _feedback(self, answer: StoredAnswer, signal: str, text: str | None = None) -> dict[str, Any]:
        if not self.user:
            raise DaemonError("feedback teaches one user's adapter: start with --user NAME")
        body: dict[str, Any] = {"completion_id": answer.completion_id, "choice": answer.choice, "signal": signal}
        return self.client.post("/v1/feedback", body if text is None else {**body, "text": text})

    def _body(self) -> dict[str, Any]:
        """The request for an answer to the last question. The model's name is left to the daemon, which serves one."""
        asked = {"user": self.user or None, **self._sampling}
        return {"messages": self._messages, **{key: value for key, value in asked.items() if value is not None}}


class Repl:
    """Turns typed lines into calls of the session and shows the results."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._open: list[str] = []
        """Feedback that was not learned within PATIENCE_S: every line that is typed looks after it."""
        self.commands: dict[str, Callable[[str], None]] = {
            "/up": lambda _: self._noted(session.rate("up")),
            "/down": lambda _: self._noted(session.rate("down")),
            "/edit": self._edit,
            "/regen": self._regenerate,
            "/pick": self._pick,
            "/new": self._new,
            "/help": lambda _: click.echo(HELP),
        }

    def handle(self, line: str) -> bool:
        """One typed line; False ends the conversation. It goes on after failures, which are shown, and after Ctrl-C."""
        text = line.strip()
        command, _, argument = text.partition(" ")
        try:
            if command in ("/quit", "/exit"):
                return False
            if self.session.open_candidates and text in map(str, range(1, CANDIDATES + 1)):
                self._choose(int(text))
            elif command in self.commands:
                self.commands[command](argument.strip())
            elif command.startswith("/"):
                click.echo(f'edged: "{command}" is no command: /help lists them', err=True)
            elif text:
                self.session.say(text)
                self._answer()
            self._look_after(0.0)
        except DaemonError as error:
            click.echo(f"edged: {error}", err=True)
        except KeyboardInterrupt:
            self.session.client.close()
        return True

    def _answer(self) -> None:
        """Stream the next answer; Ctrl-C stops it, not the conversation."""
        try:
            for piece in self.session.stream():
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            click.secho(" (stopped)", dim=True)
            return
        answer = self.session.last_answer()
        click.echo(click.style(" (cut at the token limit)", dim=True) if answer.cut else "")

    def _regenerate(self, _: str) -> None:
        self.session.regenerate()
        self._answer()

    def _edit(self, argument: str) -> None:
        before = self.session.last_answer().text
        edited = click.edit(before) if not argument and sys.stdin.isatty() else None
        text = argument or (edited or "").strip()
        if not text:
            raise DaemonError("the edited answer is empty, so nothing was sent: /edit TEXT")
        self._noted(self.session.rate("edit", text))

    def _pick(self, argument: str) -> None:
        if argument:
            if not argument.isdecimal():
                raise DaemonError(f'"{argument}" is no candidate: /pick asks for two, then /pick 1 or /pick 2')
            return self._choose(int(argument))
        self.session.last_answer()
        self.session.candidates(CANDIDATES)
        for index, candidate in enumerate(self.session.open_candidates, 1):
            click.echo(click.style(f"{index}  ", bold=True) + candidate.text)
        return click.secho("1 or 2 chooses; anything else goes on without choosing", dim=True)

    def _choose(self, index: int) -> None:
        if not self.session.open_candidates:
            raise DaemonError("there are no candidates to pick from: /pick asks for two")
        self._noted(self.session.pick(index))

    def _new(self, _: str) -> None:
        self.session.clear()
        click.secho("a new conversation", dim=True)

    def _noted(self, result: dict[str, Any]) -> None:
        pairs = len(result["pair_ids"])
        what = f"{pairs} pair{'s' * (pairs > 1)} to learn from" if pairs else result.get("reason") or "no pair yet"
        click.secho(f"noted: {what}", dim=True)
        if pairs:
            self._open.append(result["id"])
            self._look_after(PATIENCE_S)

    def _look_after(self, patience_s: float) -> None:
        """Say what became of what was taught; of the latest, after `patience_s`, also what it waits for."""
        until, feedback, self._open = time.monotonic() + patience_s, self._open, []
        for number, feedback_id in enumerate(feedback, 1):
            latest = patience_s > 0 and number == len(feedback)
            while True:
                found = self.session.client.get(f"/v1/feedback/{feedback_id}")
                if not latest or found["settled"] or found["blocked"] or time.monotonic() >= until:
                    break
                time.sleep(_ASK_S)
            if not found["settled"]:
                self._open.append(feedback_id)
            if found["settled"] or latest:
                said = "; ".join(dict.fromkeys(pair["text"] for pair in found["pairs"]))
                click.secho(f"  {said}", dim=True)


def _lines() -> Iterator[str]:
    """What is typed, or the lines of a pipe, until the end or Ctrl-C at the prompt."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
