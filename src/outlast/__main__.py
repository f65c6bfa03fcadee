"""`python -m outlast` is `outlast`."""

import sys

from outlast.cli.main import main

sys.exit(main())
