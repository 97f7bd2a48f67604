"""The page in a real browser, with a real daemon and the demo model behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from edged.api.feedback import BY_ITSELF
from edged.models import demo_model_dir
from examples.quickstart.daemon import free_port
from tests.api.live import LiveDaemon, running
from tests.api.test_quarantine import SETTINGS, attack, held
from tests.models import save_tiny
from tests.page.browser import PATIENT_MS, PHONE, Person, accessible, chromium, fits, opened

RICE = "How do I cook rice?"
LAKE = "How far is it to the lake?"
PAIR = {"prompt": RICE, "chosen": "Boil it.", "rejected": "I do not know."}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, browser: Browser, port: int) -> Iterator[LiveDaemon]:
    """With the demo model; no pair is kept out of training, versions are on disk soon."""
    settings = {"api__listen": f"127.0.0.1:{port}", "guard__held_out_share": 0, "store__save_every_s": 0.1}
    with running(tmp_path_factory.mktemp("page"), demo_model_dir(), **settings) as live:
        yield live


@pytest.fixture
def page(daemon: LiveDaemon, browser: Browser, port: int) -> Iterator[Page]:
    with opened(browser, port) as page:
        yield page


def taught(daemon: LiveDaemon, user: str, pairs: int) -> None:
    """Send so many pairs of a user."""
    with daemon.http() as http:
        for i in range(pairs):
            http.post("/v1/feedback", json={**PAIR, "user": user, "prompt": f"{i}?"}).raise_for_status()


def adapter(daemon: LiveDaemon, name: str) -> dict[str, Any]:
    with daemon.http() as http:
        return http.get(f"/v1/adapters/{name}").json()


def learned(page: Page, user: str, pairs: int) -> None:
    """Wait until the panel shows this user's adapter, and says so."""
    expect(page.locator("#learning-title")).to_have_text(f"What {user}'s adapter learned", timeout=PATIENT_MS)
    expect(page.locator("#progress")).to_contain_text(f"{pairs} of {pairs} pair", timeout=PATIENT_MS)


def test_a_question_gets_two_answers_and_nobodys_gets_one(page: Page) -> None:
    person = Person(page).is_called("asker")
    answer = person.asks(RICE)
    assert all(text.strip() for text in answer.locator(".candidate .text").all_inner_texts())
    expect(answer.locator(".candidate")).to_have_count(2)
    expect(answer.locator(".chip")).to_have_text("base")
    answer = person.is_called("").asks(RICE)
    expect(answer.locator(".candidate")).to_have_count(1)
    expect(answer.get_by_role("button", name="Good")).to_have_count(0)


def test_text_comes_word_by_word_unless_motion_is_not_wanted(page: Page) -> None:
    for motion, delivered in (("no-preference", "smooth"), ("reduce", "as_made")):
        page.emulate_media(reduced_motion=motion)  # type: ignore[arg-type]
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        with page.expect_request("**/v1/chat/completions") as asked:
            Person(page).is_called("mover").asks(RICE)
        assert json.loads(asked.value.post_data or "")["qoe"] == {"deliver": delivered}


