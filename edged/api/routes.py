"""The table of all routes, from which the application, the check of roles and the OpenAPI document are made."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from edged.api import (
    adapters,
    completions,
    events,
    feedback,
    importing,
    metrics,
    models,
    page,
    progress,
    quarantine,
    requests,
    responses,
    settings_route,
    status,
    storage,
    trace,
)
from edged.api.event_streams import MOST_BACKLOG
from edged.api.openapi import document
from edged.api.route import EVENTS, Route

_TAR = ("application/x-tar",)
_PAGE_FILES = ("text/css", "text/javascript", "image/svg+xml")
_METRICS = ("text/plain", "application/openmetrics-text")
_USER = {"user": {"type": "string", "pattern": requests.USER_PATTERN}}


async def get_document(request: web.Request) -> dict[str, Any]:
    """The OpenAPI document."""
    return document(ROUTES)


def _choice(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*words]}


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


ROUTES = (
    Route("POST", "/v1/chat/completions", completions.chat_completions, role="use",
          summary="An answer to a conversation",
          body=(requests.ChatRequest,), answer=responses.ChatCompletion, media=(EVENTS,), errors=(404,)),
    Route("POST", "/v1/completions", completions.completions, role="use",
          summary="A continuation of a text",
          body=(requests.CompletionRequest,), answer=responses.TextCompletion, media=(EVENTS,), errors=(404,)),
    Route("GET", "/v1/models", models.list_models, role="use",
          summary="The base model, and one model for each adapter", answer=responses.ModelList),
    Route("GET", "/v1/models/{id:.+}", models.get_model, role="use",
          summary="One model", answer=responses.Model, errors=(404,)),
    Route("POST", "/v1/feedback", feedback.post_feedback, role="train",
          summary="Take a signal or a pair; 200 means that it is on disk",
          body=(requests.SignalRequest, requests.PairRequest), answer=responses.FeedbackTaken, errors=(404,)),
    Route("GET", "/v1/feedback", feedback.get_feedback, role="train",
          summary="All pairs, or those of one user, as JSON lines", query=_USER, media=("application/jsonl",)),
    Route("GET", "/v1/feedback/{id}", progress.get_feedback_progress, role="use",
          summary="What became of a feedback's pairs, or what they wait for",
          answer=responses.FeedbackProgress, errors=(404,)),
    Route("GET", "/v1/adapters", adapters.list_adapters, role="use",
          summary="Every adapter with its means", answer=responses.AdapterList),
    Route("GET", "/v1/adapters/{name}", adapters.get_adapter, role="use",
          summary="One adapter with its versions and pairs",
          query={"limit": _integer(1, adapters.MOST_SERIES_PAIRS)}, answer=responses.AdapterDetail, errors=(404,)),
    Route("DELETE", "/v1/adapters/{name}", adapters.forget, role="train",
          summary="Forget an adapter and everything that came from its user",
          answer=responses.Forgotten, errors=(404,)),
    Route("POST", "/v1/adapters/{name}/rollback", adapters.rollback, role="train",
          summary="Serve an earlier version again",
          body=(requests.RollbackRequest,), answer=responses.RolledBack, errors=(404,)),
    Route("POST", "/v1/adapters/{name}/mend", adapters.mend, role="train",
          summary="Test the version that is served; a good one takes the place of a broken one",
          answer=responses.Examined, status=202, errors=(404,)),
    Route("GET", "/v1/adapters/{name}/export", adapters.export, role="train",
          summary="The newest version on disk as a tar of a PEFT folder", media=_TAR, errors=(404, 409)),
    Route("POST", "/v1/adapters/{name}/import", importing.import_adapter, role="train",
          summary="Take a tar of a PEFT folder as a user's newest version", streamed=True,
          query={"reason": _choice(*importing.REASONS)}, answer=responses.Imported, errors=(408, 409, 413)),
    Route("GET", "/v1/quarantine", quarantine.list_quarantined, role="train",
          summary="Pairs that look poisoned and wait for a decision", query=_USER, answer=responses.Quarantine),
    Route("POST", "/v1/quarantine", quarantine.decide_all, role="train",
          summary="Release or drop all such pairs of a user",
          body=(requests.UserQuarantineRequest,), answer=responses.AllDecided),
    Route("POST", "/v1/quarantine/{pair}", quarantine.decide, role="train",
          summary="Release or drop such a pair",
          body=(requests.QuarantineRequest,), answer=responses.Decided, errors=(404, 409)),
    Route("GET", "/v1/backup", storage.backup,
          summary="Database, adapters, profiles and settings as one tar",
          query={"versions": _choice("newest", "all")}, media=_TAR),
    Route("GET", "/v1/store", storage.store_report,
          summary="The database's sizes and rows", answer=responses.StoreReport),
    Route("POST", "/v1/store/prune", storage.prune,
          summary="Delete now what the settings no longer keep", answer=responses.Pruned),
    Route("POST", "/v1/store/vacuum", storage.vacuum,
          summary="Rewrite the database without free pages", answer=responses.Vacuumed),
    Route("GET", "/v1/status", status.status, role="use", always=True,
          summary="What the daemon does", answer=responses.Status),
    Route("GET", "/v1/settings", settings_route.get_settings,
          summary="The settings in use", answer=responses.SettingsInUse),
    Route("POST", "/v1/reload", settings_route.reload,
          summary="Read the settings again", answer=responses.Reloaded),
    Route("GET", "/v1/trace", trace.get_trace,
          summary="What the engine did, in Chrome's trace event format",
          query={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": trace.MOST_SECONDS}},
          answer=responses.Trace),
    Route("GET", "/metrics", metrics.metrics, role="metrics", always=True,
          summary="All metrics for Prometheus", media=_METRICS),
    Route("GET", "/v1/events", events.events, role="use",
          summary="What happens, as server-sent events",
          query={"events": {"type": "string"}, "backlog": _integer(0, MOST_BACKLOG)}, media=(EVENTS,)),
    Route("GET", "/healthz", status.healthz, role="anybody", always=True,
          summary="Whether the process should be left alone", answer=responses.Health),
    Route("GET", "/readyz", status.readyz, role="anybody", always=True,
          summary="Whether completions are served", answer=responses.Ready),
    Route("GET", "/", page.page, role="anybody", always=True,
          summary="The page", media=("text/html",)),
    Route("GET", "/page/{name}", page.file, role="anybody", always=True,
          summary="A file of the page", media=_PAGE_FILES, errors=(404,)),
    Route("GET", "/openapi.json", get_document, role="anybody",
          summary="This document", answer=responses.Document),
)  # fmt: skip
"""One row for each method of each path; a row without a role is for admins."""
