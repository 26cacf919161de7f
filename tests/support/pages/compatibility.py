"""The tables of docs/compatibility.md, from what the tests run and what the broker has.

`python -m tests.support.pages.compatibility` writes them into the page, between lines like `<!-- commands -->`;
`tests.unit.broker.test_compatibility_page` fails where the page has others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from duemq.broker.access.permission import Permission
from duemq.protocol.codes import RequestCode
from duemq.protocol.unsupported import UNSUPPORTED
from tests.interop.admin.mqadmin_commands import BOTH, COMMANDS, Command
from tests.interop.consume.test_start_positions import EXPECTED
from tests.support.broker import running

PAGE: Final = Path(__file__).parents[3] / "docs" / "compatibility.md"
FIRST_OWN_CODE: Final = 30_000
"""duemq's own request codes are this and above, and below 40,000."""
TESTED: Final = {
    test: names.split()
    for test, names in {
        "interop/send/test_send.py": "SEND_MESSAGE SEND_MESSAGE_V2 SEND_BATCH_MESSAGE",
        "interop/consume/test_pull.py": (
            "PULL_MESSAGE LITE_PULL_MESSAGE QUERY_CONSUMER_OFFSET UPDATE_CONSUMER_OFFSET "
            "SEARCH_OFFSET_BY_TIMESTAMP GET_MAX_OFFSET GET_MIN_OFFSET"
        ),
        "interop/consume/test_push.py": "HEART_BEAT UNREGISTER_CLIENT GET_CONSUMER_LIST_BY_GROUP CHECK_CLIENT_CONFIG",
        "interop/consume/test_ordered.py": "LOCK_BATCH_MQ UNLOCK_BATCH_MQ",
        "interop/consume/test_retry.py": "CONSUMER_SEND_MSG_BACK",
        "interop/send/test_timer.py": "RECALL_MESSAGE",
        "interop/admin/test_nameserver.py": (
            "REGISTER_BROKER UNREGISTER_BROKER QUERY_DATA_VERSION GET_ROUTEINFO_BY_TOPIC"
        ),
        "interop/security/test_acl.py": (
            "UPDATE_AND_CREATE_ACL_CONFIG DELETE_ACL_CONFIG GET_BROKER_CLUSTER_ACL_INFO "
            "UPDATE_GLOBAL_WHITE_ADDRS_CONFIG GET_BROKER_CLUSTER_ACL_CONFIG"
        ),
        "interop/security/test_auth.py": (
            "AUTH_CREATE_USER AUTH_UPDATE_USER AUTH_DELETE_USER AUTH_GET_USER AUTH_LIST_USER "
            "AUTH_CREATE_ACL AUTH_UPDATE_ACL AUTH_DELETE_ACL AUTH_GET_ACL AUTH_LIST_ACL"
        ),
        "interop/admin/test_admin_api.py": (
            "GET_CONSUMER_RUNNING_INFO CONSUME_MESSAGE_DIRECTLY INVOKE_BROKER_TO_RESET_OFFSET"
        ),
        "interop/admin/test_mqadmin.py": (
            "GET_CONSUME_STATS VIEW_BROKER_STATS_DATA GET_BROKER_CONFIG GET_ALL_SUBSCRIPTIONGROUP_CONFIG"
        ),
        "interop/admin/test_mqadmin_all.py": (
            "UPDATE_AND_CREATE_TOPIC UPDATE_AND_CREATE_TOPIC_LIST GET_ALL_TOPIC_CONFIG "
            "VIEW_MESSAGE_BY_ID UPDATE_BROKER_CONFIG GET_BROKER_RUNTIME_INFO PUT_KV_CONFIG "
            "GET_KV_CONFIG DELETE_KV_CONFIG GET_BROKER_CLUSTER_INFO "
            "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST "
            "GET_TOPIC_STATS_INFO GET_CONSUMER_CONNECTION_LIST GET_PRODUCER_CONNECTION_LIST "
            "WIPE_WRITE_PERM_OF_BROKER ADD_WRITE_PERM_OF_BROKER GET_ALL_TOPIC_LIST_FROM_NAMESERVER "
            "DELETE_SUBSCRIPTIONGROUP DELETE_TOPIC_IN_BROKER DELETE_TOPIC_IN_NAMESRV "
            "GET_TOPICS_BY_CLUSTER QUERY_TOPIC_CONSUME_BY_WHO CLEAN_EXPIRED_CONSUMEQUEUE "
            "DELETE_EXPIRED_COMMITLOG CLEAN_UNUSED_TOPIC CLONE_GROUP_OFFSET GET_BROKER_CONSUME_STATS "
            "GET_NAMESRV_CONFIG UPDATE_NAMESRV_CONFIG QUERY_CONSUME_QUEUE GET_ALL_PRODUCER_INFO "
            "GET_TOPIC_CONFIG GET_SUBSCRIPTIONGROUP_CONFIG"
        ),
        "unit/broker/admin/test_consumption.py": (
            "QUERY_CORRECTION_OFFSET QUERY_CONSUME_TIME_SPAN QUERY_TOPICS_BY_CONSUMER QUERY_SUBSCRIPTION_BY_CONSUMER"
        ),
        "unit/broker/names/test_nameserver.py": "GET_KVLIST_BY_NAMESPACE GET_SYSTEM_TOPIC_LIST_FROM_NS",
        "unit/broker/tables/test_topics.py": "GET_SYSTEM_TOPIC_LIST_FROM_BROKER",
        "unit/broker/consume/test_pull.py": "GET_ALL_CONSUMER_OFFSET GET_EARLIEST_MSG_STORETIME",
        "unit/broker/net/test_cold_reads.py": "GET_ALL_DELAY_OFFSET",
        "unit/broker/waiting/test_timers.py": "GET_TIMER_CHECK_POINT GET_TIMER_METRICS",
    }.items()
}
"""The request codes that each test sends, by its own or a client's; of several tests, the one with a real client."""
_ON_TIMERS: Final = "see [Timers](timers.md#listing-and-changing-waiting-messages)"
OWN: Final = {
    "MOVE_CLOCK": (
        "moves the broker's clock ahead by `advanceMillis` (0 only asks); the answer's header has the time in `now`. "
        "Refused with 16 NO_PERMISSION unless the broker was started with `testClock=true`",
        "0.1.0",
    ),
    "CANCEL_MESSAGE": (
        "cancels waiting messages by their offset message ids, see [Timers](timers.md#recalling-and-cancelling)",
        "0.1.0",
    ),
    "LIST_PENDING": (f"lists or counts waiting messages, {_ON_TIMERS}", "0.1.0"),
    "DUE_CURVE": (f"counts the messages that are due in each of several spans of time, {_ON_TIMERS}", "0.1.0"),
    "CHANGE_PENDING": (f"cancels, reschedules or delivers waiting messages, {_ON_TIMERS}", "0.1.0"),
    "REPORT_BRIDGE": (
        "an [MQTT bridge](mqtt.md#what-the-bridge-tells-of-itself) reports its counters: its name in "
        "`bridge`, and a JSON object of up to 64 integers as the body. `brokerStatus` shows them until the connection "
        "ends",
        "0.1.0",
    ),
    "CHANGE_RECURRING": (
        "pauses, resumes or removes a [recurring message](timers.md#recurring-messages): `topic`, `name`, `action` "
        f"(`pause`, `resume`, `remove`), {_ON_TIMERS}",
        "0.1.0",
    ),
    "CHANGE_BY_HANDLE": (f"CHANGE_PENDING for the sender of the messages, {_ON_TIMERS}", "0.1.0"),
}
"""duemq's own request codes: what each does, and the version that has it first."""
_STATES: Final = {
    "young": "begins at offset 0, and its messages are in memory",
    "on disk": "begins at offset 0, and its messages are no longer in memory",
    "shortened": "its first messages have expired",
}
_BEGINS: Final = {
    "first": "CONSUME_FROM_FIRST_OFFSET",
    "last": "CONSUME_FROM_LAST_OFFSET",
    "time": "CONSUME_FROM_TIMESTAMP",
}


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _answer(command: Command) -> str:
    """What duemq makes of a command, in words."""
    if command.refused is not None:
        return "not yet" if command.is_planned else "refused"
    if command.test is not None:
        return "works" if command.test.startswith("tests/") else "not run"
    return "works, but the output differs" if command.differs is not None else "same output"


