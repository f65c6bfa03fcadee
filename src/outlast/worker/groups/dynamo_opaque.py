"""Functions and classes that dynamo must not trace.

While a compiled function runs, dynamo looks at every Python frame that begins, also at those that
C++ begins: DDP broadcasts its buffers through our group. It must neither trace nor break there.
The mark is on the code itself: nothing is wrapped, and dynamo is not imported for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
_c: Any = eval_frame  # torch's stubs do not name all of it
_SKIP = _c._FrameExecStrategy(_c._FrameAction.SKIP, _c._FrameAction.SKIP)  # noqa: SLF001 - with callees


def opaque(function: F) -> F:
    """Mark `function`: run as it is, with all that it calls; a graph that calls it breaks there."""
    code: Any = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        _c.set_code_exec_strategy(code, _SKIP)
        marked: Any = function
        marked._torchdynamo_disable = True  # noqa: SLF001 - asked where dynamo would inline it
    return function


def opaque_class(cls: C) -> C:
    """Mark all methods that `cls` itself defines."""
    for member in vars(cls).values():
        function: Any = member.fget if isinstance(member, property) else member
        opaque(function)
    return cls
