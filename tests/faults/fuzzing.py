"""Three accounts of different roles use one daemon in any order, while its promises are looked at after each step.

A rule draws a request; `_checked` compares its status with what the caller may do, looks for other users' secrets in
every byte that comes back, and remembers what was acknowledged. Hypothesis shrinks what fails to the fewest steps.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from edged.store.restore import restore
from tests.api.accounts import ANN, BOB, Answer, Client
from tests.api.live import LiveDaemon
from tests.models import save_tiny

ADMIN, SHARED = "root", "kitchen"
ROLES = {ADMIN: {"admin", "use", "train"}, ANN: {"use", "train"}, BOB: {"use"}}
SPEAKS_FOR = {ADMIN: {ADMIN, ANN, BOB, SHARED}, ANN: {ANN, SHARED}, BOB: {BOB}}
ANNOUNCED = {"loading", "draining", "cancelled", "queue_full", "busy", "timeout", "too_many_requests"}
"""Codes with which the daemon may answer 503."""
RULES = [
    {"peers": [f"user:{ANN}"], "roles": ["use", "train"], "users": ["@self", f"{SHARED}*"]},
    {"peers": [f"user:{BOB}"], "roles": ["use"]},
]
SETTINGS = {
    "api__socket_mode": "0666",
    "access__rules": json.dumps(RULES),
    "store__save_every_s": 0.05,
    "serving__on_update": "pin",
    "align__micro_batch_pairs": 2,
    "cache__memory_mb": 2,
}
RELOADED = ("align.beta = 0.4", "guard.held_out_share = 0.5", "feedback.pairs_per_hour = 3", "limits.stored_mb = 1",
            "scheduler.tbt_slowdown = 2.0", "serving.max_queue = 4", "align.rank = 3", "align.beta = -1")  # fmt: skip
"""Some apply, some need a restart, the last is refused."""
FOR_ADMINS = ("/v1/settings", "/v1/store", "/v1/backup", "/v1/trace?seconds=60")
READ = (*FOR_ADMINS, "/v1/models", "/v1/adapters", "/v1/adapters/{}", "/v1/adapters/{}/export", "/v1/models/tiny:{}",
        "/v1/feedback", "/v1/feedback?user={}", "/v1/quarantine", "/v1/quarantine?user={}", "/v1/status", "/metrics",
        "/openapi.json")  # fmt: skip

ODD = (b"plain", b"\xff\xfe", b"\xed\xa0\x80", "Zoë".encode(), b"", b"a b")
ODD_HEADERS = ("X-Request-Id", "X-Session-Id", "X-Edged-Run", "X-Edged-Application", "Authorization", "Last-Event-ID")
CONTENTS = (b'{"prompt":"a","completion":"b"}\n' * 3, b'{"prompt":"a","chosen":"b","rejected":"c"}\n' * 3,
            b'{"prompt":"\xff"}\n', b"[" * 2000, b"\r\n--Xb\r\n", b"")  # fmt: skip

callers = st.sampled_from([ADMIN, ANN, BOB])
users = st.sampled_from([ADMIN, ANN, BOB, SHARED])
options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.7, 2]),
        "n": st.integers(1, 4),
        "top_p": st.sampled_from([1e-9, 0.5, 1]),
        "repetition_penalty": st.sampled_from([0.01, 1.0, 2.0]),
        "min_tokens": st.integers(0, 6),
        "logprobs": st.integers(0, 5),
        "logit_bias": st.dictionaries(st.sampled_from(["3", "65", "100"]), st.sampled_from([-100, 100]), max_size=2),
        "stop": st.sampled_from(["a", ["\n", "e"]]),
        "service_tier": st.sampled_from(["default", "flex"]),
    },
)


def content(path: Path) -> bytes:
    """A file's content; nothing of one that another user's learning has renamed since it was listed."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


