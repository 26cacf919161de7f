"""The embedded name server, which tells clients the brokers of a topic. It always knows the topics of its own broker;
other brokers register theirs with it as they would with RocketMQ's.

Codes: 105, 106, 206, 224, 304, 216 for clients and tools; 103, 104, 322 for brokers; `key_values` has those of the
key-value configuration. Behaviour after apache/rocketmq namesrv/routeinfo/RouteInfoManager.java (4.9.7).
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping
from typing import Any, Final

import msgspec
import structlog

from duemq.broker.access.permission import ADMINISTER, LOOK, OPEN
from duemq.broker.errors import LimitReached, Refused
from duemq.broker.limits import MAX_NAME_LENGTH, Limits
from duemq.broker.names.key_values import KeyValues, size_of
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.settings.config import MAX_QUEUES
from duemq.broker.tables.topics import PERM_WRITE, Topics
from duemq.protocol.codes import VERSION_STRICT_JSON, RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData, DataVersion, QueueData, TopicConfig, TopicRoute
from duemq.protocol.requests.headers import (
    BrokerIdentity,
    BrokerName,
    ClusterName,
    GetRouteInfo,
    NoFields,
    RegisterBroker,
    Request,
    TopicName,
    WipedTopics,
    WritableTopics,
    response,
)
from duemq.protocol.requests.registration import decode_registration
from duemq.storage.clock import Clock

log = structlog.get_logger(__name__)

ORDER_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
EXPIRE_MS: Final = 120_000
_BROKER_BYTES: Final = 1024
"""The number of bytes that a registration without topics counts as."""
_MAX_MISSED: Final = 100
"""Maximum number of topics without a route that are remembered for a connection."""
PRIMARY: Final = 0


class _Broker(msgspec.Struct):
    """A registered broker: one broker id of one name."""

    cluster: str
    name: str
    broker_id: int
    address: str
    ha_address: str
    version: DataVersion
    topics: dict[str, TopicConfig]
    size: int
    """Size of the registration in bytes."""
    last_update: float
    """Time of the last registration or version query, in seconds of the monotonic clock."""
    connection: Connection


def _check_queues(topics: Mapping[str, TopicConfig]) -> None:
    """Raise Refused for topics with more queues than clients can handle in a route."""
    for topic, config in topics.items():
        for count in (config.read_queue_nums, config.write_queue_nums):
            if not 0 <= count <= MAX_QUEUES:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR, f"the topic {topic} has {count} queues: it must have 0 to {MAX_QUEUES}"
                )


class NameServer:
    """Routes of all known brokers. The own broker's topics are looked up, not copied."""

    def __init__(
        self,
        *,
        cluster: str,
        broker_name: str,
        address: str,
        topics: Topics,
        values: KeyValues,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._own = BrokerData({PRIMARY: address}, broker_name, cluster)
        self._topics = topics
        self._clock = clock
        self._values = values
        self._brokers: dict[tuple[str, int], _Broker] = {}
        self._of_connection: dict[Connection, set[tuple[str, int]]] = {}
        self._drained: set[str] = set()
        """Names of brokers without write permission: clients send no more messages to them."""
        self._registered = 0
        """Size of all registrations in bytes."""
        self._missed: dict[Connection, set[str]] = {}
        """Topics that a client asked for in vain, by connection."""
        self._found: set[str] = set()
        """Topics whose route such a client has received since the last call of `take_found`."""
        self._found_before: set[str] = set()
        """The same, for the time between the last two calls."""

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo, OPEN, self.route)
        router.add(RequestCode.GET_BROKER_CLUSTER_INFO, NoFields, LOOK, self.clusters)
        router.add(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, NoFields, LOOK, self.all_topics)
        router.add(RequestCode.GET_TOPICS_BY_CLUSTER, ClusterName, LOOK, self.topics_of_cluster)
        router.add(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, NoFields, LOOK, self.system_topics)
        router.add(RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicName, ADMINISTER, self.delete_topic)
        router.add(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerName, ADMINISTER, self.wipe_write_permission)
        router.add(RequestCode.ADD_WRITE_PERM_OF_BROKER, BrokerName, ADMINISTER, self.add_write_permission)
        router.add(RequestCode.REGISTER_BROKER, RegisterBroker, ADMINISTER, self.register_broker)
        router.add(RequestCode.UNREGISTER_BROKER, BrokerIdentity, ADMINISTER, self.unregister_broker)
        router.add(RequestCode.GET_NAMESRV_CONFIG, NoFields, LOOK, self.settings)
        router.add(RequestCode.UPDATE_NAMESRV_CONFIG, NoFields, ADMINISTER, self.update_settings)
        router.add(RequestCode.QUERY_DATA_VERSION, BrokerIdentity, ADMINISTER, self.query_data_version)
        router.add_clients(self)

    # --- routes

    def _all_brokers(self, names: Container[str] | None = None) -> list[BrokerData]:
        """Return all brokers, or those of some names, with their addresses; the own broker first."""
        brokers: dict[str, BrokerData] = {}
        if names is None or self._own.broker_name in names:
            brokers[self._own.broker_name] = BrokerData(dict(self._own.broker_addrs), *self._own_names())
        for broker in self._brokers.values():
            if names is not None and broker.name not in names:
                continue
            data = brokers.setdefault(broker.name, BrokerData({}, broker.name, broker.cluster))
            data.broker_addrs.setdefault(broker.broker_id, broker.address)
        return list(brokers.values())

    def _own_names(self) -> tuple[str, str]:
        return self._own.broker_name, self._own.cluster

    def _configs_of(self, topic: str) -> dict[str, TopicConfig]:
        """Return the configurations of a topic, by broker name."""
        configs = {
            broker.name: broker.topics[topic]
            for broker in self._brokers.values()
            if broker.broker_id == PRIMARY and topic in broker.topics
        }
        own = self._topics.get(topic)
        if own is not None:
            configs[self._own.broker_name] = self._topics.announced(own)
        return configs

    def route(self, connection: Connection, request: Request[GetRouteInfo]) -> Answer:
        """Return the route of a topic."""
        name = request.header.topic
        configs = self._configs_of(name)
        self._note_miss(connection, name, is_found=bool(configs))
        if not configs:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"No topic route info in name server for the topic: {name}. Create it with mqadmin updateTopic, or "
                "send to it where autoCreateTopicEnable=true",
            )
        drained = self._drained
        queues = [
            QueueData(
                broker,
                config.perm & ~PERM_WRITE if broker in drained else config.perm,
                config.read_queue_nums,
                config.write_queue_nums,
                config.topic_sys_flag,
            )
            for broker, config in configs.items()
        ]
        brokers = self._all_brokers(configs)
        order = self._values.of(ORDER_NAMESPACE).get(name)
        strict = request.version >= VERSION_STRICT_JSON or bool(request.header.accept_standard_json_only)
        return response(ResponseCode.SUCCESS, body=TopicRoute(brokers, queues, order).to_json(strict=strict))

    def _note_miss(self, connection: Connection, topic: str, *, is_found: bool) -> None:
        missed = self._missed.get(connection)
        if not is_found:
            if missed is None:
                missed = self._missed[connection] = set()
            if len(missed) < _MAX_MISSED and len(topic) <= MAX_NAME_LENGTH:
                missed.add(topic)
        elif missed is not None and topic in missed:
            missed.discard(topic)
            self._found.add(topic)

    def take_found(self) -> set[str]:
        """Return the topics whose route was returned to a client that had asked for it in vain before. A topic is
        reported by the second call after that, so that the client has had the time between two calls to process the
        route."""
        found, self._found_before, self._found = self._found_before, self._found, set()
        return found

    def clusters(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the clusters and their brokers."""
        brokers = self._all_brokers()
        names: dict[str, list[str]] = {}
        for broker in brokers:
            names.setdefault(broker.cluster, []).append(broker.broker_name)
        return response(ResponseCode.SUCCESS, body=bodies.cluster_info(brokers, names))

    def all_topics(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return all topics."""
        names = dict.fromkeys(self._topics.table)
        for broker in self._brokers.values():
            names.update(dict.fromkeys(broker.topics))
        return _topic_list(list(names))

    def topics_of_cluster(self, _: Connection, request: Request[ClusterName]) -> Answer:
        """Return the topics of a cluster."""
        names: dict[str, None] = {}
        if request.header.cluster == self._own.cluster:
            names.update(dict.fromkeys(self._topics.table))
        for broker in self._brokers.values():
            if broker.cluster == request.header.cluster:
                names.update(dict.fromkeys(broker.topics))
        return _topic_list(list(names))

    def system_topics(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the topics named after clusters and brokers."""
        brokers = self._all_brokers()
        names = dict.fromkeys(name for broker in brokers for name in (broker.cluster, broker.broker_name))
        return _topic_list(list(names), brokers[0].broker_addrs[PRIMARY])

    def delete_topic(self, _: Connection, request: Request[TopicName]) -> Answer:
        """Remove a topic of other brokers until they register it again; the own broker's topic is deleted by a request
        to the broker."""
        for broker in self._brokers.values():
            broker.topics.pop(request.header.topic, None)
        return response(ResponseCode.SUCCESS)

    def wipe_write_permission(self, _: Connection, request: Request[BrokerName]) -> Answer:
        """Remove the write permission of a broker's topics from all routes, until it is added again, or a broker that
        has just been started registers under this name."""
        name = request.header.broker_name
        count = self._count_topics(name)
        if count:
            self._drained.add(name)
        log.info("write_permission_wiped", broker=name, topics=count)
        return response(ResponseCode.SUCCESS, None, WipedTopics(count))

    def add_write_permission(self, _: Connection, request: Request[BrokerName]) -> Answer:
        """Undo `wipe_write_permission`: the routes have the permissions of the topics again."""
        name = request.header.broker_name
        self._drained.discard(name)
        count = self._count_topics(name)
        log.info("write_permission_added", broker=name, topics=count)
        return response(ResponseCode.SUCCESS, None, WritableTopics(count))

    def _count_topics(self, name: str) -> int:
        if name == self._own.broker_name:
            return len(self._topics.table)
        broker = self._brokers.get((name, PRIMARY))
        return len(broker.topics) if broker is not None else 0

    # --- settings

    def settings(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return those properties of RocketMQ's name server that have a meaning here."""
        text = "".join(
            f"{name}={value}\n"
            for name, value in (
                ("kvConfigPath", self._values.path),
                ("orderMessageEnable", "true"),
                ("returnOrderTopicConfigToBroker", "true"),
                ("scanNotActiveBrokerInterval", EXPIRE_MS),
            )
        )
        return response(ResponseCode.SUCCESS, body=text.encode())

    def update_settings(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Refuse: the embedded name server has the settings of its broker."""
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            "the embedded name server has no settings of its own: change those of its broker with updateBrokerConfig",
        )

    # --- other brokers

    def register_broker(self, connection: Connection, request: Request[RegisterBroker]) -> Answer:
        """Register another broker and its topics."""
        header = request.header
        if header.body_crc32 and zlib.crc32(request.body) & 0x7FFFFFFF != header.body_crc32:
            raise Refused(ResponseCode.SYSTEM_ERROR, "crc32 not match")
        if (header.broker_name, header.broker_id) == (self._own.broker_name, PRIMARY):
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"the broker name {header.broker_name} is that of this name server's broker"
            )
        version, topics, size = decode_registration(request.body, compressed=header.compressed)
        _check_queues(topics)
        key = (header.broker_name, header.broker_id)
        old = self._brokers.get(key)
        size += _BROKER_BYTES + size_of(header.broker_name, header.cluster_name, header.broker_addr)
        more = size - (old.size if old is not None else 0)
        self._check_room(more, is_new=old is None)
        if old is None:
            self._drained.discard(header.broker_name)
            log.info("broker_registered", broker=header.broker_name, broker_id=header.broker_id, at=header.broker_addr)
        else:
            self._of_connection[old.connection].discard(key)
        self._registered += more
        self._of_connection.setdefault(connection, set()).add(key)
        self._brokers[key] = _Broker(
            cluster=header.cluster_name,
            name=header.broker_name,
            broker_id=header.broker_id,
            address=header.broker_addr,
            ha_address=header.ha_server_addr,
            version=version,
            topics=topics,
            size=size,
            last_update=self._clock.monotonic(),
            connection=connection,
        )
        answer = response(ResponseCode.SUCCESS)
        primary = self._brokers.get((header.broker_name, PRIMARY))
        if header.broker_id != PRIMARY and primary is not None:
            answer.ext.update(masterAddr=primary.address, haServerAddr=primary.ha_address)
        orders = self._values.of(ORDER_NAMESPACE)
        if orders:
            answer.body = fastjson.dumps({"table": orders})
        return answer

    def _check_room(self, more: int, *, is_new: bool) -> None:
        """Raise LimitReached if a registration would be one broker too many, or its `more` bytes too many."""
        limits = self._limits
        if is_new and len(self._brokers) >= limits.registered_brokers:
            raise LimitReached(
                "maxRegisteredBrokers",
                ResponseCode.SYSTEM_ERROR,
                f"there are {len(self._brokers)} brokers, and maxRegisteredBrokers={limits.registered_brokers}: raise "
                "that setting, or register elsewhere",
            )
        if more > 0 and self._registered + more > limits.registration_bytes:
            raise LimitReached(
                "maxRegistrationBytes",
                ResponseCode.SYSTEM_ERROR,
                f"brokers have registered {self._registered} bytes, and maxRegistrationBytes="
                f"{limits.registration_bytes}: {more} more are refused. Use fewer topics, or raise that setting",
            )

    def unregister_broker(self, _: Connection, request: Request[BrokerIdentity]) -> Answer:
        """Remove another broker."""
        self._forget((request.header.broker_name, request.header.broker_id))
        return response(ResponseCode.SUCCESS)

    def query_data_version(self, _: Connection, request: Request[BrokerIdentity]) -> Answer:
        """Tell a broker whether its topics have changed since it registered them."""
        broker = self._brokers.get((request.header.broker_name, request.header.broker_id))
        asked = bodies.decode_request(request.body, DataVersion)
        answer = response(ResponseCode.SUCCESS)
        answer.ext["changed"] = "true"
        if broker is not None:
            broker.last_update = self._clock.monotonic()
            answer.ext["changed"] = "true" if broker.version != asked else "false"
            answer.body = fastjson.dumps(broker.version.to_json())
        return answer

    def connection_lost(self, connection: Connection) -> None:
        """Remove the brokers registered over a lost connection."""
        self._missed.pop(connection, None)
        for key in list(self._of_connection.get(connection, ())):
            self._forget(key)
        self._of_connection.pop(connection, None)

    def expire(self) -> None:
        """Remove brokers that have stopped registering."""
        limit = self._clock.monotonic() - EXPIRE_MS / 1000
        for key in [key for key, broker in self._brokers.items() if broker.last_update < limit]:
            self._forget(key)

    def _forget(self, key: tuple[str, int]) -> None:
        broker = self._brokers.pop(key, None)
        if broker is not None:
            self._registered -= broker.size
            self._of_connection[broker.connection].discard(key)
            log.info("broker_gone", broker=key[0], broker_id=key[1])


def _topic_list(names: list[str], address: str | None = None) -> Answer:
    body: dict[str, Any] = {"topicList": names}
    if address is not None:
        body["brokerAddr"] = address
    return response(ResponseCode.SUCCESS, body=fastjson.dumps(body))
