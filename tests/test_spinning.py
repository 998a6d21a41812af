"""What processes find in their environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASKS = """if True:
    from jigsawrl.processes import fork_server
    from spinning import tell
    if __name__ == "__main__":
        context = fork_server([])
        ours, theirs = context.Pipe()
        context.Process(target=tell, args=(theirs,)).start()
        print(ours.recv())
"""
TELLS = "import os\ndef tell(pipe): pipe.send(os.environ.get('GOMP_SPINCOUNT'))\n"


@pytest.mark.parametrize(
    ("own", "found"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
    ids=["by itself", "its user's count", "its user's policy"],
)
def test_threads_that_wait_soon_let_go_of_their_cores_unless_their_user_wants_otherwise(own, found, tmp_path):
    (tmp_path / "spinning.py").write_text(TELLS)
    (tmp_path / "asks.py").write_text(ASKS)
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    path = os.pathsep.join([str(tmp_path), *sys.path])
    asked = subprocess.run(
        [sys.executable, str(tmp_path / "asks.py")],
        env={**clean, **own, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.stdout.strip() == found, asked.stderr