class ThreeAccounts(RuleBasedStateMachine):
    """One daemon, an admin, an account that teaches and one that only asks."""

    completions = Bundle("completions")
    feedback = Bundle("feedback")
    files = Bundle("files")
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="edged-fuzz-"))
        self.folder.chmod(0o755)
        self.model, self.config = (
            save_tiny(self.folder / "tiny", max_position_embeddings=256),
            self.folder / "edged.toml",
        )
        self.config.write_text("")
        self.daemon = self._start()
        self.numbers = itertools.count()
        self.acknowledged: dict[str, set[str]] = {user: set() for user in SPEAKS_FOR[ADMIN]}
        """Prompts of pairs, by user, that must be in the export."""
        self.secrets: dict[str, set[bytes]] = {user: set() for user in SPEAKS_FOR[ADMIN]}
        self.answered: dict[tuple[str, str], str] = {}
        """Greedy text by weights and prompt."""

    def _start(self) -> LiveDaemon:
        return LiveDaemon(self.folder / "run", self.model, config=self.config, **SETTINGS).wait_until_ready()

    # -- what is looked at -------------------------------------------------------------------------------------------

    def call(self, caller: str, method: str, path: str, body: Any = None, role: str = "", user: str = "") -> Answer:
        """A request whose answer is looked at; it must be refused where the caller lacks the role or the user."""
        answer = Client(caller, self.daemon.socket).call(method, path, body)
        self._checked(answer, caller, f"{caller}: {method} {path} {json.dumps(body)[:200]}")
        if (role and role not in ROLES[caller]) or (user and user not in SPEAKS_FOR[caller]):
            assert answer.status in (400, 403, 404), (answer.status, answer.data[:300], path)
        return answer

    def _checked(self, answer: Answer, caller: str, what: str) -> None:
        said = f"{what}: {answer.status} {answer.data[:300]!r}"
        assert answer.status < 500 or (answer.status == 503 and answer.code in ANNOUNCED), said
        for user in SPEAKS_FOR[ADMIN] - SPEAKS_FOR[caller]:
            found = [secret for secret in self.secrets[user] if secret in answer.data]
            assert not found, f"{said} has {user}'s {found}"

    def _secret(self, user: str) -> str:
        secret = f"secret-{user}-{next(self.numbers):06d}"
        self.secrets[user].add(secret.encode())
        return secret

    @invariant()
    def what_was_acknowledged_is_there_and_what_was_forgotten_is_not(self) -> None:
        answer = Client(ADMIN, self.daemon.socket).get("/v1/feedback")
        assert answer.status == 200, answer.data[:300]
        stored: dict[str, set[str]] = {user: set() for user in SPEAKS_FOR[ADMIN]}
        for row in answer.lines:
            stored[row["user"]].add(row["prompt"])
        for user, prompts in self.acknowledged.items():
            assert prompts <= stored[user], f"{user} lost {prompts - stored[user]}"

    # -- what happens ------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Something to look for from the beginning."""
        for user in (ANN, BOB, SHARED):
            self.teach(ADMIN, user)
            self.ask(ADMIN, user, {"temperature": 0}, 4)

    @rule(target=completions, caller=callers, user=st.none() | users, fields=options, tokens=st.integers(1, 12))
    def ask(self, caller: str, user: str | None, fields: dict[str, Any], tokens: int) -> Any:
        prompt = self._secret(user) if user and user in SPEAKS_FOR[caller] else "what everybody asks"
        body = {"prompt": prompt, "max_tokens": tokens, **({"user": user} if user else {}), **fields}
        answer = self.call(caller, "POST", "/v1/completions", body, "use", user or "")
        if answer.status != 200:
            return multiple()
        weights = answer.json["system_fingerprint"]
        assert weights == "base" or (user and weights.startswith(f"{user}@")), (weights, body)
        plain = not set(fields) - {"temperature", "service_tier"}
        if plain and fields.get("temperature") == 0:
            (choice,) = answer.json["choices"]
            # A longer answer to the same begins with the shorter one.
            key, text = (weights, prompt), choice["text"].rstrip("�")
            known = self.answered.setdefault(key, text)
            assert text.startswith(known) or known.startswith(text), (key, text, known)
        return (answer.json["id"], user, len(answer.json["choices"]))

    @rule(caller=callers, user=users, tokens=st.integers(20, 200))
    def leave_in_the_middle(self, caller: str, user: str, tokens: int) -> None:
        body = {"prompt": "never mind", "max_tokens": tokens, "user": user, "stream": True, "ignore_eos": True}
        data = json.dumps(body).encode()
        with Client(caller, self.daemon.socket).connected() as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: edged\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            connection.recv(64)

    @rule(caller=callers, user=users)
    def teach(self, caller: str, user: str) -> None:
        prompt = self._secret(user)
        body = {"user": user, "prompt": prompt, "chosen": "It is so.", "rejected": "no no no"}
        answer = self.call(caller, "POST", "/v1/feedback", body, "train", user)
        if answer.status == 200:
            self.acknowledged[user].add(prompt)

    @rule(
        target=feedback, caller=callers, completion=completions, kind=st.sampled_from(["up", "down", "chosen", "edit"])
    )
    def rate(self, caller: str, completion: tuple[str, str | None, int], kind: str) -> Any:
        completion_id, user, choices = completion
        more: dict[str, Any] = {"chosen": {"choice": choices - 1}, "edit": {"text": "edited"}}.get(kind, {})
        body = {"completion_id": completion_id, "signal": kind, **more}
        answer = self.call(caller, "POST", "/v1/feedback", body, "train", user or "")
        return answer.json["id"] if answer.status == 200 else multiple()

    @rule(caller=callers, feedback_id=feedback)
    def follow(self, caller: str, feedback_id: str) -> None:
        self.call(caller, "GET", f"/v1/feedback/{feedback_id}")

    @rule(caller=callers)
    def look_everywhere(self, caller: str) -> None:
        for path in READ:
            for user in sorted(SPEAKS_FOR[ADMIN]) if "{}" in path else [""]:
                role = "admin" if path in FOR_ADMINS else ""
                self.call(caller, "GET", path.format(user), role=role, user=user)

    @rule(caller=callers)
    def listen(self, caller: str) -> None:
        with Client(caller, self.daemon.socket).connected() as connection:
            connection.sendall(b"GET /v1/events?backlog=99 HTTP/1.1\r\nHost: edged\r\n\r\n")
            data = connection.recv(65536)
        assert int(data.split()[1]) in (200, 429), data
        for other in SPEAKS_FOR[ADMIN] - SPEAKS_FOR[caller]:
            assert not any(secret in data for secret in self.secrets[other]), data

    @rule(caller=callers, user=users, version=st.integers(0, 5))
    def roll_back(self, caller: str, user: str, version: int) -> None:
        self.call(caller, "POST", f"/v1/adapters/{user}/rollback", {"version": version}, "train", user)

    @rule(caller=callers, user=users)
    def mend(self, caller: str, user: str) -> None:
        self.call(caller, "POST", f"/v1/adapters/{user}/mend", role="train", user=user)

    @rule(caller=callers, one=users, other=users)
    def hand_over(self, caller: str, one: str, other: str) -> None:
        """Export an adapter and import it for somebody else."""
        exported = self.call(caller, "GET", f"/v1/adapters/{one}/export", role="train", user=one)
        if exported.status != 200:
            return
        client = Client(caller, self.daemon.socket)
        with client.connected() as connection:
            head = f"POST /v1/adapters/{other}/import HTTP/1.1\r\nHost: edged\r\nConnection: close\r\n"
            connection.sendall(f"{head}Content-Length: {len(exported.data)}\r\n\r\n".encode() + exported.data)
            status = int(connection.recv(4096).split()[1])
        assert status in ((200, 409, 429) if other in SPEAKS_FOR[caller] else (403, 404)), status

    @rule(caller=callers, user=users, value=st.sampled_from(ODD), name=st.sampled_from(ODD_HEADERS))
    def send_an_odd_header(self, caller: str, user: str, value: bytes, name: str) -> None:
        data = json.dumps({"prompt": "odd", "max_tokens": 1, "user": user}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: edged\r\nConnection: close\r\n%b: %b\r\nContent-Length: %d\r\n\r\n"
        )
        with Client(caller, self.daemon.socket).connected() as connection:
            connection.sendall(head % (name.encode(), value, len(data)) + data)
            answer = connection.recv(65536)
        allowed = (200, 400, 429, 503) if user in SPEAKS_FOR[caller] else (400, 403)
        assert int(answer.split()[1]) in allowed, answer

    @rule(target=files, caller=callers, name=st.sampled_from(ODD), content=st.sampled_from(CONTENTS))
    def upload(self, caller: str, name: bytes, content: bytes) -> Any:
        fields = b'--XbX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        fields += b'--XbX\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n' % name
        form = fields + content + b"\r\n--XbX--\r\n"
        kind = "multipart/form-data; boundary=XbX"
        answer = Client(caller, self.daemon.socket).call("POST", "/v1/files", form, **{"Content-Type": kind})
        self._checked(answer, caller, f"{caller} uploads {name!r}")
        assert answer.status in ((200, 400, 403, 429) if "train" in ROLES[caller] else (403,)), answer.data
        return (answer.json["id"], caller) if answer.status == 200 else multiple()

    @rule(target=jobs, caller=callers, file=files, method=st.sampled_from(["supervised", "dpo"]))
    def begin_a_job(self, caller: str, file: tuple[str, str], method: str) -> Any:
        suffix = f"{caller}-{next(self.numbers)}"
        body = {"model": "tiny", "training_file": file[0], "suffix": suffix, "method": {"type": method}}
        answer = self.call(caller, "POST", "/v1/fine_tuning/jobs", body, "train")
        if caller not in (ADMIN, file[1]):
            assert answer.status in (403, 404), answer.data
        return (answer.json["id"], caller) if answer.status == 200 else multiple()

    @rule(
        caller=callers, job=jobs, what=st.sampled_from(["", "/events", "/checkpoints", "/pause", "/resume", "/cancel"])
    )
    def use_a_job(self, caller: str, job: tuple[str, str], what: str) -> None:
        method = "POST" if what in ("/pause", "/resume", "/cancel") else "GET"
        answer = self.call(caller, method, f"/v1/fine_tuning/jobs/{job[0]}{what}", role="train")
        if caller not in (ADMIN, job[1]):
            assert answer.status in (403, 404), answer.data

    @rule(caller=callers, file=files)
    def delete_a_file(self, caller: str, file: tuple[str, str]) -> None:
        answer = self.call(caller, "DELETE", f"/v1/files/{file[0]}", role="train")
        if caller not in (ADMIN, file[1]):
            assert answer.status in (403, 404), answer.data

    @rule(caller=callers, user=users, action=st.sampled_from(["release", "drop"]))
    def decide(self, caller: str, user: str, action: str) -> None:
        self.call(caller, "POST", "/v1/quarantine", {"user": user, "action": action}, "train", user)

    @rule(caller=callers, user=users)
    def forget(self, caller: str, user: str) -> None:
        answer = self.call(caller, "DELETE", f"/v1/adapters/{user}", role="train", user=user)
        if answer.status != 200:
            return
        self.acknowledged[user].clear()
        self.answered = {key: text for key, text in self.answered.items() if not key[0].startswith(f"{user}@")}
        files = [path for path in self.daemon.data.rglob("*") if path.is_file()]
        left = [(path, secret) for path in files for secret in self.secrets[user] if secret in content(path)]
        assert not left, f"{user} is forgotten, and {left} are there"
        self.secrets[user].clear()

    @rule(caller=callers, lines=st.lists(st.sampled_from(RELOADED), max_size=3, unique=True))
    def reload(self, caller: str, lines: list[str]) -> None:
        tables: dict[str, list[str]] = {}
        for line in lines:
            section, _, setting = line.partition(".")
            if setting.split()[0] not in " ".join(tables.get(section, [])):
                tables.setdefault(section, []).append(setting)
        self.config.write_text("".join(f"[{name}]\n" + "\n".join(rows) + "\n" for name, rows in tables.items()))
        self.call(caller, "POST", "/v1/reload", role="admin")

    @rule(path=st.sampled_from(["/v1/store/prune", "/v1/store/vacuum"]), caller=callers)
    def keep_house(self, caller: str, path: str) -> None:
        self.call(caller, "POST", path, {}, role="admin")

    @rule(bodies=st.lists(st.tuples(callers, users, st.integers(1, 3)), min_size=2, max_size=6))
    def ask_together(self, bodies: list[tuple[str, str, int]]) -> None:
        """Open requests of several accounts share iterations."""
        open_requests = []
        for caller, user, choices in bodies:
            data = json.dumps({"prompt": "together", "max_tokens": 16, "user": user, "n": choices}).encode()
            connection = Client(caller, self.daemon.socket).connected()
            head = "POST /v1/completions HTTP/1.1\r\nHost: edged\r\nConnection: close\r\n"
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            open_requests.append((caller, user, connection))
        for caller, user, connection in open_requests:
            data = b""
            while piece := connection.recv(65536):
                data += piece
            connection.close()
            status = int(data.split()[1])
            assert status in ((200, 429, 503) if user in SPEAKS_FOR[caller] else (403,)), data[:300]
            for other in SPEAKS_FOR[ADMIN] - SPEAKS_FOR[caller]:
                assert not any(secret in data for secret in self.secrets[other]), data[:300]

    @rule(number=st.sampled_from([signal.SIGKILL, signal.SIGTERM]))
    def end_and_start_again(self, number: signal.Signals) -> None:
        code = self.daemon.stop(number)
        assert code == (-number if number == signal.SIGKILL else 0), self.daemon.log[-3000:]
        self._start_again()

    @rule()
    def restore_a_backup(self) -> None:
        backup = self.call(ADMIN, "GET", "/v1/backup")
        assert self.daemon.stop() == 0, self.daemon.log[-3000:]
        if backup.status == 200:
            file = self.folder / "backup.tar"
            file.write_bytes(backup.data)
            aside = restore(file, self.daemon.data, force=True)[1]
            assert aside is not None
            shutil.rmtree(aside)
        self._start_again()

    def _start_again(self) -> None:
        # The numbers of versions that were not on disk yet are given again.
        self.answered = {key: text for key, text in self.answered.items() if key[0] == "base"}
        if "beta = -1" in self.config.read_text():
            self.config.write_text("")
        self.daemon = self._start()

    def teardown(self) -> None:
        """At rest every page is free or cached, and the daemon ends as it should."""
        try:
            if self.daemon.process.is_alive():
                self._settle()
                assert self.daemon.idle(), self.daemon.status()
                assert self.daemon.stop() == 0, self.daemon.log[-3000:]
            assert "Traceback" not in self.daemon.log, self.daemon.log[-3000:]
        finally:
            self.daemon.process.kill()
            self.daemon.process.join()
            shutil.rmtree(self.folder)

    def _settle(self) -> None:
        """Wait until nothing is being learned."""
        end = time.monotonic() + 60
        while (tuning := self.daemon.status()["finetune"])["pairs_queued"] or tuning["testing"]:
            assert time.monotonic() < end, tuning
            time.sleep(0.05)
