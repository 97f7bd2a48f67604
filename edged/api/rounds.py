"""The rounds of this box, one at a time: from a round file to the record, which waits here until it is fetched."""

import asyncio
import logging
import secrets
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Literal

import numpy as np
import torch
from sqlite_utils import Database

from edged.align.adapters.adapter import AdapterError
from edged.align.rounds import LocalRound, RoundFailed
from edged.engine.engine import Engine
from edged.engine.request import EngineStopping
from edged.federated.averaging import B, new_start
from edged.federated.campaign_file import CampaignRefused
from edged.federated.privacy import clipped, epsilon, noised, norm
from edged.federated.records import (
    FederatedRecord,
    HeldOutCounts,
    RecordForm,
    RecordRefused,
    RoundFile,
    check_weights,
    fingerprint,
)
from edged.federated.terms import Terms, agreed_terms, consent_text, text_sha256
from edged.http.errors import ApiError, bad_request
from edged.settings.federated import FederatedSettings
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store, utc_now, utc_text
from edged.store.federated import consents, ledger

log = logging.getLogger("edged.api")


@dataclass(slots=True, eq=False)
class OpenRound:
    """The latest round: who takes part in what, how far it is, and its record once that is made."""

    id: str
    user: str
    file: RoundFile
    terms: Terms
    start: Mapping[str, torch.Tensor]
    """The weights that it began with."""
    state: Literal["training", "done", "failed"] = "training"
    reason: str = ""
    """Why it failed."""
    content: bytes = b""
    """The record."""
    line: ledger.LedgerLine | None = None
    """The record's line of the ledger."""