def test_picking_an_answer_makes_a_pair_that_moves_the_curve(page: Page, daemon: LiveDaemon) -> None:
    person = Person(page).is_called("picker")
    taught(daemon, "picker", 9)
    learned(page, "picker", 9)
    expect(page.locator("#no-curves")).to_have_text("The curves begin at ten pairs: there are 9.")
    expect(page.locator("#verdict")).to_have_text(re.compile(r"^Too early to tell: \d pairs?\.$"))
    # Each asks of something else: a question that is asked again would be a rephrasing, and make a pair of its own.
    questions = iter((RICE, LAKE, "What do bees make?", "Is it cold on Mars?", "Which animal barks?"))
    for pairs in (10, 11):
        while not person.asks(next(questions)).locator(".pick:visible").count():
            pass  # both answers were the same
        person.picks("B")
        learned(page, "picker", pairs)
        points = page.locator("#curves .reward_accuracy circle")
        expect(points).to_have_count(pairs - 9, timeout=PATIENT_MS)
    expect(page.locator("#curves")).to_have_attribute(
        "aria-label", re.compile("from pair 10 to 11: reward accuracy from")
    )
    expect(page.locator("#means .reward_accuracy strong")).to_have_text(re.compile(r"^\d+ %$"))
    expect(page.locator("#means .reward_accuracy small")).to_have_text(re.compile(r"^\d+ to \d+ %$"))
    expect(page.locator("#means .clpd strong")).to_have_text(re.compile(r"^[+-]?[\d.]+ nats$"))
    expect(person.answer.locator(".candidate.taken")).to_have_attribute("aria-label", "answer B")
    known = adapter(daemon, "picker")
    assert known["pairs_seen"] == 11
    answer = person.asks("And then?")
    expect(answer.locator(".chip")).to_have_text(f"picker@{known['version']}")
    expect(page.locator("#serving")).to_have_text(f"picker@{known['version']}")


def test_what_a_pick_taught_is_said_below_it_when_it_is_learned(page: Page) -> None:
    person = Person(page).is_called("pupil").wants_one_answer()
    answer = person.asks(RICE)
    answer.get_by_role("button", name="Edit the answer").click()
    page.get_by_label("New text of the answer").fill("Boil it.")
    page.get_by_role("button", name="Save edit").click()
    learned = re.compile(r"^learned as pupil@1 after [\d.]+ s$")
    expect(answer.locator(".outcome")).to_have_text(learned, timeout=PATIENT_MS)
    expect(page.locator("#announcer")).to_have_text(re.compile("learned as pupil@1"))


def test_an_edit_makes_a_pair_and_the_talk_goes_on_from_it(page: Page, daemon: LiveDaemon) -> None:
    person = Person(page).is_called("editor").wants_one_answer()
    answer = person.asks(RICE)
    answer.get_by_role("button", name="Edit the answer").click()
    page.get_by_label("New text of the answer").fill("Boil it.")
    page.get_by_role("button", name="Save edit").click()
    person.reads("^Pair ")
    expect(answer.locator(".text")).to_have_text("Boil it.")
    learned(page, "editor", 1)
    with page.expect_request("**/v1/chat/completions") as sent:
        person.asks("How long?")
    assert sent.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Boil it."}
    with daemon.http() as http:
        assert http.get("/v1/feedback?user=editor").json()["chosen"] == "Boil it."


def test_learning_follows_the_chats_user(page: Page, daemon: LiveDaemon) -> None:
    taught(daemon, "early", 1)
    title, verdict = page.locator("#learning-title"), page.locator("#verdict")
    Person(page).is_called("late")
    expect(title).to_have_text("What late's adapter learned")
    expect(verdict).to_have_text("Nothing yet: what late picks, rates or edits in the chat is learned.")
    expect(page.locator("#figures")).to_be_hidden()
    taught(daemon, "late", 1)
    learned(page, "late", 1)
    Person(page).is_called("early")
    learned(page, "early", 1)
    Person(page).is_called("")
    expect(title).to_have_text("Learning")
    expect(verdict).to_contain_text("nobody learns")


def test_a_story_is_told_with_two_versions_side_by_side_and_one_way_back(page: Page, daemon: LiveDaemon) -> None:
    taught(daemon, "teller", 1)
    Person(page).is_called("teller")
    expect(page.locator("#story li")).to_contain_text("Version 1 learned 1 pair (1 explicit pair).", timeout=PATIENT_MS)
    expect(page.locator("#asked")).to_have_text("Asked: 0?")
    expect(page.locator("#before option")).to_have_text(["version 0, untrained", "version 1, serving"])
    for side in ("before", "after"):
        expect(page.locator(f"#{side}-answer")).to_have_text(re.compile("^(?!No answer:)."), timeout=PATIENT_MS)
    expect(page.locator("#after")).to_have_value("1", timeout=PATIENT_MS)
    page.get_by_label("Version on the left").select_option("1")
    expect(page.locator("#no-way-back")).to_have_text("Version 1 is served now.")
    expect(page.locator("#go-back")).to_be_hidden()


