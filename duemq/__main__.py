"""Runs the command line for `python -m duemq`."""

from duemq.cli import main

if __name__ == "__main__":
    main()
