"""Stands in for jtop.service: jetson-stats' own manager on a socket, answering every client with a recording.

Run as `jtop_service.py SOCKET RECORDING`; it prints a line when it answers. Only what the service reads from the
hardware is recorded: the protocol, and all of the client, is jetson-stats'.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from multiprocessing import Event, Queue
from pathlib import Path
from typing import Any

from jtop import service


def answer(controls: Any, init: dict[str, Any]) -> None:
    """The service's part in `jtop.start`: a client that names its interval is told of the board."""
    while True:
        control = controls.get()
        if "init" in control:
            controls.put(control)
            time.sleep(0.02)
        elif "interval" in control:
            controls.put({"init": init})


def tick(event: Any) -> None:
    """New readings, which are the old ones."""
    while True:
        event.set()
        time.sleep(0.05)


def main(socket: str, recording: str) -> None:
    recorded = json.loads(Path(recording).read_text())
    service.JTOP_PIPE = socket
    controls, event = Queue(), Event()
    service.JtopManager.register("get_queue", callable=lambda: controls)
    service.JtopManager.register("sync_data", callable=lambda: recorded["stats"])
    service.JtopManager.register("sync_event", callable=lambda: event)
    server = service.JtopManager().get_server()
    threading.Thread(target=answer, args=(controls, recorded["init"]), daemon=True).start()
    threading.Thread(target=tick, args=(event,), daemon=True).start()
    print("answers", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
