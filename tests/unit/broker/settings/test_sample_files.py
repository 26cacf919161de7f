"""The sample files in conf/ of RocketMQ 4.9.7 and 5.3.3, by their properties: those of a primary start a broker as they
are; those of other processes are refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from duemq.broker.errors import ConfigError
from duemq.broker.settings.config import load

_KEPT: Final = "brokerClusterName={}\nbrokerName={}\nbrokerId={}\ndeleteWhen=04\nfileReservedTime=48\nbrokerRole={}\n"


def of_broker(name: str, number: int, role: str) -> str:
    return _KEPT.format("DefaultCluster", name, number, role) + "flushDiskType=ASYNC_FLUSH\n"


def of_container(name: str, number: int, role: str, port: int) -> str:
    """5.3's brokers in a container."""
    return (
        f"#Broker\nbrokerClusterName=DefaultCluster\nbrokerName={name}\nbrokerId={number}\nbrokerRole={role}\n"
        f"flushDiskType=ASYNC_FLUSH\nstorePathRootDir=/root/{name}/store\n"
        f"storePathCommitLog=/root/{name}/store/commitlog\nlistenPort={port}\nhaListenPort={port + 1}\n"
        "totalReplicas=2\ninSyncReplicas=2\nminInSyncReplicas=1\nenableAutoInSyncReplicas=true\n"
        "slaveReadEnable=true\nbrokerHeartbeatInterval=1000\nbrokerNotActiveTimeoutMillis=5000\n"
        "sendHeartbeatTimeoutMillis=1000\nenableSlaveActingMaster=true\n"
    )


def of_dledger(number: int) -> str:
    return (
        f"brokerClusterName = RaftCluster\nbrokerName=RaftNode00\nlistenPort=309{number + 1}1\n"
        f"namesrvAddr=127.0.0.1:9876\nstorePathRootDir=/tmp/rmqstore/node0{number}\n"
        f"storePathCommitLog=/tmp/rmqstore/node0{number}/commitlog\nenableDLegerCommitLog=true\n"
        "dLegerGroup=RaftNode00\ndLegerPeers=n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913\n"
        f"## must be unique\ndLegerSelfId=n{number}\nsendMessageThreadPoolNums=16\n"
    )


def of_controlled(number: int) -> str:
    return (
        "brokerClusterName = DefaultCluster\nbrokerName = broker-a\nbrokerId = -1\nbrokerRole = SLAVE\n"
        "deleteWhen = 04\nfileReservedTime = 48\nenableControllerMode = true\ncontrollerAddr = 127.0.0.1:9878\n"
        f"namesrvAddr = 127.0.0.1:9876\nallAckInSyncStateSet=true\nlistenPort=309{number + 1}1\n"
        f"storePathRootDir=/tmp/rmqstore/node0{number}\nstorePathCommitLog=/tmp/rmqstore/node0{number}/commitlog\n"
    )


PRIMARIES: Final = {
    "broker.conf": of_broker("broker-a", 0, "ASYNC_MASTER").replace("=", " = "),
    "2m-2s-async/broker-a.properties": of_broker("broker-a", 0, "ASYNC_MASTER"),
    "2m-2s-async/broker-b.properties": of_broker("broker-b", 0, "ASYNC_MASTER"),
    "2m-2s-sync/broker-a.properties": of_broker("broker-a", 0, "SYNC_MASTER"),
    "2m-2s-sync/broker-b.properties": of_broker("broker-b", 0, "SYNC_MASTER"),
    "2m-noslave/broker-a.properties": of_broker("broker-a", 0, "ASYNC_MASTER"),
    "2m-noslave/broker-b.properties": of_broker("broker-b", 0, "ASYNC_MASTER"),
    "2m-noslave/broker-trace.properties": of_broker("broker-trace", 0, "ASYNC_MASTER"),
    "container/broker-a-in-container1.conf": of_container("broker-a", 0, "SYNC_MASTER", 10911),
    "container/broker-b-in-container2.conf": of_container("broker-b", 0, "SYNC_MASTER", 20911),
}
CONTROLLER: Final = (
    "controllerDLegerGroup = group1\ncontrollerDLegerPeers = n0-127.0.0.1:9878\ncontrollerDLegerSelfId = n0\n"
)
OTHERS: Final = {
    "2m-2s-async/broker-a-s.properties": (of_broker("broker-a", 1, "SLAVE"), "a slave"),
    "2m-2s-async/broker-b-s.properties": (of_broker("broker-b", 1, "SLAVE"), "a slave"),
    "2m-2s-sync/broker-a-s.properties": (of_broker("broker-a", 1, "SLAVE"), "a slave"),
    "2m-2s-sync/broker-b-s.properties": (of_broker("broker-b", 1, "SLAVE"), "a slave"),
    "container/broker-a-in-container2.conf": (of_container("broker-a", 1, "SLAVE", 10911), "a slave"),
    "container/broker-b-in-container1.conf": (of_container("broker-b", 1, "SLAVE", 20911), "a slave"),
    "container/broker-container1.conf": (
        "#Container\nlistenPort=10811\nnamesrvAddr=172.22.144.49:9876\nfetchNamesrvAddrByAddressServer=false\n"
        "brokerConfigPaths=/root/a-in-container1.conf:/root/b-in-container1.conf\n",
        "a container of several brokers",
    ),
    "dledger/broker-n0.conf": (of_dledger(0), "a DLedger group"),
    "dledger/broker-n1.conf": (of_dledger(1), "a DLedger group"),
    "dledger/broker-n2.conf": (of_dledger(2), "a DLedger group"),
    "controller/quick-start/broker-n0.conf": (of_controlled(0), "a slave"),
    "controller/quick-start/broker-n1.conf": (of_controlled(1), "a slave"),
    "controller/quick-start/namesrv.conf": (f"enableControllerInNamesrv = true\n{CONTROLLER}", "a controller"),
    "controller/controller-standalone.conf": (CONTROLLER, "a controller"),
}


@pytest.mark.parametrize("name", PRIMARIES)
def test_the_file_of_a_primary_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(PRIMARIES[name])
    loaded = load(str(path), environment={})
    assert loaded.config.broker_id == 0
    assert loaded.config.broker_name in name or name == "broker.conf"
    assert loaded.config.cluster_name == "DefaultCluster"
    assert loaded.config.flush_disk_type == "ASYNC_FLUSH"


@pytest.mark.parametrize("name", OTHERS)
def test_the_file_of_another_process_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    text, kind = OTHERS[name]
    path = tmp_path / "broker.conf"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f": these settings are for {kind}"):
        load(str(path), environment={})


@pytest.mark.parametrize("setting", ["enableDLegerCommitLog=false", "enableControllerMode=false", "brokerId= 0"])
def test_settings_that_say_no_to_replicas_are_taken(setting: str) -> None:
    assert load(None, [setting], environment={}).config.broker_id == 0
