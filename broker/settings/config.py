"""The broker's settings: RocketMQ's own property names, from a file, the environment and flags; later sources override
earlier ones. Each setting is declared once, below; the declaration feeds the parser, its errors and the documentation.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from duemq.broker.errors import ConfigError
from duemq.broker.settings import broker_conf
from duemq.broker.settings.rocketmq_properties import UNUSED
from duemq.scheduler.levels.table import DEFAULT as DEFAULT_LEVELS
from duemq.scheduler.levels.table import DelayLevels

ENVIRONMENT_PREFIX: Final = "DUEMQ_"
_HELP: Final = "help"
_PROPERTY: Final = "property"
_CHOICES: Final = "choices"
_RANGE: Final = "range"
_LIVE: Final = "live"
_SECRET: Final = "secret"
PORTS: Final = (1, 65535)
_DAY_SECONDS: Final = 86_400
_MIB: Final = 1024 * 1024
MAX_QUEUES: Final = 65536
"""Maximum number of queues of one topic, whatever the settings say."""
MAX_DELAY_LEVELS: Final = 1000
"""Maximum number of delay levels. The checkpoint's note takes 28 bytes per level, and each level has a queue with
files; nobody needs more levels."""
_TIMER_PRECISION_MS: Final = 1000
_MAX_REPEATED: Final = 100
DEFAULT_TLS_FILE: Final = "/etc/rocketmq/tls.properties"
"""RocketMQ's default path; the file need not exist."""


def _setting(
    name: str,
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] | None = None,
    limits: tuple[int, int] | None = None,
    live: bool = False,
    secret: bool = False,
) -> Any:
    """`live`: the setting may change while the broker runs; the component that uses it reads it at each use, or
    subscribes to it, see `broker.settings.live_settings`. `secret`: its value is never shown."""
    metadata = {_PROPERTY: name, _HELP: text, _CHOICES: choices, _RANGE: limits, _LIVE: live, _SECRET: secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True)
