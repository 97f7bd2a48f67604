"""The taste model: what it prefers, how sure it is, and what it says that it believes."""

import random

import numpy as np
import pytest

from edged.align.taste.model import Opinion, Taste

STARTS = ("Bake it", "Let it rest", "Walk to the station", "Open the window", "Read the manual", "Water the plant")
MIDDLES = ("for ten minutes", "before noon", "with some care", "at the table", "near the river", "as you like")


def prompt(number: int) -> str:
    return (
        f"{random.Random(number).choice(('How do I', 'When should I', 'Can I'))} {STARTS[number % 6].lower()} {number}"
    )


def answer(rng: random.Random, mark: str) -> str:
    sentences = [f"{rng.choice(STARTS)} {rng.choice(MIDDLES)}" for _ in range(rng.randint(1, 3))]
    return ". ".join(sentences) + mark


def picks(count: int, liked: str = "!", start: int = 0, at_s: float = 0.0) -> list[Opinion]:
    """Picks of one of four answers: the one that ends with `liked`."""
    out = []
    for number in range(start, start + count):
        rng = random.Random(number)
        others = [answer(rng, mark) for mark in ".!?" if mark != liked] + [answer(rng, ".")]
        chosen = answer(rng, liked)
        out += [Opinion(prompt(number), chosen, other, 1.0, at_s + number) for other in others]
    return out


def share_liked(taste: Taste, liked: str = "!", asked: int = 40) -> float:
    """Share of unseen prompts for which the best of four answers ends with `liked`."""
    hits = 0
    for number in range(1000, 1000 + asked):
        rng = random.Random(number)
        answers = [answer(rng, mark) for mark in "!..?"]
        rng.shuffle(answers)
        hits += answers[int(np.argmax(taste.scores(prompt(number), answers)))].endswith(liked)
    return hits / asked


def test_five_picks_show_on_unseen_prompts():
    assert share_liked(Taste.fit(picks(5))) >= 0.9


@pytest.mark.parametrize(("count", "sure"), [(1, 0.5), (3, 0.75), (4, 0.75)])
def test_few_picks_that_agree_are_no_reason_to_doubt_it(count, sure):
    assert Taste.fit(picks(count)).sure == pytest.approx(sure, abs=0.06)


def test_ten_picks_the_other_way_change_its_mind():
    assert share_liked(Taste.fit(picks(20) + picks(10, liked="?", start=20)), "?") >= 0.8


def test_it_is_sure_of_a_taste_and_not_of_chance():
    rng = random.Random(0)
    chance = [
        Opinion(each.prompt, *rng.sample([each.chosen, each.rejected], 2), weight=1.0, at_s=each.at_s)
        for each in picks(20)
    ]
    assert Taste.fit(picks(5)).sure > 0.65
    assert Taste.fit(picks(10)).sure > 0.8
    assert Taste.fit(chance).sure < 0.65
    assert Taste.fit([]).sure == 0.5


def test_signals_by_chance_do_not_tell_that_all_answers_are_liked():
    """Without a prior of the threshold by which answers are liked this person likes .83 of them."""
    rng, opinions = random.Random(4), []
    for number in range(20):
        answers = [answer(random.Random(f"4 {number} {k}"), rng.choice("!..?")) for k in range(4)]
        chosen = answers[rng.randrange(4)]
        opinions += [Opinion(prompt(number), chosen, other, 1.0, number) for other in answers if other != chosen]
    taste = Taste.fit(opinions)
    likes = [taste.likes(prompt(n), answer(random.Random(n), "!.?."[n % 4])) for n in range(1000, 1040)]
    assert 0.4 < np.mean(likes) < 0.7


def test_signals_that_contradict_each_other_leave_it_unsure():
    there = picks(6)
    back = [Opinion(each.prompt, each.rejected, each.chosen, 1.0, each.at_s) for each in there]
    taste = Taste.fit(there + back)
    assert taste.sure < 0.6
    assert taste.preference("p", "Bake it!", "Bake it.") == pytest.approx(0.5, abs=0.1)


def sentences_of(rng: random.Random, count: int) -> list[str]:
    return [f"{rng.choice(STARTS).lower()} {rng.choice(MIDDLES)}" for _ in range(count)]


