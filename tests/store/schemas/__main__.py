"""Write the dumps that are missing."""

from tests.store.schemas import VERSIONS, dump, file_of

for version in VERSIONS:
    if not file_of(version).exists():
        file_of(version).write_text(dump(version))
