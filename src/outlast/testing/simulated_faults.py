"""Faults that strike a simulated run: at points of workers' lives, and at times."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from outlast import events
from outlast.controller import inputs
from outlast.controller.planned_migration import SCHEDULER
from outlast.testing.absent_ranks.shrink_options import HOST_LOSSES
from outlast.testing.fault_plan import DRAINS, NOTICES, ROLL
from outlast.testing.simulated_process import SimProcess
from outlast.testing.simulated_terms import STORE

if TYPE_CHECKING:
    from outlast.testing.simulated_agent import SimAgent
    from outlast.testing.simulated_cluster import SimCluster

OPERATOR = "operator"
PAST_S = 1e-3


class FaultInjector:
    """Carries out the faults of a plan."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster, self._line = cluster, cluster.timeline
        self._drains: dict[str, events.Warned] = {}  # by host, as the scheduler has them
        self._notices: dict[str, tuple[events.Warned, float]] = {}  # by code, with the deadline
        self._rolling: list[str] = []  # hosts whose turn to leave is still to come
        self._rolls: tuple[events.Warned, ...] = ()
        self.released = 0  # hosts that have left the run
        self._strikes = [
            [strike, strike.nth] for strike in cluster.plan.strikes + cluster.plan.flips
        ]

    def strike(self, point: str, worker: SimProcess) -> str:
        """Return the planned fault of a worker at this point; "" nearly always."""
        for armed in self._strikes:
            strike, remaining = armed
            if strike.point == point and remaining > 0 and strike.seat in (-1, worker.seat):
                if strike.deed == "wait":  # part of the script: every worker of that phase waits
                    if strike.nth == worker.n + 1:
                        self._cluster.note(f"{worker.name} waits at {point}")
                        return "wait"
                    continue
                armed[1] = remaining - 1
                if remaining == 1:
                    self._cluster.struck += 1
                    worker.struck = True
                    self._cluster.note(f"{strike.deed} {worker.name} at {point}")
                    if strike.deed == "crash":
                        self._cluster.crash_in = self._line.dice.randint(0, 4)
                    elif strike.deed == "drop":
                        worker.agent.hang_up(self._line.between(0.0, 1.0))
                    return strike.deed
        return ""

    def drains(self) -> tuple[events.Warned, ...]:
        """Return what the scheduler says of draining nodes."""
        return tuple(self._drains.values())

    def _drain(self, hosts: list[str]) -> None:
        """Drain hosts, or take their drains back if all have one."""
        is_back = self._drains.keys() >= set(hosts)
        for host in hosts:
            if is_back:
                del self._drains[host]
            elif host not in self._drains:
                self._drains[host] = events.Warned(
                    t_ns=self._line.now_ns,
                    host=host,
                    check=SCHEDULER,
                    symptom="node-drain",
                    severity="drain",
                    code=f"root@{self._line.now_s:.3f}",
                    device="",
                    detail="simulated",
                )

    def notices(self) -> tuple[events.Warned, ...]:
        """Return what an operator says of hosts and ranks, with the time that remains."""
        now_s = self._line.now_s
        return tuple(
            replace(one, within_s=max(PAST_S, end_s - now_s)) if end_s else one
            for one, end_s in self._notices.values()
        )

    def rolls(self) -> tuple[events.Warned, ...]:
        """Return which host an operator lets leave the run now."""
        return self._rolls

    def release(self, agent: SimAgent) -> None:
        """Let a host leave the run; it comes back later, and then the next one leaves."""
        self.released += 1
        self._cluster.note(f"{agent.name} leaves the run")
        self._rolls = ()
        self._lose(agent)
        self._line.after(self._line.between(7.0, 9.0), self._roll)

    def _roll(self) -> None:
        if self._rolling:
            host = self._rolling.pop(0)
            one = events.Warned(
                t_ns=self._line.now_ns,
                host=host,
                check=ROLL,
                symptom="node-drain",
                severity="drain",
                code=f"{host}@{self._line.now_s:.3f}",
                device="",
                detail="simulated",
            )
            self._rolls = (one,)

    def _give_notice(self, what: str, agent: SimAgent) -> None:
        """Announce the loss of a host, a rank or all hosts, truly or not; or take all back."""
        line, dice = self._line, self._line.dice
        if self._notices and dice.random() < 0.3:
            self._notices.clear()
            return
        within_s = dice.choice((0.0, 0.0, 0.5, 3.0, 8.0, 25.0))
        seated = [each for each in self._cluster.alive_workers() if each.seat >= 0]
        worker = dice.choice(seated) if what == "notice rank" and seated else None
        agents = list(self._cluster.agents.values()) if what == "notice all" else [agent]
        for each in [worker.agent] if worker else agents:
            code = f"{len(self._notices)}@{line.now_s:.3f}"
            one = events.Warned(
                t_ns=line.now_ns,
                host=each.name,
                check=OPERATOR,
                symptom="node-drain",
                severity="drain",
                code=code,
                device=f"rank {worker.seat}" if worker else "",
                detail="simulated",
                worker=worker.name if worker else "",
            )
            self._notices[code] = one, line.now_s + within_s if within_s else 0.0
            if within_s and worker is None and dice.random() < 0.5:
                line.after(within_s, partial(self._lose_as_announced, code, each))

    def _lose_as_announced(self, code: str, agent: SimAgent) -> None:
        if self._notices.pop(code, None) is not None:
            self._lose(agent)

    def happen(self, what: str) -> None:
        """Let a fault strike now."""
        line, controller = self._line, self._cluster.controller
        self._cluster.struck += 1
        self._cluster.note(f"happens: {what}")
        alive = self._cluster.alive_workers()
        agent = line.dice.choice(list(self._cluster.agents.values()))
        if what in ("kill", "pair", "all"):
            count = {"kill": 1, "pair": 2, "all": len(alive)}[what]
            for worker in line.dice.sample(alive, min(count, len(alive))):
                worker.die(events.Fault(kind="killed", detail="SIGKILL", signal=9))
        elif what == "crash" and controller.alive:
            self._cluster.crash_in = line.dice.randint(0, 12)
        elif what == "agent":
            agent.die()
            line.after(line.between(0.5, 6.0), lambda: setattr(agent, "present", True))
        elif what in HOST_LOSSES:
            self._lose_for_long(what)
        elif what == "join":
            self._cluster.join()
        elif what == "look":
            self._cluster.look_costs_a_host = True
        elif what in ("drop", "cut"):
            agent.hang_up(line.between(*((0.0, 1.0) if what == "drop" else (2.0, 8.0))))
        elif what == "link":  # both hosts reach the controller
            one, other = line.dice.sample(list(self._cluster.agents), 2)
            lasts_s = line.dice.choice((line.between(0.5, 9.0), 1000.0))
            self._cluster.cut(one, other, line.now_s + lasts_s)
        elif what == "unwell":
            agent.check()
        elif what in DRAINS:
            self._drain(list(self._cluster.agents) if what == "drain all" else [agent.name])
        elif what == ROLL:
            self._rolling = list(self._cluster.agents)
            self._line.dice.shuffle(self._rolling)
            self._roll()
        elif what in NOTICES:
            self._give_notice(what, agent)
        elif what in ("stop", "save") and controller.alive:
            request = inputs.StopRequested if what == "stop" else inputs.SaveRequested
            controller.feed(request(t_ns=line.now_ns, reason="asked"))
        elif self._cluster.terms is not None:
            self._happen_to_control(what, agent)

    def _happen_to_control(self, what: str, agent: SimAgent) -> None:
        """Let a fault strike the newest controller, its host, or the network."""
        line, cluster = self._line, self._cluster
        owner = cluster.controller.host
        assert owner is not None
        hosts = list(cluster.agents)
        until_s = line.now_s + line.between(0.3, 9.0)
        if what == "freeze":  # between two of its messages
            cluster.controller.stop_in = line.dice.randint(1, 6)
        elif what == "host":
            self._lose(owner)
        elif what == "pair of hosts":
            self._lose(owner)
            self._lose(agent)
        elif what == "frost":
            line.dice.choice((agent, owner)).freeze(line.between(0.3, 8.0))
        elif what == "exile":
            self._exile(line.dice.choice([name for name in hosts if name != owner.name]))
        elif what in ("storeless", "blind", "outage"):
            blind = {"storeless": [owner.name], "blind": [agent.name], "outage": hosts}[what]
            for name in blind:
                cluster.cut(name, STORE, until_s)
        elif what in ("island", "one", "split"):
            others = [name for name in hosts if name != owner.name]
            away = {
                "island": others,
                "one": line.dice.sample(others, 1),
                "split": line.dice.sample(others, line.dice.randint(1, len(others))),
            }[what]
            here = [name for name in hosts if name not in away]
            for name in away:
                for other in here if what != "one" else [owner.name]:
                    cluster.part(name, other, until_s)
            if what == "split":
                for name in line.dice.choice((away, here)):
                    cluster.cut(name, STORE, until_s)

    def _exile(self, name: str) -> None:
        """Cut a host off from the others, which lose the store for a time, perhaps later."""
        line, cluster = self._line, self._cluster
        others = [other for other in cluster.agents if other != name]
        for other in others:
            cluster.part(name, other, line.now_s + line.between(4.0, 20.0))

        def lose_store() -> None:
            until_s = line.now_s + line.between(1.0, 12.0)
            for other in others:
                cluster.cut(other, STORE, until_s)

        line.after(line.between(0.0, 6.0), lose_store)

    def _lose(self, agent: SimAgent, low_s: float = 0.5, high_s: float = 6.0) -> None:
        """Let a host lose power; it boots again later."""
        agent.lose_power()
        boots_s = self._line.between(low_s, high_s)
        self._line.after(boots_s, lambda: setattr(agent, "present", True))

    def _lose_for_long(self, what: str) -> None:
        """Let hosts lose power for long, or for good: one always has it."""
        up = [agent for agent in self._cluster.agents.values() if agent.present]
        count = min(2 if what == "lose two" else 1, len(up) - 1)
        away_s = (1000.0, 1000.0) if what == "lose for good" else (4.0, 40.0)
        for agent in self._line.dice.sample(up, max(0, count)):
            self._lose(agent, *away_s)
