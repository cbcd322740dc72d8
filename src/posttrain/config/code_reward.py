"""`type: code`: the answer's Python code, run against the tests of its task in a sandbox."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from posttrain.config.base import PositiveFloat, PositiveInt
from posttrain.config.reward_base import WHAT_TYPE_MEANS, RewardConfig


class CodeRewardConfig(RewardConfig):
    """1 when the code in the answer passes the tests of its task, run in a sandbox."""

    default_timeout_s: ClassVar[float] = 60.0  # for all tests of one answer
    keeps_cores_busy: ClassVar[bool] = True

    type: Literal["code"] = Field(description=WHAT_TYPE_MEANS)
    sandbox: Literal["strict", "best_effort", "none"] = Field(
        default="strict",
        description="strict is namespaces or nothing, best_effort the best that this machine has, none only limits.",
    )
    reward: Literal["all_passed", "share_passed"] = Field(
        default="all_passed", description="Gives 1 only when every test passes, or the share of tests that do."
    )
    code_block: Literal["python", "any", "whole"] = Field(
        default="python",
        description="Code is the last ```python block, the last block of any language, or the whole answer.",
    )
    tests_key: str | None = Field(
        default=None, description="Key of the task's metadata that holds its tests; null looks for the usual ones."
    )
    output_match: Literal["lines", "tokens"] = Field(
        default="lines", description="Compares printed output line by line, or word by word."
    )
    time_limit_s: PositiveFloat = Field(
        default=5.0, description="Seconds of CPU time for one process of one program, rounded up to whole ones."
    )
    wall_time_limit_s: PositiveFloat | None = Field(
        default=None, description="Seconds of wall-clock time for one program; null is 3 x time_limit_s."
    )
    max_memory_mib: PositiveInt = Field(default=1024, description="MiB of memory for one program and its children.")
    max_processes: PositiveInt = Field(
        default=16, description="Processes and threads that a program may have at a time."
    )
    max_files_mib: PositiveInt = Field(default=64, description="MiB that a program may write to files.")
    max_output_kib: PositiveInt = Field(default=1024, description="KiB that a program may print.")
    python: str | None = Field(
        default=None, description="Python interpreter that runs the code; null is the one that runs posttrain."
    )
    site_packages: bool = Field(
        default=False, description="Lets the code import the packages that are installed beside that interpreter."
    )
    read_only_paths: list[str] = Field(
        default_factory=list, description="Absolute paths that the code may read, besides Python and system libraries."
    )
