"""Every command against a real daemon with a real (tiny) model."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from edged.runtime.printable import printable
from tests.cli.conftest import Daemon, clean_environment, wait_for
from tests.models import tiny_model

PAIRS = [
    {"prompt": f"Question {i}:", "chosen": f" yes, certainly {i}", "rejected": f" no, never ever {i}"}
    for i in range(12)
]


def import_pairs(daemon: Daemon, folder: Path, user: str) -> None:
    """Import PAIRS for `user` and wait until they are learned."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    daemon.run("feedback", "import", str(path), "--user", user, "--format", "trl", "--no-wait")
    with daemon.client() as client:
        wait_for(
            lambda: not client.get("/v1/status")["queue"]["finetune"] and learned(daemon, user), "pairs not learned"
        )


def learned(daemon: Daemon, user: str) -> bool:
    with daemon.client() as client:
        summary = next(item for item in client.get("/v1/adapters")["adapters"] if item["adapter"] == user)
    return bool(summary["pairs_seen"] == summary["pairs_trained"] + summary["pairs_held_out"])


@pytest.fixture(scope="module")
def ada(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user whose adapter has learned PAIRS."""
    import_pairs(daemon, tmp_path_factory.mktemp("ada"), "ada")
    return "ada"


def test_ask_streams_the_same_answer_that_json_shows(daemon: Daemon) -> None:
    arguments = ("ask", "Hello there", "--temperature", "0", "--max-tokens", "12")
    streamed = daemon.run(*arguments).stdout
    answer = json.loads(daemon.run(*arguments, "--json").stdout)
    assert answer["object"] == "chat.completion"
    assert streamed == printable(answer["choices"][0]["message"]["content"]) + "\n"


def test_ask_reads_standard_input(daemon: Daemon) -> None:
    piped = daemon.run("ask", "-", "--temperature", "0", "--max-tokens", "5", input="Hello there").stdout
    assert piped == daemon.run("ask", "Hello there", "--temperature", "0", "--max-tokens", "5").stdout
    assert "prompt is empty" in daemon.run("ask", "-", input=" \n", code=1).stderr


def test_ask_passes_the_daemon_s_refusal_on(daemon: Daemon) -> None:
    result = daemon.run("ask", "x" * 5000, code=1)
    assert result.stderr.startswith("edged: ")
    assert "context" in result.stderr


def test_status_shows_the_model_and_json_has_every_number(daemon: Daemon) -> None:
    brief = daemon.run("status", COLUMNS="300").stdout
    assert re.match(r"Healthy, .+, \d+ users?, ", brief)
    assert "TTFT" not in brief
    text = daemon.run("status", "--all", COLUMNS="300").stdout
    for word in (
        "tiny",
        "Llama",
        "TTFT",
        "prefill",
        "decode",
        "fine-tune",
        "pages",
        "tokens saved",
        "offloaded",
        "spare room",
        "drafts",
        "GiB",
    ):
        assert word in text
    assert "for neighbours" in text
    assert "a guess" in text
    data = json.loads(daemon.run("status", "--json").stdout)
    assert {"model", "queue", "rates", "latency", "bins", "pages", "finetune", "device"} <= data.keys()
    assert {"hit_share", "hit_tokens", "restored_tokens", "spilled_pages", "spill"} <= data["prefix"].keys()
    model = data["cost_model"]
    assert {"mape_percent_by_kind", "after_warm_up", "source", "iterations", "drift", "slowness"} <= model.keys()


@pytest.mark.parametrize("command", ["status", "metrics"])
@pytest.mark.parametrize("as_json", [False, True])
def test_watching_into_a_pipe_gives_a_line_per_refresh(daemon: Daemon, command: str, as_json: bool) -> None:
    arguments = [command, "--watch", "--interval", "0.1", *(["--json"] if as_json else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "edged.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(EDGED_SOCKET=str(daemon.socket)),
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert errors == ""
    assert all(line.endswith("\n") for line in lines)
    if as_json:
        assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize("command", ["status", "metrics"])
def test_watching_on_a_terminal_refreshes_until_ctrl_c(daemon: Daemon, command: str, ada: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        environment = clean_environment(EDGED_SOCKET=str(daemon.socket), TERM="xterm-256color", LINES="50")
        os.execve(sys.executable, [sys.executable, "-m", "edged.cli", command, "-w", "--interval", "0.1"], environment)
    shown = read_until(
        terminal, "decode" if command == "status" else ada, "win rate" if command == "metrics" else "TTFT"
    )
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert "Traceback" not in shown


def read_until(terminal: int, *words: str, seconds: float = 20.0) -> str:
    """What a terminal received, up to when it has all `words`."""
    shown, end = "", time.monotonic() + seconds
    while not all(word in shown for word in words):
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def test_metrics_has_a_row_and_plots_per_user_and_the_documented_json(daemon: Daemon, ada: str) -> None:
    def verdict() -> str:
        return str(json.loads(daemon.run("metrics", ada, "--json").stdout)["adapters"][0]["verdict"])

    # The answers of an idle daemon are judged between two commands, too.
    said, end = "", time.monotonic() + 60.0
    while said != verdict():
        assert time.monotonic() < end, said
        said = verdict()
        text = daemon.run("metrics", ada).stdout
        shown = daemon.run("adapters", "show", ada).stdout
    assert f"{ada}, pairs 10 to {len(PAIRS)}" in text
    assert said in text.splitlines()[0]
    assert re.search(r"\d+ % \(\d+ to \d+\)", text)
    assert said in shown
    assert "CLPD in nats" in text
    assert "┤" in text
    adapters = json.loads(daemon.run("metrics", "--json").stdout)["adapters"]
    item = next(item for item in adapters if item["adapter"] == ada)
    expected = {
        "version",
        "pairs_seen",
        "pairs_trained",
        "win_rate",
        "clpd",
        "reward_accuracy",
        "reward_margin",
        "loss",
    }
    assert expected <= item.keys()
    assert item["pairs_seen"] == len(PAIRS)


def test_a_users_story_is_told_with_two_answers_side_by_side(daemon: Daemon, ada: str) -> None:
    told = json.loads(daemon.run("metrics", ada, "--story", "--json").stdout)
    text = " ".join(daemon.run("metrics", ada, "--story").stdout.split())
    for part in (told["verdict"], told["events"][0]["text"], told["prompt"], f"edged adapters rollback {ada} "):
        assert part in text
    assert "version 0, the untrained adapter" in text
    missing = daemon.run("metrics", ada, "--story", "--versions", "0", "999", code=1).stderr
    assert "version 999 has no answer" in missing
    assert "USER --story" in daemon.run("metrics", "--story", code=2).stderr


def test_metrics_of_an_unknown_user_names_the_known_ones(daemon: Daemon, ada: str) -> None:
    error = daemon.run("metrics", "nobody", code=1).stderr
    assert '"nobody"' in error
    assert ada in error


def test_adapters_are_listed_shown_rolled_back_exported_and_forgotten(daemon: Daemon, tmp_path: Path) -> None:
    import_pairs(daemon, tmp_path, "bob")
    listed = json.loads(daemon.run("adapters", "list", "--json").stdout)["adapters"]
    version = next(item["version"] for item in listed if item["adapter"] == "bob")
    assert version >= 1
    table = daemon.run("adapters", "list", COLUMNS="200").stdout
    for word in ("bob v", "on disk", "last use", "waiting", "held", "early"):
        assert word in table
    item = next(item for item in listed if item["adapter"] == "bob")
    assert item["last_used_at"] >= item["updated_at"]
    shown = daemon.run("adapters", "show", "bob", COLUMNS="200").stdout
    for word in ("trained", "held out", "KL", "neutral text", "serving", "edged adapters rollback bob"):
        assert word in shown

    assert "already" in daemon.run("adapters", "rollback", "bob", str(version)).stdout
    rolled = json.loads(daemon.run("adapters", "rollback", "bob", "0", "--json").stdout)
    assert rolled["version"] == version + 1
    assert "no version 999" in daemon.run("adapters", "rollback", "bob", "999", code=1).stderr

    with daemon.client() as client:
        wait_for(lambda: any(item["on_disk"] for item in client.get("/v1/adapters/bob")["versions"]), "never saved")
        on_disk = {item["adapter"]: item["disk_bytes"] for item in client.get("/v1/adapters")["adapters"]}
    assert on_disk["bob"] > 1000
    folder = tmp_path / "peft"
    assert str(folder) in daemon.run("adapters", "export", "bob", "--output", str(folder)).stdout
    assert {path.name for path in folder.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    card = (folder / "README.md").read_text()
    assert "library_name: peft" in card
    assert f"of {len(PAIRS)} preference pairs learned" in card
    # Where PEFT finds the base again.
    base = Path(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    assert (base / "config.json").is_file()
    assert json.dumps(str(base)) in card
    weights = load_file(folder / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(
        PeftModel.from_pretrained(tiny_model(), str(folder)), save_embedding_layers=False
    )
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert "version 1 of joy" in daemon.run("adapters", "import", str(folder), "--user", "joy").stdout
    assert "not an empty folder" in daemon.run("adapters", "export", "bob", "--output", str(folder), code=1).stderr

    assert daemon.run("adapters", "forget", "bob", input="n\n", code=1).stdout.startswith("Delete everything")
    unknown = daemon.run("adapters", "forget", "bobby", input="n\n", code=1).stdout
    assert unknown.startswith('No adapter is called "bobby" (known: ')
    forgotten = daemon.run("adapters", "forget", "bob", "--yes").stdout
    assert "bob is forgotten" in forgotten
    assert "copies made before still hold bob: backups" in forgotten
    assert "bob" not in daemon.run("adapters", "list").stdout
    assert "bob" in daemon.run("adapters", "show", "bob", code=1).stderr


def test_import_keeps_good_lines_and_reports_bad_ones_by_number(daemon: Daemon, tmp_path: Path) -> None:
    lines = [
        json.dumps({"prompt": "A:", "chosen": " one", "rejected": " two"}),
        "{broken",
        json.dumps({"prompt": "A:", "chosen": " same", "rejected": " same"}),
        json.dumps({"prompt": "B:", "chosen": " three", "rejected": " four"}),
    ]
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    result = daemon.run("feedback", "import", str(path), "--user", "carl", "--format", "trl", code=1)
    assert "line 2: " in result.stderr
    assert "line 3: " in result.stderr
    assert "line 1: " not in result.stderr
    assert result.stdout == "2 pairs imported for carl, 2 bad lines not learned\n2 of 2 have their outcome: 2 learned\n"
    exported = [json.loads(line) for line in daemon.run("feedback", "export", "--user", "carl").stdout.splitlines()]
    assert [pair["chosen"] for pair in exported] == [" one", " three"]


def test_import_of_hh_dialogues_takes_the_part_that_is_asked_for(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "hh.jsonl"
    dialogue = "\n\nHuman: Question {}?\n\nAssistant: {}"
    path.write_text(
        "".join(
            json.dumps({"chosen": dialogue.format(i, "Yes."), "rejected": dialogue.format(i, "No.")}) + "\n"
            for i in range(6)
        )
    )
    arguments = ("feedback", "import", str(path), "--user", "dora", "--format", "hh", "--json")
    result = json.loads(daemon.run(*arguments, "--skip", "2", "--limit", "3").stdout)
    counts = {"user": "dora", "pairs": 3, "waiting_already": 0, "bad_lines": []}
    assert result == {**counts, "outcomes": {"trained": 3}, "waits_for": None}
    exported = [json.loads(line) for line in daemon.run("feedback", "export", "--user", "dora").stdout.splitlines()]
    assert [pair["messages"][0]["content"] for pair in exported] == ["Question 2?", "Question 3?", "Question 4?"]


def test_an_exported_file_can_be_imported_for_another_user(daemon: Daemon, tmp_path: Path, ada: str) -> None:
    path = tmp_path / "export.jsonl"
    assert daemon.run("feedback", "export", "--user", ada, "-o", str(path)).stdout.startswith(f"{len(PAIRS)} pairs")
    result = json.loads(daemon.run("feedback", "import", str(path), "--user", "eve", "--json").stdout)
    assert result["pairs"] == len(PAIRS)


def test_import_of_a_missing_file_or_for_an_impossible_user_says_so(daemon: Daemon, tmp_path: Path) -> None:
    assert "nowhere.jsonl" in daemon.run("feedback", "import", "nowhere.jsonl", "--user", "ada", code=1).stderr
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(PAIRS[0]))
    result = daemon.run("feedback", "import", str(path), "--user", "a/b", "--format", "trl", code=1)
    assert "line 1: " in result.stderr
    assert "a/b" in result.stderr


def chat(daemon: Daemon, *lines: str, user: str = "fay") -> subprocess.CompletedProcess[str]:
    """A conversation typed into `edged chat`."""
    arguments = ["--user", user] if user else []
    return daemon.run("chat", *arguments, "--max-tokens", "8", "--temperature", "1", input="\n".join(lines) + "\n")


def signals(daemon: Daemon, user: str) -> list[tuple[str, str, str]]:
    """(source, chosen, rejected) of the pairs that `user` made, without single ratings."""
    lines = daemon.run("feedback", "export", "--user", user).stdout.splitlines()
    pairs = [pair for pair in map(json.loads, lines) if "chosen" in pair]
    return [(pair["source"], pair["chosen"], pair["rejected"]) for pair in pairs]


def test_picking_in_a_chat_makes_a_pair_of_the_two_candidates(daemon: Daemon) -> None:
    result = chat(daemon, "Hello", "/pick", "2", "/quit", user="gus")
    assert result.stderr == ""
    assert "noted: 1 pair to learn from" in result.stdout
    ((source, chosen, rejected),) = signals(daemon, "gus")
    assert source == "chosen"
    shown = ["".join(line.split()) for line in result.stdout.splitlines()]
    for number, text in ((2, chosen), (1, rejected)):
        assert "".join(f"{number}{printable(text)}".split()) in "".join(shown)


def test_what_was_taught_in_a_chat_is_said_to_be_learned(daemon: Daemon) -> None:
    result = chat(daemon, "Hello", "/edit Good morning to you", "/quit", user="guy")
    assert re.search(r"^noted: 1 pair to learn from\n  learned as guy@1 after [\d.]+ s$", result.stdout, re.MULTILINE)


def test_a_chat_word_by_word_says_the_same(daemon: Daemon) -> None:
    result = chat(daemon, "/pace", "Hello", "/pace off", "/up", user="kim")
    assert result.stderr == ""
    assert result.stdout.startswith("word by word\n")
    assert "as it is made\nnoted" in result.stdout
    assert "QoE" in daemon.run("status", "--all").stdout


def test_editing_in_a_chat_prefers_the_edited_text(daemon: Daemon) -> None:
    chat(daemon, "Hello", "/edit Good morning to you", user="hal")
    ((source, chosen, _),) = signals(daemon, "hal")
    assert (source, chosen) == ("edit", "Good morning to you")


def test_regenerating_and_accepting_in_a_chat_prefers_the_second_answer(daemon: Daemon) -> None:
    result = chat(daemon, "Hello", "/regen", "/up", user="ian")
    assert "noted: 1 pair to learn from" in result.stdout
    ((source, _, _),) = signals(daemon, "ian")
    assert source == "regenerate"


def test_a_thumb_alone_is_learned_and_says_what_it_waits_for(daemon: Daemon) -> None:
    result = chat(daemon, "Hello", "/down", user="jim")
    assert "noted: learned as a single rating; waits for an answer" in result.stdout
    assert "learned as jim@1" in result.stdout


def test_mistakes_in_a_chat_are_explained_and_the_chat_goes_on(daemon: Daemon) -> None:
    result = chat(daemon, "/up", "/nonsense", "/pick 1", "/pick x", "Hello", "/edit ", "/help", "/new", "/down")
    for message in ("no answer yet", "is no command", "no candidates", "is no candidate", "edited answer is empty"):
        assert message in result.stderr
    assert "/regen" in result.stdout


def test_a_chat_without_a_user_says_who_would_learn(daemon: Daemon) -> None:
    result = chat(daemon, "Hello", "/up", user="")
    assert "--user NAME" in result.stderr


def test_a_preference_is_written_shown_and_cleared(daemon: Daemon) -> None:
    assert daemon.run("teach", "uli").stdout == "uli: nothing is written\n"
    written = 'uli: always: "formal, metric units" (in the system prompt of every chat)\n'
    assert daemon.run("teach", "uli", "formal, metric units").stdout == written
    assert daemon.run("teach", "uli").stdout == written
    assert json.loads(daemon.run("teach", "uli", "--json").stdout)["in_prompt"] is True
    assert 'always: "formal, metric units"' in chat(daemon, "Hello", user="uli").stdout
    assert daemon.run("teach", "uli", "--clear").stdout == "uli: nothing is written\n"
    assert "always" not in chat(daemon, "Hello", user="uli").stdout


def test_a_preference_that_is_refused_says_why(daemon: Daemon) -> None:
    refused = daemon.run("teach", "uli", "x" * 501, code=1)
    assert refused.stderr == 'edged: "text": 501 characters are too many: at most 500\n'
    daemon.run("teach", "uli", "formal", "--clear", code=2)


def test_a_line_that_is_not_believed_cannot_be_struck(daemon: Daemon, ada: str) -> None:
    refused = daemon.run("teach", ada, "--strike", "nonsense", code=1)
    assert refused.stderr.startswith(f'edged: "nonsense" is no line of {ada}: there are ')
    refused = daemon.run("teach", ada, "--unstrike", "nonsense", code=1)
    assert refused.stderr == f'edged: "nonsense" is no struck line of {ada}: there are none\n'
