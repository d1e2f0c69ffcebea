"""A program forked from the warm start ends, and says, what the same program says from a cold start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import run_program

pytestmark = pytest.mark.programs

CHILD = "import os, sys; print(sys.argv, os.environ['NAME'], os.getsid(0) == os.getpid(), sys.stdin.read())"
SAME = {
    "arguments": "import sys; print(sys.argv, __name__)",
    "a status": "import sys; sys.exit(7)",
    "a sentence": "import sys; sys.exit('that was wrong')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "an exit at once": "import os; print('gone', flush=True); os._exit(3)",
    "at exit": "import atexit; atexit.register(print, 'last')",
    "a thread that goes on": "import threading, time; threading.Timer(0.05, print, ['later']).start()",
    "a child": f"""if True:
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, "word"], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={{**os.environ, "NAME": "me"}},
                                 start_new_session=True)
        print(child.communicate(), child.returncode)""",
    "a child that fails": """if True:
        import subprocess, sys
        done = subprocess.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True)
        print(done.returncode, done.stdout, done.stderr.splitlines()[-1])""",
    "a child with an option of Python's": """if True:
        import subprocess, sys
        print(subprocess.run([sys.executable, "-S", "-c", "print(6)"], capture_output=True, text=True).stdout)""",
    "a child that keeps a pipe": """if True:
        import os, subprocess, sys
        kept, other = os.pipe(), os.pipe()
        look = f"import os; print([os.path.exists(f'/proc/self/fd/{{fd}}') for fd in ({kept[0]}, {other[0]})])"
        done = subprocess.run([sys.executable, "-c", look], pass_fds=(kept[0],), capture_output=True, text=True)
        print(done.stdout, done.stderr)""",
}


@pytest.mark.parametrize("name", SAME)
def test_a_warm_program_says_and_ends_as_a_cold_one(name: str, tmp_path: Path) -> None:
    arguments = ["-c", SAME[name], "one", "two"]
    cold = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run_program(arguments, tmp_path / "output", env=os.environ) == (cold.returncode, cold.stdout)
