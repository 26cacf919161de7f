"""The command line as `python -m duemq`."""

from duemq.cli import main

main()
