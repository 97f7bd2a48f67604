"""What `edged status` shows of the box and its governors, where they know something."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from edged.cli.status import USERS, box_rows, governor_rows, reader_rows, trouble_rows
from edged.telemetry.reading import Reading


def shown(fill: Any, data: dict[str, Any]) -> str:
    table = Table(box=None, show_header=False)
    fill(table, data)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_hot_jetson_is_shown_with_its_limits() -> None:
    reading = Reading(
        0.0,
        memory_available_bytes=2 << 30,
        memory_total_bytes=8 << 30,
        memory_pressure_some_percent=12.0,
        temperature_c=91.0,
        temperature_limit_c=99.0,
        gpu_percent=97.0,
        gpu_clock_hz=828e6,
        gpu_clock_max_hz=1300e6,
        power_w=27.9,
        power_mode="MODE_50W",
    )
    text = shown(box_rows, {"name": "cuda:0", **reading.report()})
    for part in ("91 °C of at most 99 °C", "12 % of the time", "97 % busy, 828 of 1300 MHz", "27.9 W, MODE_50W"):
        assert part in text


def test_a_box_that_knows_little_shows_no_dashes_for_a_gpu() -> None:
    text = shown(box_rows, {"name": "cpu", **Reading(0.0).report()})
    assert "GPU" not in text
    assert "°C" not in text


def test_the_users_who_were_served_worst_are_named_with_their_qoe() -> None:
    users = {f"u{number:02}": {"answers": number + 1, "qoe_mean": 1.0 - 0.01 * number} for number in range(USERS + 3)}
    readers = {"qoe_mean": 0.95, "qoe_p5": 0.91, "qoe_95_share": 0.5, "users": users}
    text = shown(lambda table, data: reader_rows(table, data, 3.0), readers)
    assert "QoE 0.950, p5 0.910, 50 % at least 0.95" in text
    assert "u10 0.900 (11), u09 0.910 (10)" in text
    assert "u02" not in text
    assert "3 more" in text
    assert "by user" not in shown(lambda table, data: reader_rows(table, data, 3.0), {**readers, "users": {}})


def test_what_is_held_is_shown_with_the_reason() -> None:
    governors = {
        "enabled": True,
        "memory": {"holds": ["caches", "pruning"], "reason": "200 MiB are available, 256 MiB are to be"},
        "power": {"finetune_share": 0.5, "reasons": ["91 °C of at most 99 °C"]},
        "energy": {"joules_per_output_token": 0.71, "joules_per_pair": None},
    }
    text = shown(governor_rows, governors)
    assert "holds caches, pruning: 200 MiB are available, 256 MiB are to be" in text
    assert "fine-tuning 50 % of the time: 91 °C" in text
    assert "0.71 J a token, – a pair" in text
    assert "governor.enabled" in shown(governor_rows, {"enabled": False})


def test_what_is_not_as_it_should_be_and_why_nothing_is_learned_come_first() -> None:
    tuning = {"enabled": True, "held": False, "reason": "", "alarms": ["ann"]}
    data: dict[str, Any] = {
        "degraded": ["the disk is full", "the policy mace failed"],
        "finetune": tuning,
        "quarantine": {"pairs": 3},
        "model": {"trust_remote_code": True},
    }
    text = shown(trouble_rows, data)
    for part in (
        "the disk is full",
        "the policy mace failed",
        "3 pairs wait for a decision (alarm: ann)",
        "own Python",
    ):
        assert part in text
    assert "not learning" not in text
    for changes, why in (
        ({"held": True}, "held back"),
        ({"enabled": False, "reason": "the policy sequential does not train"}, "sequential does not train"),
        ({"enabled": False}, "paused, or off (align.enabled)"),
        ({"reason": "memory ran out in a step"}, "memory ran out in a step"),
    ):
        assert why in shown(trouble_rows, {**data, "finetune": {**tuning, **changes}})
    fine = {**data, "degraded": [], "quarantine": {"pairs": 0}, "model": {"trust_remote_code": False}}
    assert not shown(trouble_rows, fine).strip()