class BrokerConfig:
    """All settings; each field's `metadata["help"]` explains it. Times are in ms and sizes in bytes unless noted."""

    cluster_name: str = _setting("brokerClusterName", "DefaultCluster", "cluster this broker belongs to")
    broker_name: str = _setting("brokerName", "", "name of the broker in routes; default: the machine's host name")
    broker_id: int = _setting("brokerId", 0, "0, for a primary; replicas are not supported yet", limits=(0, 0))
    broker_role: str = _setting(
        "brokerRole",
        "ASYNC_MASTER",
        "accepted for compatibility; without replicas both values mean the same",
        choices=("ASYNC_MASTER", "SYNC_MASTER"),
    )
    host: str = _setting("bindAddress", "127.0.0.1", "address to listen on (as --host)")
    advertised_host: str = _setting("brokerIP1", "", "address given to clients; default: the one listened on")
    listen_port: int = _setting("listenPort", 10911, "port of the broker; port - 2 is the VIP port", limits=(3, 65535))
    nameserver_port: int = _setting("nameserverPort", 9876, "port of the embedded name server", limits=PORTS)
    nameserver_addresses: str = _setting(
        "namesrvAddr", "", "host:port;host:port of external name servers; if set, the embedded one does not start"
    )
    register_period_ms: int = _setting(
        "registerNameServerPeriod",
        30_000,
        "time between registrations with external name servers",
        limits=(1000, 60_000),
    )
    broker_permission: int = _setting(
        "brokerPermission", 6, "what the broker allows: the sum of 2 (write) and 4 (read)", limits=(0, 7), live=True
    )
    region: str = _setting("regionId", "DefaultRegion", "sent to producers, for message traces")
    trace_on: bool = _setting("traceOn", True, "sent to producers, for message traces")
    trace_topic_enabled: bool = _setting("traceTopicEnable", False, "whether to create the trace topic at the start")
    trace_topic: str = _setting("msgTraceTopicName", "RMQ_SYS_TRACE_TOPIC", "name of the trace topic")

    store_root: str = _setting("storePathRootDir", "./data", "directory of the store (as --store)")
    commitlog_directory: str = _setting("storePathCommitLog", "", "directory of the commitlog; default: in the store")
    commitlog_segment_size: int = _setting(
        "mappedFileSizeCommitLog",
        1 << 30,
        "size of a commitlog file, fixed when the store is created",
        limits=(4096, 1 << 31),
    )
    queue_segment_size: int = _setting(
        "mappedFileSizeConsumeQueue",
        6_000_000,
        "size of a consume queue file, fixed when the store is created",
        limits=(20, 1 << 31),
    )
    is_extended: bool = _setting(
        "enableConsumeQueueExt", False, "whether to write extensions of consume queues, as RocketMQ can"
    )
    extension_segment_size: int = _setting(
        "mappedFileSizeConsumeQueueExt",
        48 << 20,
        "size of a file in consumequeue_ext, fixed when the store is created",
        limits=(1024, 1 << 31),
    )
    flush_disk_type: str = _setting(
        "flushDiskType",
        "ASYNC_FLUSH",
        "SYNC_FLUSH: a send is answered when its message is on the disk",
        choices=("ASYNC_FLUSH", "SYNC_FLUSH"),
    )
    flush_interval_ms: int = _setting(
        "flushIntervalCommitLog", 500, "ASYNC_FLUSH: time between flushes", limits=(1, 60_000), live=True
    )
    queue_flush_interval_ms: int = _setting(
        "flushIntervalConsumeQueue", 1000, "time between writes of the consume queues", limits=(1, 60_000), live=True
    )
    offset_flush_interval_ms: int = _setting(
        "flushConsumerOffsetInterval",
        5000,
        "time between writes of the consumer offsets",
        limits=(1, 600_000),
        live=True,
    )
    delay_offset_flush_interval_ms: int = _setting(
        "flushDelayOffsetInterval",
        10_000,
        "time between writes of the levels' progress",
        limits=(1, 600_000),
        live=True,
    )
    sync_flush_timeout_ms: int = _setting(
        "syncFlushTimeout",
        5000,
        "SYNC_FLUSH: a send that waits longer is answered FLUSH_DISK_TIMEOUT",
        limits=(1, 600_000),
    )
    max_message_size: int = _setting(
        "maxMessageSize", 4 * 1024 * 1024, "largest body of a message", limits=(1, 15 * 1024 * 1024), live=True
    )
    record_checksums: bool = _setting(
        "enabledAppendPropCRC",
        False,
        "whether each record ends with a checksum of the whole record, for `duemq spark audit --check-bodies`",
    )
    file_reserved_hours: int = _setting(
        "fileReservedTime", 72, "hours for which messages are kept", limits=(0, 10_000_000), live=True
    )
    delete_when: str = _setting(
        "deleteWhen", "04", "hours of the day at which expired files are removed, such as 04;16", live=True
    )
    disk_max_used_ratio: int = _setting(
        "diskMaxUsedSpaceRatio",
        75,
        "percent; on a fuller disk, expired files are removed at any hour",
        limits=(1, 100),
        live=True,
    )
    disk_clean_forcibly_ratio: float = _setting(
        "diskSpaceCleanForciblyRatio",
        0.85,
        "a fraction; on a fuller disk, the oldest files are removed, expired or not",
        limits=(0, 1),
        live=True,
    )
    disk_warning_ratio: float = _setting(
        "diskSpaceWarningLevelRatio",
        0.90,
        "a fraction; on a fuller disk, messages are refused",
        limits=(0, 1),
        live=True,
    )
    clean_files_forcibly: bool = _setting(
        "cleanFileForciblyEnable",
        True,
        "whether files that are not expired may be removed when the disk is full",
        live=True,
    )

    auto_create_topic: bool = _setting(
        "autoCreateTopicEnable", True, "whether a send creates its topic, modelled on TBW102", live=True
    )
    auto_create_group: bool = _setting(
        "autoCreateSubscriptionGroup", True, "whether a consumer group that is not known is created", live=True
    )
    default_topic_queues: int = _setting(
        "defaultTopicQueueNums",
        8,
        "queues of TBW102, the maximum for an auto-created topic",
        limits=(1, MAX_QUEUES),
        live=True,
    )
    cluster_topic: bool = _setting(
        "clusterTopicEnable", True, "whether the topic named after the cluster may be written and read"
    )
    broker_topic: bool = _setting(
        "brokerTopicEnable", True, "whether the topic named after the broker may be written and read"
    )
    delay_levels: str = _setting(
        "messageDelayLevel", DEFAULT_LEVELS, "the delays of the levels, from level 1 on, in s, m, h or d", live=True
    )

    async_delivery: bool = _setting(
        "enableScheduleAsyncDeliver", True, "whether a level continues before its deliveries are durable", live=True
    )
    async_delivery_pending: int = _setting(
        "scheduleAsyncDeliverMaxPendingLimit",
        2000,
        "with enableScheduleAsyncDeliver: how many deliveries of a level may wait to be durable",
        limits=(1, 10_000_000),
        live=True,
    )
    async_delivery_resends: int = _setting(
        "scheduleAsyncDeliverMaxResendNum2Blocked",
        3,
        "with enableScheduleAsyncDeliver: a delivery that failed this many times holds its level up",
        limits=(1, 1000),
        live=True,
    )
    delivery_batch: int = _setting(
        "scheduleDeliverBatchSize",
        512,
        "duemq's own: maximum number of messages of a level delivered in one write",
        limits=(1, 65536),
        live=True,
    )
    lateness_warn_ms: int = _setting(
        "scheduleLatenessWarnMillis",
        1000,
        "duemq's own: a level that is later than this is logged, with the reason",
        limits=(1, 86_400_000),
        live=True,
    )
    timer_wheel: bool = _setting("timerWheelEnable", True, "whether messages for any time are accepted")
    timer_max_delay_seconds: int = _setting(
        "timerMaxDelaySec",
        366 * _DAY_SECONDS,
        "seconds; a message for a later time is refused",
        limits=(1, 3660 * _DAY_SECONDS),
        live=True,
    )
    timer_precision_ms: int = _setting(
        "timerPrecisionMs",
        _TIMER_PRECISION_MS,
        "1000, the width of a slot of the timer wheel; delivery is exact to the millisecond anyway",
        limits=(1, 2**31 - 1),
    )
    timer_roll_window: int = _setting(
        "timerRollWindowSlot",
        2 * _DAY_SECONDS,
        "seconds; a message for a later time is put into the wheel again when this much time has passed",
        limits=(-(2**31), 2**31 - 1),
        live=True,
    )
    timer_congest_limit: int = _setting(
        "timerCongestNumEachSlot",
        2**31 - 1,
        "maximum number of messages that are accepted for one second",
        limits=(1, 2**31 - 1),
        live=True,
    )
    timer_stop_enqueue: bool = _setting(
        "timerStopEnqueue", False, "whether new messages are kept out of the timer wheel for now, and wait", live=True
    )
    timer_stop_dequeue: bool = _setting(
        "timerStopDequeue", False, "whether the messages in the timer wheel are held back for now", live=True
    )
    timer_log_segment_size: int = _setting(
        "mappedFileSizeTimerLog",
        100 * 1024 * 1024,
        "size of a timer log file, fixed when the store is created",
        limits=(4096, 2**31 - 1),
    )
    recall_enabled: bool = _setting(
        "recallMessageEnable", True, "whether a waiting message may be recalled, cancelled or changed", live=True
    )
    recall_always_succeeds: bool = _setting(
        "recallAlwaysSucceeds",
        False,
        "whether a recall of a message that is unknown or delivered is answered with success, as RocketMQ does",
        live=True,
    )
    mqtt_bridge: str = _setting(
        "mqttBridge",
        "",
        "duemq's own: rules file (bridge.toml) of an MQTT bridge to run beside the broker; empty: none",
    )
    test_clock: bool = _setting("testClock", False, "duemq's own: whether `duemq clock advance` may move the clock")

    long_polling: bool = _setting(
        "longPollingEnable", True, "whether a pull may wait as long as it asks for", live=True
    )
    short_polling_ms: int = _setting(
        "shortPollingTimeMills",
        1000,
        "how long a pull may wait if longPollingEnable is false",
        limits=(0, 60_000),
        live=True,
    )
    pull_max_count: int = _setting(
        "maxTransferCountOnMessageInMemory",
        32,
        "maximum number of messages in a pull response",
        limits=(1, 10_000),
        live=True,
    )
    pull_max_size: int = _setting(
        "maxTransferBytesOnMessageInMemory",
        256 * 1024,
        "maximum number of bytes in a pull response",
        limits=(1, 8 * 1024 * 1024),
        live=True,
    )
    memory_ratio: int = _setting(
        "accessMessageInMemoryMaxRatio",
        40,
        "percent of memory that is assumed to hold messages in the page cache",
        limits=(0, 100),
    )
    notify_consumers: bool = _setting(
        "notifyConsumerIdsChangedEnable",
        True,
        "whether the members of a consumer group are notified when it changes",
        live=True,
    )
    send_queue_capacity: int = _setting(
        "sendThreadPoolQueueCapacity",
        10_000,
        "sends that may wait for the disk; further sends are answered SYSTEM_BUSY",
        limits=(1, 10_000_000),
        live=True,
    )
    pull_hold_capacity: int = _setting(
        "pullThreadPoolQueueCapacity",
        100_000,
        "pulls that may wait for messages; further pulls are answered immediately",
        limits=(1, 10_000_000),
        live=True,
    )
    max_unfinished_request_bytes: int = _setting(
        "maxUnfinishedRequestBytes",
        256 * _MIB,
        "duemq's own: bytes that may be held of incomplete requests; beyond it, one of the connections that hold most "
        "is closed",
        limits=(32 * _MIB, 1 << 40),
    )
    max_waiting_request_bytes: int = _setting(
        "maxWaitingRequestBytes",
        256 * _MIB,
        "duemq's own: bytes that may be held of requests and answers that wait for the disk, such as pulls of old "
        "messages; beyond it, connections are not read further",
        limits=(8 * _MIB, 1 << 40),
    )
    max_unread_response_bytes: int = _setting(
        "maxUnreadResponseBytes",
        512 * _MIB,
        "duemq's own: bytes that may be held of responses that clients do not read; beyond it, one of the connections "
        "that hold most is closed",
        limits=(32 * _MIB, 1 << 40),
    )
    max_groups_per_connection: int = _setting(
        "maxGroupsPerConnection",
        1000,
        "duemq's own: producer and consumer groups of one connection, counted for each client id",
        limits=(1, 10_000_000),
        live=True,
    )
    max_heartbeat_entries: int = _setting(
        "maxHeartbeatEntries",
        200_000,
        "duemq's own: entries from all heartbeats, some 600 bytes each: members of groups, and the groups' "
        "subscriptions (long expressions count more)",
        limits=(1000, 100_000_000),
        live=True,
    )
    max_subscriptions: int = _setting(
        "maxSubscriptionsPerGroup",
        1000,
        "duemq's own: topics that a consumer group may subscribe to",
        limits=(1, 1_000_000),
        live=True,
    )
    max_tags: int = _setting(
        "maxTagsPerSubscription",
        1000,
        "duemq's own: tags in the expression of a subscription or a pull",
        limits=(1, 30_000),
        live=True,
    )
    max_batch_messages: int = _setting(
        "maxBatchMessages",
        32_768,
        "duemq's own: messages in a batch, which are stored together, some 4 us each, while other clients wait",
        limits=(1, 1_000_000),
        live=True,
    )
    max_queue_locks: int = _setting(
        "maxQueueLocks",
        200_000,
        "duemq's own: queues that consumers may have locked, some 300 bytes each",
        limits=(1, 100_000_000),
        live=True,
    )
    max_groups: int = _setting(
        "maxSubscriptionGroups",
        100_000,
        "duemq's own: consumer groups; further groups are not created",
        limits=(1, 10_000_000),
        live=True,
    )
    max_topics: int = _setting(
        "maxTopics", 100_000, "duemq's own: topics; further topics are not created", limits=(1, 10_000_000), live=True
    )
    max_queues_per_topic: int = _setting(
        "maxQueuesPerTopic", 4096, "duemq's own: queues of one topic", limits=(1, MAX_QUEUES), live=True
    )
    max_queues: int = _setting(
        "maxQueues", 2_000_000, "duemq's own: queues of all topics", limits=(1, 1_000_000_000), live=True
    )
    max_kv_entries: int = _setting(
        "maxKVConfigEntries",
        10_000,
        "duemq's own: key-value configurations that the name server keeps",
        limits=(0, 10_000_000),
        live=True,
    )
    max_kv_bytes: int = _setting(
        "maxKVConfigBytes",
        4 * _MIB,
        "duemq's own: total size of the key-value configurations that the name server keeps",
        limits=(0, 1 << 30),
        live=True,
    )
    max_registered_brokers: int = _setting(
        "maxRegisteredBrokers",
        1000,
        "duemq's own: other brokers registered with the name server, including replicas",
        limits=(0, 100_000),
        live=True,
    )
    max_registration_bytes: int = _setting(
        "maxRegistrationBytes",
        128 * _MIB,
        "duemq's own: bytes that other brokers have registered with the name server, some 160 for each topic",
        limits=(0, 1 << 40),
        live=True,
    )
    max_connections: int = _setting(
        "maxConnections",
        0,
        "duemq's own: all connections, including those to the embedded name server; 0: as many as the limit of open "
        "files allows",
        limits=(0, 10_000_000),
        live=True,
    )
    max_connections_per_address: int = _setting(
        "maxConnectionsPerAddress",
        50_000,
        "duemq's own: connections from one address; 0: any number",
        limits=(0, 10_000_000),
        live=True,
    )
    max_new_connections: int = _setting(
        "maxNewConnections",
        10_000,
        "duemq's own: connections that have not made a request yet, including unfinished TLS handshakes",
        limits=(1, 10_000_000),
        live=True,
    )
    max_new_connection_seconds: int = _setting(
        "maxNewConnectionSeconds",
        30,
        "duemq's own: seconds within which a connection must make a request that is handled; with access control, a "
        "request of an account",
        limits=(1, 86_400),
        live=True,
    )
    max_requests_per_second: int = _setting(
        "maxRequestsPerSecond",
        0,
        "duemq's own: requests of one connection per second, which may come in one burst; further requests are "
        "answered SYSTEM_BUSY; 0: any number",
        limits=(0, 100_000_000),
        live=True,
    )
    max_requests_per_second_per_account: int = _setting(
        "maxRequestsPerSecondPerAccount",
        0,
        "duemq's own: requests of one account or user per second, over all its connections, which may come in one "
        "burst; further requests are answered SYSTEM_BUSY; 0: any number",
        limits=(0, 100_000_000),
        live=True,
    )
    max_requests_per_second_per_address: int = _setting(
        "maxRequestsPerSecondPerAddress",
        0,
        "duemq's own: requests of one address per second, over those of its connections on which no account has made "
        "a request yet (without access control, over all), which may come in one burst; further requests are answered "
        "SYSTEM_BUSY; 0: any number",
        limits=(0, 100_000_000),
        live=True,
    )
    idle_seconds: int = _setting(
        "serverChannelMaxIdleTimeSeconds",
        120,
        "seconds without incoming bytes after which a connection is closed",
        limits=(1, 86_400),
        live=True,
    )
    insecure: bool = _setting(
        "insecure",
        False,
        "duemq's own: whether to listen beyond loopback without access control (as --insecure)",
    )
    audit: bool = _setting(
        "auditLogEnable", True, "duemq's own: whether to record who changed what, see docs/security.md"
    )
    audit_path: str = _setting(
        "auditLogPath",
        "",
        "duemq's own: path of the newest file of the audit log; default: audit/audit.log in the store",
    )
    audit_file_size: int = _setting(
        "auditLogFileSize",
        64 * _MIB,
        "duemq's own: size at which a file of the audit log is followed by a new one",
        limits=(4096, 1 << 40),
        live=True,
    )
    audit_files: int = _setting(
        "auditLogFileNumber",
        10,
        "duemq's own: how many files of the audit log are kept; older ones are removed",
        limits=(1, 10_000),
        live=True,
    )
    acl: bool = _setting("aclEnable", False, "whether requests need the signature of an account in plain_acl.yml")
    rocketmq_home: str = _setting(
        "rocketmqHome",
        "",
        "directory with conf/plain_acl.yml and conf/acl/; default: $ROCKETMQ_HOME, or else plain_acl.yml and acl/ are "
        "beside the configuration file",
    )
    tls_mode: str = _setting(
        "tls.server.mode",
        "permissive",
        "disabled; permissive: clients connect with or without TLS; enforcing: only with TLS",
        choices=("disabled", "permissive", "enforcing"),
    )
    tls_config_file: str = _setting(
        "tls.config.file",
        DEFAULT_TLS_FILE,
        "file with tls.* settings, which override those of the broker; it is read again when it changes",
    )
    tls_test_mode: bool = _setting(
        "tls.test.mode.enable", True, "without a certificate: whether to make one when the first client uses TLS"
    )
    tls_server_certificate: str = _setting(
        "tls.server.certPath", "", "the broker's certificate chain, in PEM; read again on changes, as all these files"
    )
    tls_server_key: str = _setting("tls.server.keyPath", "", "the key of the broker's certificate, in PEM")
    tls_server_key_password: str = _setting("tls.server.keyPassword", "", "the password of the key", secret=True)
    tls_server_trust: str = _setting(
        "tls.server.trustCertPath", "", "authorities that must sign clients' certificates; default: the machine's"
    )
    tls_need_client_auth: str = _setting(
        "tls.server.need.client.auth",
        "none",
        "whether clients must have a certificate",
        choices=("none", "optional", "require"),
    )
    tls_auth_client: bool = _setting("tls.server.authClient", False, "whether clients' certificates are checked")
    tls_enable: str = _setting(
        "tls.enable",
        "auto",
        "whether to use TLS with the name servers of namesrvAddr; auto: if tls.server.mode=enforcing",
        choices=("auto", "true", "false"),
    )
    tls_client_certificate: str = _setting("tls.client.certPath", "", "the certificate to show to name servers, in PEM")
    tls_client_key: str = _setting("tls.client.keyPath", "", "the key of that certificate, in PEM")
    tls_client_key_password: str = _setting("tls.client.keyPassword", "", "the password of the key", secret=True)
    tls_client_trust: str = _setting(
        "tls.client.trustCertPath", "", "authorities that must sign name servers' certificates; default: the machine's"
    )
    tls_auth_server: bool = _setting(
        "tls.client.authServer", False, "whether the certificates of name servers are checked"
    )
    authentication: bool = _setting(
        "authenticationEnabled", False, "whether requests need the signature of a user of ACL 2.0 (config/users)"
    )
    authentication_provider: str = _setting(
        "authenticationProvider", "", "RocketMQ's DefaultAuthenticationProvider, which is the default"
    )
    authentication_metadata_provider: str = _setting(
        "authenticationMetadataProvider", "", "RocketMQ's LocalAuthenticationMetadataProvider, which is the default"
    )
    authentication_strategy: str = _setting(
        "authenticationStrategy",
        "",
        "RocketMQ's StatelessAuthenticationStrategy: each request is signed; or its StatefulAuthenticationStrategy: "
        "only the first request of each connection and user. The default is the former",
    )
    authentication_whitelist: str = _setting(
        "authenticationWhitelist", "", "request codes, separated by commas, that need no signature"
    )
    init_user: str = _setting(
        "initAuthenticationUser",
        "",
        'a super user that a start creates if no user has the name: {"username":"...","password":"..."}',
        secret=True,
    )
    inner_credentials: str = _setting(
        "innerClientAuthenticationCredentials",
        "",
        'keys with which the broker signs its own requests to name servers: {"accessKey":"...","secretKey":"..."}; '
        "with ACL 2.0 also a super user, created like that of initAuthenticationUser",
        secret=True,
    )
    authorization: bool = _setting(
        "authorizationEnabled",
        False,
        "whether a user may do only what its policies allow; otherwise every user may do everything",
    )
    authorization_provider: str = _setting(
        "authorizationProvider", "", "RocketMQ's DefaultAuthorizationProvider, which is the default"
    )
    authorization_metadata_provider: str = _setting(
        "authorizationMetadataProvider", "", "RocketMQ's LocalAuthorizationMetadataProvider, which is the default"
    )
    authorization_strategy: str = _setting(
        "authorizationStrategy",
        "",
        "RocketMQ's StatelessAuthorizationStrategy or StatefulAuthorizationStrategy; both mean the same here",
    )
    authorization_whitelist: str = _setting(
        "authorizationWhitelist", "", "request codes, separated by commas, that every user may use"
    )
    migrate_auth: bool = _setting(
        "migrateAuthFromV1Enabled", False, "whether a start creates users from the accounts in plain_acl.yml"
    )

    @property
    def vip_port(self) -> int:
        """RocketMQ's VIP port, to which clients may send as well."""
        return self.listen_port - 2

    @property
    def ports(self) -> list[int]:
        """The ports on which the broker and its embedded name server listen."""
        own = [self.listen_port, self.vip_port]
        return own if self.nameserver_addresses else [*own, self.nameserver_port]

    @property
    def has_access_control(self) -> bool:
        """Whether requests need an account."""
        return self.acl or self.authentication

    @property
    def listens_on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def sync_flush(self) -> bool:
        """Whether a send waits for the disk."""
        return self.flush_disk_type == "SYNC_FLUSH"


