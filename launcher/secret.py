"""Which names hold secrets. What a spec says is written to the run folder, so a secret may not stand in it."""

from __future__ import annotations

import re

_WORDS = frozenset({"KEY", "PWD", "PASS", "PASSPHRASE", "AUTH"})
_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "APIKEY")
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})
_BEARER = re.compile(r"\bBearer\s+[\w.~+/-]{8,}", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"(token|secret|passw(or)?d|credentials?|(api|access|secret|private)[-_]?key)$", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")

MASK = "********"


def name_is_secret(name: str) -> bool:
    """Whether a variable or key of this name holds a secret: WANDB_API_KEY does, TOKENIZERS_PARALLELISM does not."""
    words = re.split(r"[_\-.]", name.upper())
    return name.upper() not in _NO_SECRETS and any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def has_bearer(text: str) -> bool:
    """Whether a text holds an HTTP bearer token."""
    return bool(_BEARER.search(text))


def gives_secret(command: list[str], path: tuple[object, ...]) -> bool:
    """Whether an argument of a command is a secret: `--api-key=VALUE`, or what follows `--password`."""
    if not path or not isinstance(path[0], int):
        return False
    argument = command[path[0]]
    before = command[path[0] - 1] if path[0] else ""
    option, _, value = argument.partition("=")
    if option.startswith("-") and value:
        return bool(_SECRET_OPTION.search(option))
    return before.startswith("--") and bool(_SECRET_OPTION.search(before)) and argument[:1] not in ("", "-")


def has_url_password(text: str) -> bool:
    """Whether a text holds a URL with a password, such as postgres://user:word@host/."""
    return bool(_URL_PASSWORD.search(text))
