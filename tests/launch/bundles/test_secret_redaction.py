"""Redaction of secrets: what is left out of texts, and what stays readable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launch.bundles.secret_redaction import REDACTED, SecretRedaction, is_secret_name

ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef0123",
    "HF_TOKEN": "hf-value-of-mine",
    "MAX_TOKENS": "tokens-of-a-batch",
    "DB_PASSWORD": "hunter2222",
    "DEBUG_TOKEN": "1",
    "HOME": "/home/someone",
}


@pytest.mark.parametrize(
    "text",
    [
        "login with 0123456789abcdef0123 ok",
        "hf-value-of-mine",
        "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG",
        "key AKIAIOSFODNN7EXAMPLE used",
        "Authorization: Bearer abc.def.ghi-jkl",
        "s3://user:pa55word@bucket/path",
        "postgres://u:hunter2222@db/x",
        '{"api_key": "abcdefgh"}',
        "api-key: abcdefgh",
        "token='abcdefgh'",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "ghp_0123456789abcdefghijABCDEFGHIJ",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIE cut off",
    ],
)
def test_a_secret_is_redacted(text: str) -> None:
    redaction = SecretRedaction(ENVIRONMENT)
    found = redaction.text(text)
    assert REDACTED in found and redaction.count >= 1
    for secret in ("0123456789abcdef0123", "hf-value", "wJalr", "AKIAIO", "abc.def", "pa55word",
                   "hunter2222", "abcdefgh", "eyJhbG", "ghp_", "MIIE"):  # fmt: skip
        assert secret not in found


@pytest.mark.parametrize(
    "text",
    [
        "step 12 loss 3.14 tokens: 1048576 tokens/s=82.1k",
        "token_count=4096, max_tokens = 512",
        "n_tokens: 1e9",
        "tokenizer: gpt2, path: /data/tokenizer.json",
        "token=None",
        "password: null",
        "the token of the run is checked",
        "see https://example.org/a:b@c",
        "secretariat won",
        "tokens-of-a-batch",
        "1",
    ],
)
def test_what_a_log_of_training_says_stays(text: str) -> None:
    assert SecretRedaction(ENVIRONMENT).text(text) == text


def test_values_and_arguments_are_walked() -> None:
    redaction = SecretRedaction(ENVIRONMENT)
    plain = {
        "args": ["--lr", "0.1", "--wandb-api-key", "abc", "--token=abcdefgh", "--max-tokens", "5"],
        "nested": {"password": "x", "password_file": "", "max_tokens": 4, "note": "hunter2222"},
    }
    found = redaction.value(plain)
    assert found["args"] == [
        *("--lr", "0.1", "--wandb-api-key", REDACTED, f"--token={REDACTED}", "--max-tokens", "5")
    ]
    nested = {"password": REDACTED, "password_file": "", "max_tokens": 4, "note": REDACTED}
    assert found["nested"] == nested
    assert redaction.count == 4


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("wandb_api_key", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("password", True),
        ("GITHUB_TOKEN_2", True),
        ("MAX_TOKENS", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("PATH", False),
    ],
)
def test_names_of_secrets(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) == is_secret


@given(st.binary(max_size=200))
def test_bytes_of_any_encoding_pass(data: bytes) -> None:
    redaction = SecretRedaction({})
    found = redaction.data(data)
    assert redaction.count or found == data


@given(st.text(alphabet="abcdefgh-_=:'\"@/ \n", min_size=6, max_size=12), st.text(max_size=40))
def test_no_value_of_the_environment_gets_through(value: str, text: str) -> None:
    found = SecretRedaction({"MY_TOKEN": value}).text(f"{text} {value} {text}")
    assert value not in found or value in REDACTED or value in text
