"""The key-value configuration of the embedded name server (100, 101, 102, 219), which is kept in kvConfig.json. Clients
read from it which topics are ordered."""

from __future__ import annotations

from collections.abc import Mapping

from duemq.broker.access.permission import ADMINISTER, LOOK
from duemq.broker.errors import LimitReached, Refused
from duemq.broker.limits import Limits
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.tables.persister import Persister, SavedTable, Table, Written
from duemq.broker.tables.table import Fields, section
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests.headers import KVEntry, KVKey, KVNamespace, Request, response
from duemq.storage.config_file import ConfigFile


class KeyValues:
    """Values by namespace and key."""

    def __init__(self, file: ConfigFile, persister: Persister, limits: Limits) -> None:
        self._file = file
        self._saved = SavedTable(persister, file, self._snapshot)
        self._limits = limits
        self._values: dict[str, dict[str, str]] = {}
        self._count = 0
        self._size = 0
        """Size of all namespaces, keys and values in bytes; a namespace counts once for each key."""

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._file.path

    def load(self) -> None:
        """Read the file. Raises StoreFormatError."""
        table = section(self._file, self._file.read(), "configTable", Fields)
        for namespace, entries in table.items():
            for key, value in entries.items():
                self._set(namespace, key, str(value))

    def of(self, namespace: str) -> Mapping[str, str]:
        """Return the values of a namespace by key; empty if there are none."""
        return self._values.get(namespace, {})

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.PUT_KV_CONFIG, KVEntry, ADMINISTER, self.put)
        router.add(RequestCode.GET_KV_CONFIG, KVKey, LOOK, self.get)
        router.add(RequestCode.DELETE_KV_CONFIG, KVKey, ADMINISTER, self.delete)
        router.add(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespace, LOOK, self.list_values)

    async def put(self, _: Connection, request: Request[KVEntry]) -> Answer:
        """Set a value; it is durable when this is answered."""
        header = request.header
        self._check_room(header)
        self._set(header.namespace, header.key, header.value)
        await self._saved.saved()
        return response(ResponseCode.SUCCESS)

    def _check_room(self, header: KVEntry) -> None:
        """Raise LimitReached if there would be too many values, or if they would be too large, after one is set."""
        old, limits = self.of(header.namespace).get(header.key), self._limits
        if old is None and self._count >= limits.kv_entries:
            raise LimitReached(
                "maxKVConfigEntries",
                ResponseCode.SYSTEM_ERROR,
                f"there are {self._count} values, and maxKVConfigEntries={limits.kv_entries}: delete some (mqadmin "
                "deleteKvConfig), or raise that setting",
            )
        size = self._size + size_of(header.namespace, header.key, header.value)
        if old is not None:
            size -= size_of(header.namespace, header.key, old)
        if size > max(self._size, limits.kv_bytes):
            raise LimitReached(
                "maxKVConfigBytes",
                ResponseCode.SYSTEM_ERROR,
                f"all values would have {size} bytes, and maxKVConfigBytes={limits.kv_bytes}: delete some (mqadmin "
                "deleteKvConfig), or raise that setting",
            )

    def get(self, _: Connection, request: Request[KVKey]) -> Answer:
        """Return a value."""
        value = self.of(request.header.namespace).get(request.header.key)
        if value is None:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {request.header.namespace} Key: {request.header.key}",
            )
        answer = response(ResponseCode.SUCCESS)
        answer.ext["value"] = value
        return answer

    async def delete(self, _: Connection, request: Request[KVKey]) -> Answer:
        """Remove a value; that is durable when this is answered."""
        if self._remove(request.header.namespace, request.header.key):
            await self._saved.saved()
        return response(ResponseCode.SUCCESS)

    def list_values(self, _: Connection, request: Request[KVNamespace]) -> Answer:
        """Return the values of a namespace."""
        values = self.of(request.header.namespace)
        if not values:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {request.header.namespace}")
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({"table": values}))

    def _set(self, namespace: str, key: str, value: str) -> None:
        self._remove(namespace, key)
        self._values.setdefault(namespace, {})[key] = value
        self._count += 1
        self._size += size_of(namespace, key, value)

    def _remove(self, namespace: str, key: str) -> bool:
        """Remove a value; return whether there was one."""
        values = self._values.get(namespace, {})
        value = values.pop(key, None)
        if value is None:
            return False
        self._count -= 1
        self._size -= size_of(namespace, key, value)
        if not values:
            del self._values[namespace]
        return True

    def _snapshot(self) -> tuple[Table, Written]:
        return {"configTable": {namespace: dict(values) for namespace, values in self._values.items()}}, lambda _: None


def size_of(*texts: str) -> int:
    """Return the number of bytes of some texts."""
    return sum(len(text.encode()) for text in texts)
