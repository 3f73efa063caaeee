"""The loop: rollout, schedule, algorithms, learner, weight synchronisation."""
