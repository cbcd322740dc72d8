"""`data` and `env`: what is trained on, and who judges the answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from posttrain.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

# Tags of the two shapes that `data.train` may have; error messages leave them out.
MAP_TAG, LIST_TAG = "<map>", "<list>"


class DatasetConfig(Section):
    """One dataset. A key that is not written is taken from `data.default`, then from what the dataset is known to need."""

    dataset_name: str | None = Field(
        default=None,
        description="Known dataset such as gsm8k, or ResponseDataset / PreferenceDataset for rows of your own.",
    )
    name: str | None = Field(
        default=None, description="What the dataset is called in metrics; null is `default` or a number."
    )
    data_path: str | None = Field(
        default=None, description="File (jsonl, jsonl.gz, parquet), URL or hub name to read it from."
    )
    subset: str | None = Field(default=None, description="Configuration of a hub dataset.")
    split: str | None = Field(default=None, description="Split of a hub dataset, e.g. train.")
    input_key: str | None = Field(default=None, description="Column with the prompt.")
    output_key: str | None = Field(default=None, description="Column with the answer or the expected result.")
    prompt_key: str | None = Field(default=None, description="Column with the prompt of a pair.")
    chosen_key: str | None = Field(default=None, description="Column with the better answer of a pair.")
    rejected_key: str | None = Field(default=None, description="Column with the worse answer of a pair.")
    prompt_file: str | None = Field(
        default=None, description="Text file with one {} where the prompt goes; null uses it as it is."
    )
    system_prompt_file: str | None = Field(
        default=None, description="Text file with the system message; null sends none."
    )
    env_name: str | None = Field(default=None, description="Key under `env` that judges the answers.")
    processor: str | None = Field(
        default=None, description="How rows become prompts, by NeMo RL's name; one way here for all text."
    )
    download_dir: str | None = Field(default=None, description="Folder for downloaded data.")
    repeat: PositiveInt | None = Field(default=None, description="How many times each row is used in one pass.")
    split_validation_size: NonNegativeFloat | None = Field(
        default=None, description="Held out for validation: below 1 a fraction of the rows, from 1 on a number of rows."
    )
    seed: NonNegativeInt | None = Field(default=None, description="Seed of that split.")
    chat_key: str | None = Field(default=None, description="Column with the messages of an openai_format row.")
    system_key: str | None = Field(default=None, description="Column with the system message of an openai_format row.")
    system_prompt: str | None = Field(default=None, description="System message of openai_format rows that have none.")
    tool_key: str | None = Field(default=None, description="Column with the tools of an openai_format row.")
    use_preserving_dataset: bool | None = Field(default=None, description="Keeps columns that differ from row to row.")

    def filled_from(self, default: DatasetConfig | None) -> DatasetConfig:
        """This dataset with the keys that it does not set taken from `default`. A null that was written stays null."""
        if default is None:
            return self
        missing = {key: getattr(default, key) for key in default.model_fields_set - self.model_fields_set}
        return self.model_copy(update=missing)


def _shape(value: Any) -> str:
    return LIST_TAG if isinstance(value, list) else MAP_TAG


Datasets = Annotated[
    Annotated[DatasetConfig, Tag(MAP_TAG)] | Annotated[list[DatasetConfig], Tag(LIST_TAG)],
    Discriminator(_shape),
]


class DataConfig(Section):
    max_input_seq_length: PositiveInt | None = Field(
        default=None, description="Longest prompt in tokens; longer ones are dropped and counted; null does not check."
    )
    shuffle: bool = Field(default=True, description="Draws training rows in a seeded random order.")
    num_workers: NonNegativeInt = Field(default=1, description="Processes that read data in NeMo RL; no effect here.")
    train: Datasets | None = Field(default=None, description="The training dataset, or a list of them.")
    validation: Datasets | None = Field(
        default=None, description="The validation dataset, or a list of them; null is none."
    )
    default: DatasetConfig | None = Field(default=None, description="Keys for datasets that do not set them.")
    use_multiple_dataloader: bool = Field(default=False, description="Draws from each dataset separately.")
    num_prompts_per_dataloader: PositiveInt | None = Field(default=None, description="Prompts drawn from each.")
    custom_dataloader: str | None = Field(default=None, description="Dotted path of a function that draws prompts.")

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


class SftDataConfig(DataConfig):
    add_bos: bool = Field(default=True, description="Puts the start token before the text if it is not there.")
    add_eos: bool = Field(default=True, description="Puts the end token after the answer if it is not there.")
    add_generation_prompt: bool = Field(
        default=False, description="Ends the prompt with the header of the answer, so that the header is not trained."
    )


class EnvironmentConfig(Section):
    """One judge: a Python `function`, or answers checked by `math_verify_impl` / `verifier_type` (always so for `math`)."""

    function: str | None = Field(
        default=None,
        description="Python reward function: `file.py:name` or `package.module.name`; null is the built-in judge.",
    )
    num_workers: PositiveInt | None = Field(
        default=None, description="Processes that judge answers side by side; null picks a number."
    )
    timeout_s: PositiveFloat = Field(default=10.0, description="Seconds after which judging one answer is given up.")
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] | None = Field(
        default=None, description="How answers are compared: as mathematics, or as normalised text; null is the former."
    )
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] | None = Field(
        default=None, description="What kind of answer is expected; null is math."
    )
    stop_strings: list[str] | None = Field(default=None, description="Texts that end an answer in this environment.")
