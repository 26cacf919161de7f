"""The simulated machine: its disk, network, memory and event loop."""
