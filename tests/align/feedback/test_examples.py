"""Files of examples: what a line may be, and what a check keeps in memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from edged.align.feedback.examples import BadFile, ExampleFile
from edged.align.feedback.pair import JobStepped
from edged.align.jobs import JobPace, JobPlan, auto
from edged.settings.load import AlignSettings


def written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(turns: int) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[turn % 2], "content": "word"} for turn in range(turns)]}


def test_a_conversation_has_a_bounded_number_of_messages(tmp_path: Path) -> None:
    assert len(ExampleFile(written(tmp_path, [chat(1024)]), tmp_path, "supervised")) == 1
    with pytest.raises(BadFile, match='line 1: "messages" has 1026 messages: it may have 1 to 1024'):
        ExampleFile(written(tmp_path, [chat(1026)]), tmp_path, "supervised")


ASKED, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
STRANGE = [
    ({"prompt": [ASKED] * 1025, "chosen": [YES], "rejected": [NO]}, '"prompt" has 1025 messages'),
    ({"prompt": [{"role": "tool", "content": "a"}], "chosen": [YES], "rejected": [NO]}, 'a message of role "tool"'),
    ({"prompt": [ASKED], "chosen": [YES | {"tool_calls": [{}]}], "rejected": [NO]}, '"chosen" has .* with a tool call'),
    ({"chosen": [ASKED, YES], "rejected": [ASKED] * 1024 + [NO]}, '"rejected" has 1025 messages'),
    (
        {
            "input": {"messages": [ASKED]},
            "preferred_output": [YES | {"tool_calls": [{}]}],
            "non_preferred_output": [NO],
        },
        '"preferred_output" has .* with a tool call',
    ),
]


@pytest.mark.parametrize(("row", "told"), STRANGE)
def test_preferences_are_conversations_as_chats_are(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(BadFile, match=told):
        ExampleFile(written(tmp_path, [row]), tmp_path, "dpo")
    plain = [{"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, {"chosen": [ASKED, YES], "rejected": [ASKED, NO]}]
    found = [pairs for _, pairs in ExampleFile(written(tmp_path, plain), tmp_path, "dpo").read([0, 1])]
    assert found == [[{"messages": [ASKED], "chosen": "b", "rejected": "c"}]] * 2


def test_a_line_is_at_most_a_mebibyte(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b" * (1 << 20)}, {"prompt": "a", "completion": "b"}]
    with pytest.raises(BadFile, match=r"^line 1: it is longer than 1048576 bytes: split it$"):
        ExampleFile(written(tmp_path, rows), tmp_path, "supervised")


def test_what_is_told_of_a_bad_line_is_short(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "assistant", "content": "b", "weight": "w" * 100_000}]}] * 30
    with pytest.raises(BadFile) as refused:
        ExampleFile(written(tmp_path, rows), tmp_path, "supervised")
    assert len(str(refused.value)) < 20 * 220
    assert str(refused.value).endswith("; and 10 more")


@pytest.mark.slow
def test_a_check_keeps_as_much_of_a_large_file_as_of_a_small_one(tmp_path: Path) -> None:
    def peak(lines: int) -> int:
        path = written(tmp_path, [{"prompt": f"word {number}", "completion": "b"} for number in range(lines)])
        tracemalloc.start()
        try:
            found = ExampleFile(path, tmp_path, "supervised")
            plan = JobPlan("job", "made", AlignSettings(), lines, 4, 1, 0)
            read = [line for line, _ in found.read(plan.batch(plan.steps - 1))]
            assert len(read) == 4
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(20_000) < peak(100) + 200_000


def test_every_epoch_has_each_example_once_in_an_order_of_its_own() -> None:
    plan = JobPlan("job", "made", AlignSettings(), 103, 10, 2, 7)
    epochs = [[n for step in range(begin, begin + 11) for n in plan.batch(step)] for begin in (0, 11)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(103))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("examples", [1, 2, 4, 7, 9, 17, 100, 749, 751])
@pytest.mark.parametrize("batch_size", ["auto", 3, 4])
def test_no_step_of_kto_has_a_rating_alone(examples: int, batch_size: int | str) -> None:
    settled = auto(examples, "kto", {"batch_size": batch_size})["batch_size"]
    plan = JobPlan("job", "made", AlignSettings(), examples, settled, 1, 0)
    sizes = [len(plan.batch(step)) for step in range(plan.steps)]
    assert min(sizes) >= min(2, examples)
    assert max(sizes) <= settled
    assert sum(sizes) == examples
    if batch_size == "auto":
        assert settled == min(8, examples)
        assert auto(examples, "dpo", {"batch_size": "auto"})["batch_size"] == max(1, round(examples / 500))


def test_a_job_ends_by_the_mean_of_its_steps_and_validation_batches_from_now() -> None:
    pace = JobPace()
    assert pace.finish_s(1000.0) is None
    for step, seconds in ((6, 2.0), (7, 4.0)):
        pace.take(JobStepped("job", "made", step, step, 12, seconds=seconds), 10)
    assert pace.finish_s(1000.0) == 1000 + 3 * 5 + 3 * 10
    pace.take(JobStepped("job", "made", 7, 7, 12, seconds=1.0, validated=4), 9)
    assert pace.finish_s(1000.0) == 1000 + 3 * 5 + 1 * 9
    pace.take(JobStepped("job", "made", 7, 7, 12, seconds=1.0, validated=4), 0)
    assert pace.finish_s(1000.0) == 1000 + 3 * 5
    assert pace.finish_s(9000.0) == 9000 + 3 * 5, "also where nothing was trained for long"


def test_a_rating_without_its_label_is_told_what_it_has_not(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    for rows in ([row], [{**row, "label": True}, row]):
        with pytest.raises(BadFile, match=f'^line {len(rows)}: it has no "label": true or false$'):
            ExampleFile(written(tmp_path, rows), tmp_path, "kto")
