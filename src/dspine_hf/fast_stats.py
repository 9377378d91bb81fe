"""What the rounds of a batch drafted and what of it was accepted, counted on the host."""

from .stats_dspine import GenerationStats


class RoundLog:
    """
    Collects the figures of one call of the fast loop, row by row.

    Args:
        batch: rows.
    """

    def __init__(self, batch: int):
        self._rounds: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(batch)]

    def add(self, row: int, start: int, slots: int, agreed: int, count: int, verified: int) -> None:
        """
        A verification pass of one row.

        Args:
            row: the batch row.
            start: tokens it had decided after the prompt.
            slots: tokens of its chain of drafts, or of the longest branch that its tree can have.
            agreed: how many drafted tokens the target accepted.
            count: tokens that the row took.
            verified: drafted tokens that were put before the target: those of the chain, or of the whole tree.
        """
        self._rounds[row].append((start, slots, agreed, count, verified))

    def stats(self, new_tokens: list[int]) -> GenerationStats:
        """
        The figures of the call: sums over its rows, `round_starts` for a single row only.

        Args:
            new_tokens: tokens of every row after the prompt.
        """
        reached: list[int] = []
        passed: list[int] = []
        drafted = 0
        for _, slots, agreed, count, verified in (entry for row in self._rounds for entry in row):
            drafted += verified
            kept = min(agreed, count)
            trials = kept if count <= agreed or agreed == slots else kept + 1
            for slot in range(trials):
                if slot == len(reached):
                    reached.append(0)
                    passed.append(0)
                reached[slot] += 1
                passed[slot] += slot < kept
        rounds = sum(len(row) for row in self._rounds)
        return GenerationStats(
            rounds=rounds,
            drafted=drafted,
            accepted=sum(passed),
            new_tokens=sum(new_tokens),
            acceptance_length=(sum(new_tokens) - len(new_tokens)) / rounds if rounds else 1.0,
            slot_acceptance=tuple(p / r for p, r in zip(passed, reached, strict=True)),
            slot_trials=tuple(reached),
            round_starts=tuple(entry[0] for entry in self._rounds[0]) if len(self._rounds) == 1 else (),
        )