FORMS = {
    "long sentences": lambda rng: ", and ".join(sentences_of(rng, 6)).capitalize() + ".",
    "short sentences": lambda rng: " ".join(each.capitalize() + "." for each in sentences_of(rng, 6)),
    "a list": lambda rng: "\n".join(f"- {each}" for each in sentences_of(rng, 6)),
    "bold": lambda rng: " ".join(f"**{each.capitalize()}**." for each in sentences_of(rng, 6)),
}


@pytest.mark.parametrize("liked", FORMS)
def test_a_taste_for_a_form_shows_in_texts_of_like_words_and_length(liked):
    opinions = []
    for number in range(8):
        rng = random.Random(number)
        chosen, *others = (form(rng) for form in (FORMS[liked], *(FORMS[name] for name in FORMS if name != liked)))
        opinions += [Opinion(prompt(number), chosen, other, 1.0, number) for other in others]
    taste = Taste.fit(opinions)
    for number in range(100, 110):
        scores = taste.scores(prompt(number), [form(random.Random(number)) for form in FORMS.values()])
        assert list(FORMS)[int(np.argmax(scores))] == liked


def test_ratings_alone_teach():
    ratings = []
    for number, each in enumerate(picks(20)):
        good = number % 3 == 0
        ratings.append(Opinion(each.prompt, each.chosen if good else "", "" if good else each.rejected, 1.0, number))
    assert share_liked(Taste.fit(ratings[:20])) >= 0.8


def test_a_signal_against_the_others_or_about_answers_alike_is_doubted():
    agreed = picks(8)
    last = Opinion(prompt(9), "Walk to the station!", "Walk to the station.", 1.0, 9.0)
    against = Opinion(last.prompt, last.rejected, last.chosen, 1.0, 9.0)
    alike = Opinion(last.prompt, "Walk to the station!", "Open the window!", 1.0, 9.0)
    assert not Taste.fit([*agreed, last]).doubted
    assert Taste.fit([*agreed, against]).doubted
    assert Taste.fit([*agreed, alike]).doubted
    assert not Taste.fit([]).doubted


def test_preference_is_between_the_two_and_grows_with_evidence():
    few, many = (Taste.fit(picks(n)).preference("How do I", "Bake it!", "Bake it.") for n in (1, 20))
    assert 0.5 < few < many < 1
    back = Taste.fit(picks(20)).preference("How do I", "Bake it.", "Bake it!")
    assert back == pytest.approx(1 - many)


def test_answers_differ_where_one_is_liked_and_hardly_where_both_are_from_few_picks_on():
    taste, alike, unlike = Taste.fit(picks(6)), [], []
    for number in range(1000, 1020):
        one, other, plain = (answer(random.Random(3 * number + i), mark) for i, mark in enumerate("!!."))
        alike.append(taste.difference(prompt(number), one, other))
        unlike += [taste.difference(prompt(number), *two) for two in ((one, plain), (plain, one))]
    assert min(unlike) > 1
    assert np.mean(alike) < 0.3 * np.mean(unlike)
    assert Taste.fit([]).difference("", "a", "b") == 1.0, "nothing is known, so nothing is alike"


@pytest.mark.parametrize(("old", "new"), [(12, 2), (12, 4), (12, 6), (12, 14), (20, 7), (20, 14), (40, 12)])
def test_while_a_mind_changes_what_is_liked_now_and_what_was_are_not_alike(old, new):
    taste = Taste.fit(picks(old) + picks(new, liked="?", start=old))
    for number in range(1000, 1010):
        one, other = (answer(random.Random(2 * number + i), mark) for i, mark in enumerate("?!"))
        assert taste.difference(prompt(number), one, other) > 0.6


def test_scores_apart_know_nothing_of_the_prompts_own_opinions():
    here = [Opinion("Only here", f"Zebra {n}.", f"Quagga {n}.", 1.0, 99.0 + n) for n in range(8)]
    taste = Taste.fit([*picks(5), *here])
    both = ["Zebra.", "Quagga."]
    seen, apart = taste.scores("Only here", both), taste.scores_apart("Only here", both)
    without = Taste.fit(picks(5)).scores("Only here", both)
    assert seen[0] - seen[1] > 0.1
    assert apart[0] - apart[1] == pytest.approx(without[0] - without[1], abs=0.05)


