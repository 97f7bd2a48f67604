"""A backup is one state of everything, it is there whole or not at all, and nothing else is taken for one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sqlite3
import tarfile
import threading
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

import edged
from edged.align.feedback.pair import VersionPublished
from edged.store import Store, utc_now, utc_text
from edged.store.adapters import forget_files, insert_version, set_version_saved
from edged.store.archive import CHUNK_BYTES
from edged.store.backup import BackupError, staged, stream, write_file
from edged.store.base_models import serve_base
from edged.store.completions import insert_completion
from edged.store.data_dir import clear_leftovers
from edged.store.erasure import begin_forgetting
from edged.store.jobs.files import content_of, delete_file
from edged.store.restore import restore, verify
from tests.store.rows import MOMENT, completion


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def store(data):
    store = Store(data / "edged.db")
    store.write(lambda db: serve_base(db, "base")).result()
    yield store
    store.close()


def add_version(store, number, adapter="ada", saved=True):
    """A version as `AdapterFiles.save` leaves it, and its rows."""
    folder = store.path.parent / "adapters" / "base" / adapter / f"v{number:06d}"
    if saved:
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(f"weights {number} of {adapter}".encode() * 100)
        sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        (folder / "edged.json").write_text(json.dumps({"sha256": sums}))
    made = asdict(VersionPublished(adapter, number, number - 1, "trained"))
    store.write(lambda db: insert_version(db, MOMENT, made)).result()
    if saved:
        store.write(lambda db: set_version_saved(db, adapter, number, str(folder), [])).result()
    return folder


def add(store, *names):
    for name in names:
        row = completion(name, "x")
        store.write(lambda db, row=row: insert_completion(db, row)).result()


def back_up(data, file, settle=lambda: None, **options):
    with staged(data, "[model]\n", settle, **options) as stage:
        write_file(stream(stage, data), file)
    return file


def rows(path, sql):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.parametrize("name", ["all.tar", "all.tar.gz"])
def test_everything_comes_back(store, data, tmp_path, name):
    add(store, "a", "b")
    add_version(store, 1)
    (data / "profiles").mkdir()
    (data / "profiles" / "orin.json").write_text("{}")
    contents = verify(back_up(data, tmp_path / name))
    assert contents.rows["completions"] == 2
    target = tmp_path / "elsewhere"
    assert restore(tmp_path / name, target, force=False)[1] is None
    assert rows(target / "edged.db", "SELECT id FROM completions") == [("a",), ("b",)]
    weights = "adapters/base/ada/v000001/adapter_model.safetensors"
    assert (target / weights).read_bytes() == (data / weights).read_bytes()
    assert (target / "profiles" / "orin.json").read_text() == "{}"
    assert (target / "config.toml").read_text() == "[model]\n"
    assert target.stat().st_mode & 0o777 == 0o750
    Store(target / "edged.db").close()
    assert [path.name for path in data.glob(".scratch-*")] == []


def test_the_newest_whole_version_of_each_adapter_is_taken_and_the_database_says_so(store, data, tmp_path):
    for number in (1, 2, 3):
        add_version(store, number)
    add_version(store, 4, saved=False)
    add_version(store, 7, "bob")
    damaged = data / "adapters/base/ada/v000003/adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    target = tmp_path / "new"
    contents, _ = restore(back_up(data, tmp_path / "x.tar"), target, force=False)
    assert [(item["adapter"], item["version"]) for item in contents.manifest["adapters"]] == [("ada", 2), ("bob", 7)]
    found = rows(target / "edged.db", "SELECT adapter, version, path, on_disk FROM adapter_versions ORDER BY 1, 2")
    there = {("ada", 2): target / "adapters/base/ada/v000002", ("bob", 7): target / "adapters/base/bob/v000007"}
    for adapter, version, path, on_disk in found:
        place = there.get((adapter, version))
        assert (path, on_disk) == ((str(place), 1) if place else (None, 0))
        assert place is None or place.is_dir()
    every = verify(back_up(data, tmp_path / "y.tar", all_versions=True))
    assert [item["version"] for item in every.manifest["adapters"]] == [1, 2, 7]


def test_the_database_knows_all_that_the_adapters_had_learned(store, data, tmp_path):
    """Versions are taken first: one that is made between the two is in the database alone, and is learned again."""
    add_version(store, 1)
    file = back_up(data, tmp_path / "x.tar", settle=lambda: add_version(store, 2))
    contents, _ = restore(file, tmp_path / "new", force=False)
    assert [item["version"] for item in contents.manifest["adapters"]] == [1]
    found = rows(tmp_path / "new" / "edged.db", "SELECT version, on_disk FROM adapter_versions ORDER BY 1")
    assert found == [(1, 1), (2, 0)]


def test_who_is_forgotten_while_a_backup_is_made_is_not_in_it(store, data, tmp_path):
    for adapter in ("ada", "bob"):
        for number in (1, 2):
            add_version(store, number, adapter)
    store.write(lambda db: serve_base(db, "other")).result()

    def forget():
        store.write(lambda db: begin_forgetting(db, "ada", MOMENT)).result()
        forget_files(data / "adapters", "ada", None)

    contents = verify(back_up(data, tmp_path / "x.tar", settle=forget, all_versions=True))
    assert [(item["adapter"], item["version"]) for item in contents.manifest["adapters"]] == [("bob", 1), ("bob", 2)]


def test_writes_go_on_while_the_database_is_copied_and_what_was_acknowledged_before_is_in_it(
    store, data, tmp_path, monkeypatch
):
    from edged.store import backup

    monkeypatch.setattr(backup, "_COPY_PAGES", 1)
    add(store, *(f"a{i}" for i in range(50)))
    stop, written = threading.Event(), []

    def work():
        while not stop.is_set():
            add(store, f"b{len(written)}")
            written.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(3):
        before = len(written)
        rows_found = verify(back_up(data, tmp_path / f"{number}.tar")).rows["completions"]
        assert 50 + before <= rows_found <= 50 + len(written) + 1
    stop.set()
    thread.join()
    assert len(written) > 3


def test_a_backup_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path):
    file = tmp_path / "x.tar"
    file.write_text("earlier")

    def broken():
        yield b"half"
        raise BackupError("the disk is gone")

    with pytest.raises(BackupError):
        write_file(broken(), file)
    assert file.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [file]


def test_what_an_ended_backup_left_is_cleared(store, data):
    (data / ".scratch-x").mkdir()
    clear_leftovers(data)
    assert not (data / ".scratch-x").exists()


# -- what is no backup -------------------------------------------------------------------------------------------------


@pytest.fixture
def good(store, data, tmp_path):
    add(store, "a")
    add_version(store, 1)
    return back_up(data, tmp_path / "good.tar")


def changed(good, change):
    """The backup with its members changed: `change` takes {name: bytes} and returns more TarInfos."""
    with tarfile.open(good) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    manifest = members.pop("manifest.json")
    extra = change(members) or []
    file = good.with_name("changed.tar")
    with tarfile.open(file, "w") as tar:
        for name, content in {**members, "manifest.json": members.pop("manifest.json", manifest)}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            for more in extra:
                tar.addfile(more)
            extra = []
    return file


def link(name, target="/etc/passwd"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def altered(sql):
    """A change of the database that its manifest knows of."""

    def change(members):
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.deserialize(members["edged.db"])
            connection.execute(sql)
            connection.commit()
            sign(members, "edged.db", connection.serialize())

    return change


def add_file(file_id):
    return altered(f"INSERT INTO files VALUES ('{file_id}', '{MOMENT}', 'eve', 'x', 'fine-tune', 1, '0', NULL)")


def add_shelved(base, adapter):
    names = "base, adapter, version, created_at, parent, reason, pairs, step_s, on_disk"
    return altered(f"INSERT INTO shelved_versions ({names}) VALUES ('{base}', '{adapter}', 1, '', 0, '', 0, 0, 0)")


def vast(members):
    """A member that says to be larger than any disk."""
    info = tarfile.TarInfo("profiles/vast.json")
    info.size = 1 << 60
    return [info]


def sign(members, name, content):
    """Put `content` in, with a manifest that says so."""
    members[name] = content
    files = {key: {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()} for key, value in members.items()}
    members["manifest.json"] = json.dumps({"format": 1, "files": files, "adapters": [], "created_at": ""}).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: sign(m, "../evil", b"x"), '"../evil" has no place'),
        (lambda m: sign(m, "/tmp/evil", b"x"), '"/tmp/evil" has no place'),
        (lambda m: sign(m, "adapters/base/ada/../../x", b"x"), "has no place"),
        (lambda m: sign(m, "adapters/.hidden/ada/v1/x", b"x"), "has no place"),
        (lambda m: [link("adapters/base/ada/v000001/x")], "has no place"),
        (lambda m: [link("adapters", "/tmp")], '"adapters" has no place'),
        (lambda m: m.update({"profiles/extra.json": b"{}"}), "is not in its manifest"),
        (lambda m: m.pop("config.toml") and None, '"config.toml" is missing'),
        (lambda m: m.update({"config.toml": b"[modem]\n"}), r"config\.toml is damaged"),
        (lambda m: m.update({"manifest.json": b"{"}), "manifest cannot be read"),
        (lambda m: m.update({"manifest.json": b'{"format": 2, "files": {}}'}), "newer edged"),
        (lambda m: sign(m, "edged.db", b"SQLite format 3\0" * 100), "database"),
        (altered("INSERT INTO migrations VALUES ('m999_future', 'then')"), "newer edged"),
        (altered("CREATE TRIGGER evil AFTER INSERT ON signals BEGIN DELETE FROM pairs; END"), r"\(trigger evil\)"),
        (altered("CREATE VIEW evil AS SELECT 1"), r"\(view evil\)"),
        (altered("CREATE TABLE evil (x)"), r"\(table evil\)"),
        (altered("CREATE INDEX evil ON pairs (lower(chosen))"), r"\(index evil\)"),
        (altered("ALTER TABLE pairs ADD COLUMN evil AS (hex(chosen))"), r"\(table pairs\)"),
        (altered("DROP TRIGGER pairs_taken"), r"\(trigger pairs_taken\)"),
        (add_file("../../secret.txt"), r'name "\.\./\.\./secret\.txt", which could lead out'),
        (add_file(".."), "could lead out"),
        (add_shelved("../../x", "ada"), "could lead out"),
        (add_shelved("base", "../../x"), "could lead out"),
        (altered("UPDATE served_base SET fingerprint = '/tmp'"), "could lead out"),
        (vast, r'"profiles/vast\.json" unpacks to 1152921504606846976 bytes, and .* has room for|unexpected end'),
    ],
)
def test_a_file_that_is_no_whole_backup_is_refused_and_no_folder_appears(good, tmp_path, change, message):
    file = changed(good, change)
    for attempt in (lambda: verify(file), lambda: restore(file, tmp_path / "new", force=False)):
        with pytest.raises(BackupError, match=message):
            attempt()
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new*"))
    assert not Path("/tmp/evil").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_breaks_off_is_refused(good, share, packed):
    content = gzip.compress(good.read_bytes()) if packed else good.read_bytes()
    good.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BackupError, match=r"cannot be read|breaks off"):
        verify(good)


def test_a_flipped_bit_is_found(good):
    content = bytearray(good.read_bytes())
    content[content.index(b"weights 1 of ada")] ^= 1
    good.write_bytes(content)
    with pytest.raises(BackupError, match=r"adapter_model\.safetensors is damaged"):
        verify(good)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BackupError, match=r"nothing\.tar does not exist"):
        verify(tmp_path / "nothing.tar")


def test_a_folder_with_data_is_not_replaced_unless_told_and_is_kept(good, tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / "mine").write_text("x")
    with pytest.raises(BackupError, match=r"is not empty: give another --data-dir, or --force"):
        restore(good, target, force=False)
    _, aside = restore(good, target, force=True)
    assert aside is not None
    assert (aside / "mine").read_text() == "x"
    assert not (target / "mine").exists()
    assert target.stat().st_mode & 0o777 == 0o700
    (target / "edged.db").unlink()


def test_an_empty_folder_is_taken(good, tmp_path):
    (tmp_path / "target").mkdir()
    assert restore(good, tmp_path / "target", force=False)[1] is None


def test_a_folder_that_a_daemon_uses_is_refused(good, store, data):
    with pytest.raises(BackupError, match=r"in use by another edged \(pid \d+\).*stopped"):
        restore(good, data, force=True)
    assert rows(data / "edged.db", "SELECT id FROM completions") == [("a",)]


def test_a_folder_without_a_database_has_nothing_to_back_up(tmp_path):
    with pytest.raises(BackupError, match="nothing to back up"):
        back_up(tmp_path, tmp_path / "x.tar")


def test_a_link_in_the_place_of_the_draft_is_not_written_through(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "backup.tar"
    victim.write_text("somebody's")
    (tmp_path / f".backup.tar.{os.getpid()}.draft").symlink_to(victim)
    assert write_file([b"all ", b"of it"], target) == 9
    assert target.read_bytes() == b"all of it"
    assert not target.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert victim.read_text() == "somebody's"


def test_the_manifest_says_when_and_of_what_size_and_large_files_come_in_pieces(store, data, tmp_path):
    folder = add_version(store, 1)
    large = bytes(range(256)) * (CHUNK_BYTES // 256) + b"and more"
    (folder / "adapter_model.safetensors").write_bytes(large)
    (folder / "edged.json").write_text(
        json.dumps({"sha256": {"adapter_model.safetensors": hashlib.sha256(large).hexdigest()}})
    )
    began = utc_text(utc_now())
    manifest = verify(back_up(data, tmp_path / "x.tar")).manifest
    facts = manifest["files"]["adapters/base/ada/v000001/adapter_model.safetensors"]
    assert facts == {"bytes": CHUNK_BYTES + 8, "sha256": hashlib.sha256(large).hexdigest()}
    assert manifest["files"]["config.toml"]["bytes"] == len("[model]\n")
    assert began <= manifest["created_at"] <= utc_text(utc_now())
    assert (manifest["format"], manifest["edged"], manifest["data_dir"]) == (1, edged.__version__, str(data))


def test_a_restored_base_that_learned_nothing_yet_is_known_by_its_folder(store, data, tmp_path):
    restore(back_up(data, tmp_path / "x.tar"), tmp_path / "new", force=False)
    assert list((tmp_path / "new" / "adapters" / "base").iterdir()) == []


def test_versions_are_copied_where_they_cannot_be_linked(store, data, tmp_path, monkeypatch):
    def refuses(source, target):
        raise OSError("another file system")

    add_version(store, 1)
    monkeypatch.setattr("os.link", refuses)
    contents = verify(back_up(data, tmp_path / "x.tar"))
    assert [item["version"] for item in contents.manifest["adapters"]] == [1]


def test_an_id_that_leads_out_of_the_folder_names_no_file(store, data, tmp_path):
    (tmp_path / "secret").write_text("kept")
    sql = f"INSERT INTO files VALUES ('../../secret', '{MOMENT}', 'eve', 'x', 'fine-tune', 1, '0', NULL)"
    store.write(lambda db: db.execute(sql) and None).result()
    with pytest.raises(FileNotFoundError):
        content_of(store, "../../secret")
    assert delete_file(store, "../../secret") == ""
    (data / "adapters" / "base").mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        forget_files(data / "adapters", "../../secret", None)
    assert (tmp_path / "secret").read_text() == "kept"


def test_a_backup_leaves_files_out_that_lie_outside(store, data, tmp_path):
    (data / "files").mkdir()
    (tmp_path / "secret").write_text("kept")
    sql = f"INSERT INTO files VALUES ('../../secret', '{MOMENT}', 'eve', 'x', 'fine-tune', 1, '0', NULL)"
    store.write(lambda db: db.execute(sql) and None).result()
    with tarfile.open(back_up(data, tmp_path / "x.tar")) as tar:
        assert not [name for name in tar.getnames() if "secret" in name]
