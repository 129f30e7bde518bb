"""Proves which names and texts count as secrets: those of real services do, those of everyday settings do not."""

from __future__ import annotations

import pytest

from launcher import secret


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "db_password",
        "MYSQL_PWD",
        "APIKEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "github-token",
        "AUTHTOKEN",
        "client_secret",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert secret.name_is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PATH", "PWD", "MONKEY_PATCH", "KEYBOARD", "tokenizer", "AUTHOR", ""],
)
def test_names_of_settings(name: str) -> None:
    assert not secret.name_is_secret(name)


def test_a_url_may_not_hold_a_password() -> None:
    assert secret.has_url_password("postgres://user:word@host/db")
    assert secret.has_url_password("https://:word@host")
    for text in ("https://host:8080/a@b", "https://user@host/", "s3://bucket/a:b@c", "user:word@host"):
        assert not secret.has_url_password(text)
