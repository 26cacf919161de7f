"""The commands of mqadmin, and what duemq's broker makes of each: the table from which docs/compatibility.md is made,
and by which `tests.interop.admin.test_mqadmin_all` runs them.

`{broker}`, `{topic}` and so on in the arguments are replaced by those of the run. A command with `versions` exists only
in these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BOTH: Final = ("4.9.7", "5.3.3")
OLD: Final = ("4.9.7",)
NEW: Final = ("5.3.3",)


@dataclass(frozen=True)
class Command:
    """A command as it is run.

    `differs`: why its output is not that of Apache's broker; None if it is the same, but for times, sizes, ids and
    addresses. `refused`: a part of the output that tells why it is refused; `why`: the reason, where that part is not
    one. `is_planned`: whether a refused command is to come. `test`: another test that runs the command, which is not
    run here then.
    """

    line: str
    versions: tuple[str, ...] = BOTH
    differs: str | None = None
    refused: str | None = None
    why: str | None = None
    is_planned: bool = False
    test: str | None = None

    @property
    def name(self) -> str:
        return self.line.split()[0]


_RECORDS: Final = "records have the properties of 5.3 with both versions"
_NO_KEYS: Final = "query message by key finished, but no message"
_KEYS: Final = "duemq has no index of keys yet"
_NO_SETTINGS: Final = "the embedded name server has no settings of its own"
_OTHER_SETTINGS: Final = "duemq has settings of its own, and not all of RocketMQ's"
_ACL: Final = "tests/interop/security/test_acl.py"
_AUTH: Final = "tests/interop/security/test_auth.py"
_FOREVER: Final = "runs until it is stopped"

COMMANDS: Final = (
    # Topics and groups
    Command("updateTopic -b {broker} -t {topic}more -r 2 -w 2 -p 6"),
    Command("updateTopicList -b {broker} -f {topics_file}", NEW),
    Command("updateTopicPerm -b {broker} -t {topic} -p 6"),
    Command("updateOrderConf -t {topic} -m put -v broker-a:2"),
    Command("updateOrderConf -t {topic} -m get"),
    Command("updateOrderConf -t {topic} -m delete"),
    Command("allocateMQ -t {topic} -i 10.0.0.1,10.0.0.2"),
    Command("topicRoute -t {topic}"),
    Command("topicStatus -t {topic}"),
    Command("topicClusterList -t {topic}"),
    Command("topicList", differs="the brokers' own topics are others"),
    Command("topicList -c", differs="the brokers' own topics are others"),
    Command("updateSubGroup -b {broker} -g {group}more"),
    Command("updateSubGroupList -b {broker} -f {groups_file}", NEW),
    Command(
        "setConsumeMode -b {broker} -t {topic} -g {group} -m POP -q 0",
        NEW,
        refused="duemq has no POP consumption yet",
        is_planned=True,
    ),
    Command("updateStaticTopic -t Static{topic} -qn 2 -b broker-a", NEW, refused="duemq has no static topics"),
    Command("remappingStaticTopic", NEW, refused="duemq has no static topics", test="none: it needs a static topic"),
    # The broker and the cluster
    Command("clusterList", OLD),
    Command("clusterList", NEW, differs="duemq has no pool of threads for POP's acknowledgements to show"),
    Command("clusterList -m"),
    Command("brokerStatus -b {broker}", differs="duemq has figures of its own, and those of both versions"),
    Command("brokerConsumeStats -b {broker}"),
    Command("getBrokerConfig -b {broker}", differs=_OTHER_SETTINGS),
    Command("updateBrokerConfig -b {broker} -k deleteWhen -v 04"),
    Command("getConsumerConfig -g {group}"),
    Command("sendMsgStatus -b broker-a -c 2 -s 100"),
    Command("checkMsgSendRT -t {topic} -a 2 -s 10"),
    Command("clusterRT", test=_FOREVER),
    Command("startMonitoring", test=_FOREVER),
    Command("statsAll -t {topic}", test="tests/interop/admin/test_mqadmin.py"),
    Command("cleanExpiredCQ -b {broker}"),
    Command("deleteExpiredCommitLog -b {broker}"),
    Command("cleanUnusedTopic -b {broker}"),
    Command("exportConfigs -c DefaultCluster -f {folder}", test="tests/interop/admin/test_mqadmin.py"),
    Command("exportMetrics -c DefaultCluster -f {folder}", test="tests/interop/admin/test_mqadmin.py"),
    Command("exportMetadata -c DefaultCluster -t -f {folder}"),
    Command("exportMetadata -b {broker} -g -f {folder}"),
    Command("haStatus -b {broker}", NEW, refused="duemq has no replicas yet", is_planned=True),
    Command("resetMasterFlushOffset -b {broker} -o 0", NEW, refused="duemq has no replicas yet", is_planned=True),
    Command("getBrokerEpoch", NEW, refused="duemq has no replicas yet", is_planned=True, test="needs a controller"),
    Command("getSyncStateSet", NEW, refused="duemq has no controller", test="needs a controller"),
    Command("getControllerMetaData", NEW, refused="duemq has no controller", test="needs a controller"),
    Command("getControllerConfig", NEW, refused="duemq has no controller", test="needs a controller"),
    Command("updateControllerConfig", NEW, refused="duemq has no controller", test="needs a controller"),
    Command("electMaster", NEW, refused="duemq has no controller", test="needs a controller"),
    Command("cleanBrokerMetadata", NEW, refused="duemq has no controller", test="needs a controller"),
    Command("addBroker", NEW, refused="duemq has no containers of brokers", test="needs a container"),
    Command("removeBroker", NEW, refused="duemq has no containers of brokers", test="needs a container"),
    Command("getColdDataFlowCtrInfo -b {broker}", NEW, refused="duemq has no limits on cold reads by group"),
    Command(
        "updateColdDataFlowCtrGroupConfig -b {broker} -g {group} -v 10",
        NEW,
        refused="duemq has no limits on cold reads by group",
    ),
    Command(
        "removeColdDataFlowCtrGroupConfig -b {broker} -g {group}",
        NEW,
        refused="duemq has no limits on cold reads by group",
    ),
    Command("setCommitLogReadAheadMode -b {broker} -m 0", NEW, refused="duemq has no limits on cold reads by group"),
    Command("checkRocksdbCqWriteProgress -c DefaultCluster", NEW, refused="duemq has consume queues in files"),
    Command("exportPopRecord -b {broker} -d true", NEW, refused="duemq has no POP consumption yet", is_planned=True),
    Command("exportMetadataInRocksDB", NEW, test="offline, on Apache's files"),
    Command("rocksDBConfigToJson", NEW, test="offline, on Apache's files"),
    Command("dumpCompactionLog", NEW, test="offline, on Apache's files"),
    # Messages
    Command("queryMsgById -i {offset_id} {topic_if_new}", differs=_RECORDS),
    Command("queryMsgByOffset -t {topic} -b broker-a -i {queue} -o 0", differs=_RECORDS),
    Command("queryMsgByKey -t {topic} -k key1", refused=_NO_KEYS, why=_KEYS, is_planned=True),
    Command("queryMsgByUniqueKey -t {topic} -i {id}", refused=_NO_KEYS, why=_KEYS, is_planned=True),
    Command(
        "queryMsgTraceById -i {id}",
        refused="QueryMsgTraceByIdSubCommandcommand failed",
        why=_KEYS,
        is_planned=True,
    ),
    Command("printMsg -t {topic}", OLD, differs=_RECORDS),
    Command("printMsg -t {topic}", NEW),
    Command("printMsgByQueue -t {topic} -a broker-a -i 0 -p true", OLD, differs=_RECORDS),
    Command("printMsgByQueue -t {topic} -a broker-a -i 0 -p true", NEW),
    Command("queryCq -t {topic} -q 0 -i 0 -b {broker}"),
    Command("sendMessage -t {topic} -p hello"),
    Command("consumeMessage -t {topic} -b broker-a -i 0 -o 0 -c 1 -g reader", OLD, differs=_RECORDS),
    Command("consumeMessage -t {topic} -b broker-a -i 0 -o 0 -c 1 -g reader", NEW),
    # Clients and their progress
    Command("producerConnection -g nobody -t {topic}"),
    Command("producer -b {broker}"),
    Command("consumerConnection -g {group}"),
    Command("consumerStatus -g {group}"),
    Command("consumerProgress -g {group}", test="tests/interop/admin/test_mqadmin.py"),
    Command("cloneGroupOffset -s {group} -d {group}more -t {topic} -o false"),
    Command("resetOffsetByTime -g {group} -t {topic} -s 0", OLD),
    Command(
        "resetOffsetByTime -g {group} -t {topic} -s 0",
        NEW,
        differs="the tool resets an offline group's offsets itself, as with a broker of 4.9",
    ),
    Command("skipAccumulatedMessage -g {group} -t {topic}", OLD),
    Command(
        "skipAccumulatedMessage -g {group} -t {topic}",
        NEW,
        differs="the tool resets an offline group's offsets itself, as with a broker of 4.9",
    ),
    # The name server
    Command("updateKvConfig -s space -k key -v value"),
    Command("deleteKvConfig -s space -k key"),
    Command("wipeWritePerm -b broker-a"),
    Command("addWritePerm -b broker-a"),
    Command("getNamesrvConfig", differs=_OTHER_SETTINGS),
    Command("updateNamesrvConfig -k clusterTest -v false", refused=_NO_SETTINGS),
    # Access control
    *(
        Command(name, OLD, test=_ACL)
        for name in (
            "updateAclConfig",
            "deleteAclConfig",
            "clusterAclConfigVersion",
            "updateGlobalWhiteAddr",
            "getAclConfig",
        )
    ),
    *(
        Command(name, NEW, test=_AUTH)
        for name in (
            "createUser",
            "updateUser",
            "deleteUser",
            "getUser",
            "listUser",
            "copyUser",
            "createAcl",
            "updateAcl",
            "deleteAcl",
            "getAcl",
            "listAcl",
            "copyAcl",
        )
    ),
    # At the end, what the others need
    Command("deleteTopic -c DefaultCluster -t {topic}"),
    Command("deleteSubGroup -b {broker} -g {group}"),
)
