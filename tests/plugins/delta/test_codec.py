from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.plugins.delta.format import Codec, decode, encode

ELEMENTS = st.sampled_from([1, 2, 4, 8])


@given(ELEMENTS, st.data())
def test_whatever_the_bytes_are_they_come_back(size, data):
    count = data.draw(st.integers(0, 40)) * size
    old = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8)
    new = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8)
    assert bytes(decode(*encode(old, new, size), old, size)) == bytes(new)


@given(ELEMENTS, st.data())
def test_the_ends_of_the_range_step_into_each_other(size, data):
    kind = np.dtype(f"u{size}")
    edges = st.sampled_from([0, 1, 2**7, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1])
    pairs = data.draw(st.lists(st.tuples(edges, edges), min_size=1, max_size=30))
    old = np.array([pair[0] % 2 ** (8 * size) for pair in pairs], dtype=kind).view(np.uint8)
    new = np.array([pair[1] % 2 ** (8 * size) for pair in pairs], dtype=kind).view(np.uint8)
    assert bytes(decode(*encode(old, new, size), old, size)) == bytes(new)


@pytest.mark.parametrize(
    ("share", "codec"), [(0.0, Codec.SAME), (0.1, Codec.SPARSE), (0.8, Codec.DIFFERENCE), (None, Codec.WHOLE)]
)
def test_the_form_follows_the_share_of_what_changed(share, codec):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 50_000, dtype=np.uint16)
    if share is None:
        new = rng.integers(0, 2**8, 50_000, dtype=np.uint16)  # nothing of the old is left, and it is simpler
    else:
        new = old + (rng.random(len(old)) < share).astype(np.uint16)
    found, data = encode(old.view(np.uint8), new.view(np.uint8), 2)
    assert found is codec
    assert bytes(decode(found, data, old.view(np.uint8), 2)) == new.tobytes()


def test_views_that_do_not_lie_on_their_elements_bounds_are_read_all_the_same():
    space = np.arange(65, dtype=np.uint8)
    old, new = space[1:], np.zeros(64, dtype=np.uint8)
    assert bytes(decode(*encode(old, new, 8), old, 8)) == bytes(new)


@given(st.binary(max_size=64), st.sampled_from(list(Codec)))
def test_damage_is_an_error_and_no_number(noise, codec):
    old = np.arange(128, dtype=np.uint8)
    if codec is Codec.SAME:
        return
    try:
        found = decode(codec, noise, old, 2)
    except (ValueError, OSError):
        return
    assert len(found) == len(old)
