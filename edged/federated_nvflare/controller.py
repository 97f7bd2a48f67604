"""The hub's side of a job: one round of a campaign, or, once all are complete, the start for boxes that lack it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.signal import Signal

from edged.federated.campaign_file import CampaignRefused
from edged.federated.records import RecordRefused
from edged.federated_nvflare.hub_rounds import HubRounds, campaign_of

_LOOK_S = 0.1
_TELL_S = 120


class RoundController(Controller):
    """A job is one round, so that a box that comes later can take part in the next one.

    The round ends with `demand` records, or at its deadline with at least the threshold; what came is on disk.
    """

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Open the campaign's folder in the hub's kit. Raises CampaignRefused, OSError: the job fails."""
        root = Path(fl_ctx.get_engine().get_workspace().get_root_dir()) / "campaigns"
        self._rounds = HubRounds(root, campaign_of(fl_ctx.get_prop(FLContextKey.JOB_META)))
        self._counted = len(self._rounds.sum().boxes)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Do the round, or hand out the start."""
        rounds = self._rounds
        boxes = [client.name for client in fl_ctx.get_engine().get_clients()]
        if rounds.is_complete:
            data = {"name": rounds.job.name, "sealed": rounds.sealed_start(), **rounds.start_files()}
            self._ask("start", data, [box for box in boxes if box not in rounds.told], _TELL_S, abort_signal, fl_ctx)
            return
        asked = [box for box in boxes if box not in rounds.sum().boxes]
        deadline_s = math.ceil(rounds.job.deadline_s)
        data = {"round": rounds.round_file(), "sealed": rounds.sealed_start()}
        self._ask("round", data, asked, deadline_s, abort_signal, fl_ctx)
        number = rounds.round + 1
        ended = "is complete" if rounds.close() else "goes on: too few boxes answered"
        self.log_info(fl_ctx, f"{rounds.job.name}: round {number} {ended} ({self._counted} records)", fire_event=False)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: all is on disk."""

    def _ask(
        self, name: str, data: dict[str, Any], boxes: list[str], within_s: int, stop: Signal, ctx: FLContext
    ) -> None:
        """Send a task to boxes and wait until enough have answered, all have, or time is up."""
        if not boxes:
            return
        shareable = DXO(DataKind.APP_DEFINED, data=data).to_shareable()
        task = Task(name, shareable, timeout=within_s, result_received_cb=self._answered)
        self._since_s = time.monotonic()
        self.broadcast(task, ctx, boxes, min_responses=len(boxes))
        while task.completion_status is None and not stop.triggered and not self._has_enough(name):
            time.sleep(_LOOK_S)
        self.cancel_task(task, fl_ctx=ctx)

    def _has_enough(self, name: str) -> bool:
        return name == "round" and self._counted >= self._rounds.job.demand

    def _answered(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Take a box's answer in: it is on disk before NVFlare hands over the next one."""
        box, result = client_task.client.name, client_task.result
        code = result.get_return_code()
        if client_task.task.name == "start":
            self._rounds.tell(box)
            self.log_info(fl_ctx, f"{self._rounds.job.name}: {box} was given the start: {code}", fire_event=False)
            return
        try:
            if code != ReturnCode.OK:
                raise RecordRefused(f"it answers {code}; why stands in its own log")
            data = from_shareable(result).data
            took_s = time.monotonic() - self._since_s
            self._counted = self._rounds.take(box, data["record"], took_s, data["sealed"])
        except (RecordRefused, CampaignRefused, KeyError, TypeError, ValueError) as error:
            self.log_warning(fl_ctx, f"{self._rounds.job.name}: nothing of {box} is counted: {error}", fire_event=False)
            return
        self.log_info(fl_ctx, f"{self._rounds.job.name}: {box} is counted", fire_event=False)