FIELDS: Final = {field.metadata[_PROPERTY]: field for field in dataclasses.fields(BrokerConfig)}
"""The fields by property name."""
LIVE: Final = frozenset(name for name, field in FIELDS.items() if field.metadata[_LIVE])
"""Properties that may change while the broker runs."""
SECRET: Final = frozenset(name for name, field in FIELDS.items() if field.metadata[_SECRET])
"""Properties whose values are never shown."""
HIDDEN: Final = "******"
"""The text that is shown in place of such a value."""
_AUTH: Final = "org.apache.rocketmq.auth"
_CLASSES: Final = {
    "authenticationProvider": ("authentication.provider.DefaultAuthenticationProvider",),
    "authenticationMetadataProvider": ("authentication.provider.LocalAuthenticationMetadataProvider",),
    "authenticationStrategy": (
        "authentication.strategy.StatelessAuthenticationStrategy",
        "authentication.strategy.StatefulAuthenticationStrategy",
    ),
    "authorizationProvider": ("authorization.provider.DefaultAuthorizationProvider",),
    "authorizationMetadataProvider": ("authorization.provider.LocalAuthorizationMetadataProvider",),
    "authorizationStrategy": (
        "authorization.strategy.StatelessAuthorizationStrategy",
        "authorization.strategy.StatefulAuthorizationStrategy",
    ),
}
"""RocketMQ's classes that these settings may name, below the package `_AUTH`: duemq has an equivalent of each."""


