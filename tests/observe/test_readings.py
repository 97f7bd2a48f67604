"""What the status says is in the metrics, each figure under its own name."""

from __future__ import annotations

from pathlib import Path

from edged.governors.limits import Limits
from edged.observe.catalogue import Samples
from edged.observe.readings import put_status
from tests.engine.harness import running_engine
from tests.engine.test_limits import BIG, until
from tests.observe.test_observer import values


def test_pages_that_the_box_has_back_are_not_in_use(tmp_path: Path) -> None:
    with running_engine(tmp_path, **BIG) as (engine, _):
        total = engine.status()["pages"]["total"]
        engine.limit(Limits(pages=total - 40))
        until(lambda: engine.status()["pages"]["retired"] == 40, "pages were not given up")
        samples = Samples()
        put_status(engine.status(), samples)
    pages = {dict(labels)["state"]: value for (name, labels), value in values(samples).items() if name == "edged_pages"}
    assert pages == {"used": 0, "cached": 0, "free": total - 40, "retired": 40}


def test_fine_tuning_that_a_governor_holds_is_not_called_enabled(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, _):
        seen = []
        for limits in (Limits(), Limits(finetune_share=0.0)):
            engine.limit(limits)
            until(lambda held=not limits.finetune_share: engine.status()["finetune"]["held"] == held, "not held")  # type: ignore[misc]
            samples = Samples()
            put_status(engine.status(), samples)
            seen.append(values(samples)["edged_finetune_enabled", ()])
    assert seen == [1, 0]
