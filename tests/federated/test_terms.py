"""Terms: the box has the last word, and the text that people agree to follows from its settings."""

from __future__ import annotations

from typing import Any

import pytest

from edged.federated.campaign_file import CampaignRefused, parse_campaign
from edged.federated.privacy import epsilon
from edged.federated.terms import agreed_terms, consent_text
from edged.settings.federated import FederatedSettings

MODEL, SIZE = "0f" * 32, 82_944
TABLE = {"name": "tone", "model": MODEL, "rank": 8, "demand": 300}


def terms(box: dict[str, Any] | None = None, size: int = SIZE, **job: Any):
    return agreed_terms(parse_campaign({**TABLE, **job}), FederatedSettings(**(box or {})), MODEL, 8, size)


def test_the_stricter_of_both_counts() -> None:
    plain = terms()
    assert (plain.mode, plain.clip, plain.noise, plain.deviation, plain.min_pairs) == ("sum", 0.4, 0.0, 0.0, 16)
    assert plain.epsilon is None
    strict = terms(clip=0.2, noise=1.27, min_pairs=20)
    assert (strict.clip, strict.noise, strict.min_pairs) == (0.2, 1.27, 20)
    assert strict.deviation == pytest.approx(1.27 * 0.2 * (2 / 240) ** 0.5)
    assert strict.epsilon == pytest.approx(epsilon(1.27**-2, 1e-6))
    assert terms(min_pairs=2).min_pairs == 16
    assert terms({"noise": 1.27}).noise == 1.27


@pytest.mark.parametrize(
    ("box", "job", "told"),
    [
        ({}, {"model": "ab" * 32}, f"this box serves {MODEL}"),
        ({}, {"rank": 16}, '"rank" = 16: align.rank is 8 on this box'),
        ({}, {"aggregation": "single"}, '"aggregation" = "single": the box says "sum"'),
        ({"aggregation": "single", "noise": 1.27}, {"aggregation": "single"}, "hides a person in a sum alone"),
        ({}, {"clip": 0.5}, '"clip" = 0.5: federated.clip allows 0.4 at most'),
        ({"noise": 1.27}, {"noise": 0.5}, '"noise" = 0.5: federated.noise demands 1.27 at least'),
        ({"noise": 1.27}, {"starts": ["a", "b"]}, "so that nobody may choose: name one"),
        ({}, {"demand": 5}, "end with 4 records, and federated.min_participants demands 10 at least"),
        ({}, {"demand": 20, "noise": 1.27}, "from 229 records on a round is worth it"),
        ({"max_epsilon": 2.0}, {"noise": 1.27}, "federated.max_epsilon is 2: raise the noise"),
    ],
)
def test_less_strict_than_the_box_is_refused_by_name(box: dict[str, Any], job: dict[str, Any], told: str) -> None:
    with pytest.raises(CampaignRefused) as refused:
        terms(box, **job)
    assert told in str(refused.value)


def test_records_that_are_too_large_are_refused() -> None:
    with pytest.raises(CampaignRefused, match="have 80 MiB: federated"):
        terms(size=20 << 20)


def test_the_text_says_what_protects_and_changes_with_the_settings() -> None:
    box = FederatedSettings()
    assert "NO noise is added" in consent_text(box)
    noisy = consent_text(FederatedSettings(noise=1.27))
    assert "epsilon stays under 8 (delta 1e-06)" in noisy
    texts = {consent_text(FederatedSettings(**more)) for more in ({}, {"noise": 2.0}, {"clip": 0.3}, {"max_rounds": 2})}
    assert len(texts) == 4
    assert consent_text(FederatedSettings(enabled=True, min_pairs=3)) == consent_text(box)
