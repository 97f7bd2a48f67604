"""The settings `[fleet]`: the boxes that answer as one service, for `edged fleet serve`."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from edged.settings.access import USER_NAME, Section, refuse, setting

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NODE_NAME = re.compile(r"[A-Za-z0-9-]{1,32}")


class FleetSettings(Section):
    """Several boxes behind one address: docs/fleet.md."""

    nodes: dict[str, str] = setting({}, 'URLs of the boxes, such as { kitchen = "http://10.0.0.5:8137" }')
    ingresses: list[str] = setting([], "URLs of the ingresses at which boxes register that Ray keeps: edged fleet join")
    url: str = setting("", "this box's daemon, as the ingresses reach it; its name is api.node: edged fleet join")
    spawn: bool = setting(False, "Ray starts this box's daemon by these settings, where edged.service does not")
    policy: str = setting("fleet", "how requests without a user are placed: see docs/fleet.md")
    listen: str = setting("127.0.0.1:8136", "HOST:PORT of the ingress")
    token_file: str = setting("", 'file with the token of role "fleet" at the nodes, mode 0600; empty: loopback alone')
    authority: str = setting("", "certificates (PEM) that https nodes are checked by; empty: the system's")
    stale_s: Positive = setting(2.0, "silence after which a node gets no new requests")
    wait_s: Positive = setting(10.0, "how long a request waits where no node can be reached")
    takeover_s: Positive = setting(60.0, "how long a node is away before its users are taught elsewhere")
    move_min_s: Positive = setting(3.0, "a user is taught elsewhere where pairs are learned sooner by this and the way")
    lease_s: Positive = setting(10.0, "how long a user who was moved for that stays")
    homes: dict[str, str] = setting({}, 'nodes of users, such as { ann = "kitchen" }; others are placed by hash')

    @field_validator("nodes", mode="after")
    @classmethod
    def _are_boxes(cls, nodes: dict[str, str]) -> dict[str, str]:
        named: dict[str, str] = {}
        for name, url in nodes.items():
            if not NODE_NAME.fullmatch(name):
                refuse(f'"{name}" cannot name a node: use at most 32 letters, digits and "-"')
            plain = _plain(f'node "{name}"', url)
            if plain in named:
                refuse(f'nodes "{named[plain]}" and "{name}" have one URL, {plain}: give each its own')
            named[plain] = name
        return {name: url for url, name in named.items()}

    @field_validator("ingresses", mode="after")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        return [_plain("fleet.ingresses", url) for url in urls]

    @field_validator("url", mode="after")
    @classmethod
    def _is_url(cls, url: str) -> str:
        return url and _plain("fleet.url", url)

    @field_validator("homes", mode="after")
    @classmethod
    def _of_users(cls, homes: dict[str, str]) -> dict[str, str]:
        for user in homes:
            if not USER_NAME.fullmatch(user):
                refuse(f'"{user}" is no user\'s name')
        return homes


def _plain(what: str, url: str) -> str:
    """Return a URL as scheme://HOST:PORT; refuses any other."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        fine = False
    if not fine or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        refuse(f'{what} = "{url}": write http://HOST:PORT or https://HOST:PORT, without a path')
    return f"{parts.scheme}://{parts.netloc.lower()}"
