"""Case f: the CPU time that an import takes."""

import json
import sys
import time


def main() -> None:
    """Import the module that the argument names."""
    begin = time.process_time()
    __import__(sys.argv[1])
    seconds = time.process_time() - begin
    print(json.dumps({"cpu_s": seconds, "modules": len(sys.modules)}))


if __name__ == "__main__":
    main()
