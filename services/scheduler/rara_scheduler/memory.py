"""How the C library keeps freed memory."""

import ctypes
import sys
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # of malloc.h
_LARGE_BYTES: Final = 128 * 1024


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
