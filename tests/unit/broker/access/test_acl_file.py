"""plain_acl.yml: what is read, what is refused with its line, and what is written."""

from __future__ import annotations

import contextlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from duemq.broker.access import acl_file
from duemq.broker.access.accounts import PlainAccount
from duemq.broker.access.permission import PlainAction, Role
from duemq.broker.errors import AclFileError
from tests.support.access import ACCOUNTS, ADMIN, USER
from tests.support.canary import CANARY

PUB, SUB, BOTH, DENY = PlainAction.PUB, PlainAction.SUB, PlainAction.ANY, PlainAction.DENY
HEAD = "accounts:\n- accessKey: account-1\n  secretKey: canary-secret-1\n"


def parsed(text: str) -> acl_file.AclFile:
    return acl_file.parse(text.encode(), "conf/plain_acl.yml")


def account(lines: str = "") -> PlainAccount:
    (found,) = parsed(HEAD + "".join(f"  {line}\n" for line in lines.splitlines())).accounts
    return found


# --- reading


def test_a_whole_file() -> None:
    content = parsed(f"{ACCOUNTS}dataVersion:\n- counter: 7\n  timestamp: 1700000000000\n")
    user, admin = content.accounts
    assert (user.access_key, user.is_admin, user.role) == (USER[0], False, Role.LOOK)
    assert (user.default_topic, user.default_group) == (DENY, SUB)
    topics = {"topicA": DENY, "topicB": BOTH, "topicC": SUB}
    groups = {"%RETRY%groupA": DENY, "%RETRY%groupB": BOTH, "%RETRY%groupC": SUB}
    assert user.permissions == topics | groups
    assert (admin.access_key, admin.is_admin, admin.role, admin.permissions) == (ADMIN[0], True, Role.ADMINISTER, None)
    assert [pattern.text for pattern in content.white_lists] == ["127.0.0.2", "127.0.1.*"]
    assert admin.white_list.text == "127.0.3.1-9"
    assert not user.white_list.text
    assert content.version.to_json() == {"counter": 7, "timestamp": 1700000000000}
    assert content.warnings == []


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "accounts:\n", "globalWhiteRemoteAddresses: []\n"])
def test_an_empty_file_has_no_accounts(text: str) -> None:
    content = parsed(text)
    assert (content.accounts, content.white_lists, content.version.counter) == ([], [], 0)


@pytest.mark.parametrize(
    ("text", "action"),
    [("PUB", PUB), ("SUB", SUB), ("PUB|SUB", BOTH), ("SUB|PUB", BOTH), ("DENY", DENY), (" PUB ", PUB)],
)
def test_permissions(text: str, action: PlainAction) -> None:
    found = account(f"defaultTopicPerm: {text!r}\ntopicPerms: ['T= {text}']\ngroupPerms: ['G ={text}']")
    assert (found.default_topic, found.permissions) == (action, {"T": action, "%RETRY%G": action})


@pytest.mark.parametrize("text", ["NOPE", "pub", "ANY", "''"])
def test_a_permission_that_there_is_not_counts_as_deny_and_is_told(text: str) -> None:
    content = parsed(f"{HEAD}  defaultTopicPerm: {text}\n")
    assert content.accounts[0].default_topic == DENY
    assert [warning.line for warning in content.warnings] == [4]


def test_without_permissions_everything_is_denied() -> None:
    found = account()
    assert (found.default_topic, found.default_group, found.permissions, found.is_admin) == (DENY, DENY, None, False)


@pytest.mark.parametrize(
    ("line", "is_admin"),
    [("admin: true", True), ("admin: yes", True), ("admin: 'true'", True), ("admin: false", False), ("admin:", False)],
)
def test_the_flag_of_an_administrator(line: str, is_admin: bool) -> None:
    assert account(line).is_admin is is_admin


