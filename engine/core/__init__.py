"""The policy core: integers only, no torch, no clock."""
