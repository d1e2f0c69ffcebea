"""What leaves a run's folder has no secrets and commands no terminal."""

from __future__ import annotations

import pytest

from rallypoint.launch.observing.redaction import HIDDEN, LONGEST_LINE, Redaction, secrets_among, secrets_in

PLANTED = "Pl4ntedS3cretV4lue"


@pytest.mark.parametrize("text", [
    f"token={PLANTED}", f'{{"token": "{PLANTED}"}}', f"API_KEY: {PLANTED}", f"Authorization: Bearer {PLANTED}",
    f"s3://{PLANTED}:x@bucket/run", f"https://host/path?X-Amz-Signature={PLANTED}&b=2", f"hf_{PLANTED}",
    f"my_secret_thing = '{PLANTED}'", f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\nand more",
    f"{{\\\"password\\\": \\\"{PLANTED}\\\"}}", f"db_password={PLANTED}", f"bearer {PLANTED}",
    f"password='two words {PLANTED}'", f'{{\\"token\\": \\"a,b {PLANTED}\\"}}', f"s3://key:a/{PLANTED}@bucket/run",
    f"started as train.py --db-password {PLANTED} --steps 5",
])  # fmt: skip
def test_what_looks_like_a_secret_goes(text: str) -> None:
    shown = Redaction()(text)
    assert PLANTED not in shown
    assert HIDDEN in shown


def test_a_known_secret_goes_wherever_it_stands() -> None:
    known = [
        *secrets_among({"WANDB_API_KEY": "hunter-two", "HOME": "/home/me"}),
        *secrets_in(["--token", "open-sesame"]),
    ]
    assert Redaction(known)("xhunter-twoy and open-sesame in /home/me") == f"x{HIDDEN}y and {HIDDEN} in /home/me"
    assert Redaction(['six"\\words'])(r'{"text":"in six\"\\words"}') == f'{{"text":"in {HIDDEN}"}}', "as the log has it"
    assert secrets_in(["t.py", "--api-key=abcdefgh", "--steps", "5"]) == ["abcdefgh"]


def test_the_words_of_a_run_stay() -> None:
    text = (
        "worker12 on node-3: replica 5, tokens: 4096, layers.11.attention.query_key_value.weight at step 1234567; "
        "--tokens 4096 https://host:80/path by me@host"
    )
    assert Redaction()(text) == text
    assert Redaction()("0123456789abcdef" * 2) == HIDDEN


def test_the_hash_with_which_a_run_ends_is_no_secret() -> None:
    assert Redaction()(said := f"worker0 | weights sha256 {'0123456789abcdef' * 4}") == said


def test_escapes_are_shown_and_not_obeyed() -> None:
    assert Redaction()("a\x1b[2Jb\x07\u202e\nnext\tcolumn") == "a\\x1b[2Jb\\x07\\u202e\nnext    column"


def test_a_long_line_is_cut_and_takes_no_time() -> None:
    # A pattern that is quadratic in the text's length would run into the test's time limit.
    for piece in ("a", "token", "x://", "token=", "A1", "?&", "-----BEGIN ", "bearer "):
        assert len(Redaction()(piece * (200_000 // len(piece)))) < LONGEST_LINE + 4000
