"""What a crash leaves behind, simulated and real."""
