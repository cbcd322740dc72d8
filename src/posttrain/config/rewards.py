"""The types of reward that `env` can name, and the keys of each: a strict section a type. Loads no package that scores.

To add a type: a section here with its `type`, an entry in `REWARD_TYPES`, and in `posttrain.environments.reward_types`
the function that scores. `posttrain rewards list` and the errors for wrong keys come from the section by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Annotated, ClassVar, Literal, LiteralString, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from posttrain.config.base import (
    UNKNOWN_KEY,
    FreeMap,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    members,
    setting,
)
from posttrain.config.placement import ResourcesConfig

WHAT_TYPE_MEANS = "What kind of reward this is."


NO_REWARD = "none"


class RewardConfig(Section):
    """One reward. The built-in ones give 0 to 1, and 1 is best, so that weights compare."""

    default_timeout_s: ClassVar[float] = 10.0
    default_num_workers: ClassVar[int] = 8
    keeps_cores_busy: ClassVar[bool] = False  # then more workers than cores only cost
    mostly_waits: ClassVar[bool] = False  # then there may be more workers than cores
    keeps_conversations: ClassVar[bool] = False  # in its workers, so that all turns of one belong into the same

    type: str = setting(..., WHAT_TYPE_MEANS)
    weight: float = setting(1.0, "Factor in the sum of the environment's rewards; 0 only records, negative punishes.")
    num_workers: PositiveInt | None = setting(None, "Processes that score at once; null is the environment's number.")
    timeout_s: PositiveFloat | None = setting(
        None, "Seconds after which scoring one answer is given up; null is the environment's limit."
    )


def _is_regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f", character {error.pos + 1}"
        raise ValueError(f"not a regular expression: {error.msg}{where}") from None
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression that can be used: {error}") from None
    return pattern


Regex = Annotated[str, AfterValidator(_is_regular_expression)]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_is_regular_expression)]


PLACEHOLDERS = ("question", "response", "reference", "prompt", "conversation")
PLACEHOLDER = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)(?:\.([A-Za-z0-9_]+))?\}")


def with_known_placeholders(template: str) -> str:
    """ValueError for a placeholder that nothing would fill. Other braces, as in JSON, are just braces."""
    for match in PLACEHOLDER.finditer(template):
        name, key = match[2], match[3]
        if name is None or name in PLACEHOLDERS or (name == "metadata" and key):
            continue
        near = get_close_matches(name, PLACEHOLDERS, n=1)
        hint = f"did you mean {{{near[0]}}}?" if near else f"there are {', '.join(PLACEHOLDERS)} and metadata.KEY"
        raise ValueError(f"{match[0]} is not a placeholder; {hint}; a literal one is written {{{match[0]}}}")
    return template


def judge_template(template: str) -> str:
    with_known_placeholders(template)
    if "{response}" not in template and "{conversation}" not in template:
        raise ValueError("it shows the judge no answer: {response} is missing")
    return template


def _two_ends(ends: list[float]) -> list[float]:
    if ends[0] == ends[1]:
        raise ValueError("two different numbers are needed, for the worst and the best")
    return ends


Range = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_two_ends)]


class JudgeRewardConfig(RewardConfig):
    """How good a language model behind an OpenAI-compatible endpoint finds the answer, 0 to 1."""

    default_timeout_s: ClassVar[float] = 300.0  # with all retries of one answer
    default_num_workers: ClassVar[int] = 16
    mostly_waits: ClassVar[bool] = True

    type: Literal["judge"] = setting(..., WHAT_TYPE_MEANS)
    base_url: str = setting(..., "Where the endpoint is, up to and without /chat/completions.")
    model: str = setting(..., "Model that judges, by its name there.", min_length=1)
    api_key_env: str | None = setting(None, "Environment variable that holds the API key; null sends none.")
    prompt: Annotated[str, AfterValidator(judge_template)] | None = setting(
        None,
        "Prompt of the judge, with {response}, {question}, {reference} and others; null asks for a score of 0 to 10.",
    )
    prompt_file: str | None = setting(None, "File with that text instead.")
    system: Annotated[str, AfterValidator(with_known_placeholders)] | None = setting(
        None, "System message of the request; null sends none."
    )
    score_key: str = setting("score", "Key of the last JSON object in the verdict that holds the score.", min_length=1)
    score_pattern: Pattern | None = setting(
        None, "Regular expression instead, whose last match is the score: its first group, if any."
    )
    labels: dict[str, float] | None = setting(
        None, "Words that the verdict may hold in place of a number, and what each is worth."
    )
    score_range: Range = setting([0.0, 10.0], "Worst and best score; anything outside is not a verdict.")
    reward_range: Range = setting([0.0, 1.0], "Rewards that the worst and the best score become.")
    temperature: NonNegativeFloat = setting(0.0, "Sampling temperature of the judge.")
    max_tokens: PositiveInt = setting(1024, "Longest verdict in tokens.")
    extra_body: FreeMap = setting(dict, "Further keys of the request, as the endpoint expects.")
    extra_headers: dict[str, str] = setting(dict, "Further headers of the request.")
    request_timeout_s: PositiveFloat = setting(60.0, "Seconds for one request, from connecting to its last byte.")
    max_retries: NonNegativeInt = setting(5, "Requests after the first, when one fails or its verdict cannot be read.")
    retry_base_s: PositiveFloat = setting(1.0, "Seconds before the first retry, doubled for each next, with jitter.")
    retry_max_s: PositiveFloat = setting(60.0, "Longest pause in seconds, unless the endpoint asks for a longer one.")
    cache: bool = setting(True, "Keeps verdicts, so that no request is paid for twice.")
    cache_path: str | None = setting(None, "SQLite file of those; null is posttrain/judge.sqlite in the cache folder.")
    input_price: NonNegativeFloat = setting(0.0, "Price of a million tokens that the judge reads, in any currency.")
    output_price: NonNegativeFloat = setting(0.0, "Price of a million tokens that the judge writes.")
    usage_file: str | None = setting(None, "JSON file with sums of requests, tokens, cost; null is beside the cache.")

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not re.match(r"https?://[^/\s]+", value):
            raise ValueError("'http://host:port/v1' or 'https://host/v1' is needed")
        try:
            urlsplit(value).port  # noqa: B018
        except ValueError:  # its text quotes the part behind the colon, which may be a password
            raise ValueError("the port must be a number, as in http://host:port/v1; a / in a password is %2F") from None
        return value.rstrip("/").removesuffix("/chat/completions")

    @model_validator(mode="after")
    def _labels_are_in_range(self) -> JudgeRewardConfig:
        low, high = sorted(self.score_range)
        for label, worth in (self.labels or {}).items():
            if not low <= worth <= high:
                raise ValueError(f"labels.{label} is {worth:g}, outside of score_range {self.score_range}")
        if self.prompt_file is not None and self.prompt is not None:
            raise ValueError("prompt and prompt_file are both given: one of them is needed")
        return self


MathVerifier = Literal["hf_math_verify", "dapo_math_verify"]
VerifierType = Literal["math", "english_multichoice", "multilingual_multichoice"]
AnswerForm = Literal["latex", "expr"]
LengthUnit = Literal["tokens", "words", "characters"]


class _RuleReward(RewardConfig):
    default_num_workers: ClassVar[int] = 2  # microseconds of work each
    keeps_cores_busy: ClassVar[bool] = True


class MathRewardConfig(RewardConfig):
    """1 when the final answer equals the reference, as mathematics (hf_math_verify) or as normalised text."""

    keeps_cores_busy: ClassVar[bool] = True

    type: Literal["math"] = setting(..., WHAT_TYPE_MEANS)
    math_verify_impl: MathVerifier | None = setting(
        None, "How answers are compared: as mathematics, or as normalised text; null is the former."
    )
    verifier_type: VerifierType | None = setting(None, "What kind of answer is expected, as in NeMo RL; null is math.")
    reference_as: Literal["boxed", "written"] = setting(
        "boxed", "Reads the reference as if it stood in a box, or as it is written (LaTeX then needs its dollars)."
    )
    match_types: list[AnswerForm] = setting(
        ["latex", "expr"],
        "What counts as an answer: LaTeX in a box or dollars, plain expressions and numbers, or both.",
        min_length=1,
    )
    boxed_match_priority: NonNegativeInt = setting(0, "How early a box is looked for: 0 first, 50 after final answers.")
    precision: NonNegativeInt = setting(6, "Decimals to which numbers are compared.")
    strict: bool = setting(True, "Tells sets from intervals and keeps the names of variables apart.")
    allow_set_relation_comp: bool = setting(False, "Accepts a set for an inequality that describes it, and vice versa.")
    extract: Pattern | None = setting(
        None, "Regular expression whose last match is the answer: its first group if it has one; null reads all."
    )
    as_math_verify: bool = setting(
        False, "Takes math-verify's verdict as it is, also on numbers that are equal only because both are cut off."
    )


class CosineMathRewardConfig(MathRewardConfig):
    """Mathematics, worth more when short if right and less when short if wrong, as TRL's cosine-scaled reward."""

    type: Literal["math_cosine"] = setting(..., WHAT_TYPE_MEANS)  # type: ignore[assignment]
    max_length: PositiveInt = setting(..., "Tokens of an answer at which the long end of the schedule is reached.")
    min_value_wrong: float = setting(-1.0, "Reward of a wrong answer of no length.")
    max_value_wrong: float = setting(-0.5, "Reward of a wrong answer of max_length tokens.")
    min_value_correct: float = setting(0.5, "Reward of a right answer of max_length tokens.")
    max_value_correct: float = setting(1.0, "Reward of a right answer of no length.")


