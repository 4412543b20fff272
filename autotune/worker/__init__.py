"""The replaceable child process: jobs run there, so a kernel that faults or hangs costs one child."""