@dataclass(frozen=True)
class Origin:
    """Where the settings came from. `file`: path of the configuration file, or None. `pinned`: properties set by the
    environment or a flag, which override those of the file."""

    file: str | None = None
    pinned: frozenset[str] = frozenset()


class Loaded(NamedTuple):
    """Settings as read. `ignored`: RocketMQ's properties that have no effect here."""

    config: BrokerConfig
    ignored: list[str]
    origin: Origin


def load(file: str | None, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Loaded:
    """Read the settings.

    `overrides` are NAME=VALUE texts. Raises ConfigError with one sentence that names the wrong property or value, and
    the line of the file or the environment if the value is from there.
    """
    values: dict[str, str] = {}
    places: dict[str, str] = {}
    if file is not None:
        for name, (value, line) in broker_conf.read_properties(file).items():
            values[name], places[name] = value, f"{file}, line {line}: "
    pinned = {}
    for variable, value in (environment if environment is not None else os.environ).items():
        # No property has an underscore, and a shell allows no dot in the name of a variable.
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        name = name.replace("_", ".") if name != variable else name
        # Names in capitals are others': Kubernetes sets DUEMQ_SERVICE_HOST for a service that is called duemq.
        if name and name != variable and not name.isupper():
            if name not in FIELDS and name not in UNUSED:
                raise ConfigError(
                    f"the environment has {_short(variable)}; there is no property {_short(name)}{_nearest(name)}"
                )
            pinned[name], places[name] = value, f"the environment, {variable}: "
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"--set {_short(override)}: write it as NAME=VALUE")
        pinned[name.strip()], places[name.strip()] = value, ""
    values.update(pinned)
    home = (environment if environment is not None else os.environ).get("ROCKETMQ_HOME")
    if home:
        values.setdefault("rocketmqHome", home)
    _check_kind(values)
    parsed, ignored = _parse(values, places)
    config = BrokerConfig(**{FIELDS[name].name: value for name, value in parsed.items()})
    return Loaded(_check(_fill(config)), ignored, Origin(file, frozenset(pinned)))