def test_likes_tells_what_was_chosen_from_what_was_rejected():
    taste = Taste.fit(picks(20))
    rng = random.Random(7)
    good = [taste.likes("new", answer(rng, "!")) for _ in range(20)]
    bad = [taste.likes("new", answer(rng, ".")) for _ in range(20)]
    assert np.mean(np.array(good) > 0.5) > 0.8
    assert np.mean(np.array(bad) < 0.5) > 0.8


def test_beliefs_say_the_taste_in_words():
    belief = Taste.fit(picks(10)).beliefs()[0]
    assert (belief.text, belief.likes, belief.agree, belief.of) == ("ends with an exclamation mark", True, 10, 10)


def test_a_struck_belief_has_no_part_and_no_double():
    taste = Taste.fit(picks(10), struck=["end:!"])
    assert not any("exclamation" in each.text for each in taste.beliefs(20))
    scores = taste.scores("p", ["Bake it!", "Bake it,"])
    assert abs(scores[0] - scores[1]) < 0.5 * abs(
        np.subtract(*Taste.fit(picks(10)).scores("p", ["Bake it!", "Bake it,"]))
    )


@pytest.mark.parametrize(
    "texts",
    [
        ("", ""),
        ("", "b"),
        ("a", ""),
        ("a", "a"),
        ("x " * 5000, "y"),
        ("你好，世界！", "再见。"),
        ("😀🎉", "ok"),
        ("\n", "\t "),
    ],
)
def test_any_text_is_taken(texts):
    taste = Taste.fit([Opinion("", *texts, weight=1.0, at_s=0.0)])
    assert np.isfinite(taste.scores("", ["", "a", "你好", "\ud800"])).all()
    assert 0 <= taste.preference("", "a", "b") <= 1
    assert 0 <= taste.likes("p", "a") <= 1
    assert 0.5 <= taste.sure <= 1
    taste.beliefs()


def sure_of_cakes_and_taxes(first: int) -> tuple[float, float]:
    """How sure a taste is of cakes, where "!" is liked, and of taxes, where each second pick has it; both have numbers
    from `first` on."""
    numbers = range(12)
    cakes = [("How do I bake cake", "Bake {} in the oven{}", n, "!.") for n in numbers]
    taxes = [("When is my tax", "Pay {} to the office{}", n + 0.5, ["!.", ".!"][n % 2]) for n in numbers]
    opinions = [
        Opinion(f"{asked} {first + at_s}", *(answer.format(first + at_s, mark) for mark in marks), 1.0, at_s)
        for asked, answer, at_s, marks in cakes + taxes
    ]
    taste = Taste.fit(opinions)
    there = taste.sure_of("How do I bake cake today", ["Bake it in the oven!", "Bake it in the oven."])
    return there, taste.sure_of("When is my tax today", ["Pay it to the office!", "Pay it to the office."])


def test_a_taste_for_one_topic_is_less_sure_of_others():
    there, elsewhere = sure_of_cakes_and_taxes(0)
    assert there > 0.75 > 0.7 > elsewhere


def test_how_alike_prompts_are_does_not_depend_on_which_axes_tie():
    assert sure_of_cakes_and_taxes(100) == pytest.approx(sure_of_cakes_and_taxes(200), abs=1e-6)


def test_of_many_signals_the_newest_are_fitted_in_time():
    taste = Taste.fit(picks(334))
    assert share_liked(taste) >= 0.9
    assert taste.sure > 0.8


def test_a_beginning_is_not_judged_by_its_end():
    taste = Taste.fit(picks(10))
    both = ["Bake it!", "Bake it."]
    assert np.ptp(taste.scores("p", both, [False] * 2)) < 0.9 * np.ptp(taste.scores("p", both))
    assert taste.scores("p", ["Wow! Bake it", "Bake it"], [False] * 2)[0] > 0


def test_the_same_opinions_in_any_order_make_the_same_taste():
    opinions = picks(10)
    mixed = random.Random(1).sample(opinions, len(opinions))
    answers = ["Bake it!", "Let it rest.", "Go?"]
    assert Taste.fit(opinions).scores("p", answers) == pytest.approx(Taste.fit(mixed).scores("p", answers), abs=1e-6)
