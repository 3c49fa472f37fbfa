"""Publishing one commit of several ranks: all of them have it, or none.

Owns the talk of the ranks between the first that publishes its part and the last that knows how it ended. Does not
prepare a commit, and does not know pages. Guarantees that no rank takes it for committed while another takes it for
given up, whichever drive fails, reports what is not so, or is silent, and whoever dies.

The rule. A resume takes the newest commit that all ranks have. So a commit holds when all know that they have it,
durably, and only then may the one before go. It is nobody's when one knows that it lacks it, durably, and only then may
its own bytes be overwritten. Where a part could not be published, a look at the drive may show that it was; if that
does not make them all, every rank takes its part back, and one that succeeds is enough. If none does, or the ranks lose
each other, nothing is given up: both commits stay as they are, and the next start finds out which one all have.
"""

from __future__ import annotations

from swap import CommitStore
from tiermem.errors import TiermemError
from tiermem.zero3.collectives import Collectives, by_rank, reason_of


def publish_everywhere(store: CommitStore, ranks: Collectives) -> BaseException | None:
    """Publish on every rank, and agree. Waits for the drive and for the others.

    Returns None when all have it, or, when nobody has it any more, the error that this rank is to raise. Raises
    TiermemError if it cannot be known which of the two it is: then neither this commit nor the one before may go.
    """
    failure: BaseException | None = None
    try:
        store.publish()
    except BaseException as error:  # noqa: BLE001 - told to the others, then returned
        failure = error
    reasons = ranks.tell_text(reason_of(failure))
    if not any(reasons) or all(told[0] for told in ranks.tell([store.is_published()])):
        return None
    told = by_rank(reasons)
    if not any(told[0] for told in ranks.tell([store.withdraw()])):
        raise TiermemError(f"it is not known whether all ranks have a commit, and none can take it back: {told}")
    return failure or TiermemError(f"another rank could not publish a commit: {told}")
