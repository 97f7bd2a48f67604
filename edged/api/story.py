"""`GET /v1/adapters/{name}/story`: what an adapter learned, what waits and why, and answers of its versions."""

import asyncio
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.align import metrics, story
from edged.align.feedback.signals import UNPAIRED
from edged.api.adapters import adapter_name, unknown_adapter
from edged.api.feedback import BY_ITSELF, obstacles_of
from edged.api.responses import Story
from edged.api.services import Services, services_of
from edged.store.completions import content_text
from edged.store.feedback import count_unpaired, first_pair
from edged.store.jobs.jobs import open_job_of


async def get_story(request: web.Request) -> Story:
    """What an adapter learned when, and from which signals.

    Further what waits and why, with the step that settles it, and each version's answer to the adapter's first prompt.
    """
    services, name = services_of(request), adapter_name(request)
    liked = await services.practice.liked(name)

    def read(db: Database) -> tuple[Any, ...]:
        known = metrics.summary(db, name, liked), story.events(db, name), metrics.versions(db, name)
        job = open_job_of(db, name, services.feedback_intake.ref_model)
        return *known, count_unpaired(db, name, UNPAIRED), first_pair(db, name), job

    summary, events, versions, unpaired, first, job = await asyncio.to_thread(services.store.read, read)
    if summary is None:
        raise unknown_adapter(name)
    untrained = None if first is None else await services.version_answers.untrained(name, first)
    said: dict[int | None, str | None] = {0: untrained}
    answers = [{"version": 0, "answer": untrained, "on_disk": True}]
    for row in reversed(versions):
        # A version that has the weights of another answers as it does.
        said[row["version"]] = answer = said.get(row["restored"]) if row["answer"] is None else row["answer"]
        if answer is not None or row["on_disk"]:
            answers.append({"version": row["version"], "answer": answer, "on_disk": row["on_disk"]})
    asked = first and (content_text(first.messages[-1]) if first.messages else first.prompt)
    return Story(
        adapter=name,
        version=services.engine.version(name) or summary["version"],
        verdict=summary["verdict"],
        events=events,
        waits=_waits(services, summary, unpaired, job),
        prompt=asked,
        answers=answers,
    )


def _waits(services: Services, summary: dict[str, Any], unpaired: dict[str, int], job: str) -> list[dict[str, Any]]:
    """List the user's feedback that waits: how much, why, and the one step that settles it."""
    name, waits = summary["adapter"], []
    off = summary["ratings_queued"] if services.settings.align.unpaired == "off" else 0
    for queued, noun in ((summary["pairs_queued"] - off, "pair"), (off, "rating")):
        if queued:
            found = obstacles_of(services, noun == "rating", job)[0] or [(f"the next step of {name}", BY_ITSELF)]
            why = f"wait{'s' * (queued == 1)}: {'; '.join(why for why, _ in found)}"
            text = f"{story.count(queued, noun)} of {name} {why}"
            step = next((step for _, step in found if step != BY_ITSELF), BY_ITSELF)
            waits.append({"kind": "queued", "pairs": queued, "text": text, "step": step})
    if summary["held"]:
        step = f"edged quarantine release --user {name} if this was you, else edged quarantine drop --user {name}"
        about = {"pairs": summary["pairs_quarantined"], "text": summary["held"], "step": step}
        waits.append({"kind": "held", **about})
    if unpaired:
        number, kinds = sum(unpaired.values()), ", ".join(f"{count} {signal}" for signal, count in unpaired.items())
        text = f"{story.count(number, 'rating')} ({kinds}) of {name}: each {UNPAIRED}"
        waits.append({"kind": "unpaired", "pairs": 0, "text": text, "step": "rate another answer the other way"})
    return waits
