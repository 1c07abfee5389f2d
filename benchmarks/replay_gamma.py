"""Ride gamma policies over traces, and print how far they fall behind the best fixed gamma.

    python benchmarks/replay_gamma.py
    python benchmarks/replay_gamma.py --family rows
    python benchmarks/replay_gamma.py --family recorded --each --beside other.AutoGamma

`--beside MODULE.CLASS` rides another policy of the same interface next to today's. Regret is a
share of the rate of the fixed gamma that turns out best on that trace; below zero is better than
any. The family `rows` has texts that share the steps of 4 rows, on made and on recorded machines.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from multiprocessing import Pool
from statistics import harmonic_mean, mean
from typing import Any

import step_traces
from gamma_traces import LARGEST, Trace, all_traces, beginnings, best_fixed, fixed_rate, ride

from specrt.speculation.auto_gamma import AutoGamma

EARLY = 500
"""Tokens after which a policy should have found out what was tuned wrong."""
SHORT = 64
"""Tokens of a text that a policy begins with no knowledge of, as a first request does."""


def main() -> None:
    """Print a line for each family of traces."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", help="of traces; may be repeated")
    parser.add_argument("--each", action="store_true", help="print every trace, too")
    parser.add_argument("--beside", help="another policy: module.Class")
    arguments = parser.parse_args()
    policies: list[Callable[..., Any]] = [AutoGamma]
    if arguments.beside:
        module, name = arguments.beside.rsplit(".", 1)
        policies.insert(0, getattr(import_module(module), name))

    names = ["auto"] if len(policies) == 1 else [arguments.beside, "auto"]
    print(f"regret in %: {', '.join(names)}")
    with Pool() as pool:
        for family, traces in all_traces().items():
            if arguments.family and family not in arguments.family:
                continue
            if family == "recorded":
                short = pool.starmap(short_regrets, [(policies, trace) for trace in traces])
                means = [sum(column) / len(column) for column in zip(*short, strict=True)]
                worst = [max(column) for column in zip(*short, strict=True)]
                print(f"first {SHORT} tokens of each text, mean{shown(means)}, ", end="")
                print(f"worst{shown(worst)}")
            found = pool.starmap(regrets, [(policies, trace) for trace in traces], chunksize=1)
            if arguments.each:
                for trace, row in zip(traces, found, strict=True):
                    print(f"  {trace.name:44}{shown(row)}")
            summary = list(zip(*found, strict=True))
            means = [sum(column) / len(column) for column in summary]
            print(f"{family:14} {len(traces):4} traces, mean{shown(means[::2])}", end="")
            print(f", worst{shown([max(column) for column in summary[::2]])}", end="")
            print(f", after {EARLY} tokens worst{shown([max(column) for column in summary[1::2]])}")
        for kind, companies in step_traces.companies().items():
            if "rows" in (arguments.family or ["rows"]) and companies:
                behind = pool.map(step_traces.regret, companies, chunksize=1)
                shares = zip(companies, behind, strict=True)
                for company, share in shares if arguments.each else ():
                    print(f"  {company.name:60}{shown([share])}")
                print(f"rows, {kind:8} {len(behind):4} companies, ", end="")
                print(f"mean{shown([mean(behind)])}, worst{shown([max(behind)])}")


def regrets(policies: Sequence[Callable[..., Any]], trace: Trace) -> list[float]:
    """Return the regret of each policy, on the whole trace and after its first tokens."""
    best, late = best_fixed(trace), best_fixed(trace, EARLY)
    found = []
    for policy in policies:
        done = ride(*start(policy, trace))
        found += [1 - done.rate() / best, 1 - done.rate(EARLY) / late]
    return found


def short_regrets(policies: Sequence[Callable[..., Any]], trace: Trace) -> list[float]:
    """Return the regret of each policy where every text is a first one, over their first tokens."""
    texts = beginnings(trace, SHORT)
    best = max(
        harmonic_mean([fixed_rate(text, gamma, gamma, 0, text.length) for text in texts])
        for gamma in range(LARGEST + 1)
    )
    return [
        1 - harmonic_mean([ride(*start(policy, text)).rate() for text in texts]) / best
        for policy in policies
    ]


def start(policy: Callable[..., Any], trace: Trace) -> tuple[Any, Trace, Any]:
    """Return a new policy for a trace; in a cascade one for each drafter."""
    if trace.second is None:
        return policy(trace.known, LARGEST), trace, None
    second = policy(trace.known, LARGEST)
    free = replace(trace.known, draft_ns=(0.0,) * len(trace.known.draft_ns))
    return policy(free, LARGEST, second), trace, second


def shown(shares: Sequence[float]) -> str:
    """Return shares in percent."""
    return "".join(f" {100 * share:7.2f}" for share in shares)


if __name__ == "__main__":
    main()
