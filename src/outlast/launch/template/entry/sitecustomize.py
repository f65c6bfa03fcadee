"""Entry of the template process, in whose search path this folder is the first.

`site` imports this module before the interpreter runs the script. The template serves in here and
never returns. A forked worker returns, imports the user's own `sitecustomize`, and its interpreter
goes on as if nothing had been: it runs the script itself.
"""

import importlib
import os
import sys
import traceback

_early = frozenset(sys.modules)
try:
    from outlast.launch.template.template_process import serve

    serve(_early)
except BaseException:  # noqa: BLE001 - whatever it is, the template must never run the script
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)

del sys.modules[__name__]
importlib.import_module(__name__)  # its failure is handled by `site`, as ever