class MultipleChoiceRewardConfig(_RuleReward):
    """1 when the letter that the answer states last is the reference's."""

    type: Literal["multiple_choice"] = setting(..., WHAT_TYPE_MEANS)
    language: Literal["english", "multilingual"] = setting(
        "english", "Languages of the words for `answer` and of the letters."
    )


class ExactRewardConfig(_RuleReward):
    """1 when the answer is the reference, or one of a list of references, as text."""

    type: Literal["exact"] = setting(..., WHAT_TYPE_MEANS)
    extract: Pattern | None = setting(
        None, "Regular expression whose last match is compared: its first group if it has one; null is all."
    )
    ignore_case: bool = setting(False, "Compares without regard to capital letters.")
    ignore_punctuation: bool = setting(False, "Compares without punctuation; signs and points of numbers stay.")
    ignore_articles: bool = setting(False, "Compares without the words a, an and the.")
    collapse_whitespace: bool = setting(True, "Takes any run of white space for one space, and none at the ends.")
    normalise_unicode: bool = setting(True, "Takes characters that look alike (full width, ligatures) as equal.")


class BoxRewardConfig(_RuleReward):
    """How well the box [x1, y1, x2, y2] that the answer states last covers the reference: intersection over union."""

    type: Literal["box"] = setting(..., WHAT_TYPE_MEANS)
    extract: Pattern | None = setting(
        None, "Regular expression in whose last match the box is looked for: in its first group if it has one."
    )
    threshold: float | None = setting(None, "1 from this IoU on, otherwise 0; null gives the IoU itself.", gt=0, le=1)
    giou_below: NonNegativeFloat = setting(
        0.0,
        "Below this IoU the generalised one, -1 to 1, is given, which distinguishes near from distant boxes; 0: off.",
    )

    @model_validator(mode="after")
    def _one_measure(self) -> BoxRewardConfig:
        if self.threshold is not None and self.giou_below:
            raise ValueError("threshold gives 0 or 1: it takes no giou_below")
        return self