def change(config: BrokerConfig, values: Mapping[str, str]) -> tuple[BrokerConfig, list[str]]:
    """Return the settings after properties were changed, and the names of RocketMQ's properties that have no effect
    here.

    Raises ConfigError, with one sentence, for an unknown property, for one that only a start can change, and for
    anything that `load` would refuse.
    """
    parsed, ignored = _parse(values, {})
    changes = {}
    for name, value in parsed.items():
        field = FIELDS[name]
        if value == getattr(config, field.name) and name not in SECRET:  # a guess of a secret must not be confirmed
            continue
        if name not in LIVE:
            raise ConfigError(f"{name} cannot change while the broker runs: set it for the broker's next start")
        changes[field.name] = value
    return _check(dataclasses.replace(config, **changes)), ignored


def check_exposure(config: BrokerConfig) -> None:
    """Check that nobody can connect from another machine without an account, unless the settings allow that. Raises
    ConfigError."""
    if config.listens_on_loopback or config.has_access_control or config.insecure:
        return
    raise ConfigError(
        f"bindAddress={config.host} without access control: anyone who can reach the ports could read, change and "
        "delete everything. Switch on access control (aclEnable=true, with accounts in plain_acl.yml; docs/security.md "
        "has the three lines for it), or pass --insecure if the network keeps strangers out"
    )


