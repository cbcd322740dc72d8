"""What a machine can do is found out by trying; what it cannot is named, with what would help; and root is not
needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.environments.sandbox import levels, private_root
from posttrain.environments.sandbox.levels import Interpreter, find_interpreter, open_sandbox, remedies, why_not
from posttrain.environments.sandbox.program import Limits, Program, SandboxFailure, SandboxUnavailable
from posttrain.environments.sandbox.sandbox import Sandbox

SOURCES = Path(__file__).parents[3] / "src"
PYTHON = Interpreter("/opt/python/bin/python3", ("/opt/python/lib",))


def refusing(*refused: str):  # type: ignore[no-untyped-def]
    """A machine on which these levels fail as the kernel would have them fail."""

    def why(sandbox: Sandbox, interpreter: Interpreter) -> str | None:
        return f"unshare: not permitted ({sandbox.level})" if sandbox.level in refused else None

    return why


def test_strict_takes_namespaces_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "why_not", refusing())
    sandbox, warning = open_sandbox("strict", PYTHON)
    assert (sandbox.level, warning) == ("namespaces", "")
    monkeypatch.setattr(levels, "why_not", refusing("namespaces"))
    with pytest.raises(SandboxUnavailable, match=r"not permitted \(namespaces\)(.|\n)*best_effort"):
        open_sandbox("strict", PYTHON)


@pytest.mark.parametrize(
    ("isolation", "refused", "level", "words"),
    [
        ("best_effort", ["namespaces"], "landlock", ["shares the process numbers", "not permitted (namespaces)"]),
        ("best_effort", ["namespaces", "landlock"], "limits", ["can read and change your files"]),
        ("none", [], "limits", []),
    ],
)
def test_other_levels_warn_of_what_they_do_not_protect(
    isolation: Any, refused: list[str], level: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "why_not", refusing(*refused))
    sandbox, warning = open_sandbox(isolation, PYTHON)
    assert sandbox.level == level
    assert all(word in warning for word in words)


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="read_only_paths names '/no/such/folder'"):
        open_sandbox("none", PYTHON, ["/no/such/folder"])
    with pytest.raises(SandboxUnavailable, match="absolute path"):
        open_sandbox("none", PYTHON, ["src"])


@pytest.mark.parametrize(
    ("setting", "value", "better"),
    [
        ("kernel/unprivileged_userns_clone", "0", 1),
        ("user/max_user_namespaces", "0", 15000),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", 0),
    ],
)
def test_the_setting_that_stands_in_the_way_is_named(
    setting: str, value: str, better: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "_setting", lambda name: value if name == setting else "")
    told = "\n".join(remedies("namespaces", "unshare(user namespace): Operation not permitted", PYTHON))
    assert f"sysctl -w {setting.replace('/', '.')}={better}" in told


def test_container_with_a_filter_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"Seccomp": "2", "CapEff": "00000000a80425fb"}
    monkeypatch.setattr(levels, "_setting_in_status", lambda name: status[name])
    told = "\n".join(remedies("namespaces", "unshare(user namespace): Operation not permitted", PYTHON))
    assert "--security-opt seccomp=unconfined" in told
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "root without CAP_SYS_ADMIN" in "\n".join(remedies("namespaces", "unshare: not permitted", PYTHON))


def test_an_interpreter_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="no/such/python"):
        find_interpreter("/no/such/python")
    no_python = tmp_path / "python"
    no_python.write_text("#!/bin/sh\necho hello\n")
    no_python.chmod(0o755)
    with pytest.raises(SandboxUnavailable, match="cannot be used as a Python"):
        find_interpreter(str(no_python))


def test_another_system_than_linux_has_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels.platform, "system", lambda: "Darwin")
    assert why_not(Sandbox("limits"), PYTHON) == "it needs Linux, and this is Darwin"


def test_packages_of_the_environment_are_not_shown_unless_asked_for() -> None:
    interpreter = find_interpreter()
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python has no environment of its own")
    assert not any(path.startswith(sys.prefix) for path in interpreter.read_only)
    assert interpreter.site_packages[0].startswith(sys.prefix)


def test_a_path_beneath_another_needs_no_place_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    real, link = str(tmp_path / "real"), str(tmp_path / "link")
    places = private_root._places([f"{real}/inner", real, link])
    assert places == {real: real, link: real}


UNPRIVILEGED = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from posttrain.environments.sandbox.levels import find_interpreter, open_sandbox
from posttrain.environments.sandbox.program import Limits, Program
interpreter = find_interpreter()
found = {"user": os.getuid()}
sandbox, warning = open_sandbox("strict", interpreter)
found["level"] = sandbox.level
for name, code in json.loads(sys.argv[2]).items():
    outcome = sandbox.run(Program(interpreter.command("-c", code)), Limits(cpu_s=20, wall_s=20, max_processes=4))
    found[name] = outcome.stdout.decode().strip() or outcome.stderr.decode().strip().splitlines()[-1]
print(json.dumps(found))
"""


def test_an_ordinary_user_gets_the_full_sandbox() -> None:
    """As root: the same in a process that has become nobody, under the system's own Python."""
    programs = {
        "files": "import os; print(sorted(os.listdir('/')), os.getuid())",
        "network": "import socket; socket.socket()",
        "forks": "import os, time\ntry:\n    while True: os.fork() or time.sleep(60)\nexcept OSError: print('refused')",
        "writes": "open('/usr/lib/x', 'w')",
    }
    command = [sys.executable, "-B", "-c", UNPRIVILEGED, str(SOURCES), json.dumps(programs)]
    if os.geteuid() == 0:
        python = shutil.which("python3", path="/usr/bin")
        if python is None or shutil.which("setpriv") is None:
            pytest.skip("root needs /usr/bin/python3 and setpriv to become an ordinary user")
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, *command[1:]]
    asked = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    if "SandboxUnavailable" in asked.stderr or "Permission denied" in asked.stderr or "ImportError" in asked.stderr:
        pytest.skip(f"not possible on this machine: {asked.stderr.strip().splitlines()[-1]}")
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert found["user"] != 0
    assert found["level"] == "namespaces"
    names, user = found["files"].rsplit(" ", 1)
    assert user == "1000"
    assert not {"'root'", "'home'", "'proc'", "'var'"} & set(names.strip("[]").split(", "))
    assert found["network"] == "PermissionError: [Errno 1] Operation not permitted"
    assert found["forks"] == "refused"
    assert "Read-only file system" in found["writes"]


def test_kernel_failure_names_the_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Sandbox, program: Program, limits: Limits) -> None:
        raise SandboxFailure(
            "the sandbox could not be set up: OSError: [Errno 1] unshare(user namespace): not permitted"
        )

    monkeypatch.setattr(Sandbox, "run", failing)
    monkeypatch.setattr(levels, "_setting", lambda name: "0" if name == "user/max_user_namespaces" else "")
    reason = why_not(Sandbox("namespaces"), PYTHON)
    assert reason is not None
    assert "unshare(user namespace)" in reason
    assert "user.max_user_namespaces is 0" in reason
