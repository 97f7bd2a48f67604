"""A user's story for `edged metrics USER --story`: what was learned when, what waits and why, answers side by side."""

from typing import Any

from edged.cli.output import Renderable, make_table, moment
from edged.client.client import DaemonError


def story_line(data: dict[str, Any]) -> str:
    """Return the verdict and the latest event in one line of plain text."""
    latest = data["events"][-1]["text"] if data["events"] else "nothing happened yet"
    return f"{data['adapter']} v{data['version']}: {data['verdict']}; {latest}"


def story_screen(data: dict[str, Any], versions: tuple[int, int] | None) -> Renderable:
    """Return the story with the answers of two `versions`: the untrained and the newest that has one, if not chosen."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    name = data["adapter"]
    told = make_table("", "", fold=True, box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    told.columns[0].no_wrap, told.columns[0].style = True, "dim"
    for event in data["events"]:
        told.add_row(moment(event["at"]), event["text"])
    parts: list[Renderable] = [Text(f"{name} v{data['version']}: {data['verdict']}\n", style="bold"), told]
    for wait in data["waits"]:
        parts.append(Text(f"\nwaits: {wait['text']}"))
        parts.append(Padding(Text(f"to settle it: {wait['step']}"), (0, 0, 0, 2)))
    if data["prompt"] is not None:
        parts += [Text(f"\nAsked: {data['prompt']}"), _answers(data, versions)]
    last = max(
        (answer["version"] for answer in data["answers"] if answer["version"] < data["version"] and answer["on_disk"]),
        default=0,
    )
    if data["version"]:
        parts.append(Text(f"\nto go back: edged adapters rollback {name} {last}"))
    return Group(*parts)


def _answers(data: dict[str, Any], chosen: tuple[int, int] | None) -> Renderable:
    """Return two versions' answers side by side. Raises DaemonError for a version that has none."""
    answers = {item["version"]: item["answer"] for item in data["answers"] if item["answer"] is not None}
    if chosen is None:
        chosen = min(answers, default=0), max(answers, default=0)
    if missing := [version for version in chosen if version not in answers]:
        known = ", ".join(map(str, answers)) or "none yet"
        raise DaemonError(f"version {missing[0]} has no answer, as it was not tested (those with one: {known})")
    titles = (f"version {version}{'' if version else ', the untrained adapter'}" for version in dict.fromkeys(chosen))
    return make_table(*titles, rows=[[answers[version] for version in dict.fromkeys(chosen)]], fold=True)
