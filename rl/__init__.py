"""The loop: rollout, schedule, losses, learner and the way of the weights."""
