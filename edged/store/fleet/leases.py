"""The table `leases`: which node of a fleet is the one writer of an adapter; without a row it is this one."""

from dataclasses import dataclass
from typing import Any

from sqlite_utils import Database

from edged.store.rows import field_values, first_column, insert_row, record_of

_HERE_TOO = """EXISTS (SELECT 1 FROM leases WHERE leases.adapter = pairs.adapter AND node <> :here
    AND pairs.handed_on >= epoch)"""
"""SQL's condition on a row of `pairs`: the writer, another node than :here, has it on its disk."""


@dataclass(frozen=True, slots=True, order=True)
class Lease:
    """The right to write an adapter: of two the larger pair of epoch and node holds."""

    epoch: int
    node: str


def get_lease(db: Database, adapter: str) -> Lease | None:
    """Return an adapter's lease; None where no fleet has told of one."""
    row = next(db.query("SELECT * FROM leases WHERE adapter = ?", [adapter]), None)
    return record_of(Lease, row) if row else None


def set_lease(db: Database, adapter: str, lease: Lease) -> None:
    """Put a lease in the place of the one before."""
    insert_row(db, "leases", {"adapter": adapter, **field_values(lease)}, "INSERT OR REPLACE")


def adapters_elsewhere(db: Database, here: str) -> list[str]:
    """Return the adapters whose writer is another node than `here`."""
    return first_column(db, "SELECT adapter FROM leases WHERE node <> ?", [here])


def known_adapters(db: Database, here: str) -> list[dict[str, Any]]:
    """Return every adapter that was taught, or told of by a fleet.

    Keys: adapter, node and epoch of its writer (`here` and 0 without a lease), unsent (whether pairs are to be handed
    on to it).
    """
    sql = f"""SELECT adapter, coalesce(node, :here) AS node, coalesce(epoch, 0) AS epoch,
                  coalesce(node, :here) <> :here AND EXISTS (
                      SELECT 1 FROM pairs WHERE pairs.adapter = known.adapter AND NOT {_HERE_TOO}) AS unsent
              FROM (SELECT adapter FROM pairs UNION SELECT adapter FROM adapter_versions
                    UNION SELECT adapter FROM preferences UNION SELECT adapter FROM struck_beliefs
                    UNION SELECT adapter FROM leases) AS known
              LEFT JOIN leases USING (adapter) ORDER BY adapter"""
    return [{**row, "unsent": bool(row["unsent"])} for row in db.query(sql, {"here": here})]


def unsent_pairs(db: Database, adapter: str, here: str, most: int) -> list[int]:
    """Return the ids of an adapter's oldest pairs that its writer, another node, may not have on its disk."""
    sql = f"""SELECT id FROM pairs WHERE adapter = :adapter AND NOT {_HERE_TOO}
              AND EXISTS (SELECT 1 FROM leases WHERE adapter = :adapter AND node <> :here) ORDER BY id LIMIT :most"""
    return first_column(db, sql, {"adapter": adapter, "here": here, "most": most})


def pairs_shown(db: Database, pair_ids: list[int], here: str) -> list[int]:
    """Return those of the pairs that are this node's to show: its writer shows what it has."""
    hidden = set(first_column(db, f"SELECT id FROM pairs WHERE {_HERE_TOO}", {"here": here}))
    return [pair_id for pair_id in pair_ids if pair_id not in hidden]
