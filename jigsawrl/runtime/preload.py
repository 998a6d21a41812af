"""Imported once, by the process from which all drivers and actors are forked: heavy modules, and nothing started."""

import jigsawrl.pipeline.preload  # first: from then on it dies with its parent, and hears no Ctrl-C
import jigsawrl.runtime.driver
import jigsawrl.runtime.shares  # noqa: F401
