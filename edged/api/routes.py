"""The table of all routes, from which the application, the check of roles and the OpenAPI document are made."""

import json
from typing import Any

from aiohttp import web

from edged.align.feedback.pair import IMPORT_REASONS
from edged.api import (
    adapters,
    applications,
    completions,
    events,
    federated,
    feedback,
    leases,
    metrics,
    models,
    openai_responses,
    operations,
    page,
    preferences,
    quarantine,
    requests,
    responses,
    starts,
    status,
    story,
    trace,
)
from edged.api.event_streams import MAX_BACKLOG
from edged.api.jobs import bodies, files, finetuning
from edged.api.openapi import EVENTS, Route, document
from edged.settings.fleet import NODE_NAME

_TAR = ("application/x-tar",)
_PAGE_FILES = ("text/css", "text/javascript", "image/svg+xml")
_METRICS = ("text/plain", "application/openmetrics-text")
_USER = {"user": {"type": "string", "pattern": requests.USER_PATTERN}}
_REASON = {"reason": {"type": "string", "enum": [*IMPORT_REASONS]}}
_LIMIT = {"limit": {"type": "integer", "minimum": 1, "maximum": adapters.MAX_SERIES_PAIRS}}
_VERSIONS = {"versions": {"type": "string", "enum": ["newest", "all"]}}
_BACKLOG = {"type": "integer", "minimum": 0, "maximum": MAX_BACKLOG}
_EVENTS: dict[str, dict[str, Any]] = {"events": {"type": "string"}, "backlog": _BACKLOG}
_BYTES = ("application/octet-stream",)
_AFTER: dict[str, dict[str, Any]] = {"after": {"type": "string"}}
_PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": finetuning.MAX_LISTED},
    **_AFTER,
}
_FILES: dict[str, dict[str, Any]] = {"limit": {"type": "integer", "minimum": 1, "maximum": files.MAX_LISTED}, **_AFTER,
          "purpose": {"type": "string"}, "order": {"type": "string", "enum": ["asc", "desc"]}}  # fmt: skip
_JOB: dict[str, Any] = {"role": "train", "answer": bodies.Job, "errors": (404,)}
_LEASE: dict[str, dict[str, Any]] = {
    "node": {"type": "string", "pattern": NODE_NAME.pattern}, "epoch": {"type": "integer", "minimum": 0}}  # fmt: skip
_SHA256 = {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}
_SECONDS = {"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": trace.MAX_SECONDS}}


async def get_document(request: web.Request) -> dict[str, Any]:
    """This document."""
    return document(ROUTES)


