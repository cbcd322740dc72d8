"""Rules about conversations with tools and agents: tools that are not called or fail, limits that cut episodes, agents
that die. Counts are means over the rollouts of a step.
"""

from __future__ import annotations

from posttrain.reporting.doctor.findings import Severity
from posttrain.reporting.doctor.history import RunHistory
from posttrain.reporting.doctor.rule import Sighting, percent

CALLS, MALFORMED, FAILED = "train/tool_calls", "train/malformed_tool_calls", "train/failed_tool_calls"
AGENT_CALLS, WITH_TOOLS = "train/agent_calls", "train/calls_with_tools"
OUT_OF_TURNS, OUT_OF_TOKENS = "train/out_of_turns", "train/out_of_tokens"
PERSISTENCE = 5  # steps
ERRORS_WARNING, ERRORS_ERROR = 0.3, 0.8
CUT_WARNING, CUT_ERROR = 0.2, 0.5
DEATHS_WARNING, DEATHS_ERROR = 0.05, 0.3


def tools_unused(run: RunHistory) -> Sighting | None:
    """Of agents only if their requests offer tools."""
    calls = run.tail(CALLS, PERSISTENCE)
    if len(calls) < PERSISTENCE or any(calls) or any(run.tail(MALFORMED, PERSISTENCE)):
        return None
    if run.now(AGENT_CALLS) is not None and not run.now(WITH_TOOLS):
        return None
    text = f"no tool was called in the last {PERSISTENCE} steps, although there are tools"
    fixes = ("say in the prompt when to call a tool, or train on examples of calls first (posttrain sft)",)
    return Sighting("warning", CALLS, 0.0, text, fixes)


def tool_errors(run: RunHistory) -> Sighting | None:
    calls, malformed, failed = (sum(run.tail(key, PERSISTENCE)) for key in (CALLS, MALFORMED, FAILED))
    if not calls + malformed or len(run.values(CALLS)) < PERSISTENCE:
        return None
    share = (malformed + failed) / (calls + malformed)
    if share <= ERRORS_WARNING:
        return None
    key = MALFORMED if malformed >= failed else FAILED
    why = "cannot be read, or violate the schema" if key == MALFORMED else "are refused by the tool"
    text = f"{percent(share)} of the tool calls of the last {PERSISTENCE} steps fail; most of them {why}"
    fixes: tuple[str, ...] = ("read some of them in the rollouts",)
    if key == MALFORMED:
        fixes = (run.fix("policy.generation.stop_strings", '["</tool_call>"]'), *fixes)
    return Sighting("error" if share > ERRORS_ERROR else "warning", key, run.now(key), text, fixes)


def episodes_cut(run: RunHistory) -> Sighting | None:
    keys = (OUT_OF_TURNS, OUT_OF_TOKENS)
    key = max(keys, key=lambda one: run.now(one) or 0.0)
    now = run.now(key) or 0.0
    if not run.all_above(key, CUT_WARNING, PERSISTENCE):
        return None
    setting = "grpo.max_rollout_turns" if key == OUT_OF_TURNS else "policy.max_total_sequence_length"
    limit = run.number_setting(setting)
    text = f"{percent(now)} of the conversations are cut by {setting}, so their end is not rewarded"
    fixes = (run.fix(setting, str(int(2 * limit)) if limit else "twice as much"),)
    return Sighting("error" if run.all_above(key, CUT_ERROR, PERSISTENCE) else "warning", key, now, text, fixes)


def agents_die(run: RunHistory) -> Sighting | None:
    count = min(PERSISTENCE, len(run.values("train/unscored")))
    failed, sampled = run.tail("train/unscored", count), run.tail("train/num_samples", count)
    if run.now(AGENT_CALLS) is None or not failed or not sum(sampled):
        return None
    share = sum(failed) / sum(sampled)
    if share <= DEATHS_WARNING or (count < 3 and share < 1):
        return None
    text = f"{percent(share)} of the agents of the last steps raised, hung, died or were not scored; unscored.jsonl "
    fixes = ("posttrain agents check runs one of them", "if they only need more time: env.NAME.timeout_s")
    severity: Severity = "error" if share > DEATHS_ERROR else "warning"
    return Sighting(severity, "train/unscored", failed[-1], text + "has the reasons", fixes, "unscored")
