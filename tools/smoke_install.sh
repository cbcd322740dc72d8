#!/usr/bin/env bash
# The wheel as a user gets it: built, installed into an empty environment with pip, and with uv where there is one, then used
# in an empty folder. Needs a package index. Usage: tools/smoke_install.sh PYTHON
set -euo pipefail
python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheel" "$root"
wheel=$(echo "$work"/wheel/*.whl)

use() { # the bin folder of an environment
  echo "--- $1"
  mkdir "$work/project" && cd "$work/project"
  "$1/posttrain" --version
  "$1/posttrain" init grpo
  "$1/posttrain" config check grpo --config grpo.yaml
  "$1/python" -c "
from pathlib import Path
from posttrain.apps.demo.arithmetic import build_model, write_data
build_model(Path('model'), 1)
write_data(Path('data'), 1)"
  "$1/posttrain" grpo --config grpo.yaml model=model data=data/train.jsonl precision=float32 steps=1 prompts=2 generations=2 \
    max_new_tokens=8 max_length=64 --quiet
  test -d results/grpo/step_1
  "$1/posttrain" doctor results/grpo
  cd "$root" && rm -rf "$work/project"
}

"$python" -m venv "$work/pip"
"$work/pip/bin/pip" install --quiet --disable-pip-version-check -r "$root/requirements/torch.txt" "$wheel"
use "$work/pip/bin"
rm -rf "$work/pip"

if command -v uv > /dev/null; then
  [ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS} # uv does not read pip's settings
  uv venv --quiet --python "$python" "$work/uv"
  if uv pip install --quiet --python "$work/uv/bin/python" -r "$root/requirements/torch.txt" "$wheel"; then
    use "$work/uv/bin"
  else
    echo "uv could not install from the index that it knows: only pip was tried"
  fi
else
  echo "uv is not installed: only pip was tried"
fi
