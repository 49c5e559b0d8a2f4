"""How the C library keeps freed memory, and how often Python looks for garbage."""

import ctypes
import gc
import sys
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # of malloc.h
_LARGE_BYTES: Final = 128 * 1024
_YOUNG: Final = (
    20_000  # objects made and not freed between two looks at the young; a full batch makes some thousands
)
_OLDER: Final = (20, 50)


def give_back_large_buffers() -> bool:
    """Let each buffer of a transfer go back to the system when it is freed; False: not with this C library.

    glibc does so at first, and after the first of them keeps such buffers in the heaps of its threads, of which the
    transfers use a dozen: a scheduler that had moved one artifact of 640 MiB stayed 75 MiB larger, and 20 MiB so.
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except (OSError, AttributeError):  # another C library
        return False


def look_for_garbage_rarely() -> None:
    """Leave out what was loaded so far, and look at the rest less often: next to nothing here has cycles.

    By Python's own thresholds a fifth of the scheduler's time under load went into looking.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *_OLDER)
