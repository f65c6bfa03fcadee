"""The tests of this room share `loaders` and `driving`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
