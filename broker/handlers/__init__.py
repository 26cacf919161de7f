"""What the broker answers, by concern: a class per concern, a method per request code."""