ROUTES = (
    Route("POST", "/v1/chat/completions", completions.chat_completions, role="use",
          body=(requests.ChatRequest,), answer=responses.ChatCompletion, media=(EVENTS,), errors=(404,)),
    Route("POST", "/v1/completions", completions.completions, role="use",
          body=(requests.CompletionRequest,), answer=responses.TextCompletion, media=(EVENTS,), errors=(404,)),
    Route("POST", "/v1/responses", completions.responses, role="use", body=(openai_responses.ResponsesRequest,),
          answer=openai_responses.Response, media=(EVENTS,), errors=(404,)),
    Route("GET", "/v1/models", models.list_models, role="use", answer=responses.ModelList),
    Route("GET", "/v1/models/{id:.+}", models.get_model, role="use", answer=responses.Model, errors=(404,)),
    Route("POST", "/v1/feedback", feedback.post_feedback, role="train",
          body=(requests.SignalRequest, requests.PairRequest, requests.RatingRequest),
          answer=responses.FeedbackTaken, errors=(404,)),
    Route("GET", "/v1/feedback", feedback.get_feedback, role="train", speaks_for="user",
          query=_USER, media=("application/jsonl",)),
    Route("GET", "/v1/feedback/{id}", feedback.get_feedback_progress, role="use",
          answer=responses.FeedbackProgress, errors=(404,)),
    Route("GET", "/v1/adapters", adapters.list_adapters, role="use", answer=responses.AdapterList),
    Route("GET", "/v1/adapters/{name}", adapters.get_adapter, role="use", speaks_for="name",
          query=_LIMIT, answer=responses.AdapterDetail, errors=(404,)),
    Route("GET", "/v1/adapters/{name}/story", story.get_story, role="use", speaks_for="name",
          answer=responses.Story, errors=(404,)),
    Route("DELETE", "/v1/adapters/{name}", adapters.forget, role="train", speaks_for="name",
          answer=responses.Forgotten, errors=(404,)),
    Route("POST", "/v1/adapters/{name}/rollback", adapters.rollback, role="train", speaks_for="name",
          body=(requests.RollbackRequest,), answer=responses.RolledBack, errors=(404, 409)),
    Route("POST", "/v1/adapters/{name}/mend", adapters.check_version, role="train", speaks_for="name",
          answer=responses.Examined, status=202, errors=(404, 409)),
    Route("GET", "/v1/adapters/{name}/export", adapters.export, role="train", speaks_for="name",
          media=_TAR, errors=(404, 409)),
    Route("POST", "/v1/adapters/{name}/import", adapters.import_adapter, role="train", speaks_for="name", streamed=True,
          query=_REASON, answer=responses.Imported, errors=(408, 409, 413, 507)),
    Route("GET", "/v1/adapters/{name}/starts", starts.get_scores, role="train", speaks_for="name",
          answer=responses.StartScores, errors=(404,)),
    Route("GET", "/v1/starts", starts.list_starts, role="train", answer=responses.StartList),
    Route("PUT", "/v1/starts/{name}", starts.put_start, role="federated", streamed=True,
          answer=responses.StartAdded, errors=(408, 409, 413, 507)),
    Route("DELETE", "/v1/starts/{name}", starts.delete_start, answer=responses.StartRemoved, errors=(404, 409)),
    Route("GET", "/v1/federated", federated.get_federation, role="train", answer=responses.Federation),
    Route("PUT", "/v1/federated/consent/{user}", federated.put_consent, role="train", speaks_for="user",
          body=(requests.ConsentRequest,), answer=responses.ConsentGiven, errors=(409,)),
    Route("DELETE", "/v1/federated/consent/{user}", federated.delete_consent, role="train", speaks_for="user",
          answer=responses.ConsentRevoked),
    Route("GET", "/v1/federated/ledger", federated.get_ledger, role="federated", query=_SHA256,
          answer=responses.FederationLedger),
    Route("GET", "/v1/federated/rounds", federated.get_offer, role="federated",
          answer=responses.RoundOffer, errors=(409,)),
    Route("POST", "/v1/federated/rounds", federated.begin_round, role="federated", speaks_for="user",
          query=_USER, streamed=True, answer=responses.RoundBegun, status=202, errors=(408, 409, 413, 507)),
    Route("GET", "/v1/federated/rounds/{id}", federated.get_round, role="federated",
          answer=responses.RoundState, errors=(404,)),
    Route("GET", "/v1/federated/rounds/{id}/record", federated.get_record, role="federated",
          media=_BYTES, errors=(404, 409)),
    Route("DELETE", "/v1/federated/rounds/{id}", federated.drop_round, role="federated",
          answer=responses.RoundDropped, errors=(404,)),
    Route("GET", "/v1/adapters/{name}/preference", preferences.get_preference, role="train", speaks_for="name",
          answer=responses.Preference, errors=(404,)),
    Route("PUT", "/v1/adapters/{name}/preference", preferences.put_preference, role="train", speaks_for="name",
          body=(requests.PreferenceRequest,), answer=responses.Preference, errors=(404, 409)),
    Route("DELETE", "/v1/adapters/{name}/preference", preferences.delete_preference, role="train", speaks_for="name",
          answer=responses.Preference, errors=(404,)),
    Route("POST", "/v1/adapters/{name}/strike", preferences.strike, role="train", speaks_for="name",
          body=(requests.StrikeRequest,), answer=responses.Struck, errors=(404, 409)),
    Route("GET", "/v1/applications", applications.list_applications, role="use", answer=responses.ApplicationList),
    Route("GET", "/v1/applications/{type}", applications.get_application, role="use",
          answer=responses.RunList, errors=(404,)),
    Route("DELETE", "/v1/applications/{type}", applications.forget, role="train",
          answer=responses.ApplicationsForgotten, errors=(404,)),
    Route("GET", "/v1/quarantine", quarantine.list_quarantined, role="train", query=_USER, answer=responses.Quarantine),
    Route("POST", "/v1/quarantine", quarantine.decide_all, role="train",
          body=(requests.UserQuarantineRequest,), answer=responses.AllDecided),
    Route("POST", "/v1/quarantine/{pair}", quarantine.decide, role="train",
          body=(requests.QuarantineRequest,), answer=responses.Decided, errors=(404, 409)),
    Route("POST", "/v1/files", files.upload, role="train", streamed=True,
          answer=bodies.FileObject, errors=(408, 409, 413, 507)),
    Route("GET", "/v1/files", files.list_files, role="train", query=_FILES, answer=bodies.FileList),
    Route("GET", "/v1/files/{id}", files.get_file, role="train", answer=bodies.FileObject, errors=(404,)),
    Route("GET", "/v1/files/{id}/content", files.content, role="train", media=_BYTES, errors=(404,)),
    Route("DELETE", "/v1/files/{id}", files.delete, role="train", answer=bodies.Deleted, errors=(404, 409)),
    Route("POST", "/v1/fine_tuning/jobs", finetuning.create, role="train",
          body=(bodies.JobRequest,), answer=bodies.Job, errors=(404, 409)),
    Route("GET", "/v1/fine_tuning/jobs", finetuning.list_jobs, role="train", query=_PAGE, answer=bodies.JobList),
    Route("GET", "/v1/fine_tuning/jobs/{id}", finetuning.get_job, **_JOB),
    Route("POST", "/v1/fine_tuning/jobs/{id}/cancel", finetuning.cancel, **_JOB),
    Route("POST", "/v1/fine_tuning/jobs/{id}/pause", finetuning.pause, **_JOB),
    Route("POST", "/v1/fine_tuning/jobs/{id}/resume", finetuning.resume, **_JOB),
    Route("GET", "/v1/fine_tuning/jobs/{id}/events", finetuning.events, role="train",
          query=_PAGE, answer=bodies.EventList, errors=(404,)),
    Route("GET", "/v1/fine_tuning/jobs/{id}/checkpoints", finetuning.checkpoints, role="train",
          query=_PAGE, answer=bodies.CheckpointList, errors=(404,)),
    Route("GET", "/v1/backup", operations.backup, query=_VERSIONS, media=_TAR),
    Route("GET", "/v1/store", operations.store_report, answer=responses.StoreReport),
    Route("POST", "/v1/store/prune", operations.prune, answer=responses.Pruned),
    Route("POST", "/v1/store/vacuum", operations.vacuum, answer=responses.Vacuumed),
    Route("GET", "/v1/leases", leases.list_leases, role="fleet", answer=responses.Leases),
    Route("PUT", "/v1/leases/{name}", leases.put_lease, role="fleet",
          body=(requests.LeaseRequest,), answer=responses.LeaseTaken, errors=(404, 409)),
    Route("GET", "/v1/leases/{name}/state", leases.get_state, role="fleet", media=_TAR, errors=(404, 409)),
    Route("PUT", "/v1/leases/{name}/state", leases.put_state, role="fleet", query=_LEASE, streamed=True,
          answer=responses.LeaseTaken, errors=(404, 408, 409, 413, 507)),
    Route("GET", "/v1/leases/{name}/pairs", leases.get_pairs, role="fleet",
          answer=responses.CopiedPairs, errors=(404, 409)),
    Route("POST", "/v1/leases/{name}/pairs", leases.post_pairs, role="fleet",
          body=(requests.CopiedPairsRequest,), answer=responses.PairsTaken, errors=(404, 409)),
    Route("PUT", "/v1/leases/{name}/pairs", leases.put_pairs, role="fleet",
          body=(requests.HandedOnRequest,), answer=responses.PairsTaken, errors=(404,)),
    Route("GET", "/v1/status", status.status, role="use", always=True, answer=responses.Status),
    Route("GET", "/v1/settings", operations.get_settings, answer=responses.SettingsInUse),
    Route("POST", "/v1/reload", operations.reload, answer=responses.Reloaded),
    Route("POST", "/v1/drain", operations.drain, answer=responses.Drained),
    Route("POST", "/v1/undrain", operations.undrain, answer=responses.Drained),
    Route("GET", "/v1/trace", trace.get_trace, query=_SECONDS, answer=responses.Trace),
    Route("GET", "/metrics", metrics.metrics, role="metrics", always=True, media=_METRICS),
    Route("GET", "/v1/events", events.events, role="use", query=_EVENTS, media=(EVENTS,)),
    Route("GET", "/healthz", status.healthz, role="anybody", always=True, answer=responses.Health),
    Route("GET", "/readyz", status.readyz, role="anybody", always=True, answer=responses.Ready),
    Route("GET", "/", page.page, role="anybody", always=True, media=("text/html",)),
    Route("GET", "/page/{name}", page.file, role="anybody", always=True, media=_PAGE_FILES, errors=(404,)),
    Route("GET", "/openapi.json", get_document, role="anybody", answer=responses.Document),
)  # fmt: skip
"""One row for each method of each path; the default role is admin."""


if __name__ == "__main__":
    print(json.dumps(document(ROUTES), indent=1, ensure_ascii=False))
