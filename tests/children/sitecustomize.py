"""What every Python that a test starts imports first; tests/conftest.py sees to that.

A third of the time of importing torch, and most of a second at an interpreter's end with torch in
it, goes into looking for garbage, of which imports make none. So it is looked for less often, and
not at the end; hooks run and modules go there as ever, and tests of ends do without this.
"""

import atexit
import gc

gc.set_threshold(20_000)
atexit.register(gc.freeze)
