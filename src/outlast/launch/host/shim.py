"""Shim between fork and exec of a worker: set the parent death signal, then exec the command.

Run as `python -I -S shim.py LAUNCHER_PID COMMAND...`; standard library only, so that nothing of
the worker's environment is imported before the worker starts.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Set the parent death signal, then exec the command."""
    launcher, command = int(argv[0]), argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # If the launcher died before prctl, no signal is sent.
    if os.getppid() != launcher:
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - exec is the purpose
    except OSError as error:
        sys.stderr.write(f"cannot execute {command[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
