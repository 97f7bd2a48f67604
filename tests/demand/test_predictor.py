"""Demand: medians while little is known, then a network that reads the first call."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys

import numpy as np
import pytest

from edged.demand.network import train
from edged.demand.predictor import DemandPredictor, features_of


def plain(text: str = "summarize this page") -> np.ndarray:
    return features_of(text, 100, 1, 512)


def test_before_anything_ended_the_call_itself_is_all_that_is_known() -> None:
    assert DemandPredictor().predict("agent", plain(), 77.0) == 77.0


def test_a_new_type_costs_the_median_of_all_and_a_known_one_its_own() -> None:
    demand = DemandPredictor()
    for cost in (10.0, 20.0, 1000.0):
        demand.observe("a", plain(), cost)
    demand.observe("b", plain(), 5000.0)
    assert demand.predict("c", plain(), 1.0) == statistics.median([10.0, 20.0, 1000.0, 5000.0])
    assert demand.predict("a", plain(), 1.0) == 20.0


def test_a_network_is_due_at_twenty_runs_and_then_at_a_fifth_more() -> None:
    demand = DemandPredictor()
    due = []
    for number in range(1, 31):
        demand.observe("a", plain(), float(number))
        if demand.due("a"):
            due.append(number)
            demand.train("a")
    assert due == [20, 24, 29]


def test_the_words_of_the_first_call_tell_large_runs_from_small_ones() -> None:
    chance, demand = random.Random(1), DemandPredictor()

    def drawn() -> tuple[np.ndarray, float]:
        large = chance.random() < 0.5
        noise = " ".join(chance.choice(["the", "page", "of", "a", "text", "and"]) for _ in range(20))
        text = noise + (" merge all documents" if large else " check one claim")
        return features_of(text, 100, 1, 512), (50_000.0 if large else 500.0) * chance.uniform(0.8, 1.2)

    for _ in range(100):
        demand.observe("agent", *drawn())
    demand.train("agent")
    errors = [abs(demand.predict("agent", row, 1.0) - cost) / cost for row, cost in (drawn() for _ in range(50))]
    assert statistics.median(errors) < 0.3
    median = [abs(500.0 - cost) / cost for _, cost in (drawn() for _ in range(50))]
    assert statistics.mean(errors) < statistics.mean(median)


def test_the_same_runs_train_the_same_network() -> None:
    random_rows = np.random.default_rng(0)
    rows, targets = random_rows.normal(size=(40, 8)), random_rows.normal(size=40)
    first, second = train(rows, targets, seed=3), train(rows, targets, seed=3)
    assert first(rows[0]) == second(rows[0])
    assert first(rows[0]) == pytest.approx(targets[0], abs=1.0)


def test_a_prediction_stays_near_what_runs_have_cost() -> None:
    demand = DemandPredictor()
    for number in range(40):
        demand.observe("a", features_of("word " * (number % 5), 100, 1, 512), 100.0 + number)
    demand.train("a")
    assert 30.0 < demand.predict("a", features_of("other " * 5000, 10**9, 128, 10**9), 1.0) < 400.0


def test_a_run_that_cost_nothing_leaves_a_prediction_of_the_others() -> None:
    demand = DemandPredictor()
    for number in range(40):
        demand.observe("a", plain(), 0.0 if number == 7 else 100.0)
    demand.train("a")
    assert 1.0 < demand.predict("a", plain(), 77.0) < 300.0


def test_what_was_forgotten_is_not_predicted_from() -> None:
    demand = DemandPredictor()
    for _ in range(5):
        demand.observe("a", plain(), 10.0)
    demand.forget("a")
    assert not demand.due("a")
    demand.train("a")


def test_words_are_told_apart_only_with_the_salt() -> None:
    assert np.array_equal(features_of("a b c", 1, 1, 1, b"x"), features_of("c b a", 1, 1, 1, b"x"))
    assert not np.array_equal(features_of("a b c", 1, 1, 1, b"x"), features_of("a b c", 1, 1, 1, b"y"))


def test_memory_is_bounded_in_types() -> None:
    demand = DemandPredictor()
    for number in range(500):
        demand.observe(f"type-{number}", plain(), 1.0)
    assert len(demand._types) == 64


def test_it_needs_no_torch() -> None:
    code = "import sys, edged.demand.predictor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
