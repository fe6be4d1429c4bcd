"""An entry of the clinic: a fault, where it was reported, and what shows it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Patch = Callable[[Any, str, Any], None]  # replaces a part of our modules: (module, name, value)


@dataclass
class Fault:
    """A row of the page. `install` is the fault; its docstring says what it does."""

    install: Callable[[Patch], None]
    source: str  # where it was reported
    metric: str  # that shows it
    warning: str  # that names it; "": none does
    flags: str = ""  # of train.py, also for the healthy run beside it


def entering(table: dict[str, Fault]) -> Callable[..., Callable]:
    """The decorator that enters a function into `table`, by its name."""

    def fault(source: str, metric: str, warning: str, flags: str = "") -> Callable:
        def enter(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
            table[install.__name__] = Fault(install, source, metric, warning, flags)
            return install

        return enter

    return fault
