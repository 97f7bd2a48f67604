"""
title: Ratings for edged
description: A thumb on an answer of edged's teaches the person's adapter.
version: 0.1.0
"""  # noqa: D400, D415

import asyncio
import json
import logging
import urllib.error
import urllib.request

from pydantic import BaseModel, Field

log = logging.getLogger("edged_ratings")
_SIGNALS = {1: "up", -1: "down"}
_TIMEOUT_S = 10.0


class Event:
    """An event function of Open WebUI: it posts each new or changed rating as edged's feedback."""

    class Valves(BaseModel):
        """Where edged is, and by which right ratings are sent."""

        url: str = Field("http://127.0.0.1:8137/v1", description="edged's address, as in the connection")
        token: str = Field("", description="a token with the role train, as in the connection")

    def __init__(self) -> None:
        self.valves = self.Valves()

    async def event(self, event: dict) -> None:
        """Send the rating of a feedback that was made or changed. An event carries its id; the row has the message."""
        if event.get("event") not in ("feedback.created", "feedback.updated"):
            return
        from open_webui.models.feedbacks import Feedbacks

        row = await Feedbacks.get_feedback_by_id((event.get("subject") or {}).get("id"))
        if row is None:
            return
        rating, message = (row.data or {}).get("rating"), (row.meta or {}).get("message_id")
        if rating in _SIGNALS and message:
            await asyncio.to_thread(self._send, {"request_id": message, "signal": _SIGNALS[rating]})

    def _send(self, body: dict) -> None:
        headers = {"Content-Type": "application/json"}
        if self.valves.token:
            headers["Authorization"] = f"Bearer {self.valves.token}"
        url = f"{self.valves.url.rstrip('/')}/feedback"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            # 404: the message is another model's, or nobody's.
            log.log(logging.INFO if error.code == 404 else logging.WARNING, "edged: %s", error.read().decode()[:300])
        except OSError as error:
            log.warning("a rating did not reach edged at %s: %s", url, error)