@dataclass(eq=False)
class Rounds:
    """Begins rounds, makes their records, and lets those leave that the ledger has. It lives on the event loop."""

    store: Store
    engine: Engine
    live: Live[Settings]
    latest: OpenRound | None = None
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _finishing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.spec = self.engine.start_files.spec
        shapes = self.spec.form.shapes
        self.model = fingerprint(self.spec.fingerprint, self.spec.alpha, shapes)
        """Fingerprint of the base and the form."""
        self._size = sum(int(np.prod(shape)) for name, shape in shapes.items() if name.endswith(B))

    @property
    def settings(self) -> FederatedSettings:
        """The settings in force."""
        return self.live.current.federated

    @property
    def text_sha256(self) -> str:
        """The hash of the text that people agree to."""
        return text_sha256(consent_text(self.settings))

    # -- who may take part -------------------------------------------------------------------------------------------

    async def participants(self, noise: float, min_pairs: int) -> list[str]:
        """Return who may take part in a round, those first who did least often."""
        given = await asyncio.to_thread(self.store.read, consents.all_consents)
        agreed = [user for user, consent in given.items() if consent.text_sha256 == self.text_sha256]
        learned = await asyncio.wrap_future(self.engine.count_learned(agreed))

        def allowed(db: Database) -> list[tuple[int, str]]:
            able = (user for user in agreed if learned.get(user, 0) >= min_pairs)
            return [(ledger.spent(db, user)[0], user) for user in able if not self._spent(db, user, noise)]

        return [user for _, user in sorted(await asyncio.to_thread(self.store.read, allowed))]

    def _spent(self, db: Database, user: str, noise: float) -> str:
        """Return why a user may take part in no further round of this noise, or ""."""
        rounds, shares = ledger.spent(db, user)
        if rounds >= self.settings.max_rounds:
            return f"took part {rounds} times, and federated.max_rounds is {self.settings.max_rounds}"
        total = epsilon(shares + noise**-2, self.settings.delta) if noise else 0.0
        if total > self.settings.max_epsilon:
            return f"would come to epsilon {total:.3g}, over federated.max_epsilon = {self.settings.max_epsilon:g}"
        return ""

    async def _demand_participant(self, user: str, terms: Terms) -> None:
        """Raise ApiError (409) where this user may not take part."""
        learned = (await asyncio.wrap_future(self.engine.count_learned([user]))).get(user, 0)

        def why_not(db: Database) -> str:
            consent = consents.get_consent(db, user)
            if consent is None or consent.text_sha256 != self.text_sha256:
                return f"has not agreed to what is asked now: `edged federated consent {user}` shows it"
            if learned < terms.min_pairs:
                return f"has {learned} learned pairs, and federated.min_pairs demands {terms.min_pairs}"
            return self._spent(db, user, terms.noise)

        if problem := await asyncio.to_thread(self.store.read, why_not):
            raise ApiError(409, f"{user} {problem}", "user", "no_participant")

    async def rests(self) -> bool:
        """Tell whether a record has left so lately that a hub gets none."""
        last = await asyncio.to_thread(self.store.read, ledger.last_left_at)
        rest = timedelta(hours=self.settings.min_interval_h)
        return last is not None and utc_now() - datetime.fromisoformat(last) < rest

    async def _choose(self, terms: Terms, file: RoundFile) -> str:
        """Return who takes part in a round that a hub asks for. Raises ApiError (409); it names nobody.

        Of several starts a person takes part in that of least mean loss on their pairs, once all are scored.
        """
        if await self.rests():
            told = f"a record left less than federated.min_interval_h = {self.settings.min_interval_h:g} h ago"
            raise ApiError(409, told, code="too_soon")
        for user in await self.participants(terms.noise, terms.min_pairs):
            if len(file.job.starts) < 2 or await self._fitting(user, file.job.starts) == file.start:
                return user
        told = "nobody here has agreed, has enough learned pairs, may still take part and is fitted best by this start"
        raise ApiError(409, told, code="no_participant")

    async def _fitting(self, user: str, starts: Collection[str]) -> str | None:
        """Return the start that fits a user's pairs best; None where not all of these starts were scored on them."""
        choice = await asyncio.wrap_future(self.engine.choice(user))
        losses = {score.start: score.loss or 0.0 for score in choice.verdict if score.start in starts}
        return min(losses, key=losses.__getitem__) if losses.keys() == {*starts} else None

    # -- a round -----------------------------------------------------------------------------------------------------

    async def begin(self, file: RoundFile, user: str | None) -> OpenRound:
        """Begin a round, of this user or of one who may take part. Raises ApiError (400, 409)."""
        async with self._beginning:
            if self.latest is not None and self.latest.state == "training":
                raise ApiError(409, f"round {self.latest.id} is under way: one runs at a time", code="round_runs")
            if not (self.engine.finetuning.trains and self.live.current.align.enabled):
                raise ApiError(
                    409, "this box does not learn: align.enabled, or its policy, forbids it", code="no_learning"
                )
            try:
                terms = agreed_terms(file.job, self.settings, self.model, self.spec.rank, self._size)
                start = await asyncio.to_thread(self._weights, file)
            except (CampaignRefused, RecordRefused, AdapterError) as error:
                raise bad_request(str(error), code="round_refused") from None
            if user is None:
                user = await self._choose(terms, file)
            else:
                await self._demand_participant(user, terms)
            ended = await asyncio.to_thread(
                self.engine.begin_round, user, start, self.settings.local_pairs, not terms.noise
            )
            self.latest = OpenRound(secrets.token_hex(8), user, file, terms, start)
            self._finishing = asyncio.create_task(self._finish(self.latest, ended))
            return self.latest

    def _weights(self, file: RoundFile) -> dict[str, torch.Tensor]:
        """Return the weights of a round's start. Raises RecordRefused or AdapterError."""
        shapes, starts = self.spec.form.shapes, self.engine.starts()
        if file.tensors:
            check_weights(file.tensors, shapes)
            found = file.tensors
        elif not file.start:
            found = new_start(file.job.name, shapes)
        elif file.start in starts:
            return self.engine.start_files.weights(starts[file.start], 1.0)
        else:
            known = ", ".join(sorted(starts)) or "none"
            way_out = f"`edged starts add {file.start} FOLDER` adds it"
            raise RecordRefused(f'this box has no start "{file.start}": known are {known}; {way_out}')
        return {name: torch.from_numpy(np.ascontiguousarray(found[name])) for name in shapes}

    async def _finish(self, current: OpenRound, ended: Future[LocalRound]) -> None:
        """Make the record of a round that has ended, unless it was dropped meanwhile."""
        reason = ""
        try:
            made = await asyncio.to_thread(self._record, current, await asyncio.wrap_future(ended))
        except (RoundFailed, EngineStopping) as error:
            reason = str(error)
        except Exception:
            log.exception("a federation's round failed")
            reason = "it failed: the daemon's log says why"
        if current.state != "training":
            return
        if reason:
            current.state, current.reason = "failed", reason
        else:
            current.content, current.line = made
            current.state = "done"

    def _record(self, current: OpenRound, local: LocalRound) -> tuple[bytes, ledger.LedgerLine]:
        """Make the record and its line: all that leaves is clipped and noised here. Raises RoundFailed."""
        file, terms, shapes = current.file, current.terms, self.spec.form.shapes
        delta = {
            name: each.numpy() - current.start[name].numpy()
            for name, each in local.state.tensors().items()
            if name.endswith(B)
        }
        if not np.isfinite(norm(delta)):
            raise RoundFailed("the weights that it learned are not finite")
        tensors = clipped(delta, terms.clip)
        if terms.deviation:
            tensors = noised(tensors, terms.deviation)
        counts = None
        if local.held_out:
            before, after = local.right
            counts = HeldOutCounts(pairs=len(local.held_out), right=after, right_before=before)
        inputs = {name.removesuffix(B): shapes[name.replace("lora_B", "lora_A")][1] for name in tensors}
        record = FederatedRecord(
            job=file.job,
            round=file.round,
            nonce=file.nonce,
            start=file.start,
            base=self.model,
            mode=terms.mode,
            pairs=len(local.learned),
            held_out=counts,
            epsilon=terms.epsilon,
            form=RecordForm(alpha=self.spec.alpha, inputs=inputs),
            tensors=tensors,
        )
        content = record.content()
        told = (utc_text(utc_now()), current.user, file.job.name, file.round, file.start, terms.mode, terms.noise)
        return content, ledger.LedgerLine(*told, terms.epsilon, len(content), sha256(content).hexdigest(), file.nonce)

    async def leave(self, current: OpenRound) -> bytes:
        """Return a record that may leave: its line is in the ledger. Raises ApiError (409) and StoreError."""
        line = current.line
        if line is None:
            told = current.reason or "the round is under way"
            raise ApiError(409, f"there is no record: {told}", code="no_record")

        def charge(db: Database) -> None:
            if consents.get_consent(db, current.user) is None:
                raise ApiError(409, "its participant agrees no more", code="no_participant")
            ledger.add_line(db, line)

        await asyncio.wrap_future(self.store.write(charge))
        return current.content

    async def drop(self, current: OpenRound, reason: str) -> None:
        """End a round under way, or drop a record; one that has left stays told in the ledger."""
        training, current.state, current.reason = current.state == "training", "failed", reason
        current.content, current.line = b"", None
        if training and current is self.latest:
            await asyncio.wrap_future(self.engine.end_round(reason))

    async def forget_user(self, user: str) -> None:
        """Drop a user's round, under way or waiting."""
        if self.latest is not None and self.latest.user == user:
            await self.drop(self.latest, "its participant agrees no more")
            self.latest.user = ""

    def progress(self) -> float:
        """Return how much of the latest round's pairs is learned, from 0 to 1."""
        local = self.engine.trainer.rounds.round
        return 1.0 if local is None else 1.0 - len(local.pairs) / len(local.learned)
