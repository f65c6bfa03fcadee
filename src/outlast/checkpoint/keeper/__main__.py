"""The keeper as a program: `python -P .../keeper/__main__.py`; see `keeper_process.main`."""

import sys
from pathlib import Path


def _main() -> int:
    # The very Outlast that this file is of, wherever the trainer found it; never by way of the
    # working directory, where a script of the user's may have the name of a standard module.
    sys.path.append(str(Path(__file__).parents[3]))
    from outlast.checkpoint.keeper.keeper_process import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
