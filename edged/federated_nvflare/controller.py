"""The hub's side of a job: one round of a campaign, and, once all are complete, the starts for boxes that lack them."""

from __future__ import annotations

import math
import sys
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
from edged.federated_nvflare.hub_rounds import STARTS, HubCampaign, campaign_of

# At a round's end NVFlare clears away tensors that it streamed, and imports torch for it: seconds. Here are none.
sys.modules.setdefault("nvflare.app_opt.pt.tensor_downloader", None)  # type: ignore[arg-type]
_LOOK_S = 0.1
_TELL_S = 120


class RoundController(Controller):
    """A job is one round, so that a box that comes later can take part in the next one.

    The round ends with `demand` records, or at its deadline with at least the threshold; what came is on disk.
    """

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Open the campaign's folder in the hub's kit, with the starts that the job brings.

        Raises CampaignRefused, OSError, ValueError, KeyError: the job fails.
        """
        workspace = fl_ctx.get_engine().get_workspace()
        root, config = Path(workspace.get_root_dir()), Path(workspace.get_app_config_dir(fl_ctx.get_job_id()))
        self._campaign = HubCampaign(root / "campaigns", campaign_of(fl_ctx.get_prop(FLContextKey.JOB_META)))
        for rounds in self._campaign.rounds:
            rounds.begin_with(config / STARTS / rounds.start)
        self._missing = self._campaign.missing

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Do the round, and hand out the starts once all rounds are complete."""
        campaign = self._campaign
        boxes = [client.name for client in fl_ctx.get_engine().get_clients()]
        if not campaign.is_complete:
            boxes = self._do_round(boxes, abort_signal, fl_ctx)
        if campaign.is_complete:
            lacking = sorted(set(boxes).difference(campaign.told))
            data = {"starts": [rounds.start_file() for rounds in campaign.rounds]}
            self._ask("start", data, lacking, _TELL_S, abort_signal, fl_ctx)

    def _do_round(self, boxes: list[str], abort_signal: Signal, fl_ctx: FLContext) -> list[str]:
        """Do the round of each start that has one left; returns the boxes that have answered now."""
        campaign, before = self._campaign, self._campaign.counted
        asked = [{"round": rounds.round_file(), "sealed": rounds.sealed_start()} for rounds in campaign.open]
        others, deadline_s = [box for box in boxes if box not in before], math.ceil(campaign.job.deadline_s)
        self._ask("round", {"rounds": asked}, others, deadline_s, abort_signal, fl_ctx)
        answered = sorted(set(others).intersection(campaign.counted))
        for rounds in campaign.open:
            number, records = rounds.round + 1, len(rounds.boxes)
            ended = "is complete" if rounds.close() else "goes on: too few boxes answered"
            self.log_info(fl_ctx, f"{rounds.name}: round {number} {ended} ({records} records)", fire_event=False)
        return answered

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
        return name == "round" and self._missing <= 0

    def _answered(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Take a box's answer in: it is on disk before NVFlare hands over the next one."""
        box, result, campaign = client_task.client.name, client_task.result, self._campaign
        code = result.get_return_code()
        if client_task.task.name == "start":
            campaign.tell(box)
            self.log_info(fl_ctx, f"{campaign.job.name}: {box} was given the start: {code}", fire_event=False)
            return
        try:
            if code != ReturnCode.OK:
                raise RecordRefused(f"it answers {code}; why stands in its own log")
            data = from_shareable(result).data
            took_s = time.monotonic() - self._since_s
            campaign.take(box, data["record"], took_s, data["sealed"])
        except (RecordRefused, CampaignRefused, KeyError, TypeError, ValueError) as error:
            self.log_warning(fl_ctx, f"{campaign.job.name}: nothing of {box} is counted: {error}", fire_event=False)
            return
        self._missing = campaign.missing
        self.log_info(fl_ctx, f"{campaign.job.name}: {box} is counted", fire_event=False)
