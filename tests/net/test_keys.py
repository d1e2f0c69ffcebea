"""HKDF gives the answers of RFC 5869; no two purposes share a key."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from rallypoint.errors import UsageError
from rallypoint.net import handshake
from rallypoint.net.handshake import ROLES, dialers_keys, job_secret, role_of, role_token, ticket_for, token_keys


@pytest.mark.parametrize(
    ("secret", "salt", "info", "key", "output"),
    [
        (  # A.1
            "0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9",
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (  # A.2
            bytes(range(0x50)).hex(), bytes(range(0x60, 0xB0)).hex(), bytes(range(0xB0, 0x100)).hex(),
            "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (  # A.3
            "0b" * 22, "", "",
            "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["A.1", "A.2", "A.3"],
)  # fmt: skip
def test_hkdf_gives_the_answers_of_rfc_5869(secret: str, salt: str, info: str, key: str, output: str) -> None:
    found = handshake.extract(bytes.fromhex(salt), bytes.fromhex(secret))
    assert found.hex() == key
    assert handshake.expand(found, bytes.fromhex(info)) == bytes.fromhex(output)[:32]


def test_every_purpose_direction_token_and_greeting_has_a_key_of_its_own() -> None:
    found = []
    for token, known in itertools.product(("", "a token", "another token"), (b"", b"a ticket", b"another")):
        keys = token_keys(token, known)
        found += [keys.dialer, keys.listener, keys.session]
        for transcript in (bytes(32), bytes(31) + b"\1"):
            link = dialers_keys(keys, transcript)
            found += [link.sending, link.receiving]
    assert len(set(found)) == len(found)
    assert {len(key) for key in found} == {32}


def test_every_member_has_a_ticket_of_its_own_for_each_listener() -> None:
    who = [("worker", "w1", 1), ("worker", "w11", 1), ("worker", "w1", 11), ("server", "w1", 1), ("worker", "w", 11)]
    found = [ticket_for(secret, *one) for secret in (b"a secret", b"another") for one in who]
    assert len(set(found)) == len(found)
    assert {len(one) for one in found} == {32}
    assert ticket_for(b"a secret", "worker", "w1", 1) == found[0]


def test_keys_are_not_shown() -> None:
    keys = token_keys("a token")
    link = dialers_keys(keys, bytes(32))
    for shown in (keys, link):
        for field in dataclasses.fields(shown):
            value = getattr(shown, field.name)
            assert not isinstance(value, bytes) or (repr(value) not in repr(shown) and value.hex() not in repr(shown))


# ---- a token for each role -------------------------------------------------------------------------------------------


def test_every_role_of_every_job_has_a_token_of_its_own() -> None:
    found = [role_token(job, role) for job in ("a job's token", "another's") for role in ROLES]
    assert len({token.partition(":")[2] for token in found}) == len(found)
    assert [role_of(token) for token in found] == [*ROLES, *ROLES]
    assert found[0] == role_token("a job's token", "worker"), "it does not change: it is in files"
    assert found[0] == "worker:892b47b2a25d6a69627a677334fe0e3e30a28fa5924a8fe76985885c75ac8771"


@pytest.mark.parametrize("token", ["", "a job's token", "worker:of a job", "worker:" + 63 * "0", "gambler:" + 64 * "0"])
def test_what_is_no_role_s_token_is_a_job_s(token: str) -> None:
    assert role_of(token) == ""
    assert role_token(token, "coordinator") == token


def test_a_role_s_token_gives_no_other_token() -> None:
    token = role_token("a job's token", "worker")
    assert role_token(token, "worker") == token
    for other in ("server", "aggregator", "observer", "coordinator"):
        with pytest.raises(UsageError, match=r"^this token is for the role worker"):
            role_token(token, other)


def test_a_job_without_a_token_has_none_for_a_role() -> None:
    assert {role_token("", role) for role in (*ROLES, "coordinator")} == {""}


def test_the_job_s_secret_needs_both_the_journal_and_the_token() -> None:
    found = {job_secret(kept, token) for kept in (bytes(32), b"1" * 32) for token in ("", "a token", "another")}
    assert len(found) == 6
    assert bytes(32) not in found
