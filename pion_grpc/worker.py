"""One worker of several: `python -m pion_grpc.worker`, started by `supervisor` and by nobody else.

It is told what it is through a pipe, which stays open: the end of the pipe is the end of its parent.
"""

import os
import signal
import sys
import threading

from pion_grpc.cli.logs import set_up_logs
from pion_grpc.errors import CannotStart
from pion_grpc.server import serve
from pion_grpc.supervisor import told_by


def main() -> int:
    """Runs one worker, told by its parent what it is."""
    set_up_logs(sys.stdout)
    config, worker = told_by(sys.stdin.buffer)

    def end_with_the_parent() -> None:
        # Without the buffer: this thread would hold its lock when the interpreter wants to close it,
        # and of a worker that cannot start the last word would be a fatal error of Python's.
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_the_parent, name="parent", daemon=True).start()
    try:
        serve(config, worker)
    except CannotStart as error:
        print(f"pion-grpc: worker {worker.index}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
