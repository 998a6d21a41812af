"""Tries a chat template in a process of its own first, for it is a program: it may loop for ever, or fill the memory.

jinja2's sandbox, in which transformers runs templates, keeps them from files and from Python's internals. It bounds
neither time nor memory, and computes constant expressions at the compilation already.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from jigsawrl.errors import JigsawError

CPU_SECONDS = 10
MEMORY_BYTES = 512 << 20
MAX_TEXT = 16 << 20
TOO_LARGE = 3
PATIENCE = 120.0
"""Seconds on the clock: a process that cannot compute does not use up its own."""
USER, SYSTEM = {"role": "user", "content": "What is 7+5?"}, {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "12"}
CONVERSATIONS = ([USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER, ANSWER])


@lru_cache(maxsize=16)
def check_template(template: str) -> None:
    """A JigsawError where a template needs too much time or memory for a short conversation.

    That it may refuse a conversation is for whoever renders one.
    """
    command = [sys.executable, "-I", str(Path(__file__).with_name("chat_template_trial.py"))]
    limits = [CPU_SECONDS, MEMORY_BYTES, MAX_TEXT, TOO_LARGE]
    task = {"template": template, "conversations": CONVERSATIONS, "limits": limits}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(task).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise JigsawError(_problem(f"did not end within {PATIENCE:.0f} s")) from None
    except OSError as error:
        raise JigsawError(f"no process can be started to try the model's chat template ({error})") from None
    if done.returncode == TOO_LARGE:
        raise JigsawError(_problem(f"wants more than {MEMORY_BYTES >> 20} MiB of memory"))
    if done.returncode < 0:
        raise JigsawError(_problem(f"did not end within {CPU_SECONDS} s of computing"))


def _problem(problem: str) -> str:
    return f"the model's chat template {problem} for a conversation of a few words; correct or remove it"
