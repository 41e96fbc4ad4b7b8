"""Which BLAS computes float32 products, for NumPy and for MLX on a CPU.

MLX's Linux wheel brings the reference BLAS, which is 8 to 18 times slower than a tuned one. A preloaded
library replaces it, because the dynamic linker searches the global scope first. The one decision: what
is in use is not told by a version. The symbol that MLX calls is looked up as the linker does it, and
the file it is in is named.
"""

import ctypes
import glob
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_INSTALLED = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",  # Debian, Ubuntu
    "/usr/lib64/libopenblasp.so.0",  # Fedora
    "/usr/lib/libopenblas.so.0",  # Arch
)
_FAST = ("openblas", "mkl", "blis", "accelerate", "armpl", "nvpl")
_SYMBOL = "cblas_sgemm"


def is_fast(library: str) -> bool:
    """Returns whether a library is a tuned BLAS, judging by its name."""
    return any(name in Path(library).name.lower() for name in _FAST)


def preloadable() -> str:
    """Returns the path of an installed library to preload; empty if there is none."""
    if not sys.platform.startswith("linux"):
        return ""
    return next((path for pattern in _INSTALLED for path in sorted(glob.glob(pattern))), "")


def with_fast_blas(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment whose processes use a fast BLAS, if one is installed."""
    library = preloadable()
    if not library or environment.get("LD_PRELOAD"):
        return dict(environment)
    return {**environment, "LD_PRELOAD": library}


def of_mlx() -> str:
    """Returns the library that MLX's CPU products run in; empty if that is unknown.

    MLX must have been imported.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    return _file_of(None) or _file_of(_mlx_library())


def of_numpy() -> str:
    """Returns the library that NumPy's products run in, or the one that NumPy names as its own."""
    import numpy as np

    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    if is_fast(built):
        return str(built)
    # A distribution's own, which may stand for any: ask the linker.
    core = importlib.util.find_spec("numpy._core._multiarray_umath")
    return _file_of(core.origin or "" if core else "") or str(built)


def _mlx_library() -> str:
    package = importlib.util.find_spec("mlx")
    for place in package.submodule_search_locations or () if package else ():
        library = os.path.join(place, "lib", "libmlx.so")
        if os.path.exists(library):
            return library
    return ""


def _file_of(library: str | None) -> str:
    """Returns the file in which a library finds the symbol; None is the global scope."""
    if library == "":
        return ""
    try:
        function = getattr(ctypes.CDLL(library), _SYMBOL)
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except (OSError, AttributeError):
        return ""
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    for line in mapped:
        span, *_, name = line.split(maxsplit=5)
        begin, _, end = span.partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return name
    return ""
