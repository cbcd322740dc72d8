"""What the published guides show, beside what posttrain shows: the tables of docs/seeds/checked.md.

`seed_features.yaml` has the rows. A feature is looked for (`seen`, a pattern) in the output of the guide's script in
examples/seeds, which contains `command`, or of the command `run`. A line of a guide's block is looked for (`ours`) in
the block of the same step: it is there once. `seed_record.json` has the lines that were found, and the day:

SEED_RECORD=1 pytest tests/integration/test_seed_scripts.py tests/integration/test_seed_features.py    writes it
"""

from __future__ import annotations

import json
import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from launch_profiles import EKS, GKE, make_profile

from posttrain.apps.launch.launch_request import request_run
from posttrain.apps.launch.lint.check import check_manifests
from posttrain.apps.launch.manifest_files import read_text
from posttrain.apps.launch.workloads import render_run
from posttrain.config import load_config

TESTS = Path(__file__).parent
RECORD = TESTS / "seed_record.json"
ROWS: dict[str, list[dict[str, Any]]] = yaml.safe_load((TESTS / "seed_features.yaml").read_text(encoding="utf-8"))
FEATURES, LINES = ROWS["features"], ROWS["lines"]
MANIFESTS = TESTS.parent / "docs" / "seeds" / "manifests"
_LONGEST, _LONGEST_SHOWN = 100, 60


def check_script(seed: str, output: str, log: str = "") -> None:
    """That the output of a guide's script has its features, and the block of its second step the lines of the guide."""
    for row in FEATURES:
        if row["seed"] == seed and "command" in row:
            check_feature(row, output + "\n" + log)
    block = log[log.rindex("= Step 2/2 =") - 25 :] if log else ""
    for row in LINES if block else ():
        if row["seed"] == seed and "ours" in row:
            found = _found(row["ours"], block)
            assert len(found) == 1, f"{row['printed']}: {found}"
            _record(f"{seed} {row['printed']}", found[0], row["ours"])


def check_feature(row: dict[str, Any], output: str) -> None:
    found = _found(row["seen"], output)
    assert found, f"{row['feature']}: {row['seen']} is not in\n{output[-3000:]}"
    _record(f"{row['seed']} {row['feature']}", found[0], row["seen"])


def _found(pattern: str, text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if re.search(pattern, line)]


def _record(key: str, line: str, pattern: str) -> None:
    """The line, or what follows the match in a long one, without folders of this machine."""
    if os.environ.get("SEED_RECORD"):
        found = re.search(pattern, line)
        assert found is not None
        begin = found.start() if len(line) > _LONGEST else 0
        short = re.sub(r"/tmp/pytest\S*?/test_[^/\s']*", "…", ("…" if begin else "") + line[begin:])
        shown = " ".join(short.split())[:_LONGEST]
        known = recorded()
        known[key] = [shown, date.today().isoformat()]
        RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n", "utf-8")


def recorded() -> dict[str, list[str]]:
    return json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}


# -- the page ----------------------------------------------------------------------------------------------------------


def page() -> str:
    known = recorded()
    days = sorted({day for _, day in known.values()})
    parts = [f"Seen on {' and '.join(days)}.\n\n## Features\n\n"]
    rows = [(r["seed"], r["feature"], _code(_command(r)), _seen(known, r["seed"], r["feature"])) for r in FEATURES]
    parts.append(
        _table(("guide", "feature", "command, of `examples/seeds/GUIDE.sh` if not of posttrain", "what was seen"), rows)
    )
    for seed, title in (("001", "LoRA on two nodes"), ("004", "Llama 3.1 8B on GKE")):
        rows = [row for row in LINES if row["seed"] == seed]
        lines = [(row, known[f"{seed} {row['printed']}"][0] if "ours" in row else "–") for row in rows]
        other = [
            (_code(row["printed"]), _code(_shown(line)) if "ours" in row else line, row.get("why", ""))
            for row, line in lines
            if "why" in row or _words(row["printed"]) != _words(line)
        ]
        parts.append(
            f"\n## The log of guide {seed}, {title}\n\nOf {len(rows)} lines of the guide {len(rows) - len(other)} "
        )
        parts.append("have the same words (`device` for `gpu`) with other numbers. The others:\n\n")
        parts.append(_table(("the guide", "posttrain, step 2 of 2", ""), other))
    ours, absent = our_cluster(), dict[str, list[str]]()
    for title, kind, guide, own in (
        ("Job of guide 001", "scheduler.kind: job`, p4d.24xlarge", guide_job(), our_job()),
        ("worker group of guide 004", _RAY, guide_group(), ours["workerGroupSpecs"][0]),
        ("head and the service of guide 004", _RAY, guide_head(), ours),
    ):
        parts.append(f"\n## The {title}\n\nposttrain: `{kind}. " + _fields(guide, own, absent))
    reasons = [(", ".join(dict.fromkeys(names)), why) for why, names in absent.items()]
    parts.append("\n## Fields that are not rendered\n\n" + _table(("field", "why"), reasons))
    return "".join(parts)


_RAY = "scheduler.kind: raycluster`, a4-highgpu-8g"


def manifest_errors() -> str:
    """The errors of the manifests that the guides print, as `posttrain launch check` reports them."""
    rows = [
        (f"`{path.name}`", f"`{error.rule}`", f"`{error.path}`", error.message)
        for path in sorted(MANIFESTS.glob("printed-*.yaml"))
        for error in check_manifests(read_text(path.read_text(encoding="utf-8"), path.name)).errors
    ]
    return _table(("manifest", "rule", "path", "error"), rows)