@pytest.mark.parametrize(
    ("line", "role"),
    [("role: none", Role.NONE), ("role: look", Role.LOOK), ("role: operate", Role.OPERATE), ("", Role.LOOK),
     ("role: none\nadmin: true", Role.ADMINISTER)],
)  # fmt: skip
def test_roles(line: str, role: Role) -> None:
    assert account(line).role is role


def test_a_number_is_a_key() -> None:
    (found,) = parsed("accounts:\n- {accessKey: 12345678, secretKey: 87654321}").accounts
    assert found.access_key == "12345678"


def test_of_two_accounts_of_one_name_the_first_counts() -> None:
    content = parsed(f"{HEAD}- accessKey: account-1\n  secretKey: canary-secret-2\n  admin: true\n")
    assert [found.is_admin for found in content.accounts] == [False]
    assert [(line, "account-1" in text) for line, text in content.warnings] == [(4, True)]


def test_a_name_that_there_is_not_is_told() -> None:
    content = parsed(f"{HEAD}  toppicPerms: [T=PUB]\nacounts: []\n")
    assert [line for line, _ in content.warnings] == [5, 4]
    assert "acounts" in content.warnings[0].text
    assert "toppicPerms" in content.warnings[1].text


# --- what is refused


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("accounts: {", 2, ""),
        ("[]", 1, "the file must be a table"),
        ("text", 1, "the file must be a table"),
        ("accounts: text", 1, "accounts must be a list"),
        ("accounts:\n- text", 2, "an account must be a table"),
        ("accounts:\n- secretKey: canary-secret-1", 2, "7 characters or more"),
        ("accounts:\n- accessKey: account-1", 2, "7 characters or more"),
        ("accounts:\n- accessKey: six666\n  secretKey: canary-secret-1", 2, "7 characters or more"),
        ("accounts:\n- accessKey: account-1\n  secretKey: canary", 2, "7 characters or more"),
        ("accounts:\n- accessKey: [account-1]\n  secretKey: canary-secret-1", 2, "accessKey must be a text"),
        ("accounts:\n- accessKey: account-1\n  secretKey: 2024-01-01", 3, "quotes"),
        ("accounts:\n- accessKey: account-1\n  secretKey: 01234567", 3, "quotes"),
        ("accounts:\n- accessKey: account-1\n  secretKey: 1.2345678", 3, "quotes"),
        (f"{HEAD}  secretKey: canary-secret-2", 4, "secretKey occurs twice"),
        (f"{HEAD}  admin: maybe", 4, "admin must be true or false"),
        (f"{HEAD}  role: administer", 4, "role must be one of none, look, operate"),
        (f"{HEAD}  topicPerms: T=PUB", 4, "topicPerms must be a list"),
        (f"{HEAD}  topicPerms: [T]", 4, "NAME=PUB"),
        (f"{HEAD}  topicPerms: [T=PUB=SUB]", 4, "NAME=PUB"),
        (f"{HEAD}  topicPerms:\n  - T=PUB\n  - T=\n", 6, "NAME=PUB"),
        (f"{HEAD}  whiteRemoteAddress: canary", 4, "not an address pattern"),
        ("globalWhiteRemoteAddresses:\n- 1.1.1.1\n- 1.1", 3, "quotes"),
        ("globalWhiteRemoteAddresses:\n- 1.1.1.1\n- a.b.c.d", 3, "not an address pattern"),
        ("dataVersion: [{counter: x}]", 1, "counter must be a number"),
        ("dataVersion: 1", 1, "dataVersion must be a list"),
        ("a: &x [1]\nb: *x", 1, "aliases"),
        ("a: &x\n  b: *x", 1, "aliases"),
        ("? [a]\n: b", 1, "a name that is not text"),
        ("accounts: !!python/object/apply:os.system [id]", 1, "an account must be a table"),
        (f"{HEAD}  topicPerms: [!!python/name:os.system '']", 4, "quotes"),
        ("accounts:\n\t- x", 2, ""),
        ("[" * 100_000, 1, "depth"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_without_secrets(text: str, line: int, why: str) -> None:
    with pytest.raises(AclFileError) as caught:
        parsed(text)
    assert str(caught.value).startswith(f"conf/plain_acl.yml, line {line}: "), caught.value
    assert why in str(caught.value)
    assert "canary" not in str(caught.value)


def test_a_python_object_is_never_made() -> None:
    for tag in ("!!python/object/apply:os.system", "!!python/object/new:os.system", "!custom"):
        for text in (f"accounts: {tag} [id]", f"{HEAD}  role: {tag} 'id'", f"x: {tag} [id]"):
            try:
                content = parsed(text)
            except AclFileError:
                continue
            assert all(type(value) in (list, str, dict) for value in content.table.values())


def test_a_forgotten_blank_does_not_put_a_secret_into_a_message() -> None:
    content = parsed("accounts:\n- {accessKey: account-1, secretKey: canary-secret-1, secretKey:canary-secret-2: 1}")
    assert content.warnings
    assert not any(CANARY in text for _, text in content.warnings)


def test_what_is_not_utf_8_is_told_with_its_line() -> None:
    with pytest.raises(AclFileError, match=r"line 2: this is not UTF-8"):
        acl_file.parse(b"accounts:\n# \xff\n", "conf/plain_acl.yml")


def test_a_huge_file_is_refused() -> None:
    with pytest.raises(AclFileError, match="has more than 16777216 bytes"):
        acl_file.parse(b"#" * (acl_file.MAX_BYTES + 1), "conf/plain_acl.yml")


@given(st.text(max_size=200) | st.text("-: \n[]{}&*!'\"#|>accountsKey", max_size=200) | st.binary(max_size=100))
def test_any_text_is_read_or_refused(text: str | bytes) -> None:
    with contextlib.suppress(AclFileError):  # and nothing else
        acl_file.parse(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"), "file")


# --- writing


def test_the_form_is_that_of_rocketmqs_brokers() -> None:
    """The text that 4.9.7 wrote after updateAclConfig and updateGlobalWhiteAddr."""
    text = (
        "globalWhiteRemoteAddresses:\n- 127.0.0.2\n- 127.0.1.*\n"
        "accounts:\n- accessKey: rocketmq2\n  secretKey: canary-secret-2\n  whiteRemoteAddress: 127.0.3.1-9\n"
        "  admin: true\n"
        "- accessKey: RocketMQ\n  secretKey: canary-secret-1\n  whiteRemoteAddress: null\n  admin: false\n"
        "  defaultTopicPerm: DENY\n  topicPerms:\n  - topicA=DENY\n  - topicB=PUB|SUB\n"
        "dataVersion:\n- counter: 9\n  timestamp: 1795612737647\n"
    )
    assert acl_file.dump(parsed(text).table).decode() == text


@given(
    st.lists(
        st.fixed_dictionaries(
            {"accessKey": st.text("abcXYZ0189-_: #'\"*&é", min_size=7, max_size=12), "secretKey": st.text(min_size=7)},
            optional={
                "admin": st.booleans(),
                "defaultTopicPerm": st.sampled_from(list(acl_file.PERMISSIONS)),
                "topicPerms": st.lists(st.sampled_from(["A=PUB", "B=SUB", "C=DENY"])),
                "whiteRemoteAddress": st.sampled_from(["*", "1.1.1.1", "::1", ""]),
                "custom": st.integers(-1000, 1000),
            },
        ),
        max_size=4,
        unique_by=lambda each: each["accessKey"],
    )
)
def test_what_is_written_is_read_again(accounts: list[dict[str, object]]) -> None:
    try:
        text = acl_file.dump({"accounts": accounts})
        text.decode()
    except (UnicodeEncodeError, yaml.YAMLError):
        return  # half a surrogate pair, which no request can have
    content = acl_file.parse(text, "file")
    assert content.table == {"accounts": accounts}
    assert [found.access_key for found in content.accounts] == [each["accessKey"] for each in accounts]


def test_an_account_shows_no_secret() -> None:
    content = parsed(ACCOUNTS)
    for found in content.accounts:
        assert CANARY not in repr(found)
