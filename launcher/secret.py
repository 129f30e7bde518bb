"""Which names hold secrets. What a spec says is written to the run folder, so a secret may not stand in it."""

from __future__ import annotations

import re

_WORDS = frozenset({"KEY", "PWD", "PASS", "PASSPHRASE", "AUTH"})
_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "APIKEY")
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")

MASK = "********"


def name_is_secret(name: str) -> bool:
    """Whether a variable or key of this name holds a secret: WANDB_API_KEY does, TOKENIZERS_PARALLELISM does not."""
    words = re.split(r"[_\-.]", name.upper())
    return name.upper() not in _NO_SECRETS and any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def has_url_password(text: str) -> bool:
    """Whether a text holds a URL with a password, such as postgres://user:word@host/."""
    return bool(_URL_PASSWORD.search(text))
