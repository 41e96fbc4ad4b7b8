"""How a command ends if it cannot do what it was asked; quick to import."""


class CommandFailed(Exception):
    """The message is for people: what is wrong, and what to do next. `reason` is for programs."""

    def __init__(self, message: str, *, reason: str = "FAILED") -> None:
        super().__init__(message)
        self.reason = reason