class RegexRewardConfig(_RuleReward):
    """1 when a regular expression matches the answer."""

    type: Literal["regex"] = setting(..., WHAT_TYPE_MEANS)
    pattern: Pattern = setting(..., "Regular expression, in Python's syntax.")
    match: Literal["search", "full"] = setting("search", "Whether it matches anywhere, or the whole answer.")
    ignore_case: bool = setting(False, "Matches without regard to capital letters.")
    multiline: bool = setting(False, "^ and $ also match at the ends of lines.")
    dotall: bool = setting(False, "A dot also matches a line break.")


class JsonSchemaRewardConfig(_RuleReward):
    """1 when the answer is JSON, and fits the schema if there is one."""

    type: Literal["json_schema"] = setting(..., WHAT_TYPE_MEANS)
    schema_: FreeMap | None = setting(None, "JSON schema that the JSON must fit.", alias="schema")
    schema_file: str | None = setting(None, "File with that schema instead, as JSON.")
    where: Literal["auto", "whole", "fenced"] = setting(
        "auto", "JSON is the whole answer, the last ``` block of it, or (auto) that block if there is one."
    )

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaRewardConfig:
        if self.schema_ is not None and self.schema_file is not None:
            raise ValueError("schema and schema_file are both given: one of them is needed")
        return self