def _remark(command: Command) -> str:
    if command.refused is not None:
        return command.why or command.refused
    if command.test is not None:
        return f"`{command.test}`" if command.test.startswith("tests/") else command.test
    return command.differs or ""


def commands() -> str:
    """The commands of mqadmin: the versions of each, what duemq makes of it, and why."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for command in COMMANDS:
        versions = found.setdefault((command.name, _answer(command), _remark(command)), [])
        versions.extend(version for version in command.versions if version not in versions)
    return _rows(
        ("command", "mqadmin", "on duemq", "remark"),
        (
            (f"`{name}`", ", ".join(version for version in BOTH if version in versions), answer, remark)
            for (name, answer, remark), versions in sorted(found.items(), key=lambda item: item[0][0].lower())
        ),
    )


def _is_own(code: int) -> bool:
    return FIRST_OWN_CODE <= code < FIRST_OWN_CODE + 10_000


def handled(permissions: Mapping[int, Permission]) -> str:
    """RocketMQ's request codes that duemq has handlers for. `permissions`: what the requests of each code need. Raises
    KeyError for a code without a test."""
    tests = {name: test for test, names in TESTED.items() for name in names}
    return _rows(
        ("code", "name", "with access control it needs", "test"),
        (
            (str(code), f"`{(name := RequestCode(code).name)}`", str(permission), f"`tests/{tests[name]}`")
            for code, permission in sorted(permissions.items())
            if not _is_own(code)
        ),
    )


def own(permissions: Mapping[int, Permission]) -> str:
    """duemq's own request codes. `permissions`: what the requests of each code need. Raises KeyError for a code that
    `OWN` does not have, and the other way round."""
    codes = {RequestCode(code).name: code for code in permissions if _is_own(code)}
    return _rows(
        ("code", "name", "what it does", "with access control it needs", "since"),
        (
            (str(codes[name]), f"`{name}`", OWN[name][0], str(permissions[codes[name]]), OWN[name][1])
            for name in sorted(codes.keys() | OWN.keys(), key=lambda name: RequestCode[name])
        ),
    )


def unsupported() -> str:
    """RocketMQ's request codes without a handler, by the reason."""

    def order(code: int) -> tuple[bool, str]:
        return not UNSUPPORTED[code].is_planned, UNSUPPORTED[code].reason

    def rows() -> Iterator[tuple[str, str, str]]:
        for (_, reason), codes in groupby(sorted(UNSUPPORTED, key=lambda code: (order(code), code)), key=order):
            listed = list(codes)
            names = ", ".join(f"`{UNSUPPORTED[code].name}` ({code})" for code in listed)
            yield names, f"duemq has {reason}", "to come" if UNSUPPORTED[listed[0]].is_planned else "refused"

    return _rows(("request codes", "why", ""), rows())


