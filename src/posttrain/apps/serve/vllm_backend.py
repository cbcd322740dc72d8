"""`posttrain serve --backend vllm`: the same command line, served by vLLM's own server, which replaces this process.

posttrain resolves the model and translates the options. API, limits and metrics are vLLM's. Options without a
counterpart in vLLM's server are refused, most of them by the command line.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from posttrain.apps.serve.adapters import find_adapter, load_adapter_tokenizer, warn_of_unused_template
from posttrain.apps.serve.options import ServeOptions
from posttrain.apps.serve.sessions import Say, name_of
from posttrain.data.chat import ChatFormat
from posttrain.data.tool_prompts import ToolChat
from posttrain.engines.vllm import allowed_rank
from posttrain.errors import InputError
from posttrain.files.json_files import read_json
from posttrain.models.accepted_names import ResolvedModel, resolve_registered_model
from posttrain.models.loading import load_tokenizer

# By format of calls.
_REASONING_PARSERS = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "glm45": "glm45",
    "mistral": "mistral",
    "openai": "openai_gptoss",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
}
_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "float32": "float32"}


def vllm_arguments(options: ServeOptions, host: str, port: int, say: Say) -> tuple[list[str], dict[str, str]]:
    """Arguments of `vllm serve`, and variables for its environment, such as the key: users can see arguments."""
    _refuse(options)
    model, engine = resolve_registered_model(options.model, registry=options.registry), options.engine
    adapters = {name: str(_adapter(name, text, model, options, say)) for name, text in options.adapters.items()}
    name = options.served_name or name_of(model)
    arguments = [model.model, "--host", host, "--port", str(port), "--dtype", _DTYPES[engine.precision]]
    arguments += ["--tokenizer", model.tokenizer] if model.tokenizer != model.model else []
    if model.adapter is None:
        arguments += ["--served-model-name", name]
    else:
        adapters = {name: str(model.adapter), **adapters}
    if adapters:
        rank = max(_rank(Path(folder)) for folder in adapters.values())
        arguments += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules"]
        arguments += [f"{adapter}={folder}" for adapter, folder in adapters.items()]
    if engine.max_model_len is not None:
        arguments += ["--max-model-len", str(engine.max_model_len)]
    arguments += ["--max-num-seqs", str(engine.max_batch_size)]
    arguments += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    arguments += ["--logprobs-mode", "processed_logprobs", *_parsers(model)]
    return arguments, {"VLLM_API_KEY": options.api_keys[0]} if options.api_keys else {}


def _parsers(model: ResolvedModel) -> list[str]:
    """vLLM's parsers of calls and reasoning, by the chat template. Without the first, vLLM refuses tools."""
    chat = ToolChat(ChatFormat(load_tokenizer(model.tokenizer, f"model {model.text!r}")))
    form, arguments = chat.answers, list[str]()
    if form.name and chat.writes_tools:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", form.name]
    if form.has_channels or form.reasoning is not None:
        arguments += ["--reasoning-parser", _REASONING_PARSERS[form.name]] if form.name in _REASONING_PARSERS else []
    return arguments


def become_vllm(options: ServeOptions, host: str, port: int, say: Say) -> int:
    """Replace this process by vLLM's server. Returns only if that fails."""
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.exists() else shutil.which("vllm")
    if program is None:
        raise InputError("--backend vllm needs vLLM: pip install 'posttrain[vllm]'")
    arguments, environment = vllm_arguments(options, host, port, say)
    say(
        "vLLM takes over. API, queue, time-outs, body limit and /metrics are vLLM's own now; posttrain's are not in "
        f"force.\n  {program} serve {' '.join(arguments)}"
    )
    os.execve(program, [program, "serve", *arguments], {**os.environ, **environment})


def _adapter(name: str, text: str, main: ResolvedModel, options: ServeOptions, say: Say) -> Path:
    """The folder of an adapter, with a warning if vLLM ignores its chat template."""
    adapter = find_adapter(name, text, main, say, options.registry)
    tokenizer = load_adapter_tokenizer(name, adapter, main, say)
    if tokenizer is not None:
        warn_of_unused_template(name, tokenizer, main, say)
    return adapter.folder


def _refuse(options: ServeOptions) -> None:
    unsupported = ["--device cpu"] if options.engine.device == "cpu" else []
    if len(options.api_keys) > 1:
        unsupported.append("more than one API key")
    if unsupported:
        raise InputError(
            f"vLLM's server has no counterpart for {', '.join(unsupported)}: leave it out, or use --backend native"
        )


def _rank(adapter: Path) -> int:
    config = read_json(adapter / "adapter_config.json")
    largest = max([int(config.get("r", 16)), *(config.get("rank_pattern") or {}).values()])
    return allowed_rank(largest)
