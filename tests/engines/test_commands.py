"""What is started gets its token in its environment, and nobody is shown that."""

from __future__ import annotations

from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.far_end import RunProcess
from rallypoint.net.handshake import new_token

TOKEN = new_token()


def test_a_command_shows_no_token_of_its_environment() -> None:
    env, argv = {"RALLYPOINT_TOKEN": TOKEN}, ("true",)
    server = Command(name="server0", role="server", argv=argv, env=env)
    for command in (server, RunProcess(1, server)):
        assert TOKEN not in repr(command)
        assert "server0" in repr(command)
        assert "true" in repr(command)