class LengthRewardConfig(_RuleReward):
    """1 when the answer is as long as wanted, less the further it is from that."""

    type: Literal["length"] = setting(..., WHAT_TYPE_MEANS)
    limit: PositiveInt | None = setting(None, "Length up to which nothing is lost; set this or target.")
    target: PositiveInt | None = setting(None, "Length that is best; set this or limit.")
    unit: LengthUnit = setting("tokens", "What length is counted in.")
    tolerance: NonNegativeInt = setting(0, "Units beyond limit, or away from target, over which the reward falls to 0.")
    shape: Literal["linear", "cosine"] = setting(
        "linear", "How it falls: in a line from the limit on, or as half a cosine from length 0 on."
    )

    @model_validator(mode="after")
    def _one_aim(self) -> LengthRewardConfig:
        if (self.limit is None) == (self.target is None):
            raise ValueError("one of limit and target is needed")
        if self.shape == "cosine" and (self.limit is None or self.tolerance):
            raise ValueError("shape cosine falls from length 0 to limit: it takes limit, and no target or tolerance")
        return self


class RepetitionRewardConfig(_RuleReward):
    """The share of n-grams of the answer that are not repeats of others; 1 when none repeats."""

    type: Literal["repetition"] = setting(..., WHAT_TYPE_MEANS)
    ngram_size: PositiveInt = setting(3, "How many units in a row make one n-gram.")
    unit: LengthUnit = setting("tokens", "What n-grams are made of.")


class NoRewardConfig(_RuleReward):
    """0 for every answer: for distillation, which needs no rewards."""

    type: Literal["none"] = setting(..., WHAT_TYPE_MEANS)


class PythonRewardConfig(RewardConfig):
    """What a Python function of yours returns."""

    type: Literal["python"] = setting(..., WHAT_TYPE_MEANS)
    function: str = setting(..., "`file.py:name`, `package.module:name` or `package.module.name`.")
    as_messages: bool = setting(False, "Gives a function with TRL's signature lists of messages instead of texts.")

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if not value.strip() or not ({":", "."} & set(value)):
            raise ValueError("'file.py:name', 'package.module:name' or 'package.module.name' is needed")
        return value.strip()


class CodeRewardConfig(RewardConfig):
    """1 when the code in the answer passes the tests of its task, run in a sandbox."""

    default_timeout_s: ClassVar[float] = 60.0  # for all tests of one answer
    keeps_cores_busy: ClassVar[bool] = True

    type: Literal["code"] = setting(..., WHAT_TYPE_MEANS)
    sandbox: Literal["strict", "best_effort", "none"] = setting(
        "strict", "strict is namespaces or nothing, best_effort the best that this machine has, none only limits."
    )
    reward: Literal["all_passed", "share_passed"] = setting(
        "all_passed", "Gives 1 only when every test passes, or the share of tests that do."
    )
    code_block: Literal["python", "any", "whole"] = setting(
        "python", "Code is the last ```python block, the last block of any language, or the whole answer."
    )
    tests_key: str | None = setting(None, "Key of the task's metadata that holds its tests; null is the usual ones.")
    output_match: Literal["lines", "tokens"] = setting("lines", "Compares what is printed by lines, or by words.")
    time_limit_s: PositiveFloat = setting(5.0, "CPU seconds of one process of a program, rounded up to whole ones.")
    wall_time_limit_s: PositiveFloat | None = setting(
        None, "Seconds of wall-clock time for one program; null is 3 x time_limit_s."
    )
    max_memory_mib: PositiveInt = setting(1024, "MiB of memory for one program and its children.")
    max_processes: PositiveInt = setting(16, "Processes and threads that a program may have at a time.")
    max_files_mib: PositiveInt = setting(64, "MiB that a program may write to files.")
    max_output_kib: PositiveInt = setting(1024, "KiB that a program may print.")
    python: str | None = setting(None, "Python interpreter that runs the code; null is the one that runs posttrain.")
    site_packages: bool = setting(False, "Lets the code import packages that are installed beside that interpreter.")
    read_only_paths: list[str] = setting(list, "Absolute paths that the code may read, besides Python and libraries.")


