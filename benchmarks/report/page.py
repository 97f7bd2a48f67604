"""The report's folder: every figure as SVG with its data beside it, and the page that shows them in order."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.report.canvas import Canvas
from benchmarks.report.claims import NOT_MEASURED, NOTHING_LEARNED, Claim, claims, scheduler_claims
from benchmarks.report.learning import against_retrain_rate, over_time
from benchmarks.report.overheads import (
    prefix_sharing,
    pruning,
    pruning_command,
    scheduler_command,
    scheduler_table,
)
from benchmarks.report.panels import Figure
from benchmarks.report.scored import ScoredWorkload
from benchmarks.report.serving import ablations, breakdown, iterations, throughput, utilisation
from benchmarks.report.setting import Setting
from benchmarks.report.sources import read_pruning, read_scheduler
from benchmarks.support.command import markdown
from edged.lab.bench.compare import ComparedLoad, CompareError

PAGE = "README.md"
_ABSOLUTE = re.compile(r"(?<![\w.:/~+-])/(?:[\w.+@~-]+/)*([\w.+@~-]+)/?")
_OF_A_SETTING: tuple[Callable[[Setting], Figure | None], ...] = (
    over_time,
    utilisation,
    prefix_sharing,
    against_retrain_rate,
    throughput,
    breakdown,
    ablations,
    iterations,
)


@dataclass(frozen=True, slots=True)
class Sources:
    """Inputs of a report: folders of `edged bench compare`, and JSON files of two benchmarks."""

    folders: Sequence[Path]
    pruning: Path | None = None
    scheduler: Sequence[Path] = ()


def write_report(sources: Sources, output: Path) -> Path:
    """Draw everything into `output` and return its page. Raises NoMatplotlib, CompareError."""
    _refuse_same_names(sources.folders)
    settings = [Setting.read(folder) for folder in sources.folders]
    pruned = read_pruning(sources.pruning) if sources.pruning else {}
    scheduler = [one for path in sources.scheduler for one in read_scheduler(path)]
    output.mkdir(parents=True, exist_ok=True)
    canvas = Canvas(output)
    parts = ["# MACE's figures from our runs\n", _INTRODUCTION]
    for setting, folder in zip(settings, sources.folders, strict=True):
        parts += _setting_part(setting, folder, pruned, canvas, output)
    figures: list[tuple[Figure, str]] = []
    if figure := pruning(pruned):
        figures.append((figure, pruning_command(pruned)))
    if figure := scheduler_table(scheduler):
        figures.append((figure, scheduler_command(scheduler)))
    if figures:
        parts.append("## Other benchmarks\n")
        parts += [_figure_part(figure, figure.key, canvas, output, command) for figure, command in figures]
        parts.append(_claims_part(scheduler_claims(scheduler)))
    page = output / PAGE
    page.write_text(without_folders("\n".join(part for part in parts if part)) + "\n")
    return page


_INTRODUCTION = """`python -m benchmarks.report` wrote this page from the runs of `edged bench compare`; nothing on it
is written by hand but the paper's numbers (`benchmarks/report/paper.py`). Values are medians over seeds, in brackets
their range. The numbers of each figure are in the JSON file of its name.
"""


def _refuse_same_names(folders: Sequence[Path]) -> None:
    """Raise CompareError if two folders have one name, since figures are named by their folder."""
    known: dict[str, Path] = {}
    for folder in folders:
        other = known.setdefault(folder.resolve().name, folder)
        if other is not folder:
            raise CompareError(f'"{other}" and "{folder}" have the same last name, which figures go by: rename one')


def without_folders(text: str) -> str:
    """Return the text with absolute paths cut to base names, so that it names no folder of this machine."""
    return _ABSOLUTE.sub(r"\1", text)


def _setting_part(setting: Setting, folder: Path, pruned: dict[str, Any], canvas: Canvas, output: Path) -> list[str]:
    """Return the part of the page about one machine."""
    runs = setting.runs
    title = f"## {setting.name}: {'simulated ' + setting.simulated if setting.simulated else 'measured'}\n"
    if not runs.done:
        return [title, "No run came to a report.\n", _failures(runs.failed)]
    figures = [figure for make in _OF_A_SETTING if (figure := make(setting)) is not None]
    command = _command(runs.manifest, setting, folder)
    again = f"All of its figures are from\n\n```\n{command}\n```\n{_missing(setting)}"
    parts = [title, _about(setting), again, _failures(runs.failed), _claims_part(claims(setting, pruned))]
    return parts + [_figure_part(figure, f"{figure.key}-{setting.name}", canvas, output) for figure in figures]


def _figure_part(figure: Figure, name: str, canvas: Canvas, output: Path, command: str = "") -> str:
    """Return a figure, its numbers beside the paper's, and the command if only this figure has it."""
    (output / f"{name}.json").write_text(without_folders(json.dumps(figure.as_json(), separators=(",", ":"))) + "\n")
    lines = [f"### {figure.title}\n"]
    if figure.panels:
        drawing = canvas.draw(figure, name)
        lines.append(f"![{figure.title}]({drawing.name})\n")
    if figure.note:
        lines.append(f"{figure.note}\n")
    lines.append(_table(("", "ours", "paper"), [(row.what, row.ours, str(row.paper or "–")) for row in figure.rows]))
    lines.append(f"[Numbers]({name}.json).\n")
    if command:
        lines.append(f"```\n{command}\n```\n")
    return "\n".join(lines)