def _words(line: str) -> str:
    """Without numbers, units of time, spaces, folders and what this run adds in brackets."""
    words = re.sub(r"[^\s`]*[/…][^\s`]*", "PATH", line)
    words = re.sub(r"\d[\d.,]*\s*(?:ms|s|%)?", "0", words.replace("/gpu", "/device"))
    return re.sub(r"[\s=]+|\(0\)", "", words)


def _command(row: dict[str, Any]) -> str:
    if "run" in row:
        return "posttrain " + " ".join(row["run"])
    return str(row["command"])


def _seen(known: dict[str, list[str]], seed: str, name: str) -> str:
    return _code(_shown(known[f"{seed} {name}"][0]))


def _shown(line: str) -> str:
    return line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 1] + "…"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def guide_job() -> Any:
    return yaml.safe_load((MANIFESTS / "printed-indexed-job.yaml").read_text(encoding="utf-8"))


def _guide_values() -> Any:
    return yaml.safe_load((TESTS / "unit" / "apps" / "launch" / "guide_values.yaml").read_text(encoding="utf-8"))


def guide_group() -> Any:
    values = _guide_values()
    group = values["additionalWorkerGroups"]["worker-grp-0"]
    container = {key: group[key] for key in ("command", "resources", "securityContext", "volumeMounts")}
    image = f"{values['image']['repository']}:{values['image']['tag']}"
    container |= {"image": image, "imagePullPolicy": "Always", "env": group["containerEnv"]}
    spec = {"containers": [container], **{key: group[key] for key in ("nodeSelector", "tolerations", "volumes")}}
    template = {"metadata": {"annotations": group["annotations"]}, "spec": spec}
    return {"replicas": group["replicas"], "template": template}


def guide_head() -> Any:
    """As KubeRay's chart renders its values: the service is a field of the head group."""
    values = _guide_values()
    head = values["head"]
    container = {key: head[key] for key in ("command", "resources", "volumeMounts")} | {"env": head["containerEnv"]}
    spec = {"containers": [container, *head["sidecarContainers"]], "volumes": head["volumes"]}
    spec["serviceAccountName"] = head["serviceAccountName"]
    group = {"serviceType": values["service"]["type"], "rayStartParams": head["rayStartParams"]}
    group["template"] = {"metadata": head["template"]["metadata"], "spec": spec}
    return {"enableInTreeAutoscaling": head["enableInTreeAutoscaling"], "headGroupSpec": group}


def our_job() -> Any:
    return _rendered(EKS, "scheduler.kind=job", "nodes.instance_type=p4d.24xlarge", "nodes.capacity=on_demand")


def our_cluster() -> Any:
    return _rendered(GKE, "scheduler.kind=raycluster", nodes=3)["spec"]


def our_group() -> Any:
    return our_cluster()["workerGroupSpecs"][0]


def _rendered(profile: dict[str, Any], *settings: str, nodes: int = 2) -> Any:
    import tempfile

    run = [f"cluster.num_nodes={nodes}", "cluster.gpus_per_node=8", "checkpointing.checkpoint_dir=/shared/run"]
    with tempfile.TemporaryDirectory() as folder:
        made = make_profile(Path(folder), profile, *settings)
    return render_run(request_run(load_config("grpo", None, run), made))[-1]


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Leaves by path; items of lists by their name, key or mount path, where they have one, else by their number."""
    if isinstance(value, dict) and value:
        return {key: leaf for name, inner in value.items() for key, leaf in flat(inner, f"{path}.{name}").items()}
    if isinstance(value, list) and value and not all(isinstance(item, str) for item in value):
        names = [_name(item, index, path) for index, item in enumerate(value)]
        return {k: v for name, item in zip(names, value, strict=True) for k, v in flat(item, f"{path}[{name}]").items()}
    return {path.lstrip("."): json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value}


def _name(item: Any, index: int, path: str) -> object:
    if not isinstance(item, dict) or path.endswith("ontainers"):
        return index
    return item.get("mountPath") or item.get("name") or item.get("key") or index


def _fields(guide: Any, ours: Any, absent: dict[str, list[str]]) -> str:
    """How many fields of the guide are the same, and those that differ. Adds those not rendered by reason."""
    found, same, num_absent, rows = flat(ours), 0, 0, dict[tuple[str, str], list[str]]()
    for path, printed in flat(guide).items():
        if re.search(r"\[\S+\]\.(name|mountPath|key)$", path):
            continue  # in the path itself
        mine = found.get(path)
        short = _code(re.sub(r"^(headGroupSpec\.)?(spec\.)?(template\.)?(spec\.)?(containers\[0\]\.)?", "", path))
        if mine is None:
            absent.setdefault(why_absent(path), []).append(short)
            num_absent += 1
        elif mine == printed:
            same += 1
        else:
            rows.setdefault((_shown(_short(printed)), _shown(_short(mine))), []).append(short)
    differ = sum(map(len, rows.values()))
    lines = [(", ".join(names), _code(printed), _code(mine)) for (printed, mine), names in rows.items()]
    return (
        f"Of {same + differ + num_absent} fields {same} are the same, {num_absent} are not rendered ([below]"
        "(#fields-that-are-not-rendered)), the others:\n\n" + _table(("field", "the guide", "posttrain"), lines)
    )


def why_absent(path: str) -> str:
    """The reason of a field that posttrain does not render."""
    return next(row["why"] for row in ROWS["absent"] if re.search(row["field"], path))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
