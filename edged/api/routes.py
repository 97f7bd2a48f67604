"""What each route takes and answers, for the OpenAPI document.

Owns that table. A new route gets its line here; `tests/api/test_openapi.py` names those that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from edged.api import requests, responses

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/jsonl"
FILES = ("text/css", "text/javascript", "image/svg+xml")

_STRING: dict[str, Any] = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `answer` is the model of a JSON answer; `media` are other media types of status 200. `body` models are alternatives.
    `errors` are the statuses beyond those that every route has.
    """

    summary: str
    answer: type[BaseModel] | None = None
    body: tuple[type[BaseModel], ...] = ()
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()


def _limit(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "An answer to a conversation",
        responses.ChatCompletion,
        (requests.ChatRequest,),
        media=(EVENTS,),
        errors=(404,),
    ),
    ("POST", "/v1/completions"): Operation(
        "A continuation of a text",
        responses.TextCompletion,
        (requests.CompletionRequest,),
        media=(EVENTS,),
        errors=(404,),
    ),
    ("GET", "/v1/models"): Operation("The base model, and one model for each adapter", responses.ModelList),
    ("GET", "/v1/models/{id}"): Operation("One model", responses.Model, errors=(404,)),
    ("POST", "/v1/feedback"): Operation(
        "Take a signal or a pair; 200 means that it is on disk",
        responses.FeedbackTaken,
        (requests.SignalRequest, requests.PairRequest),
        errors=(404,),
    ),
    ("GET", "/v1/feedback"): Operation(
        "All pairs, or those of one user, as JSON lines",
        media=(LINES,),
        query={"user": {"type": "string", "pattern": requests.USER_PATTERN}},
    ),
    ("GET", "/v1/feedback/{id}"): Operation(
        "What became of a feedback's pairs, or what they wait for", responses.FeedbackProgress, errors=(404,)
    ),
    ("GET", "/v1/adapters"): Operation("Every adapter with its means", responses.AdapterList),
    ("GET", "/v1/adapters/{name}"): Operation(
        "One adapter with its versions and pairs",
        responses.AdapterDetail,
        query={"limit": _limit(100_000)},
        errors=(404,),
    ),
    ("DELETE", "/v1/adapters/{name}"): Operation(
        "Forget an adapter and everything that came from its user", responses.Forgotten, errors=(404,)
    ),
    ("POST", "/v1/adapters/{name}/rollback"): Operation(
        "Serve an earlier version again", responses.RolledBack, (requests.RollbackRequest,), errors=(404,)
    ),
    ("POST", "/v1/adapters/{name}/mend"): Operation(
        "Test the version that is served; a good one takes the place of a broken one", responses.Examined, errors=(404,)
    ),
    ("GET", "/v1/adapters/{name}/export"): Operation(
        "The newest version on disk as a tar of a PEFT folder", media=("application/x-tar",), errors=(404, 409)
    ),
    ("POST", "/v1/adapters/{name}/import"): Operation(
        "Take a tar of a PEFT folder as a user's newest version",
        responses.Imported,
        query={"reason": {"type": "string", "enum": ["imported", "rebuilt"]}},
        errors=(408, 409, 413),
    ),
    ("GET", "/v1/quarantine"): Operation(
        "Pairs that look poisoned and wait for a decision",
        responses.Quarantine,
        query={"user": {"type": "string", "pattern": requests.USER_PATTERN}},
    ),
    ("POST", "/v1/quarantine"): Operation(
        "Release or drop all such pairs of a user", responses.AllDecided, (requests.UserQuarantineRequest,)
    ),
    ("POST", "/v1/quarantine/{pair}"): Operation(
        "Release or drop such a pair", responses.Decided, (requests.QuarantineRequest,), errors=(404, 409)
    ),
    ("GET", "/v1/backup"): Operation(
        "Database, adapters, profiles and settings as one tar",
        media=("application/x-tar",),
        query={"versions": {"type": "string", "enum": ["newest", "all"]}},
    ),
    ("GET", "/v1/store"): Operation("The database's sizes and rows", responses.StoreReport),
    ("POST", "/v1/store/prune"): Operation("Delete now what the settings no longer keep", responses.Pruned),
    ("POST", "/v1/store/vacuum"): Operation("Rewrite the database without free pages", responses.Vacuumed),
    ("GET", "/v1/settings"): Operation("The settings in use", responses.SettingsInUse),
    ("POST", "/v1/reload"): Operation("Read the settings again", responses.Reloaded),
    ("GET", "/v1/trace"): Operation(
        "What the engine did, in Chrome's trace event format",
        responses.Trace,
        query={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 600}},
    ),
    ("GET", "/v1/events"): Operation(
        "What happens, as server-sent events",
        media=(EVENTS,),
        query={"events": _STRING, "backlog": {"type": "integer", "minimum": 0, "maximum": 2000}},
    ),
    ("GET", "/metrics"): Operation("All metrics for Prometheus", media=("text/plain", "application/openmetrics-text")),
    ("GET", "/"): Operation("The page", media=("text/html",)),
    ("GET", "/page/{name}"): Operation("A file of the page", media=FILES, errors=(404,)),
    ("GET", "/v1/status"): Operation("What the daemon does", responses.Status),
    ("GET", "/healthz"): Operation("Whether the process should be left alone", responses.Health),
    ("GET", "/readyz"): Operation("Whether completions are served", responses.Ready),
    ("GET", "/openapi.json"): Operation("This document", responses.Document),
}
