"""A run as a job of Slurm: a folder on the shared file system with the batch script, the config and the secret of the
run. `srun` starts `posttrain node` once on every machine, by the contract that pods have (docs/decisions/0040).

| exit code of the step | the script |
|---|---|
| 0, 64 (bad input), 65 (no progress) | ends with it |
| 85: interrupted, saved or not | requeues the job; the next attempt resumes |
| others: a crash, or a machine that was lost | requeues the job, MAX_RESTARTS times |

Slurm sends SIGTERM to the step before the time limit (`--signal`), when it preempts the job, and on `scancel`, which
ends the script as well: a cancelled job is not requeued. Crashes are counted in the folder of the job: the count of
Slurm includes interruptions.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from posttrain.apps.launch.instances import fabric_of
from posttrain.apps.launch.launch_request import LaunchRequest
from posttrain.apps.launch.manifest_files import TEMPLATES
from posttrain.apps.launch.pod_template import NODE_COMMAND, SECRET_KEY, new_secret, pod_template
from posttrain.apps.launch.workloads import MAX_RESTARTS
from posttrain.errors import ExitCode, InputError, reason_of
from posttrain.files.text_templates import render_text

SCRIPT = "job.sh"
_AFTER_SAVE_S = 10  # of the warning before the time limit: for the gang to end
# The first, and how many, below those that Linux gives to outgoing connections. Each job has two, as jobs may share a
# machine.
_PORTS = (20000, 12000)
_COMMAND_LIMIT_S = 60.0


def job_folder(request: LaunchRequest) -> PurePosixPath:
    return PurePosixPath(request.profile.storage.mount, ".posttrain", request.name)


def job_files(request: LaunchRequest) -> dict[str, bytes]:
    """By path below the folder of the job. The secret of the run is not among them."""
    texts = {SCRIPT: job_script(request), "config.yaml": request.config_text}
    return {**{name: text.encode() for name, text in texts.items()}, **request.files}


def job_script(request: LaunchRequest) -> str:
    return render_text(
        TEMPLATES / "job.sh",
        request=request,
        slurm=request.profile.slurm,
        cores=max(1, int(request.instance.cpu)),
        warning_s=request.grace_s + _AFTER_SAVE_S,
        variables=_variables(request),
        words=shlex.join,
        ports=_PORTS,
        code=ExitCode,
        folder=str(job_folder(request)),
        max_restarts=MAX_RESTARTS,
        command=NODE_COMMAND,
    )


def _variables(request: LaunchRequest) -> dict[str, str]:
    """Those of a pod, but for its own folders, and for gIB, which GKE installs."""
    on_gke = fabric_of(request.instance, request.num_nodes).env
    fabric = fabric_of(replace(request.instance, rdma=False), request.num_nodes).env
    left_out = {*(on_gke.keys() - fabric.keys()), "HOME", "HF_HOME", "POSTTRAIN_RAY_PORT", "POSTTRAIN_CONTROL_PORT"}
    listed = pod_template(request)["spec"]["containers"][0]["env"]
    pod = {str(entry["name"]): str(entry["value"]) for entry in listed if entry["name"] not in left_out}
    provider = {"aws": "aws", "gcp": "gce"}.get(request.instance.provider, "none")
    own = {
        "POSTTRAIN_CONFIG": str(job_folder(request) / "config.yaml"),
        "POSTTRAIN_CONTROL_SECRET_FILE": str(job_folder(request) / SECRET_KEY),
        "POSTTRAIN_SHM_GIB": "0",  # that of the machine
        "POSTTRAIN_NOTICE": provider if request.profile.nodes.capacity == "spot" else "none",
    }
    return {**pod, **own, **request.profile.env}


def write_job(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """The files of a job, and its secret, which only its owner reads."""
    try:
        shutil.rmtree(folder / "files", ignore_errors=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).unlink(missing_ok=True)  # may belong to somebody else, or be a link
            (folder / name).write_bytes(content)
        secret = folder / SECRET_KEY
        secret.unlink(missing_ok=True)
        with open(os.open(secret, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
            file.write(new_secret() + "\n")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({reason_of(error)}): storage.mount must be the file system that all machines "
            "of the cluster share, mounted here as well; or write the files elsewhere with `posttrain launch render`"
        ) from error
    return [*(folder / name for name in files), secret]


def submit_job(request: LaunchRequest) -> str:
    """The number of the job. Nothing is written while another job of this name is queued or runs."""
    if shutil.which("sbatch") is None:
        raise InputError(
            "sbatch is not installed here: submit from a machine of the Slurm cluster, or write the files with "
            "`posttrain launch render --to FOLDER`"
        )
    if others := _slurm("squeue", "--me", f"--name={request.name}", "--noheader", "--format=%i %T").split("\n")[0]:
        raise InputError(f"job {others} is {request.name} already: scancel it, or give another --name")
    folder = Path(job_folder(request))
    if folder.exists() or folder.is_symlink():
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise InputError(f"{folder} is a link, or not yours: give another --name, or remove it")
        folder.chmod(found.st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # the script runs as you
    write_job(folder, job_files(request))
    return _slurm("sbatch", "--parsable", str(folder / SCRIPT)).partition(";")[0]


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{command[0]} failed: {reason_of(error)}") from error
    if done.returncode != 0:
        raise InputError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()
