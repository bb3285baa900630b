"""Ports: remembered where free, otherwise from a place that the key alone decides."""

from __future__ import annotations

import socket

from roundhouse.http import ports


def test_the_same_key_gives_the_same_port_and_a_taken_one_is_passed_over() -> None:
    first = ports.choose("somewhere::prefect", None, [])
    assert ports.choose("somewhere::prefect", None, []) == first
    with socket.socket() as other:
        other.bind((ports.LOOPBACK, first))
        other.listen()
        assert not ports.is_free(first)
        assert ports.choose("somewhere::prefect", None, []) != first
        assert ports.choose("somewhere::prefect", first, []) != first
        assert "process" in ports.describe_owner(first)
    assert ports.FIRST <= first <= ports.LAST


def test_a_remembered_port_is_kept_unless_another_service_was_given_it() -> None:
    free = ports.choose("elsewhere", None, [])
    assert ports.choose("another key", free, []) == free
    assert ports.choose("another key", free, [free]) != free
