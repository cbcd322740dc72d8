"""`posttrain eval`: measure a model on a benchmark; `posttrain eval compare A B`: which of two is better, and where."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.overrides_parser import OverridesParser
from posttrain.config import EvalRunConfig, LoadedConfig, load_config
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.reporting.console import Console
from posttrain.run import quieten_libraries, refuse_missing_model

if TYPE_CHECKING:
    from posttrain.apps.evaluate.harness import HarnessRun

EXIT_NOTHING_SCORED = 1


def add_arguments(parser: OverridesParser) -> None:
    parser.usage = (
        "posttrain eval [--config FILE] [options] [MODEL] [key=value …]\n       posttrain eval compare A B [options]"
    )
    parser.actions["compare"] = (
        "compare two evaluations of the same problems: which model is better, by how much, and where",
        _add_compare,
    )
    parser.config_file()
    parser.switch("--list", "list the benchmarks that are known by name")
    parser.option("--gpu-hour-price PRICE", "shows what the evaluation cost", type=float)
    parser.option("--harness", "evaluate with the tasks of another harness", choices=("lm-eval", "inspect"))
    parser.option("--tasks NAMES", "with --harness: its tasks, separated by commas")
    parser.option("--harness-python FILE", "with --harness: a Python that has it")
    parser.option("--harness-metric NAME", "with --harness: the metric that is the reward (default: the task's first)")
    parser.option("--harness-args WORDS", "with --harness: further options of its command line, in quotes")
    parser.switch("--retry-unscored", "try problems again whose samples could not all be scored")
    parser.switch("--json", "print summary.json instead of the block")
    parser.switch("--quiet", "print the result, warnings and errors only")
    parser.words("MODEL key=value", "the model, and settings of the config")
    parser.set_defaults(run=run, interrupted="stopped; finished problems are saved, and the same command resumes")


def _add_compare(parser: OverridesParser) -> None:
    parser.words("A B", "two folders that `posttrain eval` has written")
    parser.option("--metric", "pass@k, cons@k or avg@k; the main metric of A if left out")
    parser.option("--confidence", "of the interval, as a share", default=0.95)
    parser.option("--seed", "of resampling", default=42)
    parser.option("--html FILE", "also write a self-contained HTML page", type=Path)
    parser.switch("--json", "print the comparison as JSON")
    parser.option("--show N", "changed problems to list", default=20)
    parser.set_defaults(run=run_compare)


def run(args: argparse.Namespace) -> int:
    if args.list:
        from posttrain.apps.evaluate.benchmarks import lines_for_people

        print("\n".join(["benchmarks (data.dataset_name):", *lines_for_people()]))
        return 0
    named = ("tasks", "harness_python", "harness_metric", "harness_args")
    for option in [f"--{name.replace('_', '-')}" for name in named if getattr(args, name) is not None]:
        if args.harness is None:
            raise InputError(f"{option} needs --harness lm-eval or --harness inspect")
    loaded = load_config("eval", args.config, _overrides(args))
    loaded.print_warnings()

    if loaded.config.server_url is None:  # else the name is one that the server knows
        refuse_missing_model(str(loaded.config.generation.model_name))
    quieten_libraries()
    from posttrain.apps.evaluate.build import EvaluationBuild
    from posttrain.apps.evaluate.results import SUMMARY_FILE
    from posttrain.apps.evaluate.summary import block

    # Results go to standard output, everything else beside it: `--json` can be piped.
    console = Console(sys.stderr, quiet=args.quiet)
    if args.harness is None:
        evaluation = EvaluationBuild(loaded, say=console.note)
        done = [(loaded.config, *evaluation.execute(console.progress, retry_unscored=args.retry_unscored))]
    else:
        done = _harness(args, loaded, console).execute()
    for config, summary, problems, folder in done:
        lines = [*block(config, summary, problems), f"  saved      {folder}"]
        if args.harness is not None:  # sampling is the task's own, but for what the user has set
            lines = [line for line in lines if not line.startswith("max_new_tokens=")]
        print((folder / SUMMARY_FILE).read_text("utf-8").rstrip() if args.json else "\n".join(lines))
    return EXIT_NOTHING_SCORED if all(summary.score is None for _, summary, _, _ in done) else 0


def _harness(args: argparse.Namespace, loaded: LoadedConfig[EvalRunConfig], console: Console) -> HarnessRun:
    from posttrain.apps.evaluate.harness import HarnessRun, split_words

    if args.retry_unscored:
        raise InputError("--retry-unscored does not go together with --harness, which samples a task as a whole")
    tasks = [task.strip() for task in (args.tasks or "").split(",") if task.strip()]
    words = split_words(args.harness_args)
    return HarnessRun(loaded, args.harness, tasks, console.note, args.harness_python, args.harness_metric, words)


def _overrides(args: argparse.Namespace) -> list[str]:
    """The `key=value` words; a word that cannot be one names the model."""
    models = [word for word in args.words if _is_model(word)]
    if len(models) > 1:
        raise InputError(
            f"two models are named, {models[0]!r} and {models[1]!r}; problems are named with "
            f"data.dataset_name={models[1]}, and two evaluations are compared with eval compare A B"
        )
    overrides = [word for word in args.words if not _is_model(word)]
    overrides = [f"generation.model_name={models[0]}", *overrides] if models else overrides
    if args.gpu_hour_price is not None:
        overrides.append(f"eval.gpu_hour_price={args.gpu_hour_price}")
    return overrides


def _is_model(word: str) -> bool:
    if word.startswith(("http://", "https://")):
        return True
    return "=" not in word and (not word.startswith("~") or word.startswith("~/"))  # ~a.b takes a setting out


def run_compare(args: argparse.Namespace) -> int:
    from posttrain.apps.evaluate.comparison import compare, comparison_json, comparison_lines, comparison_page
    from posttrain.apps.evaluate.results import read_evaluation

    if len(args.words) != 2:
        raise InputError(f"eval compare needs two folders, A and B; {len(args.words)} are given")
    if not 0 < args.confidence < 1:
        raise InputError(f"--confidence {args.confidence}: a share between 0 and 1 is needed, such as 0.95")
    first, second = (read_evaluation(folder) for folder in args.words)
    comparison = compare(first, second, args.metric, confidence=args.confidence, seed=args.seed)
    if args.html is not None:
        durable.write_for_user(args.html, comparison_page(comparison))
    print(comparison_json(comparison) if args.json else "\n".join(comparison_lines(comparison, show=args.show)))
    if args.html is not None and not args.json:
        print(f"\n  page  {args.html}")
    return 0
