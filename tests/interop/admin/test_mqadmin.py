"""The output of both versions of mqadmin about the broker under test.

All commands run before the first test looks at the output, those of both versions at the same time.
"""

import asyncio
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from duemq import Producer
from duemq._net.connection import connect
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests.headers import GetRouteInfo
from tests.interop.environment import LEVEL_MS, ClientPool, MqAdmins, SharedBroker
from tests.interop.support import eventually, not_on, numbered
from tests.peers.brokers.broker import BROKER, CLUSTER, Broker
from tests.peers.clients import unique
from tests.peers.messages import Outgoing
from tests.peers.mqadmin.tool import MqAdmin, rows

VERSIONS = ("4.9.7", "5.3.3")
QUEUES = 6
COUNT = 24
TIMER = "rmq_sys_wheel_timer"
_NEEDS_351 = "mqadmin 5.3.3 asks the broker for the topic's configuration (code 351), which came with 5.0"


@dataclass
class Outputs:
    """The output of one version of mqadmin by the name of the command, in the order of a topic's life."""

    tool: MqAdmin
    broker: Broker
    topic: str = field(default_factory=lambda: unique("made_by_mqadmin"))
    group: str = field(default_factory=lambda: unique("group"))
    other_group: str = field(default_factory=lambda: unique("other"))
    producers: str = field(default_factory=lambda: unique("producers"))
    of: dict[str, str] = field(default_factory=dict)
    exported: str = ""
    """The file that exportConfigs wrote."""
    metrics: str = ""
    """The file that exportMetrics wrote."""

    @property
    def version(self) -> str:
        return self.tool.version

    async def run(self, name: str, *arguments: str) -> None:
        """Run a command and keep its output under a name."""
        self.of[name] = await self.tool.run(*arguments, nameserver=self.broker.nameserver)

    def text(self, name: str) -> str:
        """Return the output of a command; fail if it is a stack trace."""
        text = self.of[name]
        assert "SubCommandException" not in text, text
        return text

    def rows(self, name: str) -> list[list[str]]:
        """Return the output of a command as a table, without its head."""
        return rows(self.text(name))

    async def run_all(self, clients: ClientPool) -> None:
        """Make a topic and a group, use them, inspect them in every way, delete them, and inspect again."""
        topic, group, address = self.topic, self.group, self.broker.address
        queues = ["-r", str(QUEUES), "-w", str(QUEUES)]
        with tempfile.TemporaryDirectory() as folder:
            await self.run("exportConfigs", "exportConfigs", "-c", CLUSTER, "-f", folder)
            path = Path(folder, "configs.json")
            self.exported = path.read_text() if path.exists() else ""
        await asyncio.gather(
            self.run("updateTopic", "updateTopic", "-b", address, "-t", topic, *queues, "-p", "6"),
            self.run("updateSubGroup", "updateSubGroup", "-b", address, "-g", self.other_group, "-r", "3", "-q", "2"),
        )
        java = await clients.java("4.9.7")
        async with (
            await java.producer(self.broker.nameserver, self.producers) as producer,
            await java.consumer(self.broker.nameserver, group, topic) as consumer,
        ):
            await producer.send(topic, numbered("message", COUNT))
            if self.broker.kind != "apache-4.9.7":
                at = str(time.time_ns() // 1_000_000 + 86_400_000)
                await producer.send(topic, [Outgoing(b"tomorrow", properties={"TIMER_DELIVER_MS": at})])
            await consumer.receive(COUNT)
            # The client tells the broker of its producers with its next heartbeat.
            await eventually(partial(java.admin(self.broker.nameserver).producer_connection, self.producers, topic))
            if self.version == "5.3.3":  # 4.9.7 does not know the option
                await self.run("topicStatus of the timers", "topicStatus", "-t", TIMER, "-c", CLUSTER)
            await asyncio.gather(
                self.run("topicList", "topicList"),
                self.run("topicRoute", "topicRoute", "-t", topic),
                self.run("topicStatus", "topicStatus", "-t", topic),
                self.run("clusterList", "clusterList"),
                self.run("brokerStatus", "brokerStatus", "-b", address),
                self.run("consumerConnection", "consumerConnection", "-g", group),
                self.run("producerConnection", "producerConnection", "-g", self.producers, "-t", topic),
                self.run("getBrokerConfig", "getBrokerConfig", "-b", address),
                self.run("updateBrokerConfig", "updateBrokerConfig", "-b", address, "-k", "deleteWhen", "-v", "04"),
                self.run("wrong config", "updateBrokerConfig", "-b", address, "-k", "deleteWhan", "-v", "04"),
            )
        await asyncio.gather(
            self.run("consumerProgress", "consumerProgress", "-g", group),
            self.run("consumerProgress of all", "consumerProgress"),
            self.run_stats(),
        )
        await self.run("sendMessage", "sendMessage", "-t", topic, "-p", "from mqadmin")
        await asyncio.gather(
            self.run("deleteTopic", "deleteTopic", "-c", CLUSTER, "-t", topic),
            self.run("deleteSubGroup", "deleteSubGroup", "-b", address, "-g", self.other_group),
        )
        await asyncio.gather(
            self.run("topicRoute after", "topicRoute", "-t", topic), self.run("topicList after", "topicList")
        )

    async def run_stats(self) -> None:
        """Run the commands that show counts; repeatedly on Apache's brokers, which take a sample every 10 s."""
        for _ in range(4):
            await self.run("statsAll", "statsAll", "-t", self.topic)
            if self.broker.kind == "duemq" or self.rows("statsAll")[0][5:] == [str(COUNT)] * 2:
                break
        with tempfile.TemporaryDirectory() as folder:
            await self.run("exportMetrics", "exportMetrics", "-c", CLUSTER, "-f", folder)
            path = Path(folder, "metrics.json")
            self.metrics = path.read_text() if path.exists() else ""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outputs_by_version(
    shared_broker: SharedBroker, clients: ClientPool, mqadmins: MqAdmins
) -> AsyncIterator[dict[str, Outputs]]:
    broker = await shared_broker.running()
    made = {version: Outputs(mqadmins[version], broker) for version in VERSIONS}
    await asyncio.gather(*(outputs.run_all(clients) for outputs in made.values()))
    yield made


@pytest.fixture(params=VERSIONS)
def outputs(outputs_by_version: dict[str, Outputs], request: pytest.FixtureRequest) -> Outputs:
    return outputs_by_version[request.param]


async def test_update_topic(outputs: Outputs) -> None:
    text = outputs.text("updateTopic")
    assert f"create topic to {outputs.broker.address} success." in text
    assert f"topicName={outputs.topic}, readQueueNums={QUEUES}, writeQueueNums={QUEUES}, perm=RW-" in text


async def test_update_sub_group(outputs: Outputs) -> None:
    text = outputs.text("updateSubGroup")
    assert f"create subscription group to {outputs.broker.address} success." in text
    assert "retryQueueNums=2, retryMaxTimes=3" in text


async def test_topic_list(outputs: Outputs) -> None:
    topics = outputs.text("topicList").split()
    expected = {outputs.topic, f"%RETRY%{outputs.group}", "TBW102", "SELF_TEST_TOPIC", "SCHEDULE_TOPIC_XXXX"}
    assert expected | {CLUSTER, BROKER} <= set(topics)
    assert len(topics) == len(set(topics))


async def test_topic_route(outputs: Outputs) -> None:
    words = "".join(outputs.text("topicRoute").split())
    assert f'"brokerAddrs":{{0:"{outputs.broker.address}"}},"brokerName":"{BROKER}","cluster":"{CLUSTER}"' in words
    assert f'"perm":6,"readQueueNums":{QUEUES},"topicSysFlag":0,"writeQueueNums":{QUEUES}' in words


async def test_topic_status(outputs: Outputs) -> None:
    if outputs.version == "5.3.3":
        not_on(outputs.broker, "apache-4.9.7", _NEEDS_351)
    rows = [row for row in outputs.rows("topicStatus") if row[0] == BROKER]  # 5.3.3 adds a line with the rate
    assert [(row[0], int(row[1]), int(row[2])) for row in rows] == [(BROKER, queue, 0) for queue in range(QUEUES)]
    assert sum(int(row[3]) for row in rows) == COUNT


async def test_cluster_list(outputs: Outputs) -> None:
    if outputs.version == "4.9.7":
        not_on(outputs.broker, "apache-5.3.3", "mqadmin 4.9.7 wants getTransferedTps, which 5.x spells correctly")
    (row,) = outputs.rows("clusterList")
    assert row[:4] == [CLUSTER, BROKER, "0", outputs.broker.address]
    assert row[4].startswith("V")


async def test_broker_status(outputs: Outputs) -> None:
    lines = [line.partition(":") for line in outputs.text("brokerStatus").splitlines() if ":" in line]
    table = {name.strip(): value.strip() for name, _, value in lines}
    assert int(table["msgPutTotalTodayNow"]) >= COUNT
    assert int(table["commitLogMaxOffset"]) > 0
    assert {"brokerVersionDesc", "putTps", "getTotalTps", "runtime", "bootTimestamp"} <= set(table)


async def test_broker_status_shows_the_levels(outputs: Outputs) -> None:
    for kind in ("apache-4.9.7", "apache-5.3.3"):
        not_on(outputs.broker, kind, "it shows the offsets of a level that has delivered something, and no more")
    text = outputs.text("brokerStatus")
    for level in range(1, len(LEVEL_MS) + 1):
        assert re.search(rf"^scheduleMessageOffset_{level} *: \d+,\d+$", text, re.MULTILINE)
        (line,) = re.findall(rf"^scheduleLevel_{level} *: (.*)$", text, re.MULTILINE)
        assert [word.partition("=")[0] for word in line.split()] == [
            "pending",
            "nextDue",
            "lateMillis",
            "lastLateMillis",
            "deliveredTps",
            "delivered",
            "skipped",
        ]


async def test_timers_are_shown(outputs: Outputs) -> None:
    """5.3.3's mqadmin shows the timers of the broker in the output of other commands: it has no command for timers
    alone."""
    not_on(outputs.broker, "apache-4.9.7", "timers came with 5.0")
    lines = [line.partition(":") for line in outputs.text("brokerStatus").splitlines() if ":" in line]
    table = {name.strip(): value.strip() for name, _, value in lines}
    assert int(table["timerReadBehind"]) >= 0
    assert int(table["timerOffsetBehind"]) >= 0
    assert int(table["timerCongestNum"]) >= 0
    assert float(table["timerEnqueueTps"]) >= 0
    assert float(table["timerDequeueTps"]) >= 0
    if outputs.version == "5.3.3":
        assert re.search(r"\b\d+-\d+\(\d+\.\dw, \d+\.\d, \d+\.\d\)", outputs.text("clusterList"))
        (row,) = outputs.rows("topicStatus of the timers")[:1]
        assert row[:3] == [BROKER, "0", "0"]
        assert int(row[3]) >= 1


async def test_consumer_progress(outputs: Outputs) -> None:
    if outputs.version == "5.3.3":
        not_on(outputs.broker, "apache-4.9.7", _NEEDS_351)
    rows = [row for row in outputs.rows("consumerProgress") if row[0] == outputs.topic]
    assert [row[1] for row in rows] == [BROKER] * QUEUES
    assert sorted(int(row[2]) for row in rows) == list(range(QUEUES))
    for row in rows:
        at_broker, of_consumer, behind = row[3:6]
        assert (at_broker, behind) == (of_consumer, "0")
    assert sum(int(row[3]) for row in rows) == COUNT
    if outputs.version == "5.3.3":
        assert {row[6] for row in rows} == {"0"}, "what was pulled and not consumed"
    assert "Diff Total: 0" in outputs.text("consumerProgress")


async def test_consumer_progress_of_all_groups(outputs: Outputs) -> None:
    rows = [row for row in outputs.rows("consumerProgress of all") if row[0] == outputs.group]
    assert [row[:3] for row in rows] == [[outputs.group, "0", "OFFLINE"]]


async def test_consumer_connection(outputs: Outputs) -> None:
    text = outputs.text("consumerConnection")
    assert "JAVA" in text
    assert "V4_9_7" in text
    assert f"{outputs.topic} " in text
    assert (
        "ConsumeType: CONSUME_PASSIVELY\nMessageModel: CLUSTERING\nConsumeFromWhere: CONSUME_FROM_FIRST_OFFSET" in text
    )


async def test_producer_connection(outputs: Outputs) -> None:
    (row,) = outputs.rows("producerConnection")
    assert row[0] == "0001"
    assert row[-2:] == ["JAVA", "V4_9_7"]


async def test_get_broker_config(outputs: Outputs) -> None:
    lines = [line.partition("=") for line in outputs.text("getBrokerConfig").splitlines()]
    table = {name.strip(): value.strip() for name, _, value in lines}
    assert table["brokerName"] == BROKER
    assert table["listenPort"] == str(outputs.broker.port)


async def test_export_configs(outputs: Outputs) -> None:
    not_on(outputs.broker, "apache-5.3.3", "mqadmin 4.9.7 reads properties that it does not have")
    assert "success" in outputs.text("exportConfigs")
    exported = json.loads(outputs.exported)
    assert exported["clusterScale"] == {"masterBrokerSize": 1, "namesrvSize": 1, "slaveBrokerSize": 0}
    assert exported["brokerConfigs"][BROKER]["flushDiskType"] == "ASYNC_FLUSH"


async def test_stats_all(outputs: Outputs) -> None:
    rows = [row for row in outputs.rows("statsAll") if row[0] == outputs.topic]
    assert [(row[1], row[2], row[5], row[6]) for row in rows] == [(outputs.group, "0", str(COUNT), str(COUNT))]
    assert float(rows[0][3]) > 0
    assert float(rows[0][4]) > 0


async def test_export_metrics(outputs: Outputs) -> None:
    if outputs.version == "4.9.7":
        not_on(outputs.broker, "apache-5.3.3", "mqadmin 4.9.7 wants getTransferedTps, which 5.x spells correctly")
    else:
        not_on(outputs.broker, "apache-4.9.7", "mqadmin 5.3.3 wants getTransferredTps, which 4.9 spells otherwise")
    assert "success" in outputs.text("exportMetrics")
    quota = json.loads(outputs.metrics)["evaluateReport"][BROKER]["runtimeQuota"]
    assert {"normalInTps", "normalOutTps", "transInTps", "scheduleInTps"} <= set(quota["tps"])
    assert {"normalOneDayInNum", "scheduleOneDayInNum"} <= set(quota["oneDayNum"])


async def test_group_attributes_that_do_not_exist_are_refused(shared_broker: SharedBroker, mqadmins: MqAdmins) -> None:
    broker = await shared_broker.running()
    not_on(broker, "apache-4.9.7", "attributes came with 5.0")
    arguments = ["-b", broker.address, "-g", unique("group"), "--attributes", "+priority.factor=50"]
    told = await mqadmins["5.3.3"].run("updateSubGroup", *arguments, nameserver=broker.nameserver)
    assert "unsupported key: priority.factor" in told


async def test_a_broker_is_drained(shared_broker: SharedBroker, mqadmins: MqAdmins) -> None:
    broker = await shared_broker.running()
    topic = unique("drained")
    async with Producer(broker.nameserver) as producer:
        await producer.send(topic, b"x")
    for wipes, adds in (VERSIONS, VERSIONS[::-1]):
        for version, command, perms in ((wipes, "wipeWritePerm", {4}), (adds, "addWritePerm", {6})):
            told = await mqadmins[version].run(command, "-b", BROKER, nameserver=broker.nameserver)
            assert f"write perm of broker[{BROKER}] in name server" in told
            assert re.search(r"OK, [1-9]\d*", told)
            connection = await connect(broker.nameserver, codec="json", on_request=lambda _: None, timeout=3)
            answer = await connection.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo(topic), timeout=3)
            connection.close()
            assert {queue["perm"] for queue in fastjson.loads(bytes(answer.body))["queueDatas"]} == perms


