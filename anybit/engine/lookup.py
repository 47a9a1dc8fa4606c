"""Prompt look-up: where a text's last tokens have come up before, it goes on as it did then."""

from dataclasses import dataclass, field

from anybit.engine.sequence import Row, Sequence

LENGTH = 3  # tokens that must be the same


@dataclass
class Places:
    """Where each run of LENGTH tokens of a text was last followed by another; read: tokens seen."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = LENGTH


class Lookup:
    """Guesses by what a text has said itself, prompt included. Costs next to nothing."""

    def __init__(self) -> None:
        self.places: dict[Sequence, Places] = {}
        self.guesses: dict[Sequence, list[int]] = {}

    def reach(self, rows: list[Row], most: int) -> list[int]:
        """How many tokens follow where each text's last tokens were before."""
        self.guesses = {row.seq: self._guess(row, most) for row in rows}
        return [len(guess) for guess in self.guesses.values()]

    def read(self, rows: list[Row], counts: list[int]) -> list[int]:
        """There is nothing to prepare."""
        return counts

    def draft(self, rows: list[Row], counts: list[int]) -> list[list[int]]:
        """What was found, in full: it is judged whether it runs or not."""
        return [self.guesses[row.seq] for row in rows]

    def forget(self, seq: Sequence) -> None:
        """A text has ended."""
        self.places.pop(seq, None)
        self.guesses.pop(seq, None)

    def _guess(self, row: Row, most: int) -> list[int]:
        tokens = row.seq.tokens
        places = self.places.setdefault(row.seq, Places())
        for end in range(places.read, len(tokens)):
            places.after[tuple(tokens[end - LENGTH : end])] = end
        places.read = max(places.read, len(tokens))
        at = places.after.get(tuple(tokens[-LENGTH:]))
        if at is None:
            return []
        period = len(tokens) - at  # what repeats itself is shorter than the guess, maybe
        return allowed(row, [tokens[at + i % period] for i in range(most)])


def allowed(row: Row, draft: list[int]) -> list[int]:
    """As much of a draft as the text's grammar, if it has one, allows."""
    if row.matcher is None:
        return draft
    matcher = row.matcher.copy()
    for i, token in enumerate(draft):
        if not matcher.allows(token):
            return draft[:i]
        matcher.take(token)
    return draft