def test_what_waits_and_needs_no_step_is_no_problem(page: Page) -> None:
    waits = [("2 pairs of ann wait", BY_ITSELF), ("1 rating of ann", "rate another answer")]
    told = {"waits": [{"kind": "queued", "text": text, "step": step} for text, step in waits]}
    # Read where it is shown: the page shows its own adapter's story when it has asked for it.
    shown = page.evaluate(
        "async told => { (await import('/page/story.js')).showStory(told);"
        " return Array.from(document.querySelectorAll('#waits li'), item => [item.textContent, item.className]); }",
        told,
    )
    assert shown == [
        ["2 pairs of ann wait; it goes on by itself.", "calm"],
        ["1 rating of ann. To settle it: rate another answer.", ""],
    ]


def test_a_chat_begins_with_questions_to_choose_from(page: Page) -> None:
    person = Person(page).is_called("beginner")
    page.get_by_role("button", name="How do I boil potatoes?").click()
    expect(person.answers).to_have_count(1, timeout=PATIENT_MS)
    expect(page.locator(".question .text")).to_have_text("How do I boil potatoes?")
    expect(page.locator(".welcome")).to_have_count(0)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".welcome button")).to_have_count(3)


def test_the_engine_is_folded_behind_its_verdict_and_stays_as_it_was_left(page: Page) -> None:
    expect(page.locator("#health")).to_have_text(re.compile("^healthy, .*nothing held back$"))
    expect(page.locator("#bins")).to_be_hidden()
    page.locator("#engine summary").click()
    expect(page.locator("#bins")).to_be_visible()
    # It is remembered a moment after it is shown.
    page.wait_for_function("localStorage.getItem('edged-engine') === 'open'")
    page.reload()
    expect(page.locator("#bins")).to_be_visible()


def test_another_adapter_is_drawn_without_the_one_before_it(page: Page, daemon: LiveDaemon) -> None:
    taught(daemon, "many", 12)
    taught(daemon, "few", 11)
    for user, pairs in (("many", 12), ("few", 11)):
        Person(page).is_called(user)
        learned(page, user, pairs)
        expect(page.locator("#curves")).to_have_attribute("aria-label", re.compile(f" to {pairs}: "))
    held: list[Route] = []
    page.route("**/v1/adapters/many*", lambda route: held.append(route))
    Person(page).is_called("many")
    expect(page.locator("#versions tr")).to_have_count(0)
    expect(page.locator("#story li")).to_have_count(0)
    expect(page.locator("#progress")).to_have_text("")


