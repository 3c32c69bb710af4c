"""What a hazard is: one piece of process-wide compile state, where it lives, how it is isolated, how it is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.rewriting import UnknownInternals

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


class Hazard(ABC):
    """One piece of state that torch keeps for the whole process and that threads therefore share.

    Attributes:
        name: short, unique, with hyphens.
        description: what goes wrong, in one sentence.
        where: the torch names it lives in.
        patched: whether :meth:`patch` is in force.
    """

    name: str
    description: str
    where: str
    patched: bool = False

    @abstractmethod
    def present(self) -> bool:
        """Whether this torch has the hazard: looks at features, never at a version number.

        Raises:
            UnknownInternals: neither the dangerous form nor a known harmless one is there.
        """

    def patch(self) -> None:
        """Isolates it. May be repeated. Callers serialise (see fx_patch).

        Raises:
            UnknownInternals: torch is not as expected; it is as it was before.
        """
        if self.patched:
            return
        try:
            self.isolate()
        except BaseException:
            self.undo()
            raise
        self.patched = True

    def restore(self) -> None:
        """Undoes :meth:`patch`: torch's objects are the ones they were. May be repeated."""
        if self.patched:
            self.undo()
            self.patched = False

    @abstractmethod
    def isolate(self) -> None:
        """What :meth:`patch` does the first time."""

    @abstractmethod
    def undo(self) -> None:
        """Takes back :meth:`isolate`, also one that stopped half-way."""

    def provoke(self, patched: bool = False, seconds: float = 4.0, timeout: float = 90.0) -> Outcome:
        """Runs the program of the same name (see provocations) in a process of its own, under a watchdog.

        Args:
            patched: whether isolation is installed there first.
            seconds: how long the program tries, after it has started.
            timeout: when the watchdog ends it, in seconds; the outcome is then "hung".
        """
        from dflash_lib import provocations

        return provocations.run(self.name, patched=patched, seconds=seconds, timeout=timeout)


class PerThreadHazard(Hazard):
    """A hazard that lives in global variables of modules, each of which becomes per-thread."""

    def __init__(self, *variables: PerThreadGlobals) -> None:
        self.variables = variables
        self._installed: list[PerThreadGlobals] = []

    def present(self) -> bool:
        for group in self.variables:
            for name in group.missing():
                raise UnknownInternals(name)
        return True

    def isolate(self) -> None:
        for group in self.variables:
            group.install()
            self._installed.append(group)

    def undo(self) -> None:
        while self._installed:
            self._installed.pop().uninstall()
