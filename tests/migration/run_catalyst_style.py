"""Run the programs in the working directory and save the numbers that their `main` returns.

python tests/migration/run_catalyst_style.py numbers.json
"""

import importlib
import json
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    if "catalyst" in Path("linear_regression.py").read_text():
        from accelerate.state import DistributedType

        DistributedType.TPU = DistributedType.XLA  # renamed in Accelerate since Catalyst's last release
    found = {}
    for path in sorted(Path.cwd().glob("*.py")):
        try:
            found[path.stem] = importlib.import_module(path.stem).main()
        except Exception:
            found[path.stem] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(found))