def limits_of(name: str) -> tuple[int, int]:
    """Return the smallest and the largest allowed value of a numeric setting that has limits."""
    low, high = FIELDS[name].metadata[_RANGE]
    return low, high


def as_text(value: object) -> str:
    """Return a value in the form of properties text."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _check_kind(values: Mapping[str, str]) -> None:
    """Check that a file is not for a process that duemq does not have. Raises ConfigError."""
    given = {name: value.strip() for name, value in values.items()}
    for name, value in given.items():
        if name == "brokerConfigPaths":
            kind = "a container of several brokers. Start a `duemq serve` of its own for each of these files"
        elif name.startswith("controllerDLeger") or name == "enableControllerInNamesrv":
            kind = "a controller, which duemq does not have"
        elif name.startswith("dLeger") or (name == "enableDLegerCommitLog" and value == "true"):
            kind = "a DLedger group, whose commitlog has another layout. duemq has no replicas yet"
        elif name == "enableControllerMode" and value == "true":
            kind = "a broker whose role a controller decides. duemq has no replicas yet"
        elif (name == "brokerRole" and value == "SLAVE") or (name == "brokerId" and value not in ("", "0")):
            kind = "a slave. duemq has no replicas yet"
        else:
            continue
        raise ConfigError(f"{name}={_short(value)}: these settings are for {kind}")


def _parse(values: Mapping[str, str], places: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the properties that are used, and the names of RocketMQ's properties that are not. Raises
    ConfigError for a wrong value, and for a property that neither has. `places`: where properties are from, by their
    names; an error begins with it."""
    parsed: dict[str, Any] = {}
    unused = []
    for name, text in values.items():
        try:
            if name in FIELDS:
                parsed[name] = parse_value(name, text)
            elif name in UNUSED:
                unused.append(name)
            else:
                raise ConfigError(f"there is no property {_short(name)}{_nearest(name)}")
        except ConfigError as error:
            raise ConfigError(f"{places.get(name, '')}{error}") from None
    return parsed, sorted(unused)


