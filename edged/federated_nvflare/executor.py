"""The box's side of a task: a round by its daemon, or a start for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.private.fed.client.admin_commands import AdminCommands, ConfigureJobLogCommand

from edged.client.client import DaemonError
from edged.federated_nvflare.box_daemon import add_start, daemon_client, facts_of, make_fitting_record, start_tar
from edged.federated_nvflare.encrypted_sum import Sealed, box_key, opened_round, opened_weights
from edged.federated_nvflare.kits import KitError

NONCE = "edged_nonce"
"""Where the filter finds of which round a result must be; NVFlare has forgotten the task by then."""


class RoundExecutor(Executor):
    """The only executor that a box loads. A task is data: the daemon checks it, and this class hands it on."""

    def __init__(self) -> None:
        super().__init__()
        # This one would configure logging, and so load any class, as a hub says.
        known = AdminCommands.commands
        known[:] = [each for each in known if not isinstance(each, ConfigureJobLogCommand)]

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return a record, or the code of a failure; why stands in this box's log alone."""
        try:
            data: dict[str, Any] = from_shareable(shareable).data
            with daemon_client() as client:
                if task_name == "start":
                    for start in data["starts"]:
                        weights = _clear(opened_weights, start["weights"], start["sealed"])
                        add_start(client, str(start["name"]), start_tar(weights, bytes(start["config"])))
                    return make_reply(ReturnCode.OK)
                asked = [_clear(opened_round, each["round"], each["sealed"]) for each in data["rounds"]]
                # No start is asked for first each time.
                random.shuffle(asked)
                of, record = make_fitting_record(client, asked, lambda: bool(abort_signal.triggered))
                fl_ctx.set_prop(NONCE, facts_of(of)["nonce"], private=True, sticky=False)
        except (DaemonError, KitError, OSError, KeyError, TypeError, ValueError) as error:
            self.log_warning(fl_ctx, f"no answer to the task {task_name!r}: {error}", fire_event=False)
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return DXO(DataKind.APP_DEFINED, data={"record": record}).to_shareable()


def _clear(opened: Callable[[bytes, Sealed, bytes], bytes], content: Any, sealed: Any) -> bytes:
    """Return a file of the hub's, in which B is moved by what is sealed."""
    pieces = [bytes(piece) for piece in sealed]
    return opened(bytes(content), pieces, box_key()) if pieces else bytes(content)
