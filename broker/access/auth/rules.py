"""The entry of a user's policies that decides about a request.

An entry is about a request if its resource, one of its actions and its addresses match. The custom policy counts; the
default one only if no entry of the custom one is about the request. Among several entries the one with the narrowest
resource counts: one of a kind before `*`, a literal name before a prefix, a longer prefix before a shorter one, and
either before all names. Of two for the same resource, the one that denies counts. If no entry is about the request, it
is refused.

5.3.3 itself takes the shortest prefix, and between a prefix and a name what comes first; later versions have this order
(apache/rocketmq issue 9539).

Source: apache/rocketmq auth/authorization/chain/AclAuthorizationHandler.java at 5.3.3 and later.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from typing import Final

from duemq.broker.access.auth.model import (
    Acl,
    Action,
    Decision,
    Entry,
    Network,
    Pattern,
    PolicyType,
    ResourceType,
    network,
)

_ALL: Final = (1 << len(Action)) - 1


def bits(actions: Iterable[Action]) -> int:
    """Return actions as a number with a bit for each."""
    number = 0
    for action in actions:
        number |= _ALL if action is Action.ALL else 1 << action
    return number


class _Rule:
    """An entry, prepared for matching."""

    __slots__ = ("_actions", "_is_for_all", "_name", "_networks", "_pattern", "_type", "decision", "order")

    def __init__(self, entry: Entry) -> None:
        resource = entry.resource
        self.decision = entry.decision
        self._actions = bits(entry.actions)
        self._type, self._pattern, self._name = (
            resource.resource_type,
            resource.resource_pattern,
            resource.resource_name or "",
        )
        found = [network(source) for source in entry.sources]
        self._networks = tuple(each for each in found if each is not None)
        # RocketMQ takes host names for networks. Here they match nothing, or everything in an entry that denies.
        self._is_for_all = not found or (self.decision is Decision.DENY and None in found)
        self.order = (
            self._type is ResourceType.ANY,
            (Pattern.LITERAL, Pattern.PREFIXED, Pattern.ANY).index(self._pattern),
            -len(self._name) if self._pattern is Pattern.PREFIXED else 0,
            self.decision is Decision.ALLOW,
        )

    def matches(
        self, kind: ResourceType, name: str, actions: int, address: Network | None, *, has_to_be_named: bool
    ) -> bool:
        if not self._actions & actions:
            return False
        if self._type is not ResourceType.ANY and self._type is not kind:
            return False
        if self._type is ResourceType.ANY or self._pattern is Pattern.ANY:
            if has_to_be_named and self.decision is Decision.ALLOW:
                return False
        elif not (name == self._name if self._pattern is Pattern.LITERAL else name.startswith(self._name)):
            return False
        return self._is_for_all or (address is not None and self._is_from(address))

    def _is_from(self, address: Network) -> bool:
        return any(each.version == address.version and address.network_address in each for each in self._networks)


class Rules:
    """The policies of a user, prepared for decisions."""

    def __init__(self, acl: Acl) -> None:
        self._by_type = tuple(tuple(_sorted(acl, kind)) for kind in (PolicyType.CUSTOM, PolicyType.DEFAULT))

    def decide(
        self, kind: ResourceType, name: str, actions: int, host: str, *, has_to_be_named: bool = False
    ) -> Decision | None:
        """Return the decision about any of some actions (see `bits`) on a resource; None if no entry is about it.
        `host`: the address of the peer. `has_to_be_named`: what allows it has to name it, or a prefix of it."""
        address = _address(host)
        for rules in self._by_type:
            for rule in rules:
                if rule.matches(kind, name, actions, address, has_to_be_named=has_to_be_named):
                    return rule.decision
        return None


def _sorted(acl: Acl, kind: PolicyType) -> Iterator[_Rule]:
    rules = [_Rule(entry) for policy in acl.policies if policy.policy_type is kind for entry in policy.entries]
    return iter(sorted(rules, key=lambda rule: rule.order))


def _address(host: str) -> Network | None:
    """Return an address as a network of one. An IPv4 address that came over IPv6 is an IPv4 address."""
    found = network(host.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Network) and found.network_address.ipv4_mapped is not None:
        return ipaddress.IPv4Network(found.network_address.ipv4_mapped)
    return found
