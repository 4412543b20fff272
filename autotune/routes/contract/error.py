"""What a broken rule is told as."""

from __future__ import annotations


class ContractError(ValueError):
    """A call breaks the contract: the rule's name, the offending value and what it should be, in one line."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"contract rule {rule}: {message}")
        self.rule = rule
        self._message = message

    def __reduce__(self) -> tuple[type[ContractError], tuple[str, str]]:
        # two arguments, one message: the default would rebuild it from the message alone
        return type(self), (self.rule, self._message)
