"""The keeper as a program: `python -P .../keeper/__main__.py`; see `keeper_process.main`."""

import sys
from pathlib import Path


def _main() -> int:
    # Import the same installation as the trainer, and nothing from the working directory: a
    # script there may have the name of a standard module.
    sys.path.append(str(Path(__file__).parents[3]))
    from outlast.checkpoint.keeper.keeper_process import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
