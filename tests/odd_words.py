"""Words that a shell, a job script or a manifest may take for something else. A script must get them as they are."""

from __future__ import annotations

WORDS = (
    "$HOME", "${HOME}", "$(echo executed)", "`echo executed`", "it's", 'say "hi"', "'$x'", "back\\slash", "\\$(x)",
    "two\nlines", "two words", "tab\there", "trailing ", "", "*", "~", "#no", "!x", ";ls", "&&", "|", ">x", "--cost=$5",
    "$$", "$$(POD_IP)", "$(POD_IP)", "{shape}", "%j", "é…", "- a: b", "a: b", "yes", "null", "0x10", "1e3", "\u2028",
)  # fmt: skip
