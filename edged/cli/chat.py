"""`edged chat`: a conversation in the terminal whose feedback the model learns from."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from edged.cli.metrics import held
from edged.cli.options import user_option, with_client
from edged.cli.session import Options, Session
from edged.client.client import Client, DaemonError

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


@click.command()
@user_option
@click.option("--system", default="", metavar="TEXT", help="A system message before the conversation.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0.0, 2.0), help="0 always gives the likeliest answer.")
@with_client
def chat(client: Client, **options: Any) -> None:
    """Talk with the model and tell it what you prefer.

    /up, /down, /edit, /regen and /pick give feedback on the last answer; /help lists all commands.
    """
    session = Session(client, Options(**options))
    user = session.options.user
    model = client.get("/v1/status")["model"]["name"]
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing for input())

        who = f"{user}'s adapter of {model}" if user else f"the base model {model}; --user NAME makes it learn from you"
        click.echo(click.style(f"{who}. /help lists the commands.", dim=True))
    for item in client.get("/v1/adapters")["adapters"]:
        if item["adapter"] == user and (waiting := held(item)):
            click.echo(click.style(waiting, dim=True))
    repl = Repl(session)
    for line in _lines():
        if not repl.handle(line):
            break


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
            click.echo(click.style(" (stopped)", dim=True))
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
        return click.echo(click.style("1 or 2 chooses; anything else goes on without choosing", dim=True))

    def _choose(self, index: int) -> None:
        if not self.session.open_candidates:
            raise DaemonError("there are no candidates to pick from: /pick asks for two")
        self._noted(self.session.pick(index))

    def _new(self, _: str) -> None:
        self.session.clear()
        click.echo(click.style("a new conversation", dim=True))

    def _noted(self, result: dict[str, Any]) -> None:
        pairs = len(result["pair_ids"])
        what = f"{pairs} pair{'s' * (pairs > 1)} to learn from" if pairs else result.get("reason") or "no pair yet"
        click.echo(click.style(f"noted: {what}", dim=True))
        if pairs:
            self._open.append(result["id"])
            self._look_after(PATIENCE_S)

    def _look_after(self, patience_s: float) -> None:
        """Say what became of what was taught; of the latest, after `patience_s`, also what it waits for."""
        until, feedback, self._open = time.monotonic() + patience_s, self._open, []
        for number, feedback_id in enumerate(feedback, 1):
            latest = patience_s > 0 and number == len(feedback)
            found = self.session.progress(feedback_id)
            while latest and not (found["settled"] or found["blocked"]) and time.monotonic() < until:
                time.sleep(_ASK_S)
                found = self.session.progress(feedback_id)
            if not found["settled"]:
                self._open.append(feedback_id)
            if found["settled"] or latest:
                said = "; ".join(dict.fromkeys(pair["text"] for pair in found["pairs"]))
                click.echo(click.style(f"  {said}", dim=True))


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
