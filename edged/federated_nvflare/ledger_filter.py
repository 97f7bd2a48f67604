"""The last gate of a box: only a record of this round that the daemon's ledger has leaves."""

from __future__ import annotations

from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from edged.client.client import Client, DaemonError
from edged.federated_nvflare.box_daemon import ROUNDS, daemon_client, facts_of, is_in_ledger
from edged.federated_nvflare.encrypted_sum import box_key, sealed_record
from edged.federated_nvflare.executor import NONCE
from edged.federated_nvflare.kits import KitError

_CODES = {value for name, value in vars(ReturnCode).items() if name.isupper()}


class LedgerFilter(Filter):
    """A filter of the box's scope, which runs before a job's own.

    NVFlare's DXOFilter lets pass what failed and what is no DXO; here each result is made anew of what may leave.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the record that the result has and nothing else of it; without one, its code alone."""
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code if code in _CODES else ReturnCode.ERROR)
        try:
            record = from_shareable(shareable).data["record"]
        except (KeyError, TypeError, ValueError):
            return make_reply(ReturnCode.OK)
        try:
            with daemon_client() as client:
                if is_in_ledger(client, record, fl_ctx.get_prop(NONCE)):
                    return DXO(DataKind.APP_DEFINED, data=_for_hub(record, client)).to_shareable()
            reason = "the daemon's ledger has no line of it and of this round"
        except (DaemonError, KitError, OSError, TypeError) as error:
            reason = str(error)
        self.log_error(fl_ctx, f"a result is held back: {reason}", fire_event=False)
        return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)


def _for_hub(record: bytes, client: Client) -> dict[str, Any]:
    """Return what the hub gets of a record, encrypted where it is for a sum alone. Raises KitError, OSError."""
    if facts_of(record)["mode"] == "single":
        return {"record": record, "sealed": []}
    data = sealed_record(record, box_key())
    size, most = sum(map(len, data["sealed"])), client.get(ROUNDS)["terms"]["max_update_mb"]
    if size > most << 20:
        raise KitError(f"the encrypted record has {size} bytes: federated.max_update_mb allows {most} MiB")
    return data
