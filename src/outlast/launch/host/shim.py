"""Between fork and exec of a worker: bind its life to the launcher's, then exec the command.

Run as `python -I -S shim.py LAUNCHER_PID COMMAND...`; standard library only, since nothing of the
worker's environment may be imported before the worker itself does.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Arrange to die with the launcher, then become the command."""
    launcher, command = int(argv[0]), argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The launcher may have died before the line above: then the signal would never come.
    if os.getppid() != launcher:
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - becoming the command is the purpose
    except OSError as error:
        sys.stderr.write(f"cannot execute {command[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
