"""The command `edged align rebuild`, which trains an adapter again from its pairs and compares it with the one that was
learned while serving."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.adapters import refuse_full, upload
from edged.cli.options import config_option, json_option, seed_option, with_client
from edged.cli.output import make_table, number, percent, print_json, print_text, show_progress
from edged.cli.settings import means_installed, served_settings, settings_of
from edged.client.client import Client, NotRunning

if TYPE_CHECKING:
    from edged.lab.rebuild.rebuild import Comparison, Rebuild


@click.group()
def align() -> None:
    """What was learned, looked at again."""


@align.command()
@click.argument("user")
@click.option("--epochs", type=click.IntRange(1), help="Times that a pair is trained on; default: align.epochs.")
@click.option("--lr", type=click.FloatRange(0.0, min_open=True), help="Step size; default: align.learning_rate.")
@seed_option
@click.option("--output", "-o", type=click.Path(path_type=Path), help="PEFT folder to write.")
@click.option("--adopt", is_flag=True, help="Serve the rebuilt adapter, as a new version.")
@click.option("--model", "-m", metavar="DIR", help="Base model; default: the running daemon's.")
@click.option("--data-dir", metavar="DIR", help="Data folder; default: the running daemon's.")
@config_option
@json_option
@with_client
def rebuild(
    client: Client, user: str, output: Path | None, adopt: bool, config: Path | None, as_json: bool, **options: Any
) -> None:
    """Train USER's adapter anew with TRL's DPOTrainer, and compare.

    All stored pairs that the online adapter was trained on are shuffled and learned from the untrained adapter on, with
    the settings' LoRA, beta and step size. Nothing is served differently unless --adopt says so. A daemon may run
    meanwhile; the base model is then loaded a second time.
    """
    if output is not None:
        refuse_full(output)
    flags = {"model.path": options["model"], "store.data_dir": options["data_dir"]}
    settings, work = _prepare(client, user, config, flags)
    from edged.lab.rebuild.training import Recipe

    align = settings.align
    recipe = Recipe(options["epochs"] or align.epochs, options["lr"] or align.learning_rate, options["seed"])
    result = work.train(recipe, lambda step, of, loss: show_progress(f"step {step} of {of}, loss {loss:.3f}"))
    show_progress("")
    version = None
    with tempfile.TemporaryDirectory(prefix="edged-") as scratch:
        folder = output or Path(scratch)
        if output is not None or adopt:
            work.save(folder)
        if not as_json:
            print_text(_text(result))
        if adopt:
            try:
                version = upload(client, work.adapter, folder, "?reason=rebuilt")["version"]
            except NotRunning:
                version = work.publish(folder)
    if as_json:
        return print_json({**asdict(result), "output": output and str(output), "adopted_version": version})
    if output is not None:
        print_text(f"the rebuilt adapter is in {output}")
    if version is not None:
        return print_text(f"{user} has version {version} now, the rebuilt one")
    return print_text(f"{user} keeps version {result.online_version}: --adopt takes the rebuilt one")


def _prepare(client: Client, user: str, config: Path | None, flags: dict[str, Any]) -> tuple[Any, Rebuild]:
    """Return the settings and a Rebuild whose base model is loaded."""
    settings = settings_of(config, flags)
    # The installed daemon's settings file is readable; a request could start that daemon and load the model twice.
    if config is None and not means_installed(None):
        settings = served_settings(client, flags) or settings
    _silence_libraries()  # before the imports, some of which log
    from edged.lab.rebuild.training import check_trl
    from edged.models import find_model
    from edged.store.data_dir import data_folder

    check_trl()
    model_dir, name = find_model(settings.model)
    from edged.lab.rebuild.rebuild import Rebuild

    return settings, Rebuild(settings, model_dir, name, data_folder(settings.store.data_dir, os.environ), user)


def _silence_libraries() -> None:
    """Silence warnings and progress bars of libraries: stderr is for training steps and errors."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for kind in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.simplefilter("ignore", kind)


def _text(result: Comparison) -> list[Any]:
    rows: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("reward accuracy", lambda score: percent(score.reward_accuracy)),
        ("reward margin", lambda score: number(score.reward_margin, 3)),
        ("win rate", lambda score: percent(score.win_rate)),
        ("CLPD", lambda score: number(score.clpd, 2, "nats")),
        ("KL to the base", lambda score: number(score.kl_nats, 4, "nats/token")),
    )
    title = f"{result.adapter}: online version {result.online_version}, rebuilt with {result.steps} steps"
    table = make_table("pairs", "", "online", "rebuilt", title=title)
    for key, name in (("held_out", "held out"), ("learned", "learned")):
        online, rebuilt = result.online[key], result.rebuilt[key]
        for index, (label, show) in enumerate(rows):
            if online is not None and rebuilt is not None:
                table.add_row(f"{name} ({online.pairs})" if index == 0 else "", label, show(online), show(rebuilt))
    nothing = "no pair is held out: what both were trained on says little about either"
    agreement = f"the same greedy tokens: {percent(result.agreement)}"
    return [_better(result) or nothing, table, agreement]


def _better(result: Comparison) -> str:
    """Return a verdict on the held-out pairs; "" without any."""
    from edged.align.metrics import wilson

    online, rebuilt = result.online["held_out"], result.rebuilt["held_out"]
    if online is None or rebuilt is None:
        return ""
    ends = [wilson(score.reward_accuracy * score.pairs, score.pairs) for score in (online, rebuilt)]
    clear = ends[0][1] < ends[1][0] or ends[1][1] < ends[0][0]
    better = "the rebuilt adapter" if rebuilt.reward_accuracy > online.reward_accuracy else "the online adapter"
    verdict = (
        f"{better} predicts {result.adapter}'s held-out pairs better"
        if clear
        else "no clear difference on held-out pairs"
    )
    said = (f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in ends)
    return f"{verdict}: {online.pairs} pairs, right are {' online and '.join(said)} rebuilt (95 % intervals)"
