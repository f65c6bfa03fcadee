"""Entry point of `python -m outlast`, the same as `outlast`."""

import sys

from outlast.cli.main import main

sys.exit(main())
