"""Rewards: plain functions from an answer to a number and the reason for it."""
