"""The commands `edged federated`: starts that boxes teach together, by file, and what users agreed to."""

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from edged.cli import federation
from edged.cli.adapters import refuse_full
from edged.cli.options import asks_daemon, explain_os_errors, shown
from edged.cli.output import make_table, moment, number, show_progress
from edged.client.client import Client, DaemonError

_ASK_EVERY_S, _MAX_RECORD_BYTES = 0.5, 1 << 30
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def federated() -> None:
    """Starts that boxes teach together: see docs/federated.md."""


for command in federation.COMMANDS:
    federated.add_command(command)


@federated.command()
@click.argument("user")
@click.option("--job", required=True, type=_FILE, metavar="FILE", help="The campaign's file (TOML).")
@click.option("--output", "-o", required=True, type=_FILE, metavar="FILE", help="The record to write.")
@click.option("--noise", type=click.FloatRange(0.0), metavar="Z", help="More noise than the campaign's, over the clip.")
@click.option("--start", default="", metavar="NAME", help="Which of the campaign's starts; default: its only one.")
@asks_daemon
def update(client: Client, user: str, job: Path, output: Path, noise: float | None, start: str) -> Any:
    """Make the record of USER for a campaign: how a start moves when it learns some of USER's pairs.

    USER must have agreed. The daemon clips the record, adds the noise, and writes its line into the ledger.
    """
    import secrets  # and what it brings, which no help needs

    from edged.federated.campaign_file import parse_campaign, read_campaign
    from edged.federated.records import RoundFile

    campaign = read_campaign(job)
    if noise is not None:
        campaign = parse_campaign({**campaign.table(), "noise": noise}, f'campaign file "{job}" with --noise')
    if not start and len(campaign.starts) > 1:
        known, scores = ", ".join(campaign.starts), f"`edged starts scores {user}` says which fits"
        raise DaemonError(f'campaign "{campaign.name}" has the starts {known}: choose with --start; {scores}')
    start = start or (campaign.starts or ("",))[0]
    asked = RoundFile(job=campaign, round=0, nonce=secrets.token_hex(16), start=start, tensors={})
    path = f"/v1/federated/rounds?user={quote(user)}"
    begun = client.call("POST", path, asked.content(), "application/octet-stream")
    path = f"/v1/federated/rounds/{begun['id']}"
    while (state := client.get(path))["state"] == "training":
        show_progress(f"{state['progress']:.0%} of the pairs are learned")
        time.sleep(_ASK_EVERY_S)
    show_progress("")
    if state["state"] == "failed":
        raise DaemonError(f"there is no record: {state['reason']}")
    with explain_os_errors(f"{output} cannot be written"), output.open("xb") as file:
        file.writelines(client.download(f"{path}/record")[1])
    client.call("DELETE", path)
    data = {
        "user": user,
        "campaign": campaign.name,
        "start": start,
        "path": str(output),
        "bytes": output.stat().st_size,
    }
    return data, f"{output} is the record of {user} for {campaign.name}; the ledger has its line"


@federated.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), metavar="FOLDER", help="PEFT folder.")
@click.option("--start", type=click.Path(path_type=Path), metavar="FOLDER", help="The named start that they are of.")
@shown
def average(files: tuple[Path, ...], output: Path, start: Path | None) -> Any:
    """Make a start of the mean of the records in FILES, each of which counts the same; no daemon is asked.

    `edged starts add NAME FOLDER` takes it.
    """
    from safetensors import SafetensorError

    from edged.federated.averaging import mean, moved, new_start, read_start, write_start
    from edged.federated.records import FederatedRecord, RecordRefused, check_together, check_weights

    refuse_full(output)
    if len({*files}) < len(files):
        raise RecordRefused("a file is named twice: give each once")
    records = {str(path): FederatedRecord.read(path, _MAX_RECORD_BYTES) for path in files}
    check_together(records)
    first, alpha = (known := [*records.values()])[0], known[0].form.alpha
    if first.start and start is None:
        raise RecordRefused(f'these records are of the start "{first.start}": give its folder with --start')
    weights = new_start(first.job.name, first.shapes)
    if start is not None:
        try:
            weights, alpha = read_start(start)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RecordRefused(f"{start} is no start: {error}") from None
    check_weights(weights, first.shapes)
    with explain_os_errors(f"{output} cannot be written"):
        write_start(output, moved(weights, mean([record.tensors for record in known])), alpha)
    counts = [record.held_out for record in known if record.held_out is not None]
    right, pairs = sum(each.right for each in counts), sum(each.pairs for each in counts)
    data = {"records": len(known), "campaign": first.job.name, "path": str(output), "held_out": pairs, "right": right}
    tested = f"; of {pairs} held-out pairs {right:g} were right after their own rounds" if pairs else ""
    return data, f"{output} is a start of {len(known)} records of {first.job.name}{tested}"


@federated.command()
@click.argument("user")
@click.option("--revoke", is_flag=True, help="Take part no more.")
@click.option("--yes", "-y", is_flag=True, help="Agree without being asked, in scripts.")
@asks_daemon
def consent(client: Client, user: str, revoke: bool, yes: bool) -> Any:
    """Show USER what would leave this box, and ask whether USER agrees."""
    path = f"/v1/federated/consent/{quote(user, safe='')}"
    if revoke:
        return client.call("DELETE", path), f"{user} takes part in no further round"
    told = client.get("/v1/federated")
    click.echo(told["text"], err=True)
    if not yes:
        click.confirm(f"Does {user} agree?", abort=True)
    data = client.call("PUT", path, {"text_sha256": told["text_sha256"]})
    return data, f"{user} agreed; `edged federated consent {user} --revoke` takes that back"


@federated.command()
@asks_daemon
def status(client: Client) -> Any:
    """What this box takes part in, and who agreed."""
    data = client.get("/v1/federated")
    terms, off = data["terms"], "" if data["enabled"] else " (federated.enabled is off: nothing leaves)"
    noise = f"noise {terms['noise']:g} times the clip" if data["guarantee"] else "no noise: no guarantee"
    rows = (
        (item["user"], moment(item["created_at"]), item["account"] or "–", f"{item['rounds']} of {terms['max_rounds']}",
         "" if item["counts"] else "to another text: ask again") for item in data["consents"]
    )  # fmt: skip
    consents = make_table("user", "agreed (UTC)", "by", "rounds", "", rows=rows)
    return data, [
        f'model = "{data["model"]}"  # base and LoRA form, rank {data["rank"]}{off}',
        f"records: {terms['aggregation']}, clipped to {terms['clip']:g}, {noise}",
        consents if data["consents"] else "nobody has agreed: `edged federated consent USER` asks",
    ]


@federated.command()
@asks_daemon
def ledger(client: Client) -> Any:
    """Every record that has left this box."""
    data = client.get("/v1/federated/ledger")
    rows = (
        (moment(line["created_at"]), line["user"] or "forgotten", line["campaign"], str(line["round"]), line["start"],
         line["mode"], str(line["bytes"]), number(line["epsilon"], 2), line["sha256"][:16]) for line in data["ledger"]
    )  # fmt: skip
    columns = ("left (UTC)", "user", "campaign", ">round", "start", "mode", ">bytes", ">epsilon", "SHA-256")
    caption = "epsilon of each record; –: without noise, there is no guarantee"
    table = make_table(*columns, rows=rows, caption=caption)
    return data, table if data["ledger"] else "nothing has left this box"
