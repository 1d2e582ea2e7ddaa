"""What users notice of a challenger: inter-token latency with `tapeout serve --shadow` against without, in turns.

    python -m benchmarks.shadow artifacts/candidate --challenger artifacts/four

Servers of one bundle get the same requests in each round, one after the other: one without a challenger, the same once
more, and one for each share of the calls that is mirrored. The second shows what differs by chance alone. The load
leaves pauses, in which challengers work: without them they get no time at all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.serving.load import Text
from benchmarks.serving.scenarios import open_loop
from benchmarks.serving.servers import OURS, ServerProcess

SETTLED_SECONDS = 2.0  # without another observation
WITHOUT, AGAIN = "without", "without, again"


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"tapeout:shadow_{name} "))


def wait_for_challenger(url: str) -> None:
    """Until it has scored what it was given, so that it does not disturb the next server."""
    before = -1.0
    while (observed := metric(url, "conversations")) != before or metric(url, "waiting"):
        before = observed
        time.sleep(SETTLED_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--challenger", type=Path, required=True, help="another bundle of the same model")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 1.0])
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals per second")
    parser.add_argument("--requests", type=int, default=60, help="of a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    text = Text.read(given.bundle / "tokenizer.json", 1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, ServerProcess] = {}
        shares = {f"mirrors {share:.0%}": share for share in given.shares}
        for number, name in enumerate((WITHOUT, AGAIN, *shares)):
            options = ["--slots", "64"]
            if name in shares:
                log = folder / f"shadow-{number}"
                options += ["--shadow", str(given.challenger.resolve()), "--share", str(shares[name])]
                options += ["--shadow-log", str(log)]
            server = ServerProcess(OURS, given.bundle, folder / f"{number}.log", given.threads, options)
            servers[name] = stack.enter_context(server)
            open_loop(server.url, text, 8, given.rate)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        names = list(servers)
        for number in range(given.rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                text.random.seed(number)
                load = open_loop(servers[name].url, text, given.requests, given.rate)
                if name in shares:
                    wait_for_challenger(servers[name].url)
                found[name].append(load.itl_ms)
                print(f"round {number + 1}, {name}: {load.itl_ms}, failed {load.failed}", file=sys.stderr, flush=True)
        for name, rounds in found.items():
            ratios = sorted(one[1] / plain[1] for one, plain in zip(rounds, found[WITHOUT], strict=True))
            line = f"{name}: median {median(r[0] for r in rounds):.2f} ms, P99 {median(r[1] for r in rounds):.2f} ms; "
            line += f"P99 to the first's: median {median(ratios):.3f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
            if name in shares:
                line += f"; observed {metric(servers[name].url, 'conversations'):.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
