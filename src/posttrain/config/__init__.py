"""The config of a run: NeMo RL's vocabulary, strict, typed, and readable without torch.

`load_config` reads YAML, applies overrides and returns typed sections. The package is independent of models and
devices.
"""

from posttrain.config.base import ConfigError
from posttrain.config.data import DataConfig, DatasetConfig, EnvironmentConfig
from posttrain.config.dpo import DpoConfig, DpoRunConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.grpo import AdvEstimatorConfig, GrpoConfig, LossFnConfig
from posttrain.config.grpo_run import GrpoRunConfig
from posttrain.config.loader import LoadedConfig, guess_kind, load_config
from posttrain.config.policy import (
    DtensorConfig,
    GenerationConfig,
    GrpoPolicyConfig,
    LoraConfig,
    NativeConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from posttrain.config.run_config import CheckpointingConfig, ClusterConfig, LoggerConfig, RunConfig
from posttrain.config.runs import ALL_KINDS, KINDS, TRAINING_NAMES, Kind, SftConfig, SftRunConfig

__all__ = [
    "ALL_KINDS", "KINDS", "TRAINING_NAMES", "AdvEstimatorConfig", "CheckpointingConfig", "ClusterConfig",
    "ConfigError", "DataConfig", "DatasetConfig", "DpoConfig", "DpoRunConfig", "DtensorConfig",
    "EnvironmentConfig", "EvalRunConfig", "GenerationConfig", "GrpoConfig", "GrpoPolicyConfig", "GrpoRunConfig",
    "Kind", "LoadedConfig", "LoggerConfig", "LoraConfig", "LossFnConfig", "NativeConfig", "OptimizerConfig",
    "PolicyConfig", "RunConfig", "SequencePackingConfig", "SftConfig", "SftRunConfig", "TokenizerConfig",
    "guess_kind", "load_config",
]  # fmt: skip
