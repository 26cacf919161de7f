"""`duemq mqtt-bridge check`: the effect of the rules on sample topics, as text."""

from __future__ import annotations

from collections.abc import Iterator

from duemq._values.durations import format_duration
from duemq.errors import ArgumentError
from duemq.mqtt_bridge.rules.filters import check_topic
from duemq.mqtt_bridge.rules.model import Delay, DelayRefused, Inbound, Rules, TemplateError


def describe(rules: Rules) -> Iterator[str]:
    """Yield lines about the connections, the subscriptions and the rules."""
    connection = rules.connection
    account = f" with the account {rules.account.access_key}" if rules.account.access_key else ""
    yield (
        f"MQTT {connection.protocol} at {connection.host}:{connection.port} as {connection.client_id}, "
        f"RocketMQ by {rules.nameserver}{account}, state in {connection.state_directory}"
    )
    for each in rules.subscriptions:
        yield f"subscribes to {each.filter} with QoS {each.qos}"
    for rule in rules.inbound:
        yield f"line {rule.line}: MQTT {rule.filter} to RocketMQ"
    for out in rules.outbound:
        yield f"line {out.line}: RocketMQ {out.topic} ({out.tags}) to MQTT with QoS {out.qos}, as group {out.group}"
    if rules.delayed is not None:
        prefixes = ", ".join(f"{prefix}/..." for prefix in rules.delayed.prefixes)
        yield f"delays by {prefixes}, waiting in {rules.delayed.topic}"


def sample(rules: Rules, topic: str, now_ms: int) -> tuple[list[str], bool]:
    """Return where a message to an MQTT topic goes, a line for each step, and whether the bridge accepts the message.
    `now_ms`: the time, ms since the epoch."""
    try:
        check_topic(topic)
        delay = rules.delayed.read(topic, (), now_ms) if rules.delayed is not None else None
    except (ArgumentError, DelayRefused) as error:
        return [f"{topic}: refused: {error}"], False
    if delay is None:
        line, is_taken = _plain(rules.inbound, topic)
        return [f"{topic}: {line}"], is_taken
    line, _ = _plain(rules.inbound, delay.plain_topic)
    lines = [f"{topic}: {_of_delay(delay)}"]
    if not delay.recall:
        lines.append(f"then {delay.plain_topic} on MQTT: {line}")
    return lines, True


def _plain(inbound: tuple[Inbound, ...], topic: str) -> tuple[str, bool]:
    for rule in inbound:
        try:
            target = rule.target(topic)
        except TemplateError as error:
            return f"refused: {error} (line {rule.line})", False
        if target is not None:
            names = {"key": target.key, "tags": target.tags, "sharding key": target.sharding_key}
            given = "".join(f", {name} {value}" for name, value in names.items() if value is not None)
            return f"to RocketMQ's topic {target.topic}{given} (line {rule.line})", True
    return "no rule takes it to RocketMQ", False


def _of_delay(delay: Delay) -> str:
    if delay.recall:
        return f"cancels the waiting message with the key {delay.key}"
    when = (
        f"waits {format_duration(delay.delay_ms)}"
        if delay.delay_ms is not None
        else f"waits until {delay.deliver_at_ms} ms since the epoch"
    )
    place = f", and replaces the waiting message with the key {delay.key}" if delay.replace else ""
    return f"{when}{place or (f', with the key {delay.key}' if delay.key else '')}"
