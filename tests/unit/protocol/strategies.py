"""Hypothesis strategies for values on the wire."""

from __future__ import annotations

from hypothesis import strategies as st

from duemq.protocol.codes import LANGUAGES
from duemq.protocol.frames.command import Command
from duemq.protocol.records.record import StoredMessage

INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
"""Any text that UTF-8 can carry."""
SOME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)

COMMANDS = st.builds(
    Command,
    code=INT16,
    language=st.sampled_from(LANGUAGES),
    version=INT16,
    opaque=INT32,
    flag=INT32,
    remark=st.none() | SOME_TEXT,
    ext=st.dictionaries(SOME_TEXT, SOME_TEXT, max_size=6),
    body=st.binary(max_size=60),
)
"""Commands that every header codec can carry."""

WIDE_COMMANDS = st.builds(
    Command,
    code=INT32,
    language=st.none() | TEXT,
    version=INT32,
    opaque=INT32,
    flag=INT32,
    remark=st.none() | TEXT,
    ext=st.dictionaries(TEXT, TEXT, max_size=6),
    body=st.binary(max_size=60),
)
"""Commands that the JSON and MessagePack headers can carry."""

_HOSTS = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)

MESSAGES = st.builds(
    StoredMessage,
    queue_id=INT32,
    flag=INT32,
    queue_offset=INT64,
    physical_offset=st.integers(0, 2**63 - 1),
    sys_flag=INT32,
    born_timestamp=INT64,
    born_host=_HOSTS,
    store_timestamp=INT64,
    store_host=_HOSTS,
    reconsume_times=INT32,
    prepared_transaction_offset=INT64,
    body=st.binary(max_size=80),
    topic=st.text("abcDEF_%-|0123456789", max_size=127),
    properties_text=TEXT,
)
