from __future__ import annotations

import pytest

from duemq.mqtt_bridge.rules.lines import Path, line_of, path_of

TEXT = '''\
# a comment
nameserver = "x"

[mqtt]
host = "a"  # [[to_mqtt]]
"port" = 1
note = """
port = 2
[[to_mqtt]]
"""

[[to_mqtt]]
topic = "A"
qos = 0
 [[ to_mqtt ]]
topic = "B"
[[to_rocketmq]]
filter = "#"
[delayed]
prefixes = [
  "a",
]
longest = "1d"
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("nameserver",), 2),
        (("mqtt", "host"), 5),
        (("mqtt", "port"), 6),
        (("mqtt", "other"), 4),
        (("to_mqtt", 0, "qos"), 14),
        (("to_mqtt", 1, "topic"), 16),
        (("to_mqtt", 1, "qos"), 15),
        (("to_rocketmq", 0, "filter"), 18),
        (("delayed", "prefixes", 1), 20),
        (("delayed", "longest"), 23),
        (("status", "topic"), 1),
        ((), 1),
    ],
)
def test_the_line_of_a_key(path: Path, line: int) -> None:
    assert line_of(TEXT, path) == line


@pytest.mark.parametrize(
    ("where", "path"),
    [("$", ()), ("$.a", ("a",)), ("$.to_mqtt[1].qos", ("to_mqtt", 1, "qos")), ("$.a.b[0]", ("a", "b", 0))],
)
def test_the_path_that_an_error_names(where: str, path: Path) -> None:
    assert path_of(where) == path
