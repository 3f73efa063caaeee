"""Workers: engines in processes of their own, and what passes between."""
