"""Settings of the garbage collector for every Python process that a test starts.

A third of the time of importing torch, and most of a second at an interpreter's end with torch in
it, is spent on garbage collection, and imports make no garbage. The collector runs less often, and
not at the end. Exit hooks run as usual. Tests of interpreter exits do not use these settings.
"""

import atexit
import gc

gc.set_threshold(20_000)
atexit.register(gc.freeze)
