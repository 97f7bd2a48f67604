"""The credentials of connections to nodes and ingresses: the fleet's token, and the authority of certificates."""

import ssl
import stat
from pathlib import Path

from edged.settings.load import ConfigError, Settings


def token_of(settings: Settings) -> str:
    """Return the token in `fleet.token_file`, "" where none is named. Raises ConfigError; its message has no token."""
    if not settings.fleet.token_file:
        return ""
    path = Path(settings.fleet.token_file).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f'token file "{path}" may be read by others: chmod 600 it')
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'token file "{path}" cannot be read: {error}') from None
    if not token or not token.isascii() or len(token.split()) != 1:
        raise ConfigError(f'token file "{path}" has no token: write the line that `edged token new` printed')
    return token


def tls_of(settings: Settings) -> ssl.SSLContext:
    """Return the TLS of connections to https nodes. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=settings.fleet.authority or None)
    except OSError as error:
        raise ConfigError(f'fleet.authority = "{settings.fleet.authority}" cannot be used: {error}') from None
