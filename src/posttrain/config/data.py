"""`data` and `env`: what is trained on, and who judges the answers."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Discriminator, SerializerFunctionWrapHandler, Tag, model_serializer, model_validator

from posttrain.config.base import (
    FreeMap,
    NonNegativeFloat,
    NonNegativeInt,
    OpenSection,
    PositiveFloat,
    PositiveInt,
    Section,
    setting,
)
from posttrain.config.rewards import (
    NAMED_REWARDS,
    REWARD_TYPES,
    MathVerifier,
    RewardBlock,
    RewardConfig,
    VerifierType,
    parse_reward,
    refuse_unknown_keys,
    reward_keys,
    rewards_of_functions,
)

# Tags of the two shapes that `data.train` may have; error messages leave them out.
MAP_TAG, LIST_TAG = "<map>", "<list>"

REWARD = "reward"  # the key under `env` of what is given as `reward=file.py:function`
BUILT_IN_TURNS = {
    "calculator": "posttrain.environments.turns.calculator:Calculator",
    "search": "posttrain.environments.turns.search:Search",
    "mcp": "posttrain.environments.turns.mcp:McpTools",
    "openenv": "posttrain.environments.turns.openenv:OpenEnv",
}
REMOTE_TURNS = frozenset({"mcp", "openenv"})
WITH_OWN_PYTHON = frozenset({"openenv", "verifiers"})  # `turns` and `agent` whose packages exclude ours
TRACE_GROUPS = "TraceGroups"  # the dataset of labelled traces whose answers GRPO learns from

_PARTS_ONLY = frozenset({"weight"})  # a single reward has nothing to be weighed against


class TraceColumnsConfig(Section):
    """Which column means what. null: the usual name, where the file has it; "": not used."""

    input: str | None = setting(None, "Column with the prompt, text or messages.")
    output: str | None = setting(None, "Column with the answer.")
    messages: str | None = setting(None, "Column with prompt and answer as messages.")
    prompt_len: str | None = setting(None, "Column with the number of leading messages that are the prompt.")
    reward: str = setting("final_reward", "Column with the reward.")
    group_id: str | None = setting(None, "Column with an id of the prompt.")
    trace_id: str | None = setting(None, "Column with an id of the trace.")
    model: str | None = setting(None, "Column with the model that answered.")
    time: str | None = setting(None, "Column with the time of the answer.")
    reference: str | None = setting(None, "Column with the expected answer.")


class TraceFiltersConfig(Section):
    """Which traces are used; the others are counted by reason."""

    min_reward_threshold: float | None = setting(None, "Traces with a lower reward are left out; null keeps all.")
    since: str | None = setting(None, "First moment that is included, such as 2026-03-01; UTC.")
    until: str | None = setting(None, "First moment that is excluded; UTC.")
    where: FreeMap = setting(dict, "Column: the value, or the values, that it must have.")
    duplicates: Literal["keep", "exact", "near"] = setting(
        "keep", "Of equal, or nearly equal, answers to one prompt the first is kept."
    )
    near_similarity: float = setting(0.9, "Similarity, 0 to 1, from which two texts are nearly equal.", ge=0.7, le=1)


class PairRulesConfig(Section):
    """How the traces of one prompt become pairs."""

    preferred: float = setting(0.7, "A trace with at least this reward is preferred.")
    rejected_below: float = setting(0.5, "A trace with a reward below this is rejected.")
    strategy: Literal["best_worst", "all", "one_per_preferred", "by_margin"] = setting(
        "best_worst", "Which preferred trace meets which rejected one."
    )
    min_margin: float = setting(0.0, "Least difference of the two rewards of a pair.", ge=0)
    max_pairs_per_prompt: PositiveInt | None = setting(None, "Most pairs of one prompt; null is no limit.")


class DatasetConfig(Section):
    """One dataset. A key that is not written is that of `data.default`, then what the dataset is known to need."""

    dataset_name: str | None = setting(
        None, "Known dataset such as gsm8k, or ResponseDataset / PreferenceDataset for rows of your own."
    )
    name: str | None = setting(None, "What the dataset is called in metrics; null is `default` or a number.")
    data_path: str | None = setting(None, "File (jsonl, jsonl.gz, parquet), URL or hub name to read it from.")
    subset: str | None = setting(None, "Configuration of a hub dataset.")
    split: str | None = setting(None, "Split of a hub dataset, e.g. train.")
    input_key: str | None = setting(None, "Column with the prompt.")
    output_key: str | None = setting(None, "Column with the answer or the expected result.")
    prompt_key: str | None = setting(None, "Column with the prompt of a pair.")
    chosen_key: str | None = setting(None, "Column with the better answer of a pair.")
    rejected_key: str | None = setting(None, "Column with the worse answer of a pair.")
    chosen_reward_key: str | None = setting(None, "Column with the reward of the better answer.")
    rejected_reward_key: str | None = setting(None, "Column with the reward of the worse answer.")
    default_chosen_reward: float | None = setting(None, "Reward of better answers whose row states none; null is 1.0.")
    default_rejected_reward: float | None = setting(None, "Reward of worse answers whose row states none; null is 0.0.")
    completion_key: str | None = setting(None, "Column with an answer that is judged on its own.")
    label_key: str | None = setting(None, "Column with whether that answer is wanted.")
    prompt_is_templated: bool | None = setting(
        None, "Prompts that are text hold the chat template already; null: only in NeMo-Aligner's columns."
    )
    trace_columns: TraceColumnsConfig | None = setting(None, "Columns of labelled traces.")
    trace_filters: TraceFiltersConfig | None = setting(None, "Which labelled traces are used.")
    pair_rules: PairRulesConfig | None = setting(None, "How labelled traces become pairs.")
    prompt_file: str | None = setting(None, "Text file with one {} where the prompt goes; null uses it as it is.")
    system_prompt_file: str | None = setting(None, "Text file with the system message; null sends none.")
    image_key: str | None = setting(None, 'Column with images; null is `images` or `image`, "" is none.')
    image_dir: str | None = setting(None, "Folder that holds the images that rows name; null is that of the data file.")
    allow_image_urls: bool | None = setting(None, "Fetches images that rows name by http(s) URLs; null refuses them.")
    env_name: str | None = setting(None, "Key under `env` that judges the answers.")
    download_dir: str | None = setting(None, "Folder for downloaded data.")
    repeat: PositiveInt | None = setting(None, "How many times each row is used in one pass.")
    split_validation_size: NonNegativeFloat | None = setting(
        None, "Held out for validation: below 1 a fraction of the rows, from 1 on a number of rows."
    )
    seed: NonNegativeInt | None = setting(None, "Seed of that split.")
    chat_key: str | None = setting(None, "Column with the messages of an openai_format row.")
    system_key: str | None = setting(None, "Column with the system message of an openai_format row.")
    system_prompt: str | None = setting(None, "System message of openai_format rows that have none.")

    @property
    def holds_recorded_groups(self) -> bool:
        return (self.dataset_name or "").lower() == TRACE_GROUPS.lower()

    @model_serializer(mode="wrap")
    def _written_keys(self, dump: SerializerFunctionWrapHandler) -> FreeMap:
        """A key that is left out is filled from `data.default`, a null is not."""
        return {key: value for key, value in dump(self).items() if key in self.model_fields_set}

    def filled_from(self, default: DatasetConfig | None) -> DatasetConfig:
        """This dataset with the keys that it does not set taken from `default`. A null that was written stays null."""
        if default is None:
            return self
        missing = {key: getattr(default, key) for key in default.model_fields_set - self.model_fields_set}
        return self.model_copy(update=missing)


Datasets = Annotated[
    Annotated[DatasetConfig, Tag(MAP_TAG)] | Annotated[list[DatasetConfig], Tag(LIST_TAG)],
    Discriminator(lambda value: LIST_TAG if isinstance(value, list) else MAP_TAG),
]


class DataConfig(Section):
    max_input_seq_length: PositiveInt | None = setting(
        None, "Longest prompt in tokens; longer ones are dropped and counted; null does not check."
    )
    shuffle: bool = setting(True, "Draws training rows in a seeded random order.")
    train: Datasets | None = setting(None, "The training dataset, or a list of them.")
    validation: Datasets | None = setting(None, "The validation dataset, or a list of them; null is none.")
    default: DatasetConfig | None = setting(None, "Keys for datasets that do not set them.")

    def sets_by_key(self) -> dict[str, list[DatasetConfig]]:
        return {"data.train": self.train_sets(), "data.validation": self.validation_sets()}

    def train_sets(self) -> list[DatasetConfig]:
        """The training datasets with `data.default` filled in."""
        return _filled(self.train, self.default)

    def validation_sets(self) -> list[DatasetConfig]:
        """The validation datasets with `data.default` filled in."""
        return _filled(self.validation, self.default)


def _filled(sets: DatasetConfig | list[DatasetConfig] | None, default: DatasetConfig | None) -> list[DatasetConfig]:
    if sets is None:
        return []
    return [entry.filled_from(default) for entry in (sets if isinstance(sets, list) else [sets])]


class EnvironmentConfig(OpenSection):
    """Who judges answers: several `rewards` with weights, or one by its `type` with that type's own keys beside it.

    `function` alone is a reward of type python. `math_verify_impl` or `verifier_type`, or the name `math`, is one of
    type math.
    """

    type: str | None = setting(None, "Type of the only reward, with its own keys beside it; `posttrain rewards list`.")
    rewards: dict[str, RewardBlock] | None = setting(
        None, "Several rewards by name, each with `type`, `weight` and the keys of its type."
    )
    reward_functions: list[FreeMap] | None = setting(
        None, "NeMo RL's rewards of images instead: format, exact_alnum, math_expr, bbox_giou with `weight`."
    )
    function: str | None = setting(
        None, "Python reward function: `file.py:name` or `package.module.name`; null is the built-in judge."
    )
    num_workers: PositiveInt | None = setting(None, "Processes that judge answers side by side; null picks a number.")
    timeout_s: PositiveFloat | None = setting(
        None, "Seconds after which judging one answer is given up; null is what its type needs."
    )
    math_verify_impl: MathVerifier | None = setting(
        None, "How answers are compared: as mathematics, or as normalised text; null is the former."
    )
    verifier_type: VerifierType | None = setting(None, "What kind of answer is expected; null is math.")
    stop_strings: list[str] | None = setting(None, "Texts that end an answer in this environment.")
    turns: str | None = setting(
        None,
        "What takes turns with the model: calculator, search, mcp, openenv, `file.py:Class`; null is a single turn.",
    )
    turns_kwargs: FreeMap = setting(dict, "Arguments of that class.")
    python: str | None = setting(
        None,
        "Python that has OpenEnv or verifiers, or that runs code of `type: code`; null is the one that runs posttrain.",
    )
    agent: str | list[str] | None = setting(
        None,
        "Agent that asks the model by OpenAI's chat API: `file.py:function`, the words of a command, or verifiers.",
    )
    agent_kwargs: FreeMap = setting(dict, "Further arguments of that function.")
    env: dict[str, str | None] = setting(
        dict, "Variables for the agent, or the process of OpenEnv; null passes on the run's, and no credential else."
    )
    turn_timeout_s: PositiveFloat | None = setting(
        None, "Seconds that an agent may work between two requests; null is no limit besides timeout_s."
    )

    @model_validator(mode="after")
    def _rewards_can_be_read(self) -> EnvironmentConfig:
        self.reward_configs("")
        return self

    @property
    def takes_turns(self) -> bool:
        return self.turns is not None or self.agent is not None

    def turns_problems(self, name: str) -> Iterator[str]:
        """Of the environment `name`, in a run that uses it."""
        if self.turns is not None and self.turns not in BUILT_IN_TURNS and not {":", "."} & set(self.turns):
            near = get_close_matches(self.turns, BUILT_IN_TURNS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(BUILT_IN_TURNS)}"
            yield (
                f"env.{name}.turns = {self.turns!r} is not an environment that posttrain has ({hint}); one of your "
                "own is named 'file.py:Class' or 'package.module:Class'"
            )
        if self.turns_kwargs and self.turns is None:
            yield f"env.{name}.turns_kwargs are arguments of a class that is not named: set env.{name}.turns"
        runs_code = any(reward.type == "code" for reward in self.reward_configs(name).values())
        if self.python is not None and not runs_code and not {self.turns, str(self.agent)} & WITH_OWN_PYTHON:
            known = "`turns: openenv`, `agent: verifiers` and `type: code`"
            yield f"env.{name}.python = {self.python!r} is for {known}: remove it"
        if self.env and self.agent is None and self.turns != "openenv":
            hint = "write turns_kwargs.env" if self.turns == "mcp" else "remove it"
            yield f"env.{name}.env has variables for an agent or `turns: openenv`: {hint}"
        if self.agent is None:
            for key in ("agent_kwargs", "turn_timeout_s"):
                if getattr(self, key):
                    yield f"env.{name}.{key} is for an agent, and none is named: set env.{name}.agent"
            return
        if self.turns is not None:
            yield f"env.{name} has both `turns` and `agent`: an agent takes its own turns, so remove one of them"
        if isinstance(self.agent, str) and self.agent != "verifiers" and not {":", "."} & set(self.agent):
            yield (
                f"env.{name}.agent = {self.agent!r} names no function: write 'file.py:solve' or "
                f"'package.module:solve'; a command is a list of words: [{self.agent}]"
            )
        if isinstance(self.agent, list) and (not "".join(self.agent[:1]) or self.agent_kwargs):
            problem = "takes no agent_kwargs" if self.agent_kwargs else "is a list without words"
            yield f"env.{name}.agent {problem}: a command is a list of words, such as [python, agent.py]"

    def reward_configs(self, name: str) -> dict[str, RewardConfig]:
        """The rewards by name, a single one under the empty name. Empty if no key decides what they are.

        `name` is that of the environment: `math` needs no type. Settings of the environment hold for its rewards.
        """
        extras = dict(self.model_extra or {})
        functions = self.reward_functions
        if functions is None and name in NAMED_REWARDS and not (extras or self.rewards or self.type or self.function):
            functions = NAMED_REWARDS[name]
        if functions is not None:
            if self.rewards is not None or self.type is not None or self.function is not None:
                raise ValueError("`reward_functions` and other rewards are both given: keep one of them")
            found = rewards_of_functions(functions)
            return {part: parse_reward(block) for part, block in found.items()}
        if self.rewards is not None:
            if self.type is not None or self.function is not None or extras:
                given = next(iter(extras), "type" if self.type is not None else "function")
                raise ValueError(f"`{given}` is for a single reward, but there are `rewards`: put it under one of them")
            if not self.rewards:
                raise ValueError("`rewards` is empty: at least one reward is needed")
            for part in self.rewards:
                if not part or "/" in part:  # a slash is what tells details of a reward from rewards
                    raise ValueError(f"`rewards` has the name {part!r}: a name without a slash is needed")
            return {part: parse_reward(self._with_math_keys(block)) for part, block in self.rewards.items()}
        kind = self._kind(name, extras)
        if kind is None:
            return {}
        own = {"function": self.function} if self.function is not None else {}
        if kind == "code" and self.python is not None:
            own["python"] = self.python
        return {"": parse_reward(self._with_math_keys({"type": kind, **own, **extras}), without=_PARTS_ONLY)}

    def _kind(self, name: str, extras: FreeMap) -> str | None:
        if self.type is not None:
            return self.type
        if self.function is not None:
            return "python"
        if name == "math" or self.math_verify_impl is not None or self.verifier_type is not None:
            return "math"
        # The name may still turn out to be `math`, whose keys need no type.
        others = {key: value for key, value in extras.items() if name or key not in reward_keys(REWARD_TYPES["math"])}
        refuse_unknown_keys(others, list(type(self).model_fields), "an environment without `type`")
        return None

    def _with_math_keys(self, block: FreeMap) -> FreeMap:
        """NeMo RL writes them beside `num_workers`; they stand for every math reward that does not set its own."""
        if not str(block.get("type")).startswith("math"):
            return block
        inherited = {"math_verify_impl": self.math_verify_impl, "verifier_type": self.verifier_type}
        return {**{key: value for key, value in inherited.items() if value is not None}, **block}
