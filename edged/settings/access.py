"""The settings `[access]` and `[limits]`: who may do what, for whom, and how much of it."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

USER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
"""Pattern of the names of users, and so of adapters: they become names of folders."""
NO_USER_NAME = (
    '"{}" cannot name a user: use 1 to 64 letters, digits, ".", "_", "@" or "-", the first one a letter or digit'
)
"""What is wrong with another name."""
SELF = "@self"
"""An entry of a rule's `users` that stands for the peer's own name."""
API_TOKEN = "api.token"
"""Name of the operator's token; no other may have it."""
Role = Literal["use", "train", "metrics", "fleet", "federated", "admin"]
Limit = Annotated[int, Field(ge=0)]


def refuse(message: str) -> Any:
    """Fail validation with this very sentence."""
    raise PydanticCustomError("edged", "{sentence}", {"sentence": message})


def _like(pattern: str, otherwise: str) -> AfterValidator:
    """Return a validator of texts that match `pattern`; `otherwise` says what is wrong with another one."""

    def check(text: str) -> str:
        return text if re.fullmatch(pattern, text) else refuse(f'"{text}" {otherwise}')

    return AfterValidator(check)


_PEER = _like(
    r"(user|group):[^\s:]+|(uid|gid):[0-9]{1,10}",
    'names no peer: write "user:NAME", "group:NAME", "uid:NUMBER" or "gid:NUMBER"',
)
_USERS = _like(
    r"\*|@self|[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\*?",
    f'names no user: give a name, a name\'s beginning with "*", "*" for all, or "{SELF}"',
)
_IDENTITY = _like(
    rf"field|header:[A-Za-z0-9-]{{1,64}}|name:{USER_NAME.pattern}",
    'is no identity: write "field", "header:NAME" with a header\'s name, or "name:USER"',
)
_TOKEN_NAME = _like(
    rf"(?!{re.escape(API_TOKEN)}$){USER_NAME.pattern}",
    f'cannot name a token: use letters, digits, ".", "_", "@" or "-", and not "{API_TOKEN}"',
)


def token_hash(token: str) -> str:
    """The SHA-256 of a bearer token, in hex digits: the settings keep nothing else of it.

    A token has 256 random bits, so a plain hash suffices: the token cannot be guessed back from it.
    """
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def setting(default: Any, description: str, **bounds: Any) -> Any:
    """Return a field of a section with its description, which all documents of the settings show."""
    return Field(default, description=description, **bounds)


class Section(BaseModel):
    """A table of settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class _Grant(Section):
    """The roles and users that a rule or token grants, and where a request says which of them asks."""

    roles: list[Role]
    users: list[Annotated[str, _USERS]] = [SELF]
    identity: Annotated[str, _IDENTITY] = "field"

    @model_validator(mode="after")
    def _admins_speak_for_all(self) -> _Grant:
        if "admin" in self.roles and not {"*", SELF}.issuperset(self.users):
            refuse('"admin" speaks for everybody: leave "users" out')
        return self

    @model_validator(mode="after")
    def _speaks_for_its_identity(self) -> _Grant:
        name = self.identity.removeprefix("name:")
        begins = (user.removesuffix("*") for user in self.users if user.endswith("*"))
        known = {SELF, name} & {*self.users} or "admin" in self.roles or any(map(name.startswith, begins))
        if name != self.identity and not known:
            refuse(f'the identity "{self.identity}" is of none of its users: name "{name}" in "users"')
        return self


class AccessRule(_Grant):
    """The rights of some peers of the Unix socket."""

    peers: Annotated[list[Annotated[str, _PEER]], Field(min_length=1)]


class AccessToken(_Grant):
    """The rights of a token's holder over TCP."""

    name: Annotated[str, _TOKEN_NAME]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    users: list[Annotated[str, _USERS]] = []

    @model_validator(mode="after")
    def _no_self(self) -> AccessToken:
        if SELF in self.users:
            refuse(f'a token has no name of its own on this box, so "{SELF}" means nobody: name its users')
        return self


class AccessSettings(Section):
    """Callers and their rights: see docs/security.md."""

    rules: list[AccessRule] = setting([], "of peers of the Unix socket, the first that fits counts")
    tokens: list[AccessToken] = setting([], "of TCP callers, as edged token new prints them")

    @property
    def granted_users(self) -> list[str]:
        """Users, by name or pattern, that a rule or a token speaks for."""
        return [user for grant in (*self.rules, *self.tokens) for user in grant.users]

    @field_validator("rules", "tokens", mode="before")
    @classmethod
    def _from_the_environment(cls, value: Any) -> Any:
        """Read the list as JSON where it comes from an environment variable."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            return refuse(f"it is neither a list of tables nor JSON: {error}")

    @field_validator("tokens")
    @classmethod
    def _named_once(cls, tokens: list[AccessToken]) -> list[AccessToken]:
        names = [token.name for token in tokens]
        for name in names:
            if names.count(name) > 1:
                refuse(f'two tokens are named "{name}": give each a name of its own')
        return tokens


class LimitSettings(Section):
    """The most that one user may take; 0: as much as there is."""

    requests_per_minute: Limit = setting(0, "completions that a user may ask for; 0: no limit")
    tokens_per_minute: Limit = setting(0, "tokens of a user's prompts and answers; 0: no limit")
    concurrent_requests: Limit = setting(0, "a user's answers at once, n choices count n; 0: no limit")
    best_of: int = setting(16, "answers that a request's best_of may have drawn", ge=1)
    feedback_per_minute: Limit = setting(0, "signals and pairs of a user; 0: no limit")
    queued_pairs: Limit = setting(5000, "a user's pairs that may wait to be learned, if align.enabled; 0: no limit")
    stored_mb: Limit = setting(0, "what is kept of a user / 2^20; 0: no limit")
    patience: float = setting(
        1.0,
        "factor of the time that a client has: 10 s for a request's header, 30 s for its body, 75 s between requests,"
        " 30 s with a full buffer unread",
        gt=0.0,
    )

    @property
    def header_s(self) -> float:
        """The time that a request's header may take."""
        return 10.0 * self.patience

    @property
    def body_s(self) -> float:
        """The time that a request's body may take."""
        return 30.0 * self.patience

    @property
    def idle_s(self) -> float:
        """The time that a connection may wait between requests."""
        return 75.0 * self.patience

    @property
    def stalled_s(self) -> float:
        """The time that a client may leave a full buffer unread."""
        return 30.0 * self.patience
