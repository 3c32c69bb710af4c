"""UserError: the base of every error that a user can cause and mend."""

from __future__ import annotations


class UserError(ValueError):
    """One line that names the thing and says what to do.

    The shell prints it and exits with 2; a notebook shows it as any exception. An error of ours is never one of
    these, so that it keeps its traceback.
    """
