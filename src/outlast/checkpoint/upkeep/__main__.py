"""The upkeep process as a program: `python -P .../upkeep/__main__.py NAME`."""

import sys
from pathlib import Path


def _main() -> int:
    # As of the keeper: the very Outlast that this file is of, never by the working directory.
    sys.path.append(str(Path(__file__).parents[3]))
    from outlast.checkpoint.upkeep.upkeep_process import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
