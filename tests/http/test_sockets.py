"""Where the daemon listens: which path, who may use it, what happens when it is taken or left over."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from edged.http.sockets import ListenError, UnixListener, inherited_sockets, tcp_socket
from edged.settings.addresses import socket_paths


def leave_socket(path: Path) -> None:
    """What a daemon leaves that was killed: a socket file on which nobody listens."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


@pytest.mark.parametrize(
    ("setting", "environ", "expected"),
    [
        ("/a/b.sock", {"EDGED_SOCKET": "/c"}, "/a/b.sock"),
        ("~/b.sock", {}, Path.home() / "b.sock"),
        ("", {"EDGED_SOCKET": "~/c.sock"}, Path.home() / "c.sock"),
        ("", {"EDGED_SOCKET": "/c/d.sock", "XDG_RUNTIME_DIR": "/run/user/1"}, "/c/d.sock"),
        ("", {"RUNTIME_DIRECTORY": "/run/one:/run/two", "XDG_RUNTIME_DIR": "/run/user/1"}, "/run/one/edged.sock"),
        ("", {"XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/edged.sock"),
    ],
)
def test_the_socket_is_found_as_documented(setting: str, environ: dict[str, str], expected: str | Path) -> None:
    assert socket_paths(setting, environ)[0] == Path(expected)


def test_a_plain_user_without_a_runtime_folder_listens_among_its_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = Path("/run/edged/edged.sock")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert socket_paths("", {}) == (systems,)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert socket_paths("", {}) == (Path.home() / ".local/share/edged/edged.sock", systems)
    assert socket_paths("", {"XDG_DATA_HOME": "/d"}) == (Path("/d/edged/edged.sock"), systems)


def test_the_socket_is_for_owner_and_group_and_goes_with_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "edged.sock"
    listener = UnixListener(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    listener.close()
    assert not path.exists()


def test_its_mode_says_who_may_open_it(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "edged.sock", 0o666)
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o666
    listener.close()


def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "edged.sock"
    leave_socket(path)
    listener = UnixListener(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert client.getpeername() == str(path)
    listener.close()


def test_a_living_daemons_socket_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "edged.sock"
    listener = UnixListener(path)
    with pytest.raises(ListenError, match=rf"{path}.*pid {os.getpid()}"):
        UnixListener(path)
    listener.close()
    UnixListener(path).close()


def test_another_programs_socket_and_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "edged.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ListenError, match="another program"):
            UnixListener(path)
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ListenError, match="not a socket"):
        UnixListener(path)
    assert path.read_text() == "precious"


def test_a_socket_that_was_replaced_meanwhile_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "edged.sock"
    listener = UnixListener(path)
    path.unlink()
    path.write_text("somebody else's")
    listener.close()
    assert path.exists()


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="longer than 107 bytes"):
        UnixListener(tmp_path / ("x" * 120))
    (tmp_path / "file").write_text("")
    with pytest.raises(ListenError, match=r"cannot listen on .*file/edged\.sock"):
        UnixListener(tmp_path / "file" / "edged.sock")


@pytest.mark.parametrize(
    "listen", ["8080", "localhost:", "localhost:http", ":80", "localhost:99999", "no.such.host.:80"]
)
def test_a_malformed_tcp_address_is_refused(listen: str) -> None:
    with pytest.raises(ListenError, match=r"api\.listen"):
        tcp_socket(listen, False)


def test_tcp_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(ListenError, match=r"set api\.token"):
        tcp_socket("0.0.0.0:0", False)
    tcp_socket("0.0.0.0:0", True).close()
    tcp_socket("127.0.0.1:0", False).close()


def test_a_taken_tcp_port_is_named() -> None:
    first = tcp_socket("127.0.0.1:0", False)
    port = first.getsockname()[1]
    with pytest.raises(ListenError, match=f"127.0.0.1:{port}.*in use"):
        tcp_socket(f"127.0.0.1:{port}", False)
    first.close()


def test_sockets_meant_for_another_process_are_not_taken() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
    assert inherited_sockets(environ, os.getpid() + 1) == []
    assert inherited_sockets({**environ, "LISTEN_FDS": ""}, os.getpid()) == []
    assert inherited_sockets({"LISTEN_FDS": "2"}, os.getpid()) == []


def test_a_lock_beside_the_socket_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("somebody's")
    (tmp_path / "edged.sock.lock").symlink_to(victim)
    with pytest.raises(ListenError, match="symbolic link"):
        UnixListener(tmp_path / "edged.sock")
    assert victim.read_text() == "somebody's"