def _claims_part(found: Sequence[Claim]) -> str:
    """Return the claims that these runs measured, and one line with the others."""
    told = [claim for claim in found if claim.verdict != NOT_MEASURED]
    others = [claim.what for claim in found if claim.verdict == NOT_MEASURED]
    rows: list[tuple[str, ...]] = [(one.what, one.paper, one.ours, one.learned, one.verdict) for one in told]
    head: tuple[str, ...] = ("", "wanted", "ours", "pairs learned", "verdict")
    if all(claim.learned == NOTHING_LEARNED for claim in told):
        head, rows = (*head[:3], head[4]), [(*row[:3], row[4]) for row in rows]
    parts = ["### What must come out\n", _table(head, rows) if rows else ""]
    parts.append(f"Not measured by these runs: {'; '.join(others)}.\n" if others else "")
    return "\n".join(part for part in parts if part) if found else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"{line}\n" for line in markdown(head, rows))


def _about(setting: Setting) -> str:
    """Return lines on the model, the trace and the machine."""
    workload, first = setting.runs.manifest["workload"], setting.runs.done[0].report
    model, seeds = first["model"], setting.runs.axis("seed")
    prompt, answer = first["load"]["mean_prompt_tokens"], first["load"]["mean_output_tokens"]
    capacity = setting.runs.manifest.get("capacity_per_s")
    burst = f" A burst reached {capacity:.2f} requests/s." if capacity else ""
    return (
        f"{model['name']} ({model['dtype']} on {model['device']}), trace {first['load']['trace']}: "
        f"prompts of {prompt:.0f} and answers of {answer:.0f} tokens, {workload['seconds']:.0f} s each, "
        f"seeds {', '.join(map(str, seeds))}, {len(setting.runs.done)} runs.{burst} "
        f"Figures at one point are taken at {setting.point()}.\n"
    )


def _failures(failed: dict[str, str]) -> str:
    """Return lines on the runs that failed."""
    return "".join(f"- {name} failed: {error}\n" for name, error in failed.items())


def _missing(setting: Setting) -> str:
    """Return a line on the command's runs that are missing here; empty if none is."""
    points = list(product(*(setting.runs.axis(name) for name in ("policy", "retrain_rate", "rate_per_s", "seed"))))
    ran = {(run.policy, run.retrain_rate, run.rate_per_s, run.seed) for run in (done.run for done in setting.runs.done)}
    missing = Counter((rate, seed) for policy, rate, per_s, seed in points if (policy, rate, per_s, seed) not in ran)
    told = ", ".join(f"{count} of seed {seed} at {rate:.0%} retrain rate" for (rate, seed), count in missing.items())
    return f"\nThat is {len(points)} runs, of which {len(ran)} were made. Missing are {told}.\n" if missing else ""


def _base_name(path: str | None) -> str | None:
    """Return the base name of a file or folder."""
    return Path(path).name if path else None


def _command(manifest: dict[str, Any], setting: Setting, folder: Path) -> str:
    """Return the command that repeats the comparison."""
    workload = manifest["workload"]
    loads = sorted({done.run.load for done in setting.runs.done if done.run.load is not None})
    rates = sorted({done.run.rate_per_s for done in setting.runs.done if done.run.load is None})
    options: dict[str, Any] = {
        **{f"--{name}": _base_name(workload.get(name)) for name in ("trace", "pairs")},
        "--format": workload.get("pair_format") if workload.get("pairs") else None,
        **{f"--{name}": _base_name(workload.get(name)) for name in ("model", "config", "device")},
        "--policies": ",".join(setting.runs.axis("policy")),
        "--retrain-rates": ",".join(f"{rate:g}" for rate in setting.retrain_rates),
        "--rates": ",".join(f"{rate:g}" for rate in rates),
        "--loads": ",".join(f"{load:g}" for load in loads),
        "--seeds": ",".join(map(str, setting.runs.axis("seed"))),
        "--seconds": f"{workload['seconds']:g}",
    }
    program = (ScoredWorkload if workload.get("score_arrivals") else ComparedLoad).program
    words = [*program, "compare", folder.name]
    return shlex.join(words + [word for name, value in options.items() if value for word in (name, str(value))])
