"""Tells pagefleet of the device. Imported to see what is there, so nothing heavy happens here."""

from pagefleet.backend import Backend, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl

TRAITS = Traits(dtypes=("float32",))  # what it can do; all else is refused, done on the host, or skipped in tests


def probe() -> Probe:
    """Is the device there? Look for its driver's files; open nothing. Say what you found, or what to do about it."""
    return Probe(True, "computed by numpy on the host for now", (DeviceInfo("MyDevice"),))


def load(index: int) -> Backend:
    """A fresh backend on device `index`. Heavy imports belong here."""
    from pagefleet_mydevice.backend import MyBackend

    return MyBackend()


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    return [BackendInfo("mydevice", probe, load, TRAITS, priority=-30)]  # > 0: preferred to the CPU when it is there
