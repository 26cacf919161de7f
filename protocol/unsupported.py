"""RocketMQ's request codes for which duemq has no handler, and the reasons, which the answer to such a request gives.

Names and numbers are those of RequestCode in RocketMQ 4.9.7 and 5.3.3.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Unsupported(NamedTuple):
    """A request code without a handler. `reason` completes the sentence "duemq has ..."."""

    name: str
    reason: str
    is_planned: bool
    """Whether a handler is planned."""


_KEYS = ("no index of keys yet", True)
_TRANSACTIONS = ("no transactions yet", True)
_REPLIES = ("no request-reply yet", True)
_POP = ("no POP consumption yet", True)
_REPLICAS = ("no replicas yet", True)
_CONTROLLER = ("no controller", False)
_STATIC = ("no static topics", False)
_COLD = ("no limits on cold reads by group: reads from the disk run in threads of their own", False)
_ROCKSDB = ("consume queues in files, not in RocksDB", False)
_FILTERS = ("no filter servers, which RocketMQ removed in 4.3", False)
_UNITS = ("no units of several regions", False)
_OLD = ("no handler for it, as no client or tool of RocketMQ 4.9 or 5.3 sends it", False)
_TO_CLIENT = ("no need of it: brokers send it to clients", False)


def _table(rows: dict[tuple[str, bool], dict[int, str]]) -> dict[int, Unsupported]:
    return {code: Unsupported(name, *why) for why, names in rows.items() for code, name in names.items()}


UNSUPPORTED: Final = _table(
    {
        _KEYS: {12: "QUERY_MESSAGE"},
        _TRANSACTIONS: {37: "END_TRANSACTION", 323: "RESUME_CHECK_HALF_MESSAGE"},
        _REPLIES: {324: "SEND_REPLY_MESSAGE", 325: "SEND_REPLY_MESSAGE_V2"},
        _POP: {
            200050: "POP_MESSAGE",
            200051: "ACK_MESSAGE",
            200052: "PEEK_MESSAGE",
            200053: "CHANGE_MESSAGE_INVISIBLETIME",
            200054: "NOTIFICATION",
            200055: "POLLING_INFO",
            200056: "POP_ROLLBACK",
            200151: "BATCH_ACK_MESSAGE",
            400: "QUERY_ASSIGNMENT",
            401: "SET_MESSAGE_REQUEST_MODE",
            402: "GET_ALL_MESSAGE_REQUEST_MODE",
        },
        _REPLICAS: {
            901: "GET_BROKER_MEMBER_GROUP",
            902: "ADD_BROKER",
            903: "REMOVE_BROKER",
            904: "BROKER_HEARTBEAT",
            905: "NOTIFY_MIN_BROKER_ID_CHANGE",
            906: "EXCHANGE_BROKER_HA_INFO",
            907: "GET_BROKER_HA_STATUS",
            908: "RESET_MASTER_FLUSH_OFFSET",
            1007: "GET_BROKER_EPOCH_CACHE",
            1008: "NOTIFY_BROKER_ROLE_CHANGED",
        },
        _CONTROLLER: {
            1001: "CONTROLLER_ALTER_SYNC_STATE_SET",
            1002: "CONTROLLER_ELECT_MASTER",
            1003: "CONTROLLER_REGISTER_BROKER",
            1004: "CONTROLLER_GET_REPLICA_INFO",
            1005: "CONTROLLER_GET_METADATA_INFO",
            1006: "CONTROLLER_GET_SYNC_STATE_DATA",
            1009: "UPDATE_CONTROLLER_CONFIG",
            1010: "GET_CONTROLLER_CONFIG",
            1011: "CLEAN_BROKER_DATA",
            1012: "CONTROLLER_GET_NEXT_BROKER_ID",
            1013: "CONTROLLER_APPLY_BROKER_ID",
        },
        _STATIC: {513: "UPDATE_AND_CREATE_STATIC_TOPIC"},
        _COLD: {
            2001: "UPDATE_COLD_DATA_FLOW_CTR_CONFIG",
            2002: "REMOVE_COLD_DATA_FLOW_CTR_CONFIG",
            2003: "GET_COLD_DATA_FLOW_CTR_INFO",
            2004: "SET_COMMITLOG_READ_MODE",
        },
        _ROCKSDB: {354: "CHECK_ROCKSDB_CQ_WRITE_PROGRESS", 355: "EXPORT_ROCKSDB_CONFIG_TO_JSON"},
        _FILTERS: {301: "REGISTER_FILTER_SERVER", 302: "REGISTER_MESSAGE_FILTER_CLASS"},
        _UNITS: {
            311: "GET_UNIT_TOPIC_LIST",
            312: "GET_HAS_UNIT_SUB_TOPIC_LIST",
            313: "GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST",
        },
        _OLD: {
            13: "QUERY_BROKER_OFFSET",
            22: "GET_TOPIC_CONFIG_LIST",
            23: "GET_TOPIC_NAME_LIST",
            27: "TRIGGER_DELETE_FILES",
            47: "GET_CLIENT_CONFIG",
            209: "SUSPEND_CONSUMER",
            210: "RESUME_CONSUMER",
            211: "RESET_CONSUMER_OFFSET_IN_CONSUMER",
            212: "RESET_CONSUMER_OFFSET_IN_BROKER",
            213: "ADJUST_CONSUMER_THREAD_POOL",
            214: "WHO_CONSUME_THE_MESSAGE",
            217: "REGISTER_TOPIC_IN_NAMESRV",
            223: "INVOKE_BROKER_TO_GET_CONSUMER_STATUS",
            353: "UPDATE_AND_GET_GROUP_FORBIDDEN",
        },
        _TO_CLIENT: {
            39: "CHECK_TRANSACTION_STATE",
            40: "NOTIFY_CONSUMER_IDS_CHANGED",
            220: "RESET_CONSUMER_CLIENT_OFFSET",
            221: "GET_CONSUMER_STATUS_FROM_CLIENT",
            326: "PUSH_REPLY_MESSAGE_TO_CLIENT",
        },
    }
)
"""By request code."""
