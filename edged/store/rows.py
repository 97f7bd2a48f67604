"""Rows of tables made of dataclasses whose fields are named as the columns, and the other way round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlite_utils import Database


def insert_row(db: Database, table: str, row: Mapping[str, Any], verb: str = "INSERT") -> int:
    """Add a row whose columns are the keys; returns its rowid."""
    columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    return int(db.execute(f"{verb} INTO {table} ({columns}) VALUES ({values})", dict(row)).lastrowid or 0)


def field_values(record: Any) -> dict[str, Any]:
    """A dataclass's fields by name, as they are: nothing within them is copied."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def columns_of(kind: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that are fields of the dataclass `kind`."""
    return {field.name: row[field.name] for field in fields(kind) if field.name in row}


def json_tuple(text: str | None) -> tuple[Any, ...] | None:
    """The array in a column of JSON; None for NULL."""
    return None if text is None else tuple(json.loads(text))
