"""Prints any file of a store, duemq's or RocketMQ's, as lines of text, for finding faults. Nothing is written, and no
broker has to be stopped; writes of a running broker may be seen in part.

    python -m duemq.broker.dump FILE...       for a directory, such as a whole store, all files in it,
                                              also through symbolic links
        --from N --to N                       the first position, and the one to stop before; see below
        --limit N                             at most N lines of each file
        --body                                the bodies of messages as well

| file | one line for each | --from, --to |
| --- | --- | --- |
| commitlog/, cut/ | record | physical offset |
| consumequeue/ | unit | queue offset |
| consumequeue_ext/ | unit | offset over all files of the queue |
| timerlog/ | unit | position in the timer log |
| timerwheel | slot in use | second since the epoch |
| index/ | item | number of the item |
| checkpoint, queuecheck, timercheck | value, note, block | |
| JSON tables in config/ | entry | |
| audit/ | entry | |
| config/users, config/acls | user; entry of a policy | |

The kind of a file is recognised by its path, or else by its content. Damaged bytes are shown as a line with the word
`damaged`, a record or a slot in the wrong place with `misplaced`, and the lines continue with what can be read behind
them. A directory without files is named. A name that is not printable is quoted for bash, as in $'a\\nb'.

Exit code: 0; 1 if a line that was printed reports damage, a file could not be read, a directory could not be listed, or
standard output could not be written; 2 for wrong options.
"""

from __future__ import annotations

import argparse
import os
import stat

from duemq.protocol.dump_output import needs_package, report, run, shown_path, write_line

try:
    from duemq.broker.dump.databases import is_database
    from duemq.broker.dump.kinds import BEGIN, END, lines
    from duemq.broker.dump.walk import walk
    from duemq.protocol.dump import DamageLine
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    needs_package("duemq.broker.dump", error, "'duemq[broker]'")


def main(arguments: list[str] | None = None) -> int:
    """Run the command, see the module; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m duemq.broker.dump",
        description="Show files of a store as text.",
        epilog="Positions are physical offsets in the commitlog, queue offsets in a consume queue, offsets in its "
        "extension, positions in the timer log, seconds in the timer wheel, numbers of items in an index file.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file of a store, or a directory")
    parser.add_argument("--from", dest="start", type=int, default=BEGIN, metavar="N", help="the first position")
    parser.add_argument("--to", dest="end", type=int, default=END, metavar="N", help="the position to stop before")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N lines of each file")
    parser.add_argument("--body", action="store_true", help="the bodies of messages as well")
    given = parser.parse_args(arguments)
    if given.limit is not None and given.limit < 0:
        parser.error("--limit must be 0 or more")
    failed = False
    for path, why in (found for each in given.files for found in walk(each)):
        if isinstance(why, str) and why:
            write_line(f"{shown_path(path)}: {why}")
            continue
        try:
            if isinstance(why, OSError):
                raise why
            if not stat.S_ISREG(os.stat(path).st_mode) and not is_database(path):
                raise OSError("this is not a regular file; copy the bytes into one")
            for line in lines(path, given.start, given.end, given.limit, with_bodies=given.body):
                write_line(line)
                failed = failed or isinstance(line, DamageLine)
        except OSError as error:
            report(path, error)
            failed = True
    return int(failed)


if __name__ == "__main__":
    run(main)
