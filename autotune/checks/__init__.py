"""The safety checks: one file each, each with a planted fault that proves it can fail."""
