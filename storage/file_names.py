"""The names of a store's files and directories. Product code has them from here, never as literals of its own.

    <store>/
      commitlog/0000... ...                            records; another directory with storePathCommitLog
      consumequeue/<topic>/<queue id>/0000... ...      units of 20 bytes
      consumequeue_ext/<topic>/<queue id>/0000... ...  their extensions, with enableConsumeQueueExt
      index/<time> ...                                 hash tables from keys to records
      timerlog/0000... ...  timerwheel                 messages that wait in the timer wheel
      checkpoint                                       up to where the other files are on the disk
      abort  lock                                      whether a broker has the store open
      config/                                          tables as JSON, each with its backup <name>.bak:
        topics.json  subscriptionGroup.json  consumerOffset.json  delayOffset.json  kvConfig.json
        timercheck  timermetrics                       progress of the timers; waiting messages by topic
        users/  acls/                                  ACL 2.0: databases of RocksDB

RocketMQ 5 and duemq write all of these, with one exception: duemq writes index/ only offline (`duemq store repair`,
`duemq spark compact`, `duemq spark restore`). RocketMQ 4.9 has neither timers nor ACL 2.0.

    written by duemq only       queuecheck  cut/  repair.partial/  compacted.json
    written by RocketMQ only    abort.bak  epochFileCheckpoint  consumequeue_rocksdb/  batchconsumequeue/
                                config/topicQueueMapping.json  config/lmqConsumerOffset.json

Each constant is a path below the store, with "/" between directory and name. The modules that read and write the files
own their formats. This module imports nothing of duemq's.
"""

from __future__ import annotations

from typing import Final

COMMITLOG: Final = "commitlog"
CONSUME_QUEUES: Final = "consumequeue"
QUEUE_EXTENSIONS: Final = "consumequeue_ext"
INDEX: Final = "index"
TIMER_LOG: Final = "timerlog"
TIMER_WHEEL: Final = "timerwheel"
CHECKPOINT: Final = "checkpoint"
ABORT: Final = "abort"
LOCK: Final = "lock"

CONFIG: Final = "config"
TOPICS: Final = f"{CONFIG}/topics.json"
SUBSCRIPTION_GROUPS: Final = f"{CONFIG}/subscriptionGroup.json"
CONSUMER_OFFSETS: Final = f"{CONFIG}/consumerOffset.json"
DELAY_OFFSETS: Final = f"{CONFIG}/delayOffset.json"
KV_CONFIG: Final = f"{CONFIG}/kvConfig.json"
TIMER_CHECK: Final = f"{CONFIG}/timercheck"
TIMER_METRICS: Final = f"{CONFIG}/timermetrics"
USERS: Final = f"{CONFIG}/users"
ACLS: Final = f"{CONFIG}/acls"
BACKUP: Final = ".bak"
"""The suffix of a backup."""

QUEUE_CHECK: Final = "queuecheck"
CUT: Final = "cut"
"""For bytes that a start cut off the commitlog although they include whole records; beside the commitlog's directory,
so not below the store with storePathCommitLog."""
REPAIR: Final = "repair.partial"
"""In which `duemq store repair` works. Replaced files are kept in its old/ until all new ones are in place."""
COMPACTED: Final = "compacted.json"
"""In a store made by a compaction: {"end": where the new commitlog ended}."""

EPOCHS: Final = "epochFileCheckpoint"
"""The terms of the masters of a replicated broker."""
QUEUE_MAPPINGS: Final = f"{CONFIG}/topicQueueMapping.json"
LMQ_OFFSETS: Final = f"{CONFIG}/lmqConsumerOffset.json"
NOT_SUPPORTED: Final = ("consumequeue_rocksdb", "batchconsumequeue")
"""Directories of consume queues of kinds that duemq does not read."""
