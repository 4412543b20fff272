"""Where operands live: guarded by unmapped address space, or plain."""
