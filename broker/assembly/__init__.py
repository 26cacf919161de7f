"""How the broker is put together: for each area, a function that builds its components from what they need."""
