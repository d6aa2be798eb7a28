#!/usr/bin/env bash
# Run the quick tests with the oldest and the newest supported torch, and tests/smoke.py with other Pythons.
#   scripts/test_versions.sh PYTHON [OTHER_PYTHON ...]
# Each combination gets an environment below .venv-versions, of up to 7 GB: pip's torch for Linux includes CUDA.
set -uo pipefail
cd "$(dirname "$0")/.."
OLDEST="torch==2.11.0 torchvision==0.26.0"
NEWEST="torch==2.15.0 torchvision==0.29.2"
failed=0

# Install runnerkit with an extra into the environment of a Python and a torch; print its Python's path.
environment() {  # PYTHON TORCH_AND_TORCHVISION EXTRA
    local folder
    folder=".venv-versions/python$("$1" -c 'import platform; print(platform.python_version())')-${2%% *}"
    if [ ! -e "$folder/installed$3" ]; then
        "$1" -m venv "$folder" &&
            # Not through constraints.txt, which pins another torch.
            "$folder/bin/python" -m pip install --quiet --constraint <(tr ' ' '\n' <<<"$2") --editable ".$3" &&
            touch "$folder/installed$3" || return
    fi
    echo "$folder/bin/python"
}

report() {  # WHAT COMMAND...
    local what=$1
    shift
    if "$@"; then echo "passed: $what"; else failed=1; echo "FAILED: $what"; fi
}

quick_tests() {  # PYTHON TORCH_AND_TORCHVISION
    local python
    python=$(environment "$1" "$2" "[test]") && "$python" -m pytest -n "${JOBS:-2}" --dist worksteal -q -m "not slow"
}

smoke_runs() {  # PYTHON TORCH_AND_TORCHVISION
    local python
    python=$(environment "$1" "$2" "") && "$python" -m tests.smoke
}

for torch in "$OLDEST" "$NEWEST"; do
    report "quick tests with $1, $torch" quick_tests "$1" "$torch"
done
for python in "${@:2}"; do
    if ! command -v "$python" >/dev/null; then
        echo "not run: $python is not installed"
        continue
    fi
    report "smoke runs with $python, $NEWEST" smoke_runs "$python" "$NEWEST"
done
exit $failed
