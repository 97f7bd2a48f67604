"""Accounts of different roles use the daemon in any order; tests/faults/fuzzing.py has the rules and the promises."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.api.accounts import root_only
from tests.faults.fuzzing import ThreeAccounts

pytestmark = root_only
PLAIN = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True, "database": None}


@pytest.mark.timeout(900)
def test_whatever_three_accounts_do_in_turn_the_promises_hold() -> None:
    run_state_machine_as_test(
        ThreeAccounts, settings=settings(max_examples=1, stateful_step_count=12, derandomize=True, **PLAIN)
    )


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_for_as_long_as_somebody_has_time_for() -> None:
    """EDGED_FUZZ_MINUTES, by default 30; each round draws anew."""
    end = time.monotonic() + 60 * float(os.environ.get("EDGED_FUZZ_MINUTES", "30"))
    while time.monotonic() < end:
        run_state_machine_as_test(
            ThreeAccounts,
            settings=settings(max_examples=10, stateful_step_count=50, phases=(Phase.generate, Phase.shrink), **PLAIN),
        )
