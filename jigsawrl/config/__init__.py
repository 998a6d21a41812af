"""Run files: everything a run needs to know, validated before anything heavy is imported.

    run file + overrides -> mapping -> RunConfig (values and their combinations) -> files, folders, packages

Whatever the user has to mend is a JigsawError of one to three lines. Nothing here imports torch, runs user
code, or writes.
"""

from jigsawrl.config.runfile import load_run_file
from jigsawrl.config.settings import (
    AlgorithmConfig,
    CheckpointConfig,
    DynamicSamplingConfig,
    LoraConfig,
    ModelConfig,
    OverlongConfig,
    RolloutConfig,
    RunConfig,
    TelemetryConfig,
    TinyConfig,
    TrainerConfig,
    WandbConfig,
)
from jigsawrl.config.tasks import (
    ArithmeticTask,
    CalculatorTask,
    DataTask,
    EnvironmentTask,
    ReasoningGymTask,
    RewardConfig,
    TaskConfig,
    TextArenaTask,
)

__all__ = [
    "AlgorithmConfig",
    "ArithmeticTask",
    "CalculatorTask",
    "CheckpointConfig",
    "DataTask",
    "DynamicSamplingConfig",
    "EnvironmentTask",
    "LoraConfig",
    "ModelConfig",
    "OverlongConfig",
    "ReasoningGymTask",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TaskConfig",
    "TelemetryConfig",
    "TextArenaTask",
    "TinyConfig",
    "TrainerConfig",
    "WandbConfig",
    "load_run_file",
]
