"""The entry of a user's policies that decides about a request.

An entry is about a request if its resource, one of its actions and its addresses match. The default policy counts only
if no entry of the custom policy is about the request. Among several entries of a policy, the one with the narrowest
resource counts: a type of resource before `*`, a literal name before a prefix, a longer prefix before a shorter one,
and either before all names. Of two entries for the same resource, the one that denies counts. If no entry is about the
request, it is refused.

5.3.3 itself prefers the shortest prefix, and of a prefix and a name whichever comes first. Later versions have the
order above (apache/rocketmq issue 9539).

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
    """An entry, prepared for matching. `name`: the name or the prefix of its resource."""

    __slots__ = ("_actions", "_is_for_all", "_networks", "decision", "kind", "name", "order", "pattern")

    def __init__(self, entry: Entry) -> None:
        resource = entry.resource
        self.decision = entry.decision
        self.kind = resource.resource_type
        self.pattern = resource.resource_pattern
        self.name = resource.resource_name or ""
        self._actions = bits(entry.actions)
        found = [network(source) for source in entry.sources]
        self._networks = tuple(each for each in found if each is not None)
        # RocketMQ accepts host names as networks. Here they match no address, or every address in an entry that denies.
        self._is_for_all = not found or (self.decision is Decision.DENY and None in found)
        self.order = (self.kind is ResourceType.ANY, self.decision is Decision.ALLOW)

    def matches(self, kind: ResourceType, actions: int, address: Network | None, *, has_to_be_named: bool) -> bool:
        """Whether the entry is about a request. The caller has already compared the names of the resources, see
        `_Policy.about`."""
        if not self._actions & actions or self.kind not in (kind, ResourceType.ANY):
            return False
        names_none = self.kind is ResourceType.ANY or self.pattern is Pattern.ANY
        if names_none and has_to_be_named and self.decision is Decision.ALLOW:
            return False
        return self._is_for_all or (address is not None and self._is_from(address))

    def _is_from(self, address: Network) -> bool:
        return any(each.version == address.version and address.network_address in each for each in self._networks)


class _Policy:
    """The entries of one type. Most have a name or a prefix, and are found by it: a user may have thousands."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_name: dict[tuple[ResourceType, str], list[_Rule]] = {}
        self._by_prefix: dict[tuple[ResourceType, str], list[_Rule]] = {}
        self._others: list[_Rule] = []
        for rule in sorted(map(_Rule, entries), key=lambda rule: rule.order):
            if rule.kind is ResourceType.ANY or rule.pattern is Pattern.ANY:
                self._others.append(rule)
            else:
                table = self._by_name if rule.pattern is Pattern.LITERAL else self._by_prefix
                table.setdefault((rule.kind, rule.name), []).append(rule)
        self._lengths = sorted({len(prefix) for _, prefix in self._by_prefix}, reverse=True)

    def about(self, kind: ResourceType, name: str) -> Iterator[_Rule]:
        """Yield the entries that name a resource or a prefix of it, then those for all names, which may be of another
        type. Entries that count before others come first."""
        yield from self._by_name.get((kind, name), ())
        for length in self._lengths:
            if length <= len(name):
                yield from self._by_prefix.get((kind, name[:length]), ())
        yield from self._others


class PreparedPolicies:
    """The policies of a user, prepared for decisions."""

    def __init__(self, acl: Acl) -> None:
        self._policies = [
            _Policy(entry for policy in acl.policies if policy.policy_type is kind for entry in policy.entries)
            for kind in (PolicyType.CUSTOM, PolicyType.DEFAULT)
        ]

    def decide(
        self, kind: ResourceType, name: str, actions: int, host: str, *, has_to_be_named: bool = False
    ) -> Decision | None:
        """Return the decision about any of some actions (see `bits`) on a resource; None if no entry is about it.
        `host`: the address of the peer. `has_to_be_named`: an entry that allows has to name the resource, or a prefix
        of it."""
        address = _address(host)
        for policy in self._policies:
            for rule in policy.about(kind, name):
                if rule.matches(kind, actions, address, has_to_be_named=has_to_be_named):
                    return rule.decision
        return None


def _address(host: str) -> Network | None:
    """Return an address as a network of one address; None if it is not one. An IPv4-mapped IPv6 address counts as
    IPv4."""
    found = network(host.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Network) and found.network_address.ipv4_mapped is not None:
        return ipaddress.IPv4Network(found.network_address.ipv4_mapped)
    return found
