"""What the tests of run files share."""

from typing import Any

import pytest

from jigsawrl.config import RunConfig
from jigsawrl.config.runfile import validated
from jigsawrl.errors import JigsawError

SUMS = {"kind": "arithmetic"}


def config_of(**values: Any) -> RunConfig:
    return validated({"task": SUMS, **values})


def refusal(function: Any, *arguments: Any) -> str:
    """The message of the error, which is one to three lines without a hole in them."""
    with pytest.raises(JigsawError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    assert all(line.strip() for line in message.splitlines())
    return message