def _short(text: str) -> str:
    """Return a text for repetition in an error: shortened, and quoted with escapes if it cannot be printed."""
    short = text if len(text) <= _MAX_REPEATED else f"{text[:_MAX_REPEATED]}..."
    return short if short.isprintable() else repr(short)


def _nearest(name: str) -> str:
    if len(name) > _MAX_REPEATED:
        return ""
    known = {other.lower(): other for other in (*FIELDS, *UNUSED)}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {known[near[0]]}?" if near else ""


def parse_value(name: str, text: str) -> Any:
    """Return the value of a property. Raises ConfigError, which repeats no secret."""
    # By hand: msgspec accepts 1e3 as an integer, which Java refuses, and its errors do not say what to write instead.
    field = FIELDS[name]
    text = text.strip()
    kind: type = type(field.default)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}={_short(text)}: write true or false")
        return text.lower() == "true"
    choices = field.metadata[_CHOICES]
    if choices and text not in choices:
        raise ConfigError(f"{name}={_short(text)}: write one of {', '.join(choices)}")
    if kind is str:
        if not broker_conf.is_unicode(text):
            raise ConfigError(f"{name}={_short(text)}: write it in UTF-8")
        return text
    try:
        if "_" in text or not text.isascii():  # Python's numbers may have both, Java's neither
            raise ValueError(text)
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{name}={_short(text)}: write a {'whole ' if kind is int else ''}number") from None
    limits = field.metadata[_RANGE]
    if limits and not limits[0] <= value <= limits[1]:
        raise ConfigError(f"{name}={_short(text)}: write a number from {limits[0]} to {limits[1]}")
    return value


def _fill(config: BrokerConfig) -> BrokerConfig:
    """Fill in values that depend on the machine."""
    changes: dict[str, Any] = {"store_root": os.path.abspath(os.path.expanduser(config.store_root))}
    changes["audit_path"] = (
        os.path.abspath(os.path.expanduser(config.audit_path))
        if config.audit_path
        else os.path.join(changes["store_root"], "audit", "audit.log")
    )
    if config.commitlog_directory:
        changes["commitlog_directory"] = os.path.abspath(os.path.expanduser(config.commitlog_directory))
    if not config.broker_name:
        changes["broker_name"] = socket.gethostname() or "broker"
    if not config.advertised_host:
        everywhere = config.host in ("0.0.0.0", "::", "")
        changes["advertised_host"] = _own_address() if everywhere else config.host
    return dataclasses.replace(config, **changes)


