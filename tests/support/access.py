"""Accounts for tests: files of accounts, and requests signed by them.

The signature is computed here by the definition of HMAC and not by the code under test.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path

from duemq.protocol.frames.command import Command
from tests.support.canary import CANARY

ADMIN = ("administrator", f"{CANARY}-of-admin")
USER = ("application", f"{CANARY}-of-user")

ACCOUNTS = f"""\
globalWhiteRemoteAddresses:
- 127.0.0.2
- 127.0.1.*
accounts:
- accessKey: {USER[0]}
  secretKey: {USER[1]}
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  - groupA=DENY
  - groupB=PUB|SUB
  - groupC=SUB
- accessKey: {ADMIN[0]}
  secretKey: {ADMIN[1]}
  whiteRemoteAddress: 127.0.3.1-9
  admin: true
"""


def write_accounts(home: Path, text: str = ACCOUNTS, name: str = "plain_acl.yml") -> Path:
    """Write a file of accounts below a RocketMQ home, and return its path."""
    path = home / "conf" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return path


def signature(ext: dict[str, str], body: bytes, secret: str) -> str:
    """Return the signature of a request."""
    values = (value for name, value in sorted(ext.items()) if name != "Signature")
    content = "".join(values).encode() + body
    return base64.b64encode(hmac.new(secret.encode(), content, hashlib.sha1).digest()).decode()


def signed(command: Command, account: tuple[str, str] | None = ADMIN) -> Command:
    """Sign a request in place, and return it; None: by nobody."""
    if account is not None:
        command.ext["AccessKey"] = account[0]
        command.ext["Signature"] = signature(command.ext, bytes(command.body), account[1])
    return command
