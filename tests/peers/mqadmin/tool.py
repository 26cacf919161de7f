"""mqadmin of one version in a JVM that runs one command after the other: a start costs ten times a command."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tests.peers import install, tools
from tests.peers.brokers.apache import SHORT_LIVED
from tests.peers.brokers.process import die_with_parent
from tests.peers.class_archives.options import options as class_archive
from tests.peers.errors import PeerError

_SILENT = '<configuration><root level="OFF"/></configuration>\n'
_END = b"\n==== end of mqadmin\n"
_LONGEST_OUTPUT = 1 << 24


class MqAdmin:
    """mqadmin of one version, started with the first command. Its commands run one after the other."""

    def __init__(self, version: str, home: Path) -> None:
        self.version = version
        self._home = home
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None

    async def run(
        self, *arguments: str, nameserver: str, account: tuple[str, str] | None = None, timeout: float = 60
    ) -> str:
        """Run a command and return its output, standard output and error together. `account`: the access key and the
        secret key in conf/tools.yml, with which mqadmin signs its requests."""
        async with self._lock:
            if self._child is None or self._child.returncode is not None:
                self._child = await self._started()
            child = self._child
            assert child.stdin is not None
            assert child.stdout is not None
            self._write_keys(account)
            child.stdin.write("\t".join([*arguments, "-n", nameserver]).encode() + b"\n")
            try:
                async with asyncio.timeout(timeout):
                    output = await child.stdout.readuntil(_END)
            except asyncio.IncompleteReadError as ended:
                # It ends the JVM if it does not understand its arguments.
                await child.wait()
                output = ended.partial
            except BaseException as error:
                # The output of this command must not be taken for that of the next.
                await self._kill()
                if isinstance(error, TimeoutError):
                    raise PeerError(f"mqadmin {' '.join(arguments)} did not end within {timeout:.0f} s") from None
                raise
        return output.removesuffix(_END).decode(errors="replace")

    async def each(
        self, commands: Sequence[Sequence[str]], *, nameserver: str, account: tuple[str, str] | None = None
    ) -> list[str]:
        """Run several commands and return their outputs."""
        return [await self.run(*command, nameserver=nameserver, account=account) for command in commands]

    async def stop(self) -> None:
        """End the JVM, which has nothing to lose unless it writes an archive of classes at its end."""
        child = self._child
        if child is None or child.returncode is not None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            async with asyncio.timeout(60):
                await child.wait()
        except TimeoutError:
            await self._kill()

    async def _kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()

    def _write_keys(self, account: tuple[str, str] | None) -> None:
        """mqadmin reads the file anew with each command."""
        file = self._home / "conf" / "tools.yml"
        if account is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(f"accessKey: {account[0]}\nsecretKey: {account[1]}\n")

    async def _started(self) -> asyncio.subprocess.Process:
        conf = self._home / "conf"
        conf.mkdir(parents=True, exist_ok=True)
        (conf / "logback_tools.xml").write_text(_SILENT)
        program = install.java_program(self.version).require() / "program.jar"  # also for its log configurations
        jars = install.apache(self.version).require() / "lib"
        return await asyncio.create_subprocess_exec(
            tools.find("java"),
            *SHORT_LIVED,
            *class_archive(self.version, "mqadmin"),
            "-Xmx512m",
            f"-Duser.home={self._home}",
            f"-Drocketmq.client.logRoot={self._home / 'logs'}",
            "-Drocketmq.client.logLevel=ERROR",
            "-cp",
            f"{program}:{jars}/*",
            "duemq.peer.MqAdmins",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"ROCKETMQ_HOME": str(self._home)},
            start_new_session=True,
            preexec_fn=die_with_parent,
            limit=_LONGEST_OUTPUT,
        )


def rows(output: str) -> list[list[str]]:
    """Return the non-empty lines of an output split at blanks, without the header line (it begins with `#`)."""
    return [line.split() for line in output.splitlines() if line.strip() and not line.startswith("#")]