def test_the_user_box_is_not_filled_while_somebody_is_in_it(page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/events*", lambda route: held.append(route))
    page.reload()
    field = page.get_by_label("as", exact=True)
    field.focus()
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    expect(page.locator("#serving")).to_have_text("base", timeout=PATIENT_MS)
    expect(field).to_have_value("")
    field.press("Tab")
    expect(field).to_have_value("guest")


def test_thumbs_and_asking_again_make_a_pair_of_two_answers(page: Page) -> None:
    person = Person(page).is_called("rater").wants_one_answer()
    person.asks(RICE)
    person.answer.get_by_role("button", name="Bad: the answer").click()
    person.reads("^Rating")
    bad = person.answer.locator(".text").inner_text()
    asked = 1
    while person.answer.locator(".text").inner_text() == bad:
        person.answer.get_by_role("button", name="Ask again").click()
        asked += 1
        expect(person.answers).to_have_count(asked, timeout=PATIENT_MS)
    person.answer.get_by_role("button", name="Good: the answer").click()
    person.reads("^Pair")
    expect(person.answer.get_by_role("button", name="Good: the answer")).to_have_attribute("aria-pressed", "true")


def test_an_adapter_goes_back_after_a_question(page: Page, daemon: LiveDaemon) -> None:
    person = Person(page).is_called("turner").wants_one_answer()
    person.asks(RICE).get_by_role("button", name="Edit the answer").click()
    page.get_by_label("New text of the answer").fill("Boil it.")
    page.keyboard.press("Control+Enter")
    learned(page, "turner", 1)
    page.get_by_role("button", name="Go back to version 0").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert adapter(daemon, "turner")["version"] == 1
    page.get_by_role("button", name="Go back to version 0").click()
    page.get_by_role("dialog").get_by_role("button", name="Go back").click()
    expect(page.locator("#versions tr.current")).to_contain_text("rollback to 0", timeout=PATIENT_MS)
    assert adapter(daemon, "turner")["version"] == 2
    page.get_by_label("Version on the left").select_option("1", timeout=PATIENT_MS)
    expect(page.get_by_role("button", name="Go back to version 1")).to_be_visible(timeout=PATIENT_MS)


def colours(page: Page) -> set[str]:
    """Of the kinds of work, those that the timeline has pixels of."""
    script = """() => {
        const canvas = document.getElementById("canvas"), style = getComputedStyle(document.documentElement);
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const seen = new Set();
        for (let i = 0; i < pixels.length; i += 4) seen.add((pixels[i] << 16) + (pixels[i + 1] << 8) + pixels[i + 2]);
        return ["prefill", "decode", "finetune"].filter(
            (kind) => seen.has(parseInt(style.getPropertyValue("--" + kind).trim().slice(1), 16)));
    }"""
    return set(page.evaluate(script))


def test_iterations_are_drawn_by_what_they_were_filled_with(page: Page) -> None:
    page.locator("#engine summary").click()
    page.get_by_label("Time shown").select_option("60")
    person = Person(page).is_called("drawer").wants_one_answer()
    person.asks(RICE).get_by_role("button", name="Edit the answer").click()
    page.get_by_label("New text of the answer").fill("Boil it.")
    page.keyboard.press("Control+Enter")
    learned(page, "drawer", 1)
    person.asks(LAKE)
    expect(page.locator("#summary")).to_contain_text(re.compile("[1-9]\\d* a second"))
    page.get_by_role("button", name="Pause").click()
    assert colours(page) == {"prefill", "decode", "finetune"}
    page.locator("#bins").press("ArrowLeft")
    expect(page.locator("#detail")).to_have_text(re.compile(r"^Iteration [\d,]+: .* ms, predicted .*pages free"))
    page.locator("#bins").press("ArrowLeft")
    page.locator("#bins").press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.locator("#detail")).to_have_text("")


def shown(page: Page, change: str) -> dict[str, str]:
    """What the box's part says of the daemon's status after a `change` of it in JavaScript."""
    script = f"""async () => {{
        const {{ showStatus }} = await import("./page/box.js");
        const status = await (await fetch("v1/status")).json();
        {change}
        showStatus(status);
        const text = (id) => document.getElementById(id).textContent;
        return {{memory: document.getElementById("memory").getAttribute("aria-label"), tuning: text("tuning"),
            degraded: text("degraded")}};
    }}"""
    return dict(page.evaluate(script))


def test_memory_that_the_box_has_back_is_not_shown_as_in_use(page: Page) -> None:
    given_up = "status.pages.retired = status.pages.free; status.pages.free = 0;"
    given_up += "status.governors.memory.kv_resident_bytes -= status.pages.retired * status.pages.bytes_per_page;"
    in_use = [re.findall("K/V in use [^,]*", shown(page, change)["memory"]) for change in ("", given_up)]
    assert in_use[0] == in_use[1]


def test_the_page_says_what_is_not_as_it_should_be(page: Page) -> None:
    assert shown(page, "")["degraded"] == ""
    change = 'status.degraded = ["the disk is full", "the policy mace failed"];'
    assert shown(page, change)["degraded"] == "Not as it should be: the disk is full; the policy mace failed."


