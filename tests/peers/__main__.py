"""Command line: `python -m tests.peers install` builds missing or stale peers, with `--bench` also those that only the
benchmarks need; `path` prints their directory."""

import argparse
import sys
import time

from tests.peers import install
from tests.peers.cache import cache_directory, install_lock
from tests.peers.class_archives.make import class_archives
from tests.peers.errors import PeerError


def main() -> int:
    """Run the command line; return the exit code: 0, or 1 with one message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("command", choices=["install", "path"])
    parser.add_argument("--bench", action="store_true", help="also what only the benchmarks need")
    arguments = parser.parse_args()
    if arguments.command == "path":
        print(cache_directory())
        return 0
    try:
        with install_lock():
            artefacts = [*install.for_tests(), *map(class_archives, install.VERSIONS)]
            for artefact in [*artefacts, *([install.kafka()] if arguments.bench else [])]:
                if not artefact.is_current():
                    print(f"peers: building {artefact.name} ...", flush=True)
                    start = time.monotonic()
                    artefact.install()
                    print(f"peers: {artefact.name} is ready ({time.monotonic() - start:.0f} s)", flush=True)
    except PeerError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
