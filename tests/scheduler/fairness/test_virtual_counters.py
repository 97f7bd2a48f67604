"""Virtual token counters: the bounds of their paper, in a server that admits the least counter while there is room."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.scheduler.fairness.virtual_counters import VirtualCounters

INPUT, OUTPUT = 1.0, 2.0


@dataclass
class Call:
    user: str
    prompt: int
    answer: int
    made: int = 0


@dataclass
class Server:
    """Continuous batching by Algorithm 4: `memory` tokens, those of a call's whole length reserved as it enters."""

    memory: int
    weights: dict[str, float]
    waiting: dict[str, deque[Call]] = field(default_factory=dict)
    running: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters = VirtualCounters(lambda user: self.weights[user])
        self.service = dict.fromkeys(self.weights, 0.0)
        self.free = self.memory

    def ask(self, call: Call) -> None:
        self.counters.arrived(call.user)
        self.waiting.setdefault(call.user, deque()).append(call)

    def cancel_waiting(self, user: str) -> None:
        self.waiting[user].pop()
        self._left(user)

    def _left(self, user: str) -> None:
        self.counters.left(user)
        if not self.waiting[user]:
            del self.waiting[user]

    def step(self) -> None:
        while self.waiting:
            user = min(self.waiting, key=self.counters.counter)
            call = self.waiting[user][0]
            if call.prompt + call.answer > self.free:
                break
            self.waiting[user].popleft()
            self._left(user)
            self.free -= call.prompt + call.answer
            self.running.append(call)
            self._serve(user, INPUT * call.prompt)
        for call in list(self.running):
            call.made += 1
            self._serve(call.user, OUTPUT)
            if call.made == call.answer:
                self.running.remove(call)
                self.free += call.prompt + call.answer

    def _serve(self, user: str, service: float) -> None:
        self.service[user] += service
        self.counters.charge(user, service)


def bound(memory: int, longest: int, weights: dict[str, float]) -> float:
    return max(INPUT * longest, OUTPUT * memory) / min(weights.values())


@st.composite
def drawn_weights(draw: st.DrawFn) -> dict[str, float]:
    users = draw(st.integers(2, 5))
    return {f"user-{number}": draw(st.sampled_from([0.5, 1.0, 2.0])) for number in range(users)}


@settings(max_examples=150, deadline=None)
@given(weights=drawn_weights(), seed=st.integers(0, 2**32), memory=st.integers(60, 400))
def test_counters_of_those_who_wait_lie_within_the_bound_of_lemma_1(
    weights: dict[str, float], seed: int, memory: int
) -> None:
    chance, server = random.Random(seed), Server(memory, weights)
    for _ in range(400):
        for user in weights:
            if chance.random() < 0.2:
                server.ask(Call(user, chance.randint(1, 40), chance.randint(1, 20)))
            if user in server.waiting and chance.random() < 0.03:
                server.cancel_waiting(user)
        server.step()
        queued = server.counters.queued.values()
        assert not queued or max(queued) - min(queued) <= bound(memory, 40, weights)


@settings(max_examples=60, deadline=None)
@given(weights=drawn_weights(), seed=st.integers(0, 2**32), memory=st.integers(60, 400))
def test_two_who_always_wait_get_service_by_their_weights(weights: dict[str, float], seed: int, memory: int) -> None:
    chance, server = random.Random(seed), Server(memory, weights)
    always, past = list(weights)[:2], []
    for _ in range(500):
        for user in weights:
            while user in always and len(server.waiting.get(user, ())) < 60:
                server.ask(Call(user, chance.randint(1, 40), chance.randint(1, 20)))
            if chance.random() < 0.1:
                server.ask(Call(user, chance.randint(1, 40), chance.randint(1, 20)))
        server.step()
        past.append(tuple(server.service[user] / weights[user] for user in always))
    for begun in past[::50]:
        first, second = (now - then for now, then in zip(past[-1], begun, strict=True))
        assert abs(first - second) <= 2 * bound(memory, 40, weights)
    assert min(past[-1]) > bound(memory, 40, weights), "enough was served that the bound means something"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), memory=st.integers(60, 200), rivals=st.integers(1, 3))
def test_who_asks_for_less_than_his_share_gets_all_of_it(seed: int, memory: int, rivals: int) -> None:
    """Theorem 2: less than T/n - 5U of all T that was served to n users since he came with nothing waiting."""
    weights = {"light": 1.0} | {f"heavy-{number}": 1.0 for number in range(rivals)}
    chance, server = random.Random(seed), Server(memory, weights)
    asked, answered = 0.0, 0
    for round_ in range(3000):
        for user in weights:
            while user != "light" and len(server.waiting.get(user, ())) < 20:
                server.ask(Call(user, chance.randint(1, 40), chance.randint(1, 20)))
        if round_ % 50 == 25:
            server.ask(Call("light", 10, 5))
            asked += INPUT * 10 + OUTPUT * 5
            answered += 1
        server.step()
    enough = sum(server.service.values()) / len(weights) - 5 * bound(memory, 40, weights)
    assert asked < enough, "the load of this test does not ask for too much"
    assert server.service["light"] >= asked - (INPUT * 10 + OUTPUT * 5)
    assert answered == 60


def test_who_returns_is_lifted_to_the_least_of_those_who_wait() -> None:
    counters = VirtualCounters(lambda _: 1.0)
    for user, service in (("ann", 100.0), ("bob", 300.0)):
        counters.arrived(user)
        counters.charge(user, service)
    counters.arrived("eve")
    assert counters.counter("eve") == 100.0


def test_where_nobody_waits_who_comes_is_lifted_to_the_last_who_waited() -> None:
    counters = VirtualCounters(lambda _: 1.0)
    counters.arrived("ann")
    counters.left("ann")
    counters.charge("ann", 70.0)
    counters.arrived("eve")
    assert counters.counter("eve") == 70.0


def test_a_refund_never_leaves_less_than_those_who_wait_have() -> None:
    counters = VirtualCounters(lambda _: 1.0)
    counters.arrived("ann")
    counters.charge("ann", 50.0)
    counters.arrived("bob")
    counters.charge("bob", 60.0)
    counters.refund("bob", 80.0)
    assert counters.counter("bob") == 50.0
    counters.refund("bob", 10.0)
    assert counters.counter("bob") == 50.0
    counters.left("ann")
    counters.refund("bob", 10.0)
    assert counters.counter("bob") == 40.0


@pytest.mark.parametrize("most", [1, 3, 10])
def test_idle_names_are_forgotten_beyond_the_bound_and_queued_ones_are_not(most: int) -> None:
    counters = VirtualCounters(lambda _: 1.0, most=most)
    counters.arrived("stays")
    counters.charge("stays", 5.0)
    for number in range(100):
        counters.arrived(f"name-{number}")
        counters.charge(f"name-{number}", 1.0)
        counters.left(f"name-{number}")
    assert len(counters) <= most + 2
    assert counters.counter("stays") == 5.0
