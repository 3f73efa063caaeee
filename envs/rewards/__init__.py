"""Rewards: functions of a finished episode."""
