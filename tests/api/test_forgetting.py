"""Forgetting is done to the end, whoever leaves and whatever was under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from edged.align.feedback.pair import PairRetired, VersionPublished
from edged.align.feedback.signals import record_pair
from edged.api.adapters import forget
from edged.api.admission import ERASURES_PER_MINUTE, LimitReached, UserLimits
from edged.api.feedback_intake import FeedbackIntake
from edged.api.reading_speeds import ReadingSpeeds
from edged.api.runs import ApplicationRuns
from edged.api.services import LIFECYCLE, Lifecycle, Services
from edged.api.version_answers import VersionAnswers
from edged.api.written_preferences import WrittenPreferences
from edged.http.access import Caller
from edged.settings.access import Role
from edged.settings.live import Live
from edged.settings.load import AlignSettings, FairnessSettings, LimitSettings, Settings
from edged.store import Store, utc_now
from edged.store.adapters import insert_version
from edged.store.base_models import serve_base
from edged.store.maintenance import Maintenance
from edged.text.tokenizer import Tokenizer
from tests.align.feedback.desk import Desk
from tests.engine.harness import BuiltEngine, Client, running_engine
from tests.models import byte_tokenizer


async def no_round(user: str) -> None:
    """Drop a user's round where there is none."""


class SlowCodec(Tokenizer):
    """A codec that tokenizes when it may."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer(), "slow")
        self.entered = threading.Event()
        self.may = threading.Event()

    def encode_prompt(self, text: str) -> list[int]:
        self.entered.set()
        assert self.may.wait(10)
        return super().encode_prompt(text)


class Engine:
    """Notes what it is asked; while it forgets an adapter, a version of it is still written."""

    def __init__(self, store: Store) -> None:
        self.calls: list[str] = []
        self.forgetting = threading.Event()
        self.may_forget = threading.Event()
        self._store = store

    def follows(self, adapter: str) -> bool:
        return False

    def submit_pairs(self, pairs: list[Any]) -> None:
        self.calls.append("submit")

    def block_saves(self, name: str, held: bool) -> None:
        assert not held

    def forget(self, name: str, pair_ids: set[int]) -> Future[None]:
        self.calls.append("forget")
        self.forgetting.set()
        done: Future[None] = Future()

        def work() -> None:
            assert self.may_forget.wait(10)
            self._store.write(lambda db: insert_version(db, "t", asdict(VersionPublished(name, 1, 0, "trained"))))
            done.set_result(None)

        threading.Thread(target=work).start()
        return done


class Scene:
    """A daemon's parts, with a pair of ann's that is on its way into the engine."""

    def __init__(self, folder: Path, engine: Any = None) -> None:
        self.store, self.tokenizer = Store(folder / "edged.db"), SlowCodec()
        self.engine, self._said = engine or Engine(self.store), 0
        self.feedback_intake = FeedbackIntake(self.store, self.tokenizer, cast(Any, self.engine), Live(Settings()), "")
        self.store.write(lambda db: serve_base(db, "now")).result()
        pair = self.store.write(lambda db: record_pair(db, "ann", "good", "bad", utc_now(), prompt="Well?")).result()
        self.feedback_intake.learn_soon(pair.pair_ids)
        self.maintenance = Maintenance(self.store, Live(Settings()))
        self._app = web.Application()
        self.meanwhile: Callable[[], object] = lambda: None
        """Called when ann's rows are deleted, before the engine hears of it."""
        services = SimpleNamespace(
            store=self.store,
            engine=self.engine,
            feedback_intake=self.feedback_intake,
            job_runner=SimpleNamespace(refresh=lambda: self.meanwhile()),
            forgetting=set(),
            eraser=None,
            forgetting_stages={},
            limits=UserLimits(LimitSettings()),
            maintenance=self.maintenance,
            runs=ApplicationRuns(FairnessSettings, self.store),
            rounds=SimpleNamespace(forget_user=no_round),
            reading_speeds=ReadingSpeeds(Live(Settings()), self.store),
            preferences=WrittenPreferences(self.store, Tokenizer(byte_tokenizer(), "bytes")),
            tastes=SimpleNamespace(renew=lambda: None),
            practice=SimpleNamespace(forget=lambda name: None),
            version_answers=VersionAnswers(self.store, cast(Any, None), cast(Any, self.engine), *[cast(Any, None)] * 2),
        )
        self._app[LIFECYCLE] = Lifecycle("ready", cast(Services, services))

    def forget(self, role: Role = "admin") -> asyncio.Task[web.Response]:
        request = make_mocked_request("DELETE", "/v1/adapters/ann", match_info={"name": "ann"}, app=self._app)
        request["caller"] = Caller("the operator", "root", "root", frozenset({role}), ("*",), "admin")
        return asyncio.create_task(forget(request))

    def teach(self, user: str) -> None:
        """A pair of a user, on its way into the engine."""
        written = self.store.write(lambda db: record_pair(db, user, "yes", "no", utc_now(), prompt=f"{self._said}?"))
        written.add_done_callback(self.feedback_intake.learn_from)
        written.result()
        self._said += 1

    def rows(self) -> int:
        counts = (f"(SELECT count(*) FROM {table})" for table in ("pairs", "signals", "adapter_versions"))
        return int(self.store.read(lambda db: db.execute(f"SELECT {' + '.join(counts)}").fetchone()[0]))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.tokenizer.may.set()
    scene.engine.may_forget.set()
    scene.feedback_intake.close()
    scene.store.close()