def positions() -> str:
    """The messages that a new group gets."""

    def text(got: tuple[str, ...]) -> str:
        return {
            ("old", "new"): "all messages",
            ("new",): "those stored at that time or later",
            (): "those that come later",
        }[got]

    return _rows(
        ("the queue", *(f"`{name}`" for name in _BEGINS.values())),
        ((_STATES[state], *(text(row[begin]) for begin in _BEGINS)) for state, row in EXPECTED.items()),
    )


async def tables(store: Path) -> dict[str, str]:
    """Return all tables, by their names in the page. A broker runs for a moment, with its files in `store`."""
    async with running(store) as broker:
        permissions = dict(broker.router.permissions)
    return {
        "commands": commands(),
        "handled": handled(permissions),
        "own": own(permissions),
        "unsupported": unsupported(),
        "positions": positions(),
    }


def with_tables(page: str, made: Mapping[str, str]) -> str:
    """Return the page with the tables in their places. Raises ValueError for a table that has no place."""
    for name, table in made.items():
        page, places = re.subn(
            rf"(?s)<!-- {name} -->\n.*?<!-- end of {name} -->",
            lambda _, name=name, table=table: f"<!-- {name} -->\n\n{table}\n\n<!-- end of {name} -->",  # type: ignore[misc]
            page,
        )
        if places != 1:
            raise ValueError(f"{PAGE.name} has {places} places for the table {name!r}: it needs one")
    return page


if __name__ == "__main__":
    import asyncio
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = asyncio.run(tables(Path(folder, "store")))
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
