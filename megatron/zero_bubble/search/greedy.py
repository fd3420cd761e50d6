"""A first, simple search: list scheduling in time order, backward before forward before W."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from megatron.zero_bubble.search.problem import B, F, Orders, Problem, W


def search_placement(problem: Problem, effort: float) -> tuple[float, Orders]:
    """The cost and orders of the best schedule found on one placement."""
    del effort
    return min((serial(problem), list_schedule(problem)), key=lambda found: found[0])


def serial(problem: Problem) -> tuple[float, Orders]:
    """One microbatch at a time: feasible whenever anything is."""
    rank_of, stages = problem.placement.stage_to_rank, range(problem.num_stages)
    orders: Orders = [[] for _ in range(problem.num_ranks)]
    for _ in range(problem.num_microbatches):
        for s in stages:
            orders[rank_of[s]].append(3 * s + F)
        for s in reversed(stages):
            orders[rank_of[s]] += [3 * s + B, 3 * s + W]
    return float("inf"), orders


def list_schedule(problem: Problem) -> tuple[float, Orders]:
    """Whenever a rank is free it runs what is ready, the later half of a microbatch's way first."""
    last, rank_of, m = problem.num_stages - 1, problem.placement.stage_to_rank, problem.num_microbatches
    forwards: list[list[float]] = [[] for _ in range(last + 1)]
    backwards: list[list[float]] = [[] for _ in range(last + 1)]
    forwards[0] = [0.0] * m
    started_f, started_b = [0] * (last + 1), [0] * (last + 1)
    kept, free = [0.0] * problem.num_ranks, [0.0] * problem.num_ranks
    pending: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    orders: Orders = [[] for _ in range(problem.num_ranks)]
    events = [(0.0, rank) for rank in range(problem.num_ranks)]
    heapify(events)
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        choice, soon = _choose(problem, rank, now, forwards, backwards, started_f, started_b, kept, pending)
        if choice is None:
            if soon < float("inf"):
                heappush(events, (soon, rank))
            continue
        stage, kind = divmod(choice, 3)
        orders[rank].append(choice)
        if kind == F:
            end = now + problem.forward[stage]
            kept[rank] += problem.kept[stage]
            started_f[stage] += 1
            if stage == last:
                backwards[stage].append(end)
            else:
                forwards[stage + 1].append(end + problem.forward_hop[stage + 1])
                heappush(events, (max(now, free[rank_of[stage + 1]]), rank_of[stage + 1]))
        elif kind == B:
            end = now + problem.backward[stage]
            kept[rank] += problem.kept_by_wgrad[stage] - problem.kept[stage]
            pending[rank].append(stage)
            started_b[stage] += 1
            if stage:
                backwards[stage - 1].append(end + problem.backward_hop[stage - 1])
                heappush(events, (max(now, free[rank_of[stage - 1]]), rank_of[stage - 1]))
        else:
            end = now + problem.wgrad[stage]
            kept[rank] -= problem.kept_by_wgrad[stage]
            pending[rank].pop(0)
        free[rank] = end
        heappush(events, (end, rank))
    if any(count < m for count in started_b):
        return float("inf"), orders
    return max(end - origin for end, origin in zip(free, problem.origin, strict=True)), orders


def _choose(problem, rank, now, forwards, backwards, started_f, started_b, kept, pending):  # type: ignore[no-untyped-def]
    soon, blocked = float("inf"), False
    stages = problem.placement.stages_of(rank)
    for arrivals, started, kind in ((backwards, started_b, B), (forwards, started_f, F)):
        for stage in reversed(stages):
            if started[stage] >= len(arrivals[stage]):
                continue
            if kind == F:
                need = kept[rank] + problem.kept[stage]
                need += sum(problem.kept[s] for s in stages if s > stage and started_f[s] == started_b[s])
            else:
                need = kept[rank] + max(0.0, problem.kept_by_wgrad[stage] - problem.kept[stage])
            if need > problem.limit[rank]:
                blocked = True
                continue
            arrival = arrivals[stage][started[stage]]
            if arrival <= now:
                return 3 * stage + kind, soon
            soon = min(soon, arrival)
    if pending[rank] and (blocked or now + problem.wgrad[pending[rank][0]] <= soon):
        return 3 * pending[rank][0] + W, soon
    return None, soon
