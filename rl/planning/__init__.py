"""Search for the fleet and schedule with the shortest step."""
