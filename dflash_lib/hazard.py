"""What a hazard is: one piece of process-wide compile state, where it lives, how it is isolated, how it is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["clean", "failed", "crashed", "hung", "not applicable"]


@dataclass(frozen=True)
class Outcome:
    """What a provocation found.

    Attributes:
        status: "failed" means that the fault was seen, "clean" that it was looked for and not seen.
        failures: how often the fault was seen.
        attempts: how often it could have been.
        detail: one line for a person.
        seconds: wall time of the program.
    """

    status: Status
    failures: int = 0
    attempts: int = 0
    detail: str = ""
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


class Hazard(ABC):
    """One piece of state that torch keeps for the whole process and that threads therefore share.

    Attributes:
        name: short, unique, with hyphens.
        description: what goes wrong, in one sentence.
        where: the torch names it lives in.
    """

    name: str
    description: str
    where: str

    @abstractmethod
    def present(self) -> bool:
        """Whether this torch has the hazard: looks at features, never at a version number.

        Raises:
            UnknownInternals: neither the dangerous form nor a known harmless one is there.
        """

    @abstractmethod
    def patch(self) -> None:
        """Isolates it. May be repeated. Callers serialise (see fx_patch)."""

    @abstractmethod
    def restore(self) -> None:
        """Undoes :meth:`patch`: torch's objects are the ones they were."""

    @property
    @abstractmethod
    def patched(self) -> bool:
        """Whether :meth:`patch` is in force."""

    def provoke(self, patched: bool = False, seconds: float = 4.0, timeout: float = 90.0) -> Outcome:
        """Runs the program of the same name (see provocations) in a process of its own, under a watchdog.

        Args:
            patched: whether isolation is installed there first.
            seconds: how long the program tries, after it has started.
            timeout: when the watchdog ends it, in seconds; the outcome is then "hung".
        """
        from dflash_lib import provocations

        return provocations.run(self.name, patched=patched, seconds=seconds, timeout=timeout)
