"""The artefacts that are fetched and built, and their sources.

apache-<version>   the jars of Apache's broker, name server, client and tools
java-<version>     tests/peers/java compiled against them, as program.jar
go                 tests/peers/go as a binary, with the Go client library
cpp                the C++ client: a wheel with librocketmq.so and a ctypes binding; no Debian package needed
kafka              the jars of Apache Kafka's broker, for the benchmarks alone
chromium           only a note that the browser is installed and runs: it opens the report of the Spark jobs;
                   Debian's package
"""

import os
import platform
import shutil
import sys
from pathlib import Path

from tests.peers import tools
from tests.peers.cache import Artefact, key_of

HERE = Path(__file__).resolve().parent
VERSIONS = ("4.9.7", "5.3.3")
CPP_WHEEL = "rocketmq==0.4.4"
KAFKA = "3.9.1"

# 5.3.3 starts its broker without the proxy and the controller, but its tools refer to classes of both.
_MODULES = {
    "4.9.7": ("broker", "namesrv", "client", "tools"),
    "5.3.3": ("broker", "namesrv", "client", "tools", "proxy", "controller"),
}


def _jars(name: str, title: str, *wanted: tuple[str, str, str]) -> Artefact:
    """Jars and all that they depend on, in `lib/`. `wanted`: group, artifact and version of each."""
    dependencies = (
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, artifact, version in wanted
    )
    pom = (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>duemq</groupId><artifactId>peers</artifactId><version>1</version>"
        f"<dependencies>{''.join(dependencies)}</dependencies></project>\n"
    )

    def build(target: Path) -> None:
        mvn = tools.find("mvn")
        tools.find("java")
        (target / "pom.xml").write_text(pom)
        command = [mvn, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={target / 'lib'}"]
        tools.run(title, command, cwd=target)

    return Artefact(name, key_of(pom), build)


def apache(version: str) -> Artefact:
    """The jars of one version of RocketMQ, in `lib/`."""
    modules = [("org.apache.rocketmq", f"rocketmq-{module}", version) for module in _MODULES[version]]
    # The command lines of both versions need commons-cli and their poms leave it out.
    return _jars(f"apache-{version}", f"Apache RocketMQ {version}", *modules, ("commons-cli", "commons-cli", "1.5.0"))


def kafka() -> Artefact:
    """The jars of Apache Kafka's broker, in `lib/`."""
    # Without a logger the broker does not say when it is up.
    logger = ("org.slf4j", "slf4j-simple", "1.7.36")
    return _jars("kafka", "Apache Kafka", ("org.apache.kafka", "kafka_2.13", KAFKA), logger)


def java_program(version: str) -> Artefact:
    """The Java client program, compiled against the client of one version: `program.jar`. An archive of classes, see
    `class_archives`, has none of classes that are in a folder."""
    major = f"v{version[0]}"
    sources = [*(HERE / "java" / "src").rglob("*.java"), *(HERE / "java" / major).rglob("*.java")]
    resources = sorted((HERE / "java" / "resources").iterdir())

    def build(target: Path) -> None:
        classes = target / "classes"
        classes.mkdir()
        libraries = apache(version).require() / "lib"
        options = ["--release", "17", "-Xlint:all,-deprecation,-processing,-classfile,-serial", "-Werror", "-proc:none"]
        command = [tools.find("javac"), *options, "-cp", f"{libraries}/*", "-d", str(classes), *map(str, sources)]
        tools.run(f"the Java program for {version}", command)
        for resource in resources:
            (classes / resource.name).write_bytes(resource.read_bytes())
        jar = [tools.find("jar"), "--create", "--file", str(target / "program.jar"), "-C", str(classes), "."]
        tools.run(f"the Java program for {version}", jar)
        shutil.rmtree(classes)

    return Artefact(f"java-{version}", key_of(apache(version).key, files=[*sources, *resources]), build)


def go_program() -> Artefact:
    """The Go client program: the binary `peer`."""
    folder = HERE / "go"
    sources = [*folder.glob("*.go"), folder / "go.mod", folder / "go.sum"]

    def build(target: Path) -> None:
        env = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath"}
        tools.run("the Go program", [tools.find("go"), "build", "-o", str(target / "peer"), "."], cwd=folder, env=env)

    return Artefact("go", key_of(platform.machine(), files=sources), build)


def cpp_library() -> Artefact:
    """The C++ client and its binding, as a folder for PYTHONPATH."""

    def build(target: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(target / "site"), CPP_WHEEL]
        tools.run("the C++ client", command)
        env = os.environ | {"PYTHONPATH": str(target / "site")}
        tools.run("the C++ client", [sys.executable, "-c", "import rocketmq.client"], env=env)

    return Artefact("cpp", key_of(CPP_WHEEL, platform.machine(), sys.version), build)


def browser() -> Artefact:
    """Chromium, installed if it is missing; its version is in `version`."""

    def build(target: Path) -> None:
        version = tools.run("the browser", [tools.find_or_install("chromium", "chromium"), "--no-sandbox", "--version"])
        (target / "version").write_text(version)

    # The cache may outlive the machine: if the browser is gone, its note in the cache is out of date.
    return Artefact("chromium", key_of(platform.machine(), shutil.which("chromium") or ""), build)


def mqtt_broker() -> Artefact:
    """Mosquitto with its two clients, installed if they are missing; the broker's path is in `path`."""

    def build(target: Path) -> None:
        tools.find_or_install("mosquitto_pub", "mosquitto-clients")
        (target / "path").write_text(tools.find_or_install("mosquitto", "mosquitto"))

    # As for the browser: the cache may outlive the machine.
    return Artefact("mosquitto", key_of(platform.machine(), tools.which("mosquitto") or ""), build)


def for_tests() -> list[Artefact]:
    """The artefacts that the tests need, each after those it depends on."""
    artefacts: list[Artefact] = []
    for version in VERSIONS:
        artefacts += [apache(version), java_program(version)]
    return [*artefacts, go_program(), cpp_library(), browser(), mqtt_broker()]
