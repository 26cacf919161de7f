"""Tests of the files that a crash leaves behind, simulated and real."""
