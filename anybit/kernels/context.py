"""A GPU's context, which its driver makes in up to a second, beside the import of packages."""

import ctypes
from threading import Thread


def begin_context() -> None:
    """Have the first visible GPU's primary context made, which torch takes later, if there is one.

    The driver is called without Python's lock.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    Thread(target=retain, args=(driver,), name="anybit-context", daemon=True).start()


def retain(driver: ctypes.CDLL) -> None:
    """Make it; what fails is told by torch."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
