"""The command line that the benchmarks share: options, quick runs, progress, tables, the report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Parser = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """An option or, without dashes, a required argument; `default` may be a function."""

    name: str
    default: Any
    quick: Any
    """The default of a quick run; None: the same."""
    settings: dict[str, Any]
    """Further arguments of `add_argument`."""

    def value(self, quick: bool) -> Any:
        """Return the value that applies if the option is not given."""
        chosen = self.default if self.quick is None or not quick else self.quick
        return chosen() if callable(chosen) else chosen


def option(
    name: str, help: str, default: Any = None, quick: Any = None, least: float | None = None, **settings: Any
) -> Option:
    """Return an option with the type of its default; numbers are positive unless `least` says otherwise."""
    if type(default) in (int, float) and "type" not in settings:
        settings["type"] = number(type(default), least)
    known = {"default": default, "quick:": quick}
    told = "; ".join(
        f"{word} {','.join(map(str, value)) if isinstance(value, list) else value}"
        for word, value in known.items()
        if value not in (None, "") and not callable(value) and "action" not in settings
    )
    return Option(name, default, quick, {"help": f"{help} ({told})" if told else help, **settings})


def flag(name: str, help: str) -> Option:
    """Return an option without a value."""
    return Option(name, False, None, {"help": help, "action": "store_true"})


# -- what may be given -------------------------------------------------------------------------------------------------


def number(kind: type[int] | type[float], least: float | None = None) -> Parser:
    """Return a parser of numbers from `least` on; None: positive ones."""

    def parsed(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f'"{text}" is no {"whole " if kind is int else ""}number') from None
        if value < least if least is not None else value <= 0:
            bound = "more than 0" if least is None else f"at least {least:g}"
            raise argparse.ArgumentTypeError(f"{text} is too little: give {bound}")
        return value

    return parsed


def numbers(text: str) -> list[int]:
    """Parse positive whole numbers, separated by commas."""
    return [int(number(int)(part)) for part in text.split(",")]


def names(known: Iterable[str]) -> Parser:
    """Return a parser of some of the `known` names, separated by commas."""
    known = list(known)

    def parsed(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f'"{name}" is unknown: known are {", ".join(known)}')
        return found

    return parsed


def existing_file(text: str) -> Path:
    """Parse the path of an existing file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f'"{text}" is not a file')
    return Path(text)


def model_folder(text: str) -> Path:
    """Parse a model's directory."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f'"{text}" has no config.json: give a directory that save_pretrained wrote')
    return Path(text)


def new_file(text: str) -> Path:
    """Parse the path of a file that can be written: checked now, not after hours of measuring."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f'the folder of "{text}" does not exist')
    return Path(text)


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(text: str) -> str:
    import torch

    if text.startswith("cuda") and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("this torch sees no GPU: give cpu")
    return text


# -- options of several benchmarks -------------------------------------------------------------------------------------

PAIRS = option("pairs", "preference pairs: a (gzipped) JSONL file", type=existing_file)
FORMAT = option("--format", "of the pairs", "hh", choices=("hh", "trl", "edged"))
MODEL = option("--model", "a model's directory", type=model_folder, required=True)
DEVICE = option("--device", "cpu or cuda (default: the GPU where there is one)", _best_device, type=_device)
SIZE = option("--size", "of the random-weight model", "135m", "4m", choices=("135m", "4m", "3b"))
SEED = option("--seed", "of the load", 0, least=0)
SEEDS = option("--seeds", "orders of the pairs, from seed 0 on", 1)
THUMBS = option("--thumbs", "share of the pairs, up to 1, that come as single ratings", 0.0, least=0.0)
READERS = option("--readers", "words a second at which answers are read along; 0: nobody reads", 0.0, least=0)
OUTPUT = option("--output", "write a JSON report here", type=new_file)
JSON = flag("--json", "print JSON instead of a table")


def pace_of(options: argparse.Namespace) -> Any:
    """Return the `Pace` of the readers of READERS; None: nobody reads."""
    from edged.scheduler.reader import TOKENS_PER_WORD, Pace

    return Pace(TOKENS_PER_WORD * options.readers) if options.readers else None


def parse(doc: str | None, *options: Option, quick: str = "", program: str = "") -> argparse.Namespace:
    """Parse the command line with defaults; adds --output, --json and, if `quick` describes it, --quick."""
    return resolve(make_parser(doc, *options, quick=quick, program=program), *options)


def make_parser(doc: str | None, *options: Option, quick: str = "", program: str = "") -> argparse.ArgumentParser:
    """Return the parser of `parse`, for a benchmark that reports further errors."""
    spec = sys.modules["__main__"].__spec__
    program = program or (f"python -m {spec.name}" if spec is not None else "")
    parser = argparse.ArgumentParser(
        prog=program or None, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in (*options, OUTPUT, JSON):
        parser.add_argument(each.name, **{**each.settings, **({"default": None} if each.name[0] == "-" else {})})
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}: a smoke test")
    return parser


def resolve(parser: argparse.ArgumentParser, *options: Option) -> argparse.Namespace:
    """Parse the command line with this parser, and fill in defaults."""
    given = parser.parse_args()
    quick = getattr(given, "quick", False)
    for each in (*options, JSON):
        key = each.name.lstrip("-").replace("-", "_")
        if getattr(given, key) is None:
            setattr(given, key, each.value(quick))
    return given


# -- what is told ------------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print a line of progress on stderr: stdout is for the table or the JSON."""
    print(line, file=sys.stderr, flush=True)


def finish(options: argparse.Namespace, report: Any, shown: str) -> None:
    """Print the table, or the report if JSON was asked for, and write --output."""
    print(json.dumps(report) if options.json else shown)
    keep(options, report)


def keep(options: argparse.Namespace, report: Any) -> None:
    """Write the results so far to --output: some runs take long."""
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def table_of(columns: Mapping[str, str], items: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return lines of a table: under each heading its template, such as `{ms:.1f}`, filled from every item."""
    return markdown(list(columns), [[text.format_map(item) for text in columns.values()] for item in items])


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]
