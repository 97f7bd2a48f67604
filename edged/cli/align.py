"""`edged align rebuild`: an adapter trained again from its pairs, beside the one that was learned while serving."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.adapters import refuse_full, upload
from edged.cli.options import config_option, json_option, with_client
from edged.cli.output import make_table, number, percent, print_json, print_text, show_progress
from edged.cli.settings import means_installed, served_settings, settings_of
from edged.client.client import Client, NotRunning

if TYPE_CHECKING:
    from edged.rebuild.rebuild import Comparison, Rebuild


@click.group()
def align() -> None:
    """What was learned, looked at again."""


@align.command()
@click.argument("user")
@click.option("--epochs", type=click.IntRange(1), help="Times that a pair is trained on; default: align.epochs.")
@click.option("--lr", type=click.FloatRange(0.0, min_open=True), help="Step size; default: align.learning_rate.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="PEFT folder to write.")
@click.option("--adopt", is_flag=True, help="Serve the rebuilt adapter, as a new version.")
@click.option("--model", "-m", metavar="DIR", help="Base model; default: the running daemon's.")
@click.option("--data-dir", metavar="DIR", help="Data folder; default: the running daemon's.")
@config_option
@json_option
@with_client
def rebuild(
    client: Client,
    user: str,
    epochs: int | None,
    lr: float | None,
    seed: int,
    output: Path | None,
    adopt: bool,
    model: str | None,
    data_dir: str | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Train USER's adapter anew with TRL's DPOTrainer, and compare.

    All stored pairs that the online adapter was trained on are shuffled and learned from the untrained adapter on, with
    the settings' LoRA, beta and step size. Nothing is served differently unless --adopt says so. A daemon may run
    meanwhile; the base model is then loaded a second time.
    """
    if output is not None:
        refuse_full(output)
    settings, work = _prepare(client, user, config, {"model.path": model, "store.data_dir": data_dir})
    from edged.rebuild.training import Recipe

    recipe = Recipe(epochs or settings.align.epochs, lr or settings.align.learning_rate, seed)
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
            version = _adopt(client, work, folder)
    if as_json:
        return print_json({**result.as_dict(), "output": output and str(output), "adopted_version": version})
    if output is not None:
        click.echo(f"the rebuilt adapter is in {output}")
    if version is not None:
        return click.echo(f"{user} has version {version} now, the rebuilt one")
    return click.echo(f"{user} keeps version {result.online_version}: --adopt takes the rebuilt one")


def _prepare(client: Client, user: str, config: Path | None, flags: dict[str, Any]) -> tuple[Any, Rebuild]:
    """The settings, and the rebuild with its base model loaded."""
    settings = settings_of(config, flags)
    # The installed daemon's file is known: to ask it could start it, and load its model a second time.
    if config is None and not means_installed(None):
        settings = served_settings(client, flags) or settings
    _quieten()  # before the imports, some of which remark
    from edged.models.source import find_model
    from edged.rebuild.training import check_trl
    from edged.store.data_dir import data_folder

    check_trl()
    model_dir, name = find_model(settings.model)
    from edged.rebuild.rebuild import Rebuild

    return settings, Rebuild(settings, model_dir, name, data_folder(settings.store.data_dir, os.environ), user)


def _quieten() -> None:
    """Leave out what libraries remark on themselves: stderr is for the steps and for what goes wrong."""
    import logging
    import warnings

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for kind in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.simplefilter("ignore", kind)


def _adopt(client: Client, work: Rebuild, folder: Path) -> int:
    """Publish the adapter through the daemon, or in its folder while it is stopped; the version's number."""
    try:
        return int(upload(client, work.adapter, folder, "?reason=rebuilt")["version"])
    except NotRunning:
        return work.publish(folder)


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
    return [table, None if result.online["held_out"] else nothing, agreement]
