"""The parts of a daemon, built from the settings and connected with each other."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from edged.align.feedback.pair import Record, VersionPublished
from edged.align.journal import Journal, LogEvents
from edged.api.admission import TenantQueue, UserLimits, max_of_one, queue_sizes, tenant_places
from edged.api.event_router import EventRouter
from edged.api.event_streams import Feed
from edged.api.feedback_intake import FeedbackIntake
from edged.api.jobs.runner import JobRunner
from edged.api.outcomes import LatestOutcomes
from edged.api.practice import Practice
from edged.api.reading_speeds import ReadingSpeeds
from edged.api.rounds import Rounds
from edged.api.runs import ApplicationRuns
from edged.api.services import Lifecycle, Services
from edged.api.status import load, report
from edged.api.tastes import Tastes
from edged.api.version_answers import VersionAnswers
from edged.api.written_preferences import WrittenPreferences
from edged.engine.engine import Engine
from edged.governors.governors import Governors
from edged.models import find_model
from edged.reload import Reloader, ReloadResult, adopted
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store
from edged.store.base_models import refuse_other_base
from edged.store.data_dir import ADAPTERS_FOLDER, FILES_FOLDER
from edged.store.forgetting import finish_forgetting
from edged.store.jobs.files import sweep_files
from edged.store.maintenance import Maintenance
from edged.store.user_quota import UserQuota
from edged.telemetry.device import DeviceMonitor
from edged.text.grammar import GrammarCompiler
from edged.text.tokenizer import Tokenizer

log = logging.getLogger("edged")


def assemble(
    settings: Settings,
    store: Store,
    folder: Path,
    event_router: EventRouter,
    lifecycle: Lifecycle,
    reload: Callable[[], Awaitable[ReloadResult]],
) -> tuple[Services, Journal]:
    """Build what takes time: download, tokenizer, model, cache. Nothing is started.

    `folder` has the adapters, `reload` reads the settings again. Raises ModelMissing, TokenizerError, ModelRefused and
    OtherBase.
    """
    model_dir, name = find_model(settings.model)
    # The settings of a backup are read in another folder than that of this start.
    here = model_dir == Path(settings.model.path).expanduser()
    found = {"name": name, "path": os.path.abspath(model_dir) if here else settings.model.path}
    settings = settings.model_copy(update={"model": settings.model.model_copy(update=found)})
    if settings.model.trust_remote_code:
        log.warning("model.trust_remote_code is on: Python code in %s runs with all rights of this process", model_dir)
    live = Live(settings)
    chosen = settings.model
    arguments, template = chosen.chat_template_kwargs, chosen.response_template
    tokenizer = Tokenizer.load(model_dir, chosen.trust_remote_code, arguments, template)
    for problem in tokenizer.problems():
        log.warning('model "%s": %s', name, problem)
    if not tokenizer.writes_tools:
        log.info('model "%s": its chat template writes no tools; chats that offer some are answered without', name)
    left = finish_forgetting(store, folder / ADAPTERS_FOLDER)
    log_events, outcomes = LogEvents(), LatestOutcomes()

    def take(records: list[Record]) -> Future[None] | None:
        recorded = journal.append(records)
        log_events.on_records(records)
        feed.on_records(records)
        for record in records:
            if isinstance(record, VersionPublished) and (record.taken_back or record.is_start):
                feedback_intake.learn_again(record.adapter, recorded)
        if recorded is not None:
            recorded.add_done_callback(lambda _: feed.tell_outcomes(records))
        answers.on_records(records)
        outcomes.on_records(records)
        job_runner.on_records(records)
        practice.on_records(records)
        preferences.on_records(records)
        return recorded

    engine = Engine.build(settings, model_dir, event_router.deliver, take, folder)
    facts = engine.status()["model"]
    if settings.store.new_base == "refuse":
        store.read(partial(refuse_other_base, data_dir=folder, fingerprint=facts["fingerprint"], name=name))
    for forgotten in left:
        # The engine does this first: requests come later.
        engine.block_saves(forgotten)
        engine.forget(forgotten)
    journal = Journal(store, facts["fingerprint"])
    feed = Feed(
        event_router.loop, engine.iterations, lambda: report(lifecycle, services), lambda: load(lifecycle, services)
    )
    answers = VersionAnswers(store, tokenizer, engine, event_router, feed.tell_answer)
    tastes = Tastes(store, event_router.loop)
    preferences = WrittenPreferences(store, tokenizer)
    practice = Practice(store, tokenizer, engine, event_router, tastes, preferences, live)
    tastes.changed = practice.on_taste

    def on_pairs(adapter: str) -> None:
        tastes.refit(adapter)
        feed.tell_changed(adapter)

    feedback_intake = FeedbackIntake(
        store, tokenizer, engine, live, facts["fingerprint"], feed.tell_outcomes, on_pairs, tastes.difference
    )
    practice.learn_again = lambda adapter: feedback_intake.learn_again(adapter, None)
    about = (store, tokenizer, engine, live, facts["fingerprint"], name)
    job_runner = JobRunner(*about, feedback_intake.release)
    monitor = DeviceMonitor(facts["device"])
    governors = Governors(live, engine.limits.use, engine.limit)
    monitor.subscribe(governors.hear)
    governors.hear(monitor.latest)
    services = Services(
        live=live,
        model=name,
        engine=engine,
        store=store,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer),
        event_router=event_router,
        feed=feed,
        feedback_intake=feedback_intake,
        version_answers=answers,
        job_runner=job_runner,
        tastes=tastes,
        practice=practice,
        monitor=monitor,
        admission=TenantQueue(
            lambda: queue_sizes(live.current.serving),
            places=lambda tenants: (
                None if live.current.fairness.policy == "off" else tenant_places(live.current.serving, tenants)
            ),
            max_of_one=lambda: max_of_one(live.current.serving),
        ),
        runs=ApplicationRuns(lambda: live.current.fairness, store, engine.scheduler.late_s),
        rounds=Rounds(store, engine, live),
        limits=UserLimits(settings.limits),
        quota=UserQuota(live),
        reading_speeds=ReadingSpeeds(live, store),
        preferences=preferences,
        governors=governors,
        maintenance=Maintenance(store, live),
        outcomes=outcomes,
        started_at_s=time.time(),
        reload=reload,
    )
    if resumed := feedback_intake.resume():
        log.info("%d pairs were queued and go on", resumed)
    preferences.load()
    answers.resume()
    try:
        sweep_files(store)
    except OSError as error:
        log.warning("files that nobody uploaded stay in %s: %s", folder / FILES_FOLDER, error)
    return services, journal


def connect(services: Services, reloader: Reloader) -> None:
    """Register the parts that take over settings at run time, in the order in which they do."""
    engine = services.engine

    configure = engine.configure
    reloader.on_change(lambda settings: asyncio.wrap_future(configure(adopted(engine.settings, settings))))
    reloader.on_change(services.configure)
    reloader.on_change(lambda settings: services.limits.configure(settings.limits))
    reloader.on_change(lambda _: services.feedback_intake.release())
    reloader.on_change(lambda _: services.job_runner.run_soon())
