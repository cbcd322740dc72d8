"""A run folder in Python: its metrics, answers and findings, and its newest checkpoint to evaluate and talk with.

Everything is read from the folder on access, so a run that another process is writing can be watched too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import InputError, near_path
from posttrain.reporting.run_files import INFO_FILE, METRICS_FILE, REPORT_FILE, read_info, rollout_step

if TYPE_CHECKING:
    import pandas

    from posttrain.apps.api.settings import Config, Data, Reward
    from posttrain.apps.evaluate.results import Evaluation
    from posttrain.apps.serve.terminal import TerminalChat
    from posttrain.files.json_files import JsonObject
    from posttrain.reporting.doctor import Finding


class RunFailed(RuntimeError):
    """A run that ended without being a success: `exit_code` is the one of the command line, `run` what it wrote."""

    def __init__(self, message: str, run: Run, exit_code: int) -> None:
        super().__init__(message)
        self.run, self.exit_code = run, exit_code


class Findings(list["Finding"]):
    """What the doctor found, the worst first. Shown as text."""

    def __init__(self, found: Iterable[Finding], num_steps: int) -> None:
        super().__init__(found)
        self.num_steps = num_steps

    def __repr__(self) -> str:
        from posttrain.reporting.results import verdict

        return "\n".join([verdict(self, self.num_steps), *(f"  {finding.line}" for finding in self)])


class Run:
    """The run in a folder. `folder` is where its metrics are, `checkpoints` where its checkpoints are."""

    def __init__(self, folder: str | Path, checkpoints: str | Path | None = None) -> None:
        self.folder = Path(folder)
        self.checkpoints = Path(checkpoints) if checkpoints is not None else self.folder
        if not self.folder.is_dir():
            raise InputError(f"{self.folder} is not a folder{near_path(self.folder)}")
        if not (self.folder / INFO_FILE).exists() and not (self.folder / METRICS_FILE).exists():
            raise InputError(f"{self.folder} holds no run: it has neither {INFO_FILE} nor {METRICS_FILE}")
        self._chat: TerminalChat | None = None

    # ------------------------------------------------------------------ what is recorded

    @property
    def info(self) -> JsonObject:
        """`run.json`: title, algorithm, status, times, warnings."""
        return read_info(self.folder)

    @property
    def status(self) -> str:
        """running, finished, or ended early."""
        return str(self.info.get("status", "unknown"))

    @property
    def rows(self) -> Sequence[JsonObject]:
        """One map per step: the rows of `metrics.jsonl`."""
        from posttrain.reporting.run_data import load_run

        return load_run(self.folder).rows

    @property
    def metrics(self) -> pandas.DataFrame:
        """The same as a DataFrame with one column per metric, indexed by step: `run.metrics["train/reward"].plot()`."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "run.metrics needs pandas (pip install pandas); run.rows has the same as plain maps"
            ) from error
        rows = self.rows
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    def rollouts(self, step: int | None = None, *, validation: bool = False) -> list[JsonObject]:
        """The groups of a step, each a prompt with its answers, rewards and advantages. None is the newest step."""
        from posttrain.reporting.rows import read_rollouts
        from posttrain.reporting.run_data import load_run

        files = {rollout_step(path): path for path in load_run(self.folder).rollout_files(validation=validation)}
        if not files:
            raise InputError(f"{self.folder} has no answers of {'validation' if validation else 'training'}")
        wanted = max(found for found in files if found is not None) if step is None else step
        if wanted not in files:
            steps = [found for found in files if found is not None]
            raise InputError(
                f"{self.folder} has no answers of step {step}; it has those of steps {steps[0]} to {steps[-1]}"
            )
        return read_rollouts(files[wanted])

    def doctor(self) -> Findings:
        """What is wrong with the run, with the settings that fix it. Shown as text, and a list of findings."""
        from posttrain.reporting.examination import examine_folder

        data, found = examine_folder(self.folder)
        return Findings(found, data.last_step)

    @property
    def report(self) -> Path:
        """`report.html`."""
        return self.folder / REPORT_FILE

    # ------------------------------------------------------------------ what it trained

    def evaluate(
        self, data: Data, *, reward: Reward | None = None, config: Config | None = None, **settings: Any
    ) -> Evaluation:
        """The newest checkpoint on a benchmark or on rows of your own; see `posttrain.evaluate`."""
        from posttrain.apps.api.calls import evaluate

        return evaluate(self.checkpoints, data, reward=reward, config=config, **settings)

    def chat(self, message: str | None = None, *, new: bool = False, **options: Any) -> str | None:
        """The answer of the newest checkpoint. The conversation goes on from call to call, until `new=True`.

        Without a message: a chat in the terminal. `options` are those of `posttrain chat`: system, temperature, top_p,
        max_tokens, seed, max_model_len, precision, device. They hold until the next call with options.
        """
        from posttrain.run import quieten_libraries

        quieten_libraries()
        from posttrain.apps.serve.options import ChatOptions
        from posttrain.apps.serve.terminal import converse, open_chat

        if self._chat is None or options:
            self._chat = open_chat(str(self.checkpoints), ChatOptions(**options))
        if new:
            self._chat.reset()
        if message is None:
            converse(
                self._chat, lambda: input("> "), partial(print, end="", flush=True), partial(print, end="", flush=True)
            )
            return None
        return "".join(self._chat.answer(message))

    # ------------------------------------------------------------------ how it is shown

    def __repr__(self) -> str:
        info, rows = self.info, self.rows
        steps = f"step {rows[-1]['step']} of {info.get('max_steps', '?')}" if rows else "no step yet"
        return f"<Run {self.folder}: {info.get('title', 'untitled')}, {self.status}, {steps}>"

    def _repr_html_(self) -> str:
        from posttrain.apps.api.notebook import run_html

        return run_html(self.folder)
