"""The one way in which a reader gives up."""


class Unreadable(Exception):
    """A file that gives no document.

    It becomes `NAME VERB REASON; ADVICE` for a file that was asked for by name, and a Skipped with
    `reason` for one that was found in a folder. None of the three holds a name or a password.
    """

    def __init__(self, reason: str, advice: str, verb: str = "is") -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice
        self.verb = verb

    def message(self, name: str) -> str:
        return " ".join(f"{name} {self.verb} {self.reason}; {self.advice}".split())
