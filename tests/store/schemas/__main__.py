"""Write the dumps that are missing."""

from edged.store.migrations import MIGRATIONS
from tests.store.schemas import dump, file_of

for version in range(1, len(MIGRATIONS) + 1):
    if not file_of(version).exists():
        file_of(version).write_text(dump(version))