class RewardModelRewardConfig(RewardConfig):
    """The score of a reward model, as `posttrain rm` trains one: any number; score_mean and score_std scale it."""

    type: Literal["reward_model"] = setting(..., WHAT_TYPE_MEANS)
    model_name: str = setting(
        ..., "Folder or hub name of the reward model; a checkpoint's folder means the model in it.", min_length=1
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where it is, beside the training; auto prefers cuda.")
    precision: Literal["float32", "bfloat16"] | None = setting(
        None, "Number format of its weights; null is the one they are saved in, which they were trained in."
    )
    max_model_len: PositiveInt | None = setting(
        None, "Longest conversation in tokens, longer ones are unscored; null is the model's own limit."
    )
    max_batch_tokens: PositiveInt = setting(16384, "Tokens in one forward pass; changes memory and speed, not scores.")
    score_mean: float = setting(0.0, "Subtracted from the score, e.g. rewards_mean of its training.")
    score_std: PositiveFloat = setting(1.0, "Divides the score then, e.g. rewards_std of its training.")
    resources: ResourcesConfig | None = setting(
        None, "GPUs of its own, as a worker group beside the training; null: in the process that drives the run."
    )

    @field_validator("resources", mode="before")
    @classmethod
    def _known_resources(cls, value: object) -> object:
        if isinstance(value, dict):
            refuse_unknown_keys(value, list(ResourcesConfig.model_fields), "`resources`")
        return value


class TurnsConfig(RewardConfig):
    """The class behind `turns`, as it is sent to its worker processes. Not a type of reward: no block names it."""

    default_num_workers: ClassVar[int] = 4

    type: Literal["turns"] = setting("turns", "Tells the workers what they are.")
    turns: str = setting(..., "A built-in name, `file.py:Class`, `package.module:Class` or `package.module.Class`.")
    kwargs: FreeMap = setting(dict, "Arguments of the class.")


class RemoteTurnsConfig(TurnsConfig):
    """A class that talks to a process or a server of its own, which keeps the state."""

    default_timeout_s: ClassVar[float] = 60.0
    default_num_workers: ClassVar[int] = 8
    mostly_waits: ClassVar[bool] = True
    keeps_conversations: ClassVar[bool] = True


class AgentConfig(RewardConfig):
    """The agent of a block, as it is sent to its worker processes. Not a type of reward: no block names it."""

    default_timeout_s: ClassVar[float] = 900.0
    default_num_workers: ClassVar[int] = 16
    mostly_waits: ClassVar[bool] = True

    type: Literal["agent"] = setting("agent", "Tells the workers what they are.")
    agent: str | list[str] = setting(..., "`file.py:function`, `package.module:function`, or the words of a command.")
    kwargs: FreeMap = setting(dict, "Further arguments of the function.")
    env: dict[str, str | None] = setting(dict, "Variables that it gets beside the usual ones.")
    turn_timeout_s: PositiveFloat | None = setting(None, "Seconds between two requests; null is no limit.")


REWARD_TYPES: dict[str, type[RewardConfig]] = {
    get_args(section.model_fields["type"].annotation)[0]: section
    for section in (
        *(MathRewardConfig, CosineMathRewardConfig, MultipleChoiceRewardConfig, ExactRewardConfig, BoxRewardConfig),
        *(RegexRewardConfig, JsonSchemaRewardConfig, LengthRewardConfig, RepetitionRewardConfig, NoRewardConfig),
        *(PythonRewardConfig, RewardModelRewardConfig, CodeRewardConfig, JudgeRewardConfig),
    )
}

# Rewards of datasets with images, in NeMo RL's names: an environment with the name of one needs no further keys.
NAMED_REWARDS: dict[str, list[FreeMap]] = {
    "clevr-cogent": [{"name": "format", "weight": 0.2}, {"name": "exact_alnum", "weight": 0.8}],
    "geometry3k": [{"name": "format", "weight": 0.1}, {"name": "math_expr", "weight": 0.9}],
    "refcoco": [
        {"name": "format", "weight": 0.1},
        {"name": "bbox_giou", "weight": 0.9, "kwargs": {"giou_penalty_thres": 0.5}},
    ],
}


def rewards_of_functions(functions: Sequence[FreeMap]) -> dict[str, FreeMap]:
    """The `rewards` that NeMo RL's `reward_functions` name. Weights are scaled to a sum of 1, as there."""
    total = sum(float(one.get("weight", 0)) for one in functions)
    if total <= 0:
        raise ValueError("`reward_functions` needs entries {name, weight} with a positive sum of weights")
    rewards: dict[str, FreeMap] = {}
    for one in functions:
        kwargs = dict(one.get("kwargs") or {})
        tag, think = (re.escape(str(kwargs.pop(key, key[:-4]))) for key in ("answer_tag", "think_tag"))
        tag = re.escape(str(kwargs.pop("tag"))) if "tag" in kwargs else tag
        weight, tagged = float(one["weight"]) / total, f"(?s)<{tag}>(.*?)</{tag}>"
        match one.get("name"):
            case "format":
                for part, share in ((think, 0.25), (tag, 0.75)):
                    pattern = f"(?s)<{part}>.*</{part}>"
                    rewards[f"format_{part}"] = {"type": "regex", "pattern": pattern, "weight": share * weight}
            case "exact_alnum":
                options: FreeMap = {"extract": tagged, "ignore_case": True, "ignore_punctuation": True}
                rewards["exact"] = {"type": "exact", "weight": weight, **options}
            case "math_expr":
                rewards["math"] = {"type": "math", "extract": tagged, "weight": weight}
            case "bbox_giou":
                below = kwargs.pop("giou_penalty_thres", 10.0)
                rewards["box"] = {"type": "box", "extract": tagged, "giou_below": below, "weight": weight}
            case name:
                known = "format, exact_alnum, math_expr and bbox_giou"
                raise ValueError(f"`reward_functions` has {name!r}; {known} are known, others are `rewards`")
        if kwargs:
            raise ValueError(f"`reward_functions`: {one['name']} has no argument {next(iter(kwargs))!r}")
    return rewards


def reward_keys(section: type[RewardConfig]) -> dict[str, FieldInfo]:
    """The keys of a type as they are written in a file, with pydantic's description of each."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def takes_text_only(info: FieldInfo) -> bool:
    """Whether a key can be nothing but a text (or null)."""
    return [member for member in members(info.annotation) if member is not NoneType] == [str]


def parse_reward(block: FreeMap, *, without: frozenset[str] = frozenset()) -> RewardConfig:
    """A reward from its map. Raises pydantic's `ValidationError`, located at the key that is wrong.

    `without` names keys that have no place where this map stands.
    """
    kind = block.get("type")
    if kind not in REWARD_TYPES:
        near = get_close_matches(kind, REWARD_TYPES, n=1) if isinstance(kind, str) else []
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(REWARD_TYPES)} is needed"
        problem = "is missing" if kind is None else "is not a type of reward"
        raise _located("type", kind, f"{problem}; {hint}")
    section = REWARD_TYPES[str(kind)]
    known = [key for key in reward_keys(section) if key not in without]
    refuse_unknown_keys(block, known, f"the reward type {kind!r}")
    return section.model_validate({key: value for key, value in block.items() if value is not None or key == "type"})


def refuse_unknown_keys(block: FreeMap, known: Sequence[str], owner: str) -> None:
    for key, value in block.items():
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            raise _located(str(key), value, f"is not a key of {owner}; {hint}", UNKNOWN_KEY)


def _located(key: str, value: object, message: str, type_of_error: LiteralString = "reward_key") -> ValidationError:
    # Braces would be taken for places to fill in.
    kind = PydanticCustomError(type_of_error, "{message}", {"message": message})
    return ValidationError.from_exception_data("reward", [InitErrorDetails(type=kind, loc=(key,), input=value)])


def check_reward(block: FreeMap) -> FreeMap:
    """The map itself, if a reward can be made of it."""
    parse_reward(block)
    return block


RewardBlock = Annotated[FreeMap, AfterValidator(check_reward)]
