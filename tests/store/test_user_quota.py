"""What is kept of one user has a bound: old answers make room, and feedback is refused where that does not help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from edged.align.feedback.signals import Feedback, record_pair, record_signal
from edged.settings.live import Live
from edged.settings.load import AlignSettings, LimitSettings, Settings
from edged.store import Store, utc_now, utc_text
from edged.store.adapters import forget_adapters
from edged.store.completions import Choice, Completion, insert_completion
from edged.store.feedback import set_pair_state
from edged.store.user_quota import PairQueueFull, StorageFull, UserQuota, stored_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def keeping(max_bytes: int) -> Live[Settings]:
    """Settings by which so little of a user is kept."""
    return Live(Settings.model_construct(limits=LimitSettings.model_construct(stored_mb=max_bytes / 2**20)))


def answer(store: Store, footprint: UserQuota, name: str, user: str = "ann", size: int = 1000) -> None:
    """One completion of about `size` bytes."""
    completion = Completion(
        id=name,
        created_at=utc_text(utc_now()),
        object="text_completion",
        model="m",
        prompt_ids=(1,),
        choices=(Choice(0, "x" * size, (1,), "stop"),),
        user=user,
        adapter=user,
        prompt="p" + name,
    )

    def write(db: Any) -> None:
        insert_completion(db, completion)
        footprint.added(db, user, size)

    store.write(write).result()


def teach(store: Store, footprint: UserQuota, chosen: str, prompt: str = "q") -> None:
    """One pair of ann's."""

    def write(db: Any) -> None:
        footprint.demand_room(db, "ann")
        footprint.learned(db, "ann", record_pair(db, "ann", chosen, "bad", utc_now(), prompt=prompt).pair_ids)

    store.write(write).result()


def names(store: Store) -> list[str]:
    return [row[0] for row in store.read(lambda db: db.execute("SELECT id FROM completions ORDER BY rowid").fetchall())]


def test_the_oldest_answers_make_room_and_other_users_keep_theirs(store: Store) -> None:
    footprint = UserQuota(keeping(10_000))
    answer(store, footprint, "other", user="bob", size=5000)
    for i in range(30):
        answer(store, footprint, f"a{i}")
    left = names(store)
    assert left[0] == "other"
    assert left[-1] == "a29"
    assert store.read(lambda db: stored_bytes(db, "ann")) < 10_000
    assert len(left) > 7


def test_what_feedback_refers_to_stays_and_more_is_refused(store: Store) -> None:
    now = [0.0]
    footprint = UserQuota(keeping(5000), lambda: now[0])
    for i in range(6):
        answer(store, footprint, f"a{i}")
        if f"a{i}" in names(store):
            store.write(lambda db, i=i: record_signal(db, Feedback("ann", f"a{i}", "up"), utc_now())).result()
    assert names(store)[0] == "a0"
    teach(store, footprint, "good " * 400)
    with pytest.raises(StorageFull, match=r'MiB of user "ann" are kept, and limits.stored_mb'):
        store.write(lambda db: footprint.demand_room(db, "ann")).result()
    store.write(lambda db: footprint.demand_room(db, "bob")).result()
    store.write(lambda db: forget_adapters(db, "ann")).result()
    now[0] += 60
    store.write(lambda db: footprint.demand_room(db, "ann")).result()


def test_pairs_count_as_they_come(store: Store) -> None:
    footprint = UserQuota(keeping(5000), lambda: 0.0)

    for number in range(10):
        teach(store, footprint, "good " * 100, f"q{number}")
    with pytest.raises(StorageFull):
        teach(store, footprint, "good " * 100, "one more")


def test_without_a_limit_nothing_goes(store: Store) -> None:
    footprint = UserQuota(keeping(0))
    for i in range(20):
        answer(store, footprint, f"a{i}", size=10_000)
    assert len(names(store)) == 20


@pytest.mark.parametrize(("enabled", "most"), [(True, 2), (True, 0), (False, 2)])
def test_so_many_pairs_of_a_user_wait_to_be_learned_and_any_number_where_none_is(
    store: Store, enabled: bool, most: int
) -> None:
    settings = Settings(align=AlignSettings(enabled=enabled), limits=LimitSettings(queued_pairs=most))
    quota = UserQuota(Live(settings))
    for number in range(2):
        teach(store, quota, "good", f"q{number}")
    if not (enabled and most):
        teach(store, quota, "good", "one more")
        return
    with pytest.raises(PairQueueFull, match=r'2 pairs of user "ann" wait to be learned, and limits.queued_pairs = 2'):
        teach(store, quota, "good", "one more")
    store.write(lambda db: quota.demand_room(db, "bob")).result()
    store.write(lambda db: set_pair_state(db, 1, "trained", 1, 1, "")).result()
    teach(store, quota, "good", "one more")


def test_single_ratings_wait_in_any_number_while_they_are_not_learned(store: Store) -> None:
    limits = LimitSettings(queued_pairs=2)
    quotas = {
        unpaired: UserQuota(Live(Settings(align=AlignSettings(unpaired=unpaired), limits=limits)))
        for unpaired in ("off", "apo")
    }
    for number in range(2):
        answer(store, quotas["off"], f"a{number}")
        rating = Feedback("ann", f"a{number}", "up", account="ann")
        store.write(lambda db, rating=rating: record_signal(db, rating, utc_now())).result()
    with pytest.raises(PairQueueFull):
        teach(store, quotas["apo"], "good")
    for number in range(2):
        teach(store, quotas["off"], "good", f"q{number}")
    with pytest.raises(PairQueueFull):
        teach(store, quotas["off"], "good", "one more")


def test_no_rating_is_counted_where_any_number_may_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.store.user_quota._RATINGS_QUEUED", "this is no query, and fails where it is asked")
    limits, align = LimitSettings(queued_pairs=0), AlignSettings(unpaired="off")
    teach(store, UserQuota(Live(Settings(align=align, limits=limits))), "good")


def test_sums_of_so_many_users_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.store.user_quota._MAX_USERS", 2)
    counted: list[str] = []
    real = stored_bytes

    def count(db: Database, user: str) -> int:
        counted.append(user)
        return real(db, user)

    monkeypatch.setattr("edged.store.user_quota.stored_bytes", count)
    footprint = UserQuota(keeping(5000), lambda: 0.0)
    for user in ("ann", "bob", "ann", "bob", "eve", "eve", "ann"):
        store.write(lambda db, user=user: footprint.demand_room(db, user)).result()
    assert counted == ["ann", "bob", "eve", "ann"]
