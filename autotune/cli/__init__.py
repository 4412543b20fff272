"""The command line: one file a command. ``main`` maps every known error to one line and an exit code."""
