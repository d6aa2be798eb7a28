#!/usr/bin/env bash
# Build sdist and wheel, install the wheel where nothing else of the checkout is, and use it from there.
# Usage: scripts/check_wheel.sh PYTHON   (one that has the `dev` extra)
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m build --no-isolation --outdir "$folder/dist" "$root" >"$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }
"$python" -m pip install --quiet --no-deps --target "$folder/site" "$folder"/dist/*.whl

cd "$folder"
cat >use.py <<'PYTHON'
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import runnerkit
from runnerkit import SupervisedRunner, contrib, dl, utils

assert runnerkit.__file__.startswith(sys.argv[1]), runnerkit.__file__
assert runnerkit.engines.__file__.startswith(sys.argv[1]), runnerkit.engines.__file__
model = torch.nn.Linear(4, 2)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
runner = SupervisedRunner().train(
    model=model, criterion=torch.nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loaders={"train": DataLoader(data, batch_size=8)}, ddp=True, cpu=True, logdir="run",
)
print("the wheel trains:", runner.epoch_metrics["train"], "and has", len(dl.__all__) + len(utils.__all__) + len(contrib.__all__), "names")
PYTHON
PYTHONPATH="$folder/site" "$python" -P use.py "$folder/site"
test -f "$folder/site/runnerkit/py.typed"
test ! -e "$folder/site/tests"
