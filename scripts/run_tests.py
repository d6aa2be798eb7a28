"""Run a make target of tests; run what fails once more, alone, and list what passes only then.

    python scripts/run_tests.py FOLDER PYTHON make --keep-going test

A test that fails once in twenty runs should not hide what the others say, and must not be forgotten either: FOLDER
collects the output of each first failure, and .ci/run prints it at the end. More than three such tests fail the run.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(".pytest_cache")
MOST = 3
COUNTS = re.compile(r"^=.*\b[1-9]\d* (?:failed|errors?)\b.* in [\d.]+s", flags=re.MULTILINE)
MAKE_ERRORS = re.compile(r"^make: \*\*\* \[", flags=re.MULTILINE)


def main(folder: Path, python: str, command: list[str]) -> int:
    """Run `command`; return 0 if every test passed, at the first or at the second attempt."""
    shutil.rmtree(CACHE, ignore_errors=True)
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            output.append(line)
    if run.returncode == 0:
        return 0
    text = "".join(output)
    record = CACHE / "v" / "cache" / "lastfailed"
    failed = list(json.loads(record.read_text())) if record.exists() else []
    earlier = len(list(folder.glob("*.txt")))
    # Without a line that counts failures, pytest itself broke: a test that failed before that explains nothing.
    is_explained = len(COUNTS.findall(text)) >= max(1, len(MAKE_ERRORS.findall(text)))
    if not is_explained or not 0 < len(failed) <= MOST - earlier:
        print(f"{len(failed)} failed tests, {earlier} before: not run again")
        return run.returncode
    print(f"== run again, alone: {', '.join(failed)}", flush=True)
    again = subprocess.run([python, "-m", "pytest", "--doctest-modules", *failed], check=False)
    if again.returncode == 0:
        folder.mkdir(exist_ok=True)
        for number, test in enumerate(failed, start=earlier):
            (folder / f"{number}.txt").write_text(f"{test}\n{text[text.find('= FAILURES =') :]}")
    return again.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
