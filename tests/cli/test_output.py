"""What the commands print is text: no character of it controls the terminal, and JSON stays JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edged.cli.main import Failure
from edged.cli.output import echo, make_table, print_json, print_text, show

EVIL = "a\x1b[2J\x9b31m\u202eb\x7f"
TOLD = r"a\u001b[2J\u009b31m\u202eb\u007f"


def test_texts_tables_watched_lines_and_errors_show_control_characters_as_text(capsys: Any) -> None:
    def watched(_: dict[str, Any]) -> str:
        return EVIL

    def fetch() -> dict[str, Any]:
        if fetched:
            raise KeyboardInterrupt
        fetched.append(None)
        return {"text": EVIL}

    fetched: list[None] = []
    echo(EVIL)
    print_text([EVIL, make_table("name", rows=[(EVIL,)], title=EVIL)])
    show(fetch, watched, watched, as_json=False, watch=True, interval=0.0)
    Failure(EVIL).show()
    said = capsys.readouterr()
    assert said.out.count(TOLD) == 5
    assert said.err == f"edged: {TOLD}\n"
    assert not set(said.out + said.err) & {"\x1b", "\x9b", "\u202e", "\x7f"}


@pytest.mark.parametrize("text", [EVIL, "Grüße 🙂\nof two lines\tand a tab"])
def test_json_is_what_it_was(capsys: Any, text: str) -> None:
    print_json({"text": text})
    said = capsys.readouterr().out
    assert json.loads(said) == {"text": text}
    assert "\x9b" not in said
