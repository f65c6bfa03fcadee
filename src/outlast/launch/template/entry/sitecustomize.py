"""Entry point of the template process, whose search path begins with this folder.

`site` imports this module before the interpreter runs the script. The template serves here and
never returns. A forked worker returns and imports the user's own `sitecustomize`; its interpreter
then runs the script.
"""

import importlib
import os
import sys
import traceback

_early = frozenset(sys.modules)
try:
    from outlast.launch.template.template_process import serve

    serve(_early)
except BaseException:  # noqa: BLE001 - the template must never run the script
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)

del sys.modules[__name__]
importlib.import_module(__name__)  # `site` handles its errors
