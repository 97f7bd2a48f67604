"""The store: one SQLite file, written by one thread, readable by any SQLite tool."""

from edged.store.database import Store, StoreError
from edged.store.timestamps import utc_now, utc_text

__all__ = ["Store", "StoreError", "utc_now", "utc_text"]
