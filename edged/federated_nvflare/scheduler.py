"""NVFlare's scheduler at the hub: Venn says which campaign's round gets which boxes."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import SERVER_SITE_NAME, Job, JobMetaKey, RunStatus
from nvflare.apis.job_def_manager_spec import JobDefManagerSpec
from nvflare.apis.job_scheduler_spec import DispatchInfo, JobSchedulerSpec
from nvflare.apis.utils.job_utils import get_event_job_id

from edged.federated.campaign_file import CampaignRefused
from edged.federated_nvflare.capacity import read_capacity
from edged.federated_nvflare.dispatch import BoxGrant, Dispatcher, WaitingRound
from edged.federated_nvflare.hub_rounds import HubCampaign, HubJob, campaign_of

_ASK_S = 2.0
"""Seconds between two questions to the boxes whether they may take part."""
_MAX_FAILURES = 5
_PAUSE_S, _MAX_PAUSE_S = 5.0, 600.0
"""Seconds after which boxes are asked again that gave nothing, twice as many each time."""
_PROGRESS = "edged_progress"
"""What `edged federated jobs` sees of a campaign, in its job's meta data."""
_KEPT = (
    *("name", "job_folder_name", "deploy_map", "data_storage_format", "study", "scope", "custom_props", _PROGRESS),
    *("submitter_name", "submitter_org", "submitter_role"),
)
_UNSCHEDULED = {RunStatus.FINISHED_ABNORMAL, RunStatus.FINISHED_EXECUTION_EXCEPTION, RunStatus.FAILED_TO_RUN}


