"""What is started gets its token in its environment, and nobody is shown that."""

from __future__ import annotations

from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.far_end import RunProcess
from rallypoint.net.handshake import new_token

TOKEN = new_token()


def test_a_command_shows_no_token_of_its_environment() -> None:
    env, argv = {"RALLYPOINT_TOKEN": TOKEN}, ("true",)
    for command in (
        Command(name="server0", role="server", argv=argv, env=env), RunProcess(1, "server0", "server", argv, env),
    ):  # fmt: skip
        assert TOKEN not in repr(command)
        assert "server0" in repr(command)
        assert "true" in repr(command)
