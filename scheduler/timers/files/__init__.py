"""The timer log, the timer wheel, and the small files beside them."""