async def test_who_forgets_himself_in_a_loop_is_told_to_wait(scene: Scene) -> None:
    scene.tokenizer.may.set()
    scene.engine.may_forget.set()
    for _ in range(ERASURES_PER_MINUTE):
        scene.store.write(lambda db: record_pair(db, "ann", "good", "bad", utc_now(), prompt="Well?")).result()
        await scene.forget("train")
    with pytest.raises(LimitReached, match="3 erasures a minute") as refused:
        await scene.forget("train")
    assert 0 < refused.value.retry_after_s <= 60
    scene.store.write(lambda db: record_pair(db, "ann", "good", "bad", utc_now(), prompt="Well?")).result()
    await scene.forget("admin")


async def test_nobody_waits_for_the_whole_file_to_be_rewritten(scene: Scene) -> None:
    scene.tokenizer.may.set()
    scene.engine.may_forget.set()
    said: list[str] = []
    scene.store.write(lambda db: db.conn.set_trace_callback(said.append)).result()
    await scene.forget()
    assert not [line for line in said if line.startswith("VACUUM")]
    assert not scene.maintenance.rewrite_at_night(12)
    assert scene.maintenance.rewrite_at_night(3)
    assert [line for line in said if line.startswith("VACUUM")]
    assert not scene.maintenance.rewrite_at_night(3)


async def within(event: threading.Event, seconds: float = 10.0) -> bool:
    return await asyncio.to_thread(event.wait, seconds)


async def test_pairs_on_their_way_reach_the_engine_before_it_forgets(scene: Scene) -> None:
    assert await within(scene.tokenizer.entered)
    answer = scene.forget()
    assert not await within(scene.engine.forgetting, 0.2)
    scene.tokenizer.may.set()
    scene.engine.may_forget.set()
    await answer
    assert scene.engine.calls == ["submit", "forget"]


async def test_what_is_written_of_it_meanwhile_goes_too_even_if_the_client_has_left(scene: Scene) -> None:
    scene.tokenizer.may.set()
    answer = scene.forget()
    assert await within(scene.engine.forgetting)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    written = scene.store.read(lambda db: db.execute("PRAGMA data_version").fetchone())
    scene.engine.may_forget.set()
    for _ in range(500):
        await asyncio.sleep(0.01)
        if scene.store.read(lambda db: db.execute("PRAGMA data_version").fetchone()) != written and not scene.rows():
            break
    assert scene.rows() == 0


async def test_feedback_that_came_meanwhile_stays(scene: Scene) -> None:
    scene.tokenizer.may.set()
    answer = scene.forget()
    assert await within(scene.engine.forgetting)
    scene.store.write(lambda db: record_pair(db, "ann", "new", "old", utc_now(), prompt="And?")).result()
    scene.engine.may_forget.set()
    await answer
    assert scene.store.read(lambda db: db.execute("SELECT chosen FROM pairs").fetchall()) == [("new",)]


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[tuple[Scene, BuiltEngine, Client]]:
    """A scene with an engine, which has ann's pair and opens no steps."""
    with running_engine(tmp_path) as (engine, client):
        scene = Scene(tmp_path, engine)
        engine.pause_finetuning(True)
        scene.tokenizer.may.set()
        scene.feedback_intake.settled().result(10)
        yield scene, engine, client
        scene.feedback_intake.close()
        scene.store.close()


async def test_a_pair_that_comes_while_somebody_else_is_forgotten_is_learned(
    learning: tuple[Scene, BuiltEngine, Client],
) -> None:
    scene, engine, client = learning
    scene.meanwhile = lambda: scene.teach("bob")
    await scene.forget()
    engine.pause_finetuning(False)
    await asyncio.to_thread(client.wait, lambda: client.of(PairRetired))
    assert [(each.adapter, each.state) for each in client.of(PairRetired)] == [("bob", "trained")]


async def test_no_pair_is_learned_twice_for_a_rating_that_waited_and_was_forgotten(
    learning: tuple[Scene, BuiltEngine, Client],
) -> None:
    scene, engine, _ = learning
    scene.feedback_intake.settings.current = Settings(align=AlignSettings(unpaired="off"))
    desk = Desk(scene.store)
    desk.account = "ann"
    desk.answer("a", "an answer", user="ann")
    scene.feedback_intake.learn_soon(desk.report("a", "up", user="ann").pair_ids)
    await scene.forget()
    for _ in range(2):
        scene.teach("bob")
    scene.feedback_intake.settings.current = Settings()
    scene.feedback_intake.release()
    scene.feedback_intake.settled().result(10)
    assert engine.commands.ask(lambda: engine.trainer.pair_queues.pairs_queued).result(10) == 2


async def test_its_files_of_all_bases_go_and_other_adapters_files_stay(scene: Scene, tmp_path: Path) -> None:
    for name in ("before/ann/v000001", "before/bob/v000001", "now/ann/v000001", "now/bob/v000001"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    scene.tokenizer.may.set()
    scene.engine.may_forget.set()
    await scene.forget()
    # Those of the base that is served are the engine's to remove.
    assert adapters_in(tmp_path / "adapters") == ["before/bob", "now/ann", "now/bob"]


def adapters_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))
