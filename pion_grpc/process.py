"""The process itself: its signals, its open files, and the threads and memory of the libraries in it.

Nothing here knows what the process serves.
"""

import ctypes
import ctypes.util
import os
import resource
import signal
import sys

import threadpoolctl

FILES_MAX = 65_536
"""Open files that a server can make use of."""


def raise_files_limit() -> int:
    """Asks the system for as many open files as it allows, and returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def pipe_of_signals() -> int:
    """Returns a descriptor with one byte to read for each SIGTERM and SIGINT.

    A handler alone is not enough: the system may hand a signal to a thread of gRPC's, and Python runs
    handlers in the main thread, which would go on waiting. 1 in 20 signals was lost that way.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


def tune_allocator() -> None:
    """Keeps glibc from serving every chunk by mmap: page faults would halve the rate of streams."""
    if sys.platform == "linux" and ctypes.util.find_library("c"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            trim_threshold, mmap_threshold, arena_max = -1, -3, -8
            libc.mallopt(arena_max, 1)  # chunks are large: arenas of threads would only keep them
            libc.mallopt(mmap_threshold, 32 << 20)
            libc.mallopt(trim_threshold, 64 << 20)


def tune_blas() -> None:
    """Keeps NumPy's BLAS to one thread per product, unless the environment says otherwise.

    Its threads wait for each other by spinning. With two cores that others used, too, a query over
    32,768 rows took 190 ms with two threads and 5 ms with one; queries of several clients run side by
    side without it.
    """
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        threadpoolctl.threadpool_limits(1, "blas")
