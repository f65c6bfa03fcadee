"""Groups in which the phases of a script call collectives, as ranks report them."""

from __future__ import annotations

import msgspec

from outlast.transport.message_base import Body
from outlast.transport.rank_spans import RankSpan

GroupRanks = tuple[RankSpan, ...]


class GroupUse(msgspec.Struct, frozen=True, array_like=True):
    """Groups of one rank by their ranks. `whole`: their collectives need all members. `reduced`:
    they reduce what a member adds. `roots`: a root, and the group that it sends to or receives
    from. `sampler`: `num_replicas` and `rank` of the loader's DistributedSampler."""

    whole: tuple[GroupRanks, ...] = ()
    reduced: tuple[GroupRanks, ...] = ()
    roots: tuple[tuple[int, GroupRanks], ...] = ()
    sampler: tuple[int, ...] = ()

    def is_plain(self, rank: int, world: int) -> bool:
        """Return whether all that is used is reductions over the world, and a share of the data of
        its own: the rank needs no other, as with plain data parallelism."""
        all_ranks = (RankSpan(0, world, 1),)
        is_own = self.sampler in ((), (world, rank))
        return is_own and not self.whole and {*self.reduced} <= {all_ranks}

    def joined(self, other: GroupUse) -> GroupUse:
        """Return the groups of both; an earlier worker of a rank may have used more of them."""
        return GroupUse(
            whole=tuple(dict.fromkeys((*self.whole, *other.whole))),
            reduced=tuple(dict.fromkeys((*self.reduced, *other.reduced))),
            roots=tuple(dict.fromkeys((*self.roots, *other.roots))),
            sampler=other.sampler or self.sampler,
        )


class GroupsUsed(Body, frozen=True):
    """Report of a rank whose phases have used further groups, of model parallelism as a rule."""

    use: GroupUse