async def test_update_broker_config(outputs: Outputs) -> None:
    assert f"update broker config success, {outputs.broker.address}" in outputs.text("updateBrokerConfig")


async def test_a_wrong_update_says_why(outputs: Outputs) -> None:
    not_on(outputs.broker, "apache-4.9.7", "it ignores properties that it does not know")
    not_on(outputs.broker, "apache-5.3.3", "it ignores properties that it does not know")
    why = "CODE: 1  DESC: there is no property deleteWhan; did you mean deleteWhen?"
    assert why in outputs.of["wrong config"]


async def test_send_message(outputs: Outputs) -> None:
    (row,) = outputs.rows("sendMessage")
    assert (row[0], row[2]) == (BROKER, "SEND_OK")


async def test_delete_topic(outputs: Outputs) -> None:
    text = outputs.text("deleteTopic")
    assert f"delete topic [{outputs.topic}] from cluster [{CLUSTER}] success." in text
    assert f"delete topic [{outputs.topic}] from NameServer success." in text
    assert (
        f"CODE: 17  DESC: No topic route info in name server for the topic: {outputs.topic}"
        in (outputs.of["topicRoute after"])
    )
    assert outputs.topic not in outputs.text("topicList after").split()


async def test_delete_sub_group(outputs: Outputs) -> None:
    text = outputs.text("deleteSubGroup")
    assert f"delete subscription group [{outputs.other_group}] from broker [{outputs.broker.address}] success." in text
