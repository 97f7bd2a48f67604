"""Rows of tables made of dataclasses whose fields are named as the columns, and the other way round."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from sqlite_utils import Database

T = TypeVar("T")
Values = Sequence[Any] | Mapping[str, Any]

NAMED = "(SELECT value FROM json_each(:names))"
"""SQL's set of what the parameter `names` holds as JSON."""
JSON_COLUMNS = frozenset({"messages", "prompt_ids", "token_ids", "pair_ids"})
"""Fields whose columns hold an array as JSON."""
JSON_OBJECTS = frozenset({"template_arguments", "beside"})
"""Fields whose columns hold an object as JSON."""


def insert_row(db: Database, table: str, row: Mapping[str, Any], verb: str = "INSERT", condition: str = "1") -> int:
    """Add a row whose columns are the keys, where the SQL `condition` holds, which may name them; returns its rowid."""
    columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    stored = {name: column_value(value) for name, value in row.items()}
    sql = f"{verb} INTO {table} ({columns}) SELECT {values} WHERE {condition}"
    return int(db.execute(sql, stored).lastrowid or 0)


def update_rows(db: Database, table: str, values: Mapping[str, Any], **where: Any) -> None:
    """Set columns of the rows whose other columns are as in `where`."""
    changes, condition = ", ".join(f"{name} = :{name}" for name in values), " AND ".join(f"{n} = :{n}" for n in where)
    stored = {name: column_value(value) for name, value in values.items()}
    db.execute(f"UPDATE {table} SET {changes} WHERE {condition}", {**stored, **where})


def first_value(db: Database, sql: str, values: Values = ()) -> Any:
    """The first column of the first row that a query finds; None where it finds none."""
    row = db.execute(sql, values).fetchone()
    return row[0] if row else None


def first_column(db: Database, sql: str, values: Values = ()) -> list[Any]:
    """The first column of all rows that a query finds."""
    return [row[0] for row in db.execute(sql, values).fetchall()]


def field_values(record: Any) -> dict[str, Any]:
    """A dataclass's fields by name, as they are: nothing within them is copied."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def record_of(kind: type[T], row: Mapping[str, Any], **others: Any) -> T:
    """The dataclass `kind` of a row's columns, with JSON read, its arrays as tuples, and of `others`."""
    values = {field.name: row[field.name] for field in fields(kind) if field.name in row}  # type: ignore[arg-type]
    for name in JSON_COLUMNS & values.keys():
        values[name] = None if values[name] is None else tuple(json.loads(values[name]))
    for name in JSON_OBJECTS & values.keys():
        values[name] = None if values[name] is None else json.loads(values[name])
    return kind(**{**values, **others})


def column_value(value: Any) -> Any:
    """`value` as a column holds it: arrays and objects as JSON, and text as UTF-8 can say it.

    JSON may carry half a surrogate pair, which becomes "?".
    """
    if isinstance(value, (tuple, list, dict)):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
