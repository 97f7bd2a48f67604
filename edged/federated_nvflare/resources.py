"""A box's answer to the hub's question whether it may take part now."""

from __future__ import annotations

import contextlib
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.resource_managers.auto_clean_resource_manager import AutoCleanResourceManager
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from edged.client.client import DaemonError
from edged.federated_nvflare.box_daemon import daemon_client, drop_orphan, ready_capacity
from edged.federated_nvflare.capacity import capacity_token

_RESERVED_S = 30
_NEEDED = {
    *("ClientStatusProcessor", "ClientInfoProcessor", "ScopeInfoProcessor", "ReportResourcesProcessor"),
    *("CheckResourceProcessor", "CancelResourceProcessor", "DeployProcessor", "StartJobProcessor"),
    *("AbortAppProcessor", "AbortTaskProcessor", "NotifyJobStatusProcessor", "DeleteRunNumberProcessor"),
    "ShutdownClientProcessor",
}
"""NVFlare's commands that rounds need; others read files or configure logging, with no more right than a header."""
_PLACE = {"round": 1}
"""What is allocated: something true, else NVFlare never frees it."""


class BoxResources(AutoCleanResourceManager):
    """One place for one round. The token of a reservation says what the box has, since NVFlare hands it to the hub.

    NVFlare makes it before the agent connects; from then on the agent answers no commands but those of rounds.
    """

    def __init__(self) -> None:
        super().__init__(resources={}, expiration_period=_RESERVED_S)
        self._taken = False
        known = ClientRequestProcessors.request_processors
        known[:] = [each for each in known if type(each).__name__ in _NEEDED]

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Drop what an agent that was killed has left at the daemon."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.SYSTEM_START:
            self._drop_orphan()

    def check_resources(self, resource_requirement: dict[str, Any], fl_ctx: FLContext) -> tuple[bool, str]:
        """Return whether this box may take part now, and a token of its capacity."""
        try:
            with daemon_client() as client:
                capacity = ready_capacity(client)
        except DaemonError as error:
            self.log_warning(fl_ctx, f"this box takes no part: {error}", fire_event=False)
            return False, ""
        with self._lock:
            if capacity is None or self._taken:
                return False, ""
            token = capacity_token(capacity)
            self.reserved_resources[token] = (self._reserve_resource(resource_requirement), self.expiration_period)
            return True, token

    def free_resources(self, resources: dict[str, Any], token: str, fl_ctx: FLContext) -> None:
        """Free the place of a job whose process has ended, however it did."""
        self._drop_orphan()
        super().free_resources(resources, token, fl_ctx)

    def _drop_orphan(self) -> None:
        with contextlib.suppress(DaemonError), daemon_client() as client:
            drop_orphan(client)

    def _check_required_resource_available(self, resource_requirement: dict[str, Any]) -> bool:
        return not self._taken

    def _reserve_resource(self, resource_requirement: dict[str, Any]) -> dict[str, Any]:
        self._taken = True
        return dict(_PLACE)

    def _deallocate(self, resources: dict[str, Any]) -> None:
        self._taken = False

    def _resource_to_dict(self) -> dict[str, Any]:
        return {}
