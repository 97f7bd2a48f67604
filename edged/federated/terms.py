"""Terms: what a box and a campaign agree on, where the stricter of both counts, and what a person consents to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from edged.federated.campaign_file import CampaignFile, CampaignRefused, Mode
from edged.federated.privacy import epsilon, least_threshold, record_deviation
from edged.settings.federated import FederatedSettings


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms that hold in a campaign's rounds on this box."""

    mode: Mode
    clip: float
    noise: float
    """Standard deviation of the noise in the sum, over the clip; 0: none."""
    deviation: float
    """Standard deviation of the noise in one record."""
    min_pairs: int
    epsilon: float | None
    """Epsilon of one participation; None without noise."""


def agreed_terms(job: CampaignFile, box: FederatedSettings, model: str, rank: int, size: int) -> Terms:
    """Return what holds where a campaign may run on this box, whose records have `size` numbers.

    Raises CampaignRefused that names what is less strict than the box's settings, or does not fit it.
    """

    def demand(holds: bool, why: str) -> None:
        if not holds:
            raise CampaignRefused(f'campaign "{job.name}": {why}')

    demand(job.model == model, f'"model" = {job.model}: this box serves {model}')
    demand(job.rank == rank, f'"rank" = {job.rank}: align.rank is {rank} on this box')
    single = job.aggregation == "single"
    way_out = 'the box says "sum": ask for that, or its operator sets federated.aggregation = "single"'
    demand(not single or box.aggregation == "single", f'"aggregation" = "single": {way_out}')
    clip, noise = (own if own is not None else of for own, of in ((job.clip, box.clip), (job.noise, box.noise)))
    demand(clip <= box.clip, f'"clip" = {clip:g}: federated.clip allows {box.clip:g} at most')
    demand(noise >= box.noise, f'"noise" = {noise:g}: federated.noise demands {box.noise:g} at least')
    demand(not (noise and single), '"aggregation" = "single": this box adds noise, which hides a person in a sum alone')
    demand(not (noise and len(job.starts) > 1), '"starts": this box adds noise, so that nobody may choose: name one')
    fewest = f"federated.min_participants demands {box.min_participants} at least: raise demand or min_response"
    demand(job.threshold >= box.min_participants, f"its rounds end with {job.threshold} records, and {fewest}")
    needed = least_threshold(noise, size)
    drowned = f"noise {noise:g} drowns what {job.threshold} people have in common in {size} numbers"
    demand(job.threshold >= needed, f"{drowned}: from {needed} records on a round is worth it")
    megabytes = 4 * size / (1 << 20)
    demand(megabytes < box.max_update_mb, f"its records have {megabytes:.0f} MiB: federated.max_update_mb allows less")
    own = epsilon(noise**-2, box.delta) if noise else None
    spent = f"one round costs epsilon {own or 0.0:.3g}, and federated.max_epsilon is {box.max_epsilon:g}"
    demand(own is None or own <= box.max_epsilon, f"{spent}: raise the noise")
    deviation = record_deviation(noise, clip, job.threshold)
    return Terms(job.aggregation, clip, noise, deviation, max(job.min_pairs or 0, box.min_pairs), own)


def consent_text(box: FederatedSettings) -> str:
    """Return what a person is shown and agrees to: it follows from the box's settings."""
    leaves = (
        f"Boxes that agree teach adapters together (docs/federated.md). In {box.max_rounds} round(s) at most this box "
        f"would learn up to {box.local_pairs} of your pairs on a start of people alike. What leaves it then is how one "
        f"half of the adapter moved: numbers, clipped to length {box.clip:g}. No text, no name, no pair and nothing "
        "of your own adapter leaves."
    )
    if box.noise:
        hides = (
            f"Noise of {box.noise:g} times the clip is in each sum: over your life epsilon stays under "
            f"{box.max_epsilon:g} (delta {box.delta:g})."
        )
    else:
        hides = (
            "Beside it go the number of pairs, on how many held-out ones it was right, and of several starts the name "
            "of that which fits them best. NO noise is added: nothing guarantees that nobody learns about you from it. "
            "Agree only where you trust those who take part."
        )
    seen = "" if box.aggregation == "sum" else " Each record may be seen by itself."
    by_file = " Who averages records by file sees each."
    return f"{leaves} {hides}{seen}{by_file} You may revoke this at any time; what is in a sum by then stays there."


def text_sha256(text: str) -> str:
    """Return the SHA-256 of a text, in hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()
