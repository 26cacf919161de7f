"""The ids that a client gives its messages."""

from __future__ import annotations

from duemq._producing.unique_keys import UniqueKeys


def test_unique_keys_are_unique_and_have_32_digits() -> None:
    keys = UniqueKeys()
    made = [keys.make() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(len(key) == 32 and int(key, 16) >= 0 and key.upper() == key for key in made)
    assert UniqueKeys().make()[:20] != made[0][:20]
