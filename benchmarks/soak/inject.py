"""The daemon of a soak test: `edged serve` with settings from the environment, and faults on request.

Faults enter a running engine by hooks on the model's own modules, a policy that raises, a command that never returns.
Requests for them come through a datagram socket, whose path is an argument, as is the token that marks a prompt whose
activations are NaN. `benchmarks.support.child` starts it, so that its heap is `edged serve`'s.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch

from edged import daemon
from edged.engine.engine import Engine
from edged.settings.load import load_settings

_A_CHUNK = 16
"""Rows from which a forward without a gradient counts as a prompt's."""
_FOR_EVER_S = 3600.0


class Injector:
    """A source of faults; `arm` hooks it into an engine."""

    def __init__(self, marker: int) -> None:
        """Create an injector; `marker` is the token whose activations are NaN if three of it stand in a row."""
        self._marker = marker
        self._short: Counter[str] = Counter()
        self._policy_fails = False
        self._engine: Engine | None = None
        self._clock, self._behind_s = time.time, 0.0
        self._late = self._time

    def arm(self, engine: Engine) -> None:
        """Put the hooks into a new engine's model."""
        self._engine = engine
        engine.model.layers[0].register_forward_pre_hook(self._allocate, with_kwargs=True)
        engine.model.model.get_input_embeddings().register_forward_hook(self._spoil)
        fill = engine.scheduler.policy.fill
        plan = fill.plan

        def failing(*arguments: Any) -> Any:
            if self._policy_fails:
                raise RuntimeError("injected: the policy fails")
            return plan(*arguments)

        setattr(fill, "plan", failing)  # noqa: B010 (a method)

    def obey(self, order: dict[str, Any]) -> None:
        """Cause the fault that a datagram asks for."""
        match order["fault"]:
            case "memory":
                # max, not a sum: faults for steps accumulate while no gradient is computed, and would all come at once.
                self._short[order["where"]] = max(self._short[order["where"]], order["times"])
            case "policy":
                self._policy_fails = True
            case "restore" if self._engine is not None:
                self._policy_fails = False
                # A reload makes the scheduler ask the policy again.
                self._engine.configure(self._engine.settings)
            case "hang" if self._engine is not None:
                self._engine.commands.post(lambda: time.sleep(_FOR_EVER_S))
            case "clock":
                self._behind_s += order["seconds"]
                time.time = self._late

    def _time(self) -> float:
        """Return the time of a clock that was set back."""
        return self._clock() - self._behind_s

    def _allocate(self, _: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        where = "decode" if hidden.shape[-2] < _A_CHUNK else "prefill"
        if torch.is_grad_enabled():
            where = "finetune"
        if self._short[where] > 0:
            self._short[where] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    def _spoil(self, _: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        marked = arguments[0] == self._marker
        # Answers may sample the token, too, but hardly ever have three of it in a row in one forward.
        three = marked[..., 2:] & marked[..., 1:-1] & marked[..., :-2]
        return output.masked_fill(marked[..., None], float("nan")) if three.any() else None


def be_side(_name: str, path: str, marker: str) -> None:
    """Serve as a side of `benchmarks.support.child`, which calls this function by its name."""
    injector, build = Injector(int(marker)), Engine.build

    def build_armed(*arguments: Any) -> Engine:
        engine = build(*arguments)
        injector.arm(engine)
        return engine

    setattr(Engine, "build", build_armed)  # noqa: B010 (the daemon has no place for it, and needs none)
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.bind(path)

    def listen() -> None:
        while True:
            injector.obey(json.loads(orders.recv(4096)))

    threading.Thread(target=listen, name="soak-orders", daemon=True).start()
    sys.exit(daemon.run_daemon(load_settings(), load_settings))
