#!/usr/bin/env bash
# Build the sdist, and the wheel from it; install the wheel into an empty environment outside the checkout and run the quick
# start there; check that pip can resolve all extras together.
# Usage: scripts/check_wheel.sh PYTHON   (a Python with the `dev` extra)
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m build --no-isolation --outdir "$folder/dist" . >"$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }
wheel=$(echo "$folder"/dist/*.whl)
RUNNERKIT_WHEEL=$wheel "$python" -m pytest -q -p no:cacheprovider --timeout 1200 --basetemp "$folder/outside" tests/test_quick_start.py

extras=$("$python" - "$wheel" <<'PYTHON'
import sys
from importlib.metadata import PathDistribution
from zipfile import Path

[info] = (each for each in Path(sys.argv[1]).iterdir() if each.name.endswith(".dist-info"))
print(",".join(PathDistribution(info).metadata.get_all("Provides-Extra")))
PYTHON
)
"$python" -m pip install --quiet --dry-run --constraint constraints.txt "$wheel[$extras]"
echo "the wheel runs the quick start, and its extras are compatible: $extras"