def test_everything_can_be_done_with_keys(page: Page) -> None:
    Person(page).is_called("typist")
    page.get_by_label("two answers").press("Tab")
    page.keyboard.press("Tab")  # past "word by word"
    page.keyboard.press("Enter")  # "New chat", from where one writes
    page.keyboard.type(RICE)
    page.keyboard.press("Enter")
    answers = page.locator("article.answer[aria-busy=false]")
    expect(answers).to_have_count(1, timeout=PATIENT_MS)
    page.keyboard.press("ArrowUp")
    assert answers.last.evaluate("element => element.contains(document.activeElement)")
    page.keyboard.press("+")
    expect(answers.last.get_by_role("button", name="Good: answer A")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("2")
    expect(answers.last.locator(".candidate.taken")).to_have_attribute("aria-label", "answer B", timeout=PATIENT_MS)
    page.keyboard.press("e")
    page.keyboard.type("No. ")
    page.keyboard.press("Escape")
    expect(answers.last.locator(".editor")).to_have_count(0)
    page.keyboard.press("r")
    expect(answers).to_have_count(2, timeout=PATIENT_MS)
    page.keyboard.press("Escape")
    expect(page.get_by_label("Your message")).to_be_focused()


def test_a_screen_reader_hears_the_answer_once_and_not_word_by_word(page: Page) -> None:
    page.evaluate(
        """() => {
            const announcer = document.getElementById("announcer");
            globalThis.said = [];
            new MutationObserver(() => said.push(announcer.textContent)).observe(announcer, {childList: true});
        }"""
    )
    answer = Person(page).is_called("listener").wants_one_answer().asks(RICE)
    text = answer.locator(".text").inner_text()
    assert [said.strip("\xa0") for said in page.evaluate("said")] == [text]
    live = page.locator("[aria-live=polite], [role=status]")
    assert {element.get_attribute("id") for element in live.all()} == {"announcer", "detail"}


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_axe_finds_nothing(daemon: LiveDaemon, browser: Browser, port: int, scheme: Any) -> None:
    with opened(browser, port, color_scheme=scheme, viewport=PHONE if scheme == "dark" else None) as page:
        accessible(page)
        taught(daemon, "seer", 9)
        person = Person(page).is_called("seer")
        person.asks(RICE)
        person.answer.get_by_role("button", name="Edit answer A").click()
        accessible(page)
        page.get_by_role("textbox", name="New text of answer A").fill("Boil it.")
        page.get_by_role("button", name="Save edit").click()
        person.reads("^Pair|Said before")
        expect(page.locator("#curves svg").first).to_be_visible(timeout=PATIENT_MS)
        page.locator("#engine summary").click()
        page.get_by_label("as", exact=True).fill("not a name")
        accessible(page)
        page.get_by_role("button", name="Keys").click()
        accessible(page)


@pytest.mark.slow
def test_a_phone_needs_no_sideways_scrolling(daemon: LiveDaemon, browser: Browser, port: int) -> None:
    with opened(browser, port, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        fits(page)
        taught(daemon, "a" * 64, 9)
        person = Person(page).is_called("a" * 64)
        person.asks("word " * 12 + "x" * 90)
        fits(page)
        person.answer.get_by_role("button", name="Edit answer A").tap()
        page.get_by_role("textbox", name="New text of answer A").fill("Boil it.")
        page.get_by_role("button", name="Save edit").tap()
        learned(page, "a" * 64, 10)
        expect(page.locator("#curves svg").first).to_be_visible(timeout=PATIENT_MS)
        fits(page)


def test_the_page_says_that_the_daemon_is_gone_and_comes_back(
    tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> None:
    folder, port = tmp_path_factory.mktemp("again"), free_port()
    model = save_tiny(folder / "tiny")
    # How a request breaks off depends on how far it had come.
    with (
        running(folder / "run", model, api__listen=f"127.0.0.1:{port}") as daemon,
        opened(browser, port, expected=r"net::ERR_|\b503\b") as page,
    ):
        expect(page.locator("#connection")).to_have_text("live")
        daemon.stop()
        expect(page.locator("#connection")).to_have_text("the daemon does not answer", timeout=PATIENT_MS)
        Person(page).is_called("").asks("Anybody?")
        Person(page).reads("The daemon does not answer")
        with running(folder / "run", model, api__listen=f"127.0.0.1:{port}"):
            expect(page.locator("#connection")).to_have_text("live", timeout=PATIENT_MS)
            answer = Person(page).is_called("").asks("And now?")
            expect(answer.locator(".chip")).to_have_text("base")


def test_versions_are_compared_by_quality(page: Page, daemon: LiveDaemon) -> None:
    taught(daemon, "judge", 3)
    version = {"created_at": "2025-01-01T00:00:00+00:00", "reason": "trained", "pairs": 3, "on_disk": False}
    quality = {"held_out_reward_accuracy": 0.75, "held_out_pairs": 8, "kl_nats": 0.31, "neutral_nll_change": 0.02}
    versions = [{**version, "version": number, **quality, "answer": f"Answer {number}."} for number in (2, 1)]
    means = {"neutral_nll_change": -0.01, "answer_tokens_recent": 41.0, "version": 2, "versions": versions}

    def improved(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), **means})

    page.route("**/v1/adapters/judge*", improved)
    page.reload()
    Person(page).is_called("judge")
    new, old = (page.locator(f"#versions tr:has-text('Answer {number}.')") for number in (2, 1))
    expect(new).to_contain_text(re.compile(r"6 of 8.*0\.31.*\+2\.0 %.*serving"))
    expect(old).to_contain_text("not on disk")
    expect(page.locator("#means")).to_contain_text(re.compile("neutral text-1\.0 %.*tokens an answer41"))


def test_held_pairs_are_shown_and_settled_with_one_button(
    tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> None:
    folder, port = tmp_path_factory.mktemp("held"), free_port()
    model = save_tiny(folder / "tiny", max_position_embeddings=512)
    settings = {**SETTINGS, "api__listen": f"127.0.0.1:{port}"}
    with (
        running(folder / "run", model, **settings) as daemon,
        opened(browser, port, viewport=PHONE) as page,
        daemon.http() as http,
    ):
        Person(page).is_called("ann")
        attack(http)
        count = len(held(http))
        expect(page.locator("#held-text")).to_contain_text(f"{count} pairs of ann are held", timeout=PATIENT_MS)
        expect(page.locator("#held-text")).to_contain_text("burst: ")
        accessible(page)
        fits(page)
        page.get_by_role("button", name="Drop them").click()
        expect(page.locator("#held")).to_be_hidden(timeout=PATIENT_MS)
        assert adapter(daemon, "ann")["pairs_skipped"] == count


def test_a_token_is_asked_for_once_and_a_long_answer_can_be_stopped(
    tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> None:
    folder, port = tmp_path_factory.mktemp("token"), free_port()
    model = save_tiny(folder / "tiny", max_position_embeddings=8192)
    settings = {"api__listen": f"127.0.0.1:{port}", "api__token": "sesame", "serving__default_max_tokens": 8000}

    def endless(route: Route) -> None:
        """Rule the end token out: an answer may otherwise end before it is stopped."""
        route.continue_(post_data=json.dumps({**(route.request.post_data_json or {}), "logit_bias": {"2": -100}}))

    with running(folder / "run", model, **settings), opened(browser, port, expected="401") as page:
        page.route("**/v1/chat/completions", endless)
        for token in ("wrong", "sesame"):
            page.get_by_role("textbox", name="Token").fill(token)
            page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("live")
        person = Person(page).is_called("ada")
        person.box.fill("Talk for ever.")
        person.box.press("Enter")
        expect(page.locator(".candidate .text").first).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(person.answer.locator(".facts-line")).to_have_text("stopped", timeout=PATIENT_MS)
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        assert not page.get_by_role("dialog").is_visible()
