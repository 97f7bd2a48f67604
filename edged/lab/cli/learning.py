"""The command `edged bench federated learning`: what a start is worth to new users."""

from pathlib import Path
from typing import Any

import click

from edged.cli.options import explain_os_errors, seed_option, shown
from edged.cli.output import Renderable, make_table, number, show_progress
from edged.cli.settings import load_settings
from edged.lab.cli.load_options import Values

_COUNT = click.IntRange(1)
_FIXED = {
    "align.rank": 8,
    "align.alpha": 16.0,
    "align.practice": False,
    "align.max_loaded_adapters": 64,
    "guard.held_out_share": 0.0,
    "feedback.quarantine": False,
    "feedback.pairs_per_hour": 0,
    "starts.max": 2,
}


@click.command()
@click.option("--model", "-m", default="demo", metavar="DIR", help="As for edged serve.")
@click.option("--pairs", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Preference pairs, as HH.")  # fmt: skip
@click.option("--users", type=Values(_COUNT), default="10,100", help="Members of each taste whose mean is a start.")
@click.option("--new", type=_COUNT, default=10, help="New users of each taste.")
@click.option("--own", type=Values(_COUNT), default="1,4,8,16", help="Own pairs after which new users are tested.")
@click.option("--noise", type=click.FloatRange(0.0), default=0.0, help="Noise of a sum, in clips (z); 0: none.")
@click.option("--splits", type=click.IntRange(0), default=20, help="Seeds of the test of splits; 0: nor Auxo.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Keep what was computed there: a run that is stopped goes on.")  # fmt: skip
@seed_option
@shown
def learning(model: str, keep: Path | None, **plan: Any) -> Any:
    """Compare what new users have of own pairs, of one adapter for all, of neighbours', of a start, and of Auxo.

    Users are simulated: they like short answers, or long ones. Pairs are of the file's lines, members' of the first.
    """
    from edged.runtime.process import prepare

    prepare()
    from edged.lab.bench.federated.learning import LearningPlan, run
    from edged.models import find_model

    settings = load_settings(None, overrides={"model.path": model, **_FIXED})
    with explain_os_errors():
        report = run(LearningPlan(**plan), settings, find_model(settings.model)[0], show_progress, keep)
    show_progress("")
    return report, lambda: _screen(report)


def _screen(report: dict[str, Any]) -> list[Renderable]:
    own = list(next(iter(report["arms"].values())))
    title = f"unseen pairs that are right, {report['new_users']} new users"
    table = make_table("arm", *(f">{each} own pairs" for each in own), title=title)
    for arm, shares in report["arms"].items():
        table.add_row(arm, *(number(shares.get(each), 3) for each in own))
    for arm, shares in report["chosen_right"].items():
        table.add_row(f"{arm}: the right one fits best", *(number(shares["nearest"].get(each), 2) for each in own))
        table.add_row(f"{arm}: took one", *(number(shares["took_one"].get(each), 2) for each in own))
    screen: list[Renderable] = [table]
    if "single" in report:
        tests = make_table("updates of", ">seeds", ">splits", ">median z", ">needed", ">J after/before", ">purity")
        for kind, row in report["single"].items():
            figures = (row["z"][1], row["needs"], row["ratio"][1], row["purity"])
            tests.add_row(
                f"{kind} taste(s)", str(row["seeds"]), str(row["splits"]), *(number(each) for each in figures)
            )
        screen.append(tests)
    return screen
