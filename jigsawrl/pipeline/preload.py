"""Imported once, by the process from which actors are forked: heavy modules, and nothing started."""

from jigsawrl.processes import die_with_parent, stay_deaf

die_with_parent()  # before the imports, which take seconds
stay_deaf()

import jigsawrl.engine.engine  # noqa: E402
import jigsawrl.engine.memory  # noqa: E402
import jigsawrl.pipeline.loop  # noqa: E402, F401
