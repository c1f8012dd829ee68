"""From a scheduler's plan to token ids."""
