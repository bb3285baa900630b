"""Requests to this machine and to parts of the run go directly, whatever the proxy variables of the environment name."""

from __future__ import annotations

import pytest

from roundhouse.http.clients import http_client, proxy_note


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every proxy variable names a port at which nobody listens."""
    for name in ("NO_PROXY", "no_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://user:word@127.0.0.1:9")


@pytest.mark.parametrize(
    ("url", "foreign", "trusts"),
    [
        ("http://127.0.0.1:8000", True, False),
        ("http://localhost:8000", True, False),
        ("http://[::1]:8000", True, False),
        ("http://10.0.0.5:8000", False, False),
        ("http://10.0.0.5:8000", True, True),
        ("https://models.example", True, True),
    ],
)
def test_only_a_foreign_server_on_another_machine_is_reached_through_a_proxy(
    url: str, foreign: bool, trusts: bool
) -> None:
    with http_client(url, foreign=foreign) as client:
        assert client.trust_env is trusts


def test_the_note_names_the_variable_and_the_remedy_but_no_secret(
    proxied: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = proxy_note("http://10.0.0.5:8000")
    assert note == " http_proxy sends the request through a proxy. If that is wrong, add 10.0.0.5 to NO_PROXY."
    assert proxy_note("http://127.0.0.1:8000") == ""
    assert "HTTPS_PROXY" in proxy_note("https://models.example")
    monkeypatch.setenv("NO_PROXY", "10.0.0.5")
    assert proxy_note("http://10.0.0.5:8000") == ""