class VennScheduler(JobSchedulerSpec, FLComponent):
    """A job is submitted once; for each further round, and where one was interrupted, its clone is."""

    def __init__(self) -> None:
        super().__init__()
        self._dispatcher = Dispatcher(random.Random())
        self._ready: deque[tuple[BoxGrant, dict[str, str]]] = deque()
        """Jobs that have their boxes, with the boxes' tokens: NVFlare takes one a tick."""
        self._running: dict[str, BoxGrant] = {}
        self._ended: deque[str] = deque()
        self._ask_again_s, self._asked_for = 0.0, set[str]()
        """When boxes are asked again, unless other jobs wait than those for which they were asked."""
        self._paused_until: dict[str, float] = {}
        """Jobs of campaigns to which boxes gave nothing the last time."""
        self._is_open = False

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Note that a job has ended; the next tick submits what follows."""
        if event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED):
            self._ended.append(get_event_job_id(fl_ctx))

    def schedule_job(
        self, job_manager: JobDefManagerSpec, job_candidates: list[Job], fl_ctx: FLContext
    ) -> tuple[Job | None, dict[str, DispatchInfo] | None]:
        """Return a job whose round has its boxes, and these; (None, None) where none has."""
        try:
            if not self._is_open:
                self._reopen(job_manager, fl_ctx)
            while self._ended:
                self._follow(job_manager, self._ended.popleft(), fl_ctx)
            now, waiting = time.monotonic(), {job.job_id for job in job_candidates}
            if not self._ready and (now >= self._ask_again_s or waiting != self._asked_for):
                self._ask_again_s, self._asked_for = now + _ASK_S, waiting
                self._tick(job_manager, job_candidates, now, fl_ctx)
            return self._next(job_candidates)
        except Exception:
            self.log_exception(fl_ctx, "the scheduler's tick failed", fire_event=False)
            return None, None

    def restore_scheduled_job(self, job_id: str) -> None:
        """Do nothing: a job of a hub that ended is submitted again."""

    def remove_scheduled_job(self, job_id: str) -> None:
        """Do nothing: events tell of a job's end."""

    def _next(self, candidates: list[Job]) -> tuple[Job | None, dict[str, DispatchInfo] | None]:
        while self._ready:
            grant, tokens = self._ready.popleft()
            job = next((job for job in candidates if job.job_id == grant.job), None)
            if job is None:
                continue
            self._running[grant.job] = grant
            # NVFlare's runner reads these.
            job.meta[JobMetaKey.SCHEDULE_COUNT.value] = job.meta.get(JobMetaKey.SCHEDULE_COUNT.value, 0) + 1
            job.meta[JobMetaKey.LAST_SCHEDULE_TIME.value] = time.time()
            job.meta[JobMetaKey.SCHEDULE_HISTORY.value] = []
            (app,) = job.deploy_map
            sites = {box: DispatchInfo(app, {}, tokens[box]) for box in grant.boxes}
            return job, {**sites, SERVER_SITE_NAME: DispatchInfo(app, {}, None)}
        return None, None

    def _tick(self, manager: JobDefManagerSpec, candidates: list[Job], now: float, fl_ctx: FLContext) -> None:
        """Ask the boxes that are free, and grant them."""
        campaigns = self._campaigns(manager, candidates, fl_ctx)
        if not campaigns:
            self._dispatcher.tick({}, {}, now)
            return
        engine = fl_ctx.get_engine()
        taken = {box for grant in self._running.values() for box in grant.boxes}
        asked: dict[str, dict[str, str]] = {
            client.name: {} for client in engine.get_clients() if client.name not in taken
        }
        told = engine.check_client_resources(candidates[0], asked, fl_ctx)
        tokens = {box: token for box, (is_able, token) in told.items() if is_able}
        capacities = {box: read_capacity(token) for box, token in tokens.items()}
        able = {box: capacity for box, capacity in capacities.items() if capacity is not None}
        grants = []
        for job_id, campaign in campaigns.items():
            if campaign.is_complete:
                lacking = [box for box in sorted(able.keys() - campaign.told) if able[box].model == campaign.job.model]
                if lacking:
                    grants.append(BoxGrant(job_id, {box: able.pop(box) for box in lacking}, now))
        open_rounds = {job_id: _open(campaign) for job_id, campaign in campaigns.items() if not campaign.is_complete}
        grants += self._dispatcher.tick(open_rounds, able, now)
        self._ready.extend((grant, tokens) for grant in grants)
        granted = {box for grant in grants for box in grant.boxes}
        rest = {box: told[box] for box in tokens if box not in granted}
        if rest:
            engine.cancel_client_resources(rest, {}, fl_ctx)

    def _campaigns(
        self, manager: JobDefManagerSpec, candidates: list[Job], fl_ctx: FLContext
    ) -> dict[str, HubCampaign]:
        """Return the campaigns that wait, by job; a job of none, or of one that is over, is never scheduled."""
        found: dict[str, HubCampaign] = {}
        for job in candidates:
            try:
                campaign = HubCampaign(_root(fl_ctx), campaign_of(job.meta))
                known = campaign.nvflare
                if known.is_over or known.id not in ("", job.job_id):
                    raise CampaignRefused(
                        f'campaign "{campaign.job.name}" was submitted before: give this one another name'
                    )
                if not known.id:
                    campaign.remember(HubJob(job.job_id))
                if job.meta.get(_PROGRESS) != (progress := _progress(campaign)):
                    manager.update_meta(job.job_id, {_PROGRESS: progress}, fl_ctx)
                if time.monotonic() >= self._paused_until.get(job.job_id, 0.0):
                    found[job.job_id] = campaign
            except CampaignRefused as error:
                self.log_error(fl_ctx, f"job {job.job_id} is refused: {error}", fire_event=False)
                manager.update_meta(job.job_id, {"edged_refused": str(error)}, fl_ctx)
                manager.set_status(job.job_id, RunStatus.FINISHED_CANT_SCHEDULE, fl_ctx)
        return found

    def _follow(self, manager: JobDefManagerSpec, job_id: str, fl_ctx: FLContext) -> None:
        """Submit what follows a job that has ended: the next round, or the same one again."""
        grant, job = self._running.pop(job_id, None), manager.get_job(job_id, fl_ctx)
        if job is None:
            return
        try:
            campaign = HubCampaign(_root(fl_ctx), campaign_of(job.meta))
        except CampaignRefused:
            return
        known, status = campaign.nvflare, job.meta.get(JobMetaKey.STATUS.value)
        if known.id != job_id or known.is_over:
            return
        for rounds in campaign.open:
            rounds.close()  # the hub may have ended between the last record and this
        if grant is not None and status == RunStatus.FINISHED_COMPLETED:
            self._dispatcher.answered(campaign.job.campaign(0.0), grant, campaign.responses_s())
        failures = known.failures + 1 if status in _UNSCHEDULED else 0
        if status == RunStatus.FINISHED_ABORTED or failures >= _MAX_FAILURES:
            self._dispatcher.ended(campaign.job.campaign(0.0))
            campaign.remember(HubJob(job_id, failures, is_over=True))
            return
        meta = {name: job.meta[name] for name in _KEPT if name in job.meta}
        clone = manager.clone(job_id, meta, fl_ctx)[JobMetaKey.JOB_ID.value]
        is_idle = grant is not None and _progress(campaign) == job.meta.get(_PROGRESS)
        pause_s = min(_MAX_PAUSE_S, 2 * known.pause_s or _PAUSE_S) if is_idle else 0.0
        campaign.remember(HubJob(clone, failures, pause_s))
        self._paused_until[clone] = time.monotonic() + pause_s

    def _reopen(self, manager: JobDefManagerSpec, fl_ctx: FLContext) -> None:
        """Submit the rounds again that the hub's end has interrupted; NVFlare calls such jobs running for ever."""
        for job in manager.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx):
            manager.set_status(job.job_id, RunStatus.ABANDONED, fl_ctx)
        for path in sorted(_root(fl_ctx).glob("*/job.json")):
            known = json.loads(path.read_text("utf-8"))
            job = manager.get_job(known["id"], fl_ctx)
            if job is not None and job.meta.get(JobMetaKey.STATUS.value) != RunStatus.SUBMITTED:
                self._ended.append(job.job_id)
        self._is_open = True


def _root(fl_ctx: FLContext) -> Path:
    return Path(fl_ctx.get_engine().get_workspace().get_root_dir()) / "campaigns"


def _progress(campaign: HubCampaign) -> dict[str, int]:
    return {"rounds_complete": campaign.round, "records": len(campaign.counted), "boxes_with_start": len(campaign.told)}


def _open(campaign: HubCampaign) -> WaitingRound:
    counted = frozenset(campaign.counted)
    wanted = replace(campaign.job.campaign(time.time()), demand=campaign.missing + len(counted))
    return WaitingRound(wanted, campaign.job.rounds - campaign.round, counted)
