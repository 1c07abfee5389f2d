"""Which replica takes a request."""

from __future__ import annotations

import json

import pytest

from deploy.prefix_routing import prefix_of, ranked


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        ({"prompt": "abcdefgh"}, "abcdef"),
        ({"prompt": ["abcdefgh", "xyz"]}, "abcdef"),
        ({"prompt": [1, 2, 3]}, "[1]"),
        ({"prompt": [[1, 2, 3]]}, "[1]"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "user:h"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "user:["),
        ({"input": "abcdefgh"}, "abcdef"),
        ({}, ""),
        ({"prompt": 3}, ""),
        ({"prompt": None, "messages": []}, ""),
        ({"messages": [3, {"role": "user"}]}, "3user:"),
        ([1], ""),
    ],
)
def test_prefix_of_a_body(body: object, prefix: str) -> None:
    assert prefix_of(json.dumps(body).encode(), 6) == prefix


@pytest.mark.parametrize("body", [b"", b'{"prompt": "cut', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_has_no_prefix(body: bytes) -> None:
    assert prefix_of(body) == ""


def test_a_prefix_keeps_its_replica_until_the_queue_is_longer_by_two() -> None:
    home = ranked("text", {"a": 0, "b": 0})[0]
    other = "ab".replace(home, "")
    assert ranked("text", {home: 1, other: 0})[0] == home
    assert ranked("text", {home: 2, other: 1})[0] == home
    assert ranked("text", {home: 2, other: 0}) == [other, home]
    assert ranked("text", {home: 3, other: 2})[0] == home


def test_without_a_prefix_the_shortest_queue_wins() -> None:
    assert ranked("", {"a": 1, "b": 0, "c": 2}) == ["b", "a", "c"]
    assert ranked("", {}) == ranked("text", {}) == []


def test_a_replica_that_goes_moves_only_its_own_prefixes() -> None:
    names = [f"replica{n}" for n in range(5)]
    before = {str(n): ranked(str(n), dict.fromkeys(names, 0))[0] for n in range(1000)}
    after = {str(n): ranked(str(n), dict.fromkeys(names[1:], 0))[0] for n in range(1000)}
    moved = [prefix for prefix, name in before.items() if name != after[prefix]]
    assert all(before[prefix] == names[0] for prefix in moved)
    assert 100 < len(moved) < 300