def _own_address() -> str:
    """Return the address of the interface that the default route uses; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _check(config: BrokerConfig) -> BrokerConfig:
    """Check each setting's support and the relations between settings. Raises ConfigError."""
    _check_auth(config)
    levels = len(config.delay_levels.split())
    if levels > MAX_DELAY_LEVELS:
        raise ConfigError(
            f"messageDelayLevel has {levels} levels: at most {MAX_DELAY_LEVELS} are possible. A message with a timer "
            "may have any delay"
        )
    try:
        DelayLevels(config.delay_levels)
    except ValueError as error:
        raise ConfigError(f"messageDelayLevel={_short(config.delay_levels)}: {_short(str(error))}") from None
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in config.advertised_host else socket.AF_INET, config.advertised_host)
    except OSError:
        # Without brokerIP1, clients get the address that the broker listens on.
        name = "bindAddress" if config.advertised_host == config.host else "brokerIP1"
        raise ConfigError(f"{name}={config.advertised_host}: write an IP address") from None
    if config.max_message_size + 65536 > config.commitlog_segment_size:
        raise ConfigError(
            f"maxMessageSize={config.max_message_size} does not fit into commitlog files of "
            f"mappedFileSizeCommitLog={config.commitlog_segment_size} bytes"
        )
    if config.timer_precision_ms != _TIMER_PRECISION_MS:
        raise ConfigError(
            f"timerPrecisionMs={config.timer_precision_ms}: only {_TIMER_PRECISION_MS} is possible, since the slots of "
            "a store would be misread with any other"
        )
    if config.nameserver_addresses and not parse_addresses(config.nameserver_addresses):
        raise ConfigError(f"namesrvAddr={_short(config.nameserver_addresses)}: write host:port, or leave it empty")
    for name, text in (("brokerName", config.broker_name), ("brokerClusterName", config.cluster_name)):
        if not text.isprintable():
            raise ConfigError(f"{name}={_short(text)}: write printable characters only")
    hours = config.delete_when.split(";")
    if len(hours) > 24 or not all(len(hour) == 2 and hour.isdecimal() and int(hour) < 24 for hour in hours):
        raise ConfigError(f"deleteWhen={_short(config.delete_when)}: write hours of two digits, such as 04 or 04;16")
    if config.nameserver_port in (config.listen_port, config.vip_port) and not config.nameserver_addresses:
        raise ConfigError(f"nameserverPort={config.nameserver_port} is also a port of the broker")
    return config


def _check_auth(config: BrokerConfig) -> None:
    """Check the settings of ACL 2.0. Raises ConfigError."""
    for name, classes in _CLASSES.items():
        value = getattr(config, FIELDS[name].name)
        if value and value not in {f"{_AUTH}.{each}" for each in classes}:
            known = " or ".join(f"{_AUTH}.{each}" for each in classes)
            raise ConfigError(f"{name}={_short(value)}: duemq has no such class; write {known}")
    for name in ("authenticationWhitelist", "authorizationWhitelist"):
        codes_of(name, getattr(config, FIELDS[name].name))
    if config.authentication and config.acl:
        raise ConfigError(
            "aclEnable=true and authenticationEnabled=true: use one access control, that of 4.9 or that of 5.3; "
            "migrateAuthFromV1Enabled=true creates users from the accounts in plain_acl.yml"
        )
    if config.authorization and not config.authentication:
        raise ConfigError(
            "authorizationEnabled=true without authenticationEnabled=true: anyone could use the name of another user"
        )
    for name, keys in (
        ("initAuthenticationUser", ("username", "password")),
        ("innerClientAuthenticationCredentials", ("accessKey", "secretKey")),
    ):
        credentials_of(name, getattr(config, FIELDS[name].name), keys)


def codes_of(name: str, text: str) -> frozenset[int]:
    """Return the request codes in a white list; names of gRPC requests, which have dots, are left out. Raises
    ConfigError."""
    codes = set()
    for part in text.split(","):
        code = part.strip()
        if not code or "." in code:
            continue
        if not (code.isascii() and code.isdecimal()):
            raise ConfigError(f"{name}={_short(text)}: write request codes, such as 105,106")
        codes.add(int(code))
    return frozenset(codes)


def free_codes(config: BrokerConfig) -> frozenset[int]:
    """Return the request codes that need no user with ACL 2.0. Raises ConfigError."""
    free = codes_of("authenticationWhitelist", config.authentication_whitelist)
    if config.authorization:  # a request that is not authenticated has no user whose policies could be checked
        free &= codes_of("authorizationWhitelist", config.authorization_whitelist)
    return free


def credentials_of(name: str, text: str, keys: tuple[str, str]) -> tuple[str, str] | None:
    """Return the name and the secret in a setting's JSON text; None if it is empty. Raises ConfigError, which never
    repeats the text."""
    if not text:
        return None
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        values = tuple(found.get(key) for key in keys)
    except (msgspec.DecodeError, RecursionError):
        values = (None, None)
    first, second = values
    if not (isinstance(first, str) and isinstance(second, str) and first.strip() and second.strip()):
        raise ConfigError(f'{name}: write {{"{keys[0]}":"...","{keys[1]}":"..."}}')
    return first, second


def parse_addresses(text: str, default_port: int = 9876) -> list[tuple[str, int]]:
    """Return the hosts and ports of `host:port;host:port`. Raises ConfigError."""
    addresses = []
    for part in text.replace(",", ";").split(";"):
        if not part.strip():
            continue
        host, separator, port = part.strip().rpartition(":")
        if not separator:
            host, port = port, str(default_port)
        if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
            raise ConfigError(f"namesrvAddr={text}: {part.strip()!r} is not host:port")
        addresses.append((host.strip("[]"), int(port)))
    return addresses
